"""The capacity simulator: the engine's scheduler on a clock of its own, with measured step costs.

Must not know: models, tensors.
"""
