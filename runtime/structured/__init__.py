"""Structured output: grammars that limit which tokens a request may produce.

Must not know: schedulers, batches, HTTP.
"""
