"""Registers every operator of girih that a tile may call; whoever reads, compiles or loads tiles
imports this module, whatever else it needs."""

import girih.kernels.ops.experts
import girih.kernels.ops.schemas  # noqa: F401 (the two register the ops)
