"""Self-checks of bound programs: canary, batch invariance, comparison with transformers.

Must not know: requests, front ends.
"""
