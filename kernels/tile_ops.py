"""Registers every operator of girih that a tile may call; whoever reads, compiles or loads tiles
imports this module, whatever else it needs."""

import girih.kernels.expert_ops
import girih.kernels.ops  # noqa: F401 (the two register the ops)
