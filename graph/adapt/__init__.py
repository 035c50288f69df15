"""Stand-ins for parts of a model while it is traced: attention, masks, experts, recurrences.

Owns the only code that names families. Must not know: passes, tiles.
"""
