"""`trace`: an unmodified Hugging Face model becomes one FX graph over packed tokens.

Must not know: passes, tiles, families by name (those are in `adapt`).
"""
