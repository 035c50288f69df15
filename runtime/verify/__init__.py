"""Self-checks of a start: the canary, batch invariance, agreement with transformers.

Must not know: requests, front ends.
"""
