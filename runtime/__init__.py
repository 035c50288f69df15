"""Requests, scheduling, KV blocks, batches, sampling and the engine core."""
