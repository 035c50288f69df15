"""Where the requests of a step begin in its tokens, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from girih.kernels.base.errors import ConfigError


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata that every attention of a step reads: R requests, T tokens; host memory on the CPU.

    Checked when it is made, once for all layers. The C++ kernel derives its work items (request ×
    kv head × query tile × span of the context) from it in about a microsecond per call.

    Attributes:
        query_start: int32 [R + 1], first token of each request, then the end of the last.
        seq_lens: int32 [R], tokens in the context, the new ones included.
        block_tables: per KV group, int32 [R, blocks]: block numbers of each request's context.
        slot_mappings: per KV group, int64 [T]: where a token's key and value go; -1 for padding.

    Raises:
        ConfigError: a tensor of the wrong dtype or shape.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        for name, dtype, tensors in (
            ("query_start", torch.int32, (self.query_start,)),
            ("seq_lens", torch.int32, (self.seq_lens,)),
            ("block_tables", torch.int32, self.block_tables),
            ("slot_mappings", torch.int64, self.slot_mappings),
        ):
            for tensor in tensors:
                if tensor.dtype != dtype or tensor.stride(-1) not in (0, 1):
                    raise ConfigError(
                        f"attention metadata: {name} is {tensor.dtype} with strides "
                        f"{tensor.stride()}; it must be {dtype} with neighbouring elements adjacent"
                    )
        requests, starts = self.seq_lens.shape[0], self.query_start.shape[0]
        rows = [table.shape[0] for table in self.block_tables]
        if starts != requests + 1 or any(number != requests for number in rows):
            raise ConfigError(
                f"attention metadata: {requests} sequence lengths, but {starts} query starts "
                f"(need {requests + 1}) and block tables of {rows} rows"
            )
