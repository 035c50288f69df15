"""Hydra configuration groups and their schemas.

Must not know: how a verb uses them.
"""
