"""Attention backends: what each can do, and how a step runs on it.

Must not know: models, requests, where blocks come from.
"""
