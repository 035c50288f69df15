"""The capacity twin: the engine's scheduler on a clock of its own, with a cost for each step."""
