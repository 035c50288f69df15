"""Requests, scheduling, KV blocks, batches, sampling, the engine core and the way to it.

Must not know: HTTP, Hydra.
"""
