"""Methods of model classes that write their attention, experts or recurrence out by hand.

Each replacement is the method of the class in `METHODS`, shortened to inference without a cache,
with girih's op where the original multiplies all tokens with all others or loops over them. Shapes:
activations [1, T, hidden], per-head tensors [1, H, T, D].
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from girih.graph.adapt.capture import attention_op
from girih.graph.adapt.mask_request import Mask
from girih.kernels.base.errors import TraceError


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over [1, H, T, D] -> [1, H, T, Dv]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention_op(q, k, v, scale, Mask(True, window), slopes=slopes)
    return out.transpose(0, 1)[None]


def _merged(heads: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] -> [1, T, H * D]."""
    return heads.transpose(1, 2).flatten(2)


def _split(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[1, T, H * D] -> [1, H, T, D]."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _no_cross_attention(module: torch.nn.Module, states: torch.Tensor | None) -> None:
    if states is not None:
        raise TraceError(f"{type(module).__name__} attends to an encoder: unsupported")


def _gpt_neo(self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
    window = self.config.window_size if self.attention_type == "local" else 0
    return _attend(query, key, value, 1.0, window), None


def _gpt_neox_japanese(
    self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None
) -> Any:
    return _attend(query, key, value, 1.0 / self.norm_factor), None


def _openai_gpt(
    self: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, output_attentions: Any = False
) -> Any:
    scale = v.shape[-1] ** -0.5 if self.scale else 1.0
    return [_attend(q, k.transpose(-1, -2), v, scale)]


def _bart_like(
    self: Any, hidden_states: torch.Tensor, key_value_states: Any = None, **options: Any
) -> Any:
    """XGLM, TrOCR."""
    _no_cross_attention(self, key_value_states)
    q, k, v = (
        _split(projection(hidden_states), self.num_heads)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    return self.out_proj(_merged(_attend(q, k, v, self.scaling))), None


def _xglm_positions(self: Any, position_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """The table never grows while it is read: it has a row for every allowed position."""
    return self.weights[position_ids + self.offset].detach()


def _falcon(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: Any,
    position_embeddings: Any = None,
    **options: Any,
) -> Any:
    if alibi is not None:
        raise TraceError("Falcon with ALiBi rounds its slopes by position: unsupported")
    query, key, value = (x.transpose(1, 2) for x in _falcon_heads(self, hidden_states))
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    return self.dense(_merged(_attend(query, key, value, self.inv_norm_factor))), None


def _falcon_heads(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values [1, T, H, D] out of the fused projection, by kind of Falcon."""
    qkv = self.query_key_value(hidden_states).unflatten(2, (-1, self.head_dim))
    if self.new_decoder_architecture:
        grouped = qkv.unflatten(2, (self.num_kv_heads, -1))
        return grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    if self.multi_query:
        return qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
    separate = qkv.unflatten(2, (self.num_heads, 3))
    return separate[..., 0, :], separate[..., 1, :], separate[..., 2, :]


def _bloom(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, alibi: Any, *rest: Any,
    **options: Any,
) -> Any:  # fmt: skip
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    slopes = sys.modules[type(self).__module__]._get_alibi_slopes
    own = slopes(self.num_heads, hidden_states.device).flatten()
    out = _attend(query, key, value, self.inv_norm_factor, slopes=own)
    return residual + self.dense(_merged(out)), None


def _mpt(
    self: Any, hidden_states: torch.Tensor, position_bias: torch.Tensor, **options: Any
) -> Any:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (_split(x, self.n_heads) for x in qkv.chunk(3, dim=2))
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
    return self.out_proj(_merged(_attend(query, key, value, self.softmax_scale, 0, slopes))), None


def _minimax_lightning(self: Any, hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
    heads = self.num_attention_heads
    qkv = self.act_fn(self.qkv_proj(hidden_states))[0].unflatten(1, (heads, 3 * self.head_dim))
    query, key, value = qkv.split(self.head_dim, dim=2)
    decay = -self.slope_rate[:, :, 0].to(query.dtype).expand(query.shape[0], heads, 1)
    out = torch.ops.girih.linear_attention(query, key, value, decay)
    out = self.norm(out.flatten(1)[None])
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * out), None


def _recurrent_gemma_block(
    self: Any, input_states: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **options: Any
) -> Any:
    gate = self.act_fn(self.linear_y(input_states))
    x = self.linear_x(input_states)
    x = torch.ops.girih.causal_conv(x[0], self.conv_1d.weight.squeeze(1), self.conv_1d.bias)
    return self.linear_out(self.rg_lru(x[None], position_ids) * gate), None


def _recurrent_gemma_scan(
    self: Any, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor,
    **options: Any,
) -> Any:  # fmt: skip
    decay = (recurrent_gate * ~reset)[0]
    return torch.ops.girih.gated_sum(hidden_states[0], decay)[None], None


def _earlier(x: torch.Tensor, distance: int) -> torch.Tensor:
    """For each token of x [T, C] the row `distance` tokens before it, zero before the first."""
    if not distance:
        return x
    first, rest = x.new_ones(x.shape[1], 1), x.new_zeros(x.shape[1], distance)
    return torch.ops.girih.causal_conv(x, torch.cat((first, rest), 1), None)


def _rwkv_mix(self: Any, hidden: torch.Tensor, *names: str) -> list[torch.Tensor]:
    """The token mixed with the one before it, once for each named weight."""
    shifted = _earlier(hidden[0], 1)[None]
    mixes = [getattr(self, f"time_mix_{name}") for name in names]
    return [hidden * mix + shifted * (1 - mix) for mix in mixes]


def _rwkv_attention(self: Any, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
    key, value, receptance = _rwkv_mix(self, hidden, "key", "value", "receptance")
    key, value = self.key(key), self.value(value)
    decay = -torch.exp(self.time_decay)
    out = torch.ops.girih.wkv(key[0], value[0], decay, self.time_first)[None]
    return self.output(torch.sigmoid(self.receptance(receptance)) * out), None


def _rwkv_feed_forward(self: Any, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
    key, receptance = _rwkv_mix(self, hidden, "key", "receptance")
    value = self.value(torch.square(torch.relu(self.key(key))))
    return torch.sigmoid(self.receptance(receptance)) * value, None


def _xlstm_backend(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, igate: torch.Tensor,
    fgate: torch.Tensor, **options: Any,
) -> Any:  # fmt: skip
    rows = (x[0].transpose(0, 1) for x in (query * query.shape[-1] ** -0.5, key, value))
    gates = (igate[0].t(), F.logsigmoid(fgate[0].t()))
    eps = torch.full((1,), self.config.eps, dtype=torch.float32, device=query.device)
    return torch.ops.girih.mlstm(*rows, *gates, eps).transpose(0, 1)[None], None


def _dbrx_experts(
    self: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> Any:
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gate, up, down = (w.view(shape) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    x = hidden_states.reshape(-1, self.hidden_size)
    linear = torch.ops.girih.expert_linear
    inner = self.mlp.activation_fn(linear(x, gate, None, index, False))
    inner = inner * linear(x, up, None, index, False)
    out = (linear(inner, down, None, index, True) * weights[..., None]).sum(1)
    return out.view(hidden_states.shape)


def _longcat_experts(
    self: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> Any:
    linear = torch.ops.girih.expert_linear
    gate, up = linear(hidden_states, self.gate_up_proj, None, index, False).chunk(2, dim=-1)
    out = linear(self.act_fn(gate) * up, self.down_proj, None, index, False)
    is_identity = (index >= self.num_routed_experts)[..., None]
    out = torch.where(is_identity, hidden_states[:, None], out)
    return (out * weights[..., None]).sum(1).to(hidden_states.dtype)


def _llama4_moe(self: Any, hidden_states: torch.Tensor) -> Any:
    """The chosen experts only; the original runs every expert on every token, most times a zero."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    _, logits = self.router(x)
    top, index = logits.topk(self.top_k, dim=1)
    gates = torch.sigmoid(top.float()).to(x.dtype)
    linear, experts = torch.ops.girih.expert_linear, self.experts
    gated = x[:, None] * gates[..., None]
    gate, up = linear(gated, experts.gate_up_proj, None, index, True).chunk(2, dim=-1)
    out = linear(up * experts.act_fn(gate), experts.down_proj, None, index, True)
    return self.shared_expert(x) + out.sum(1), logits


def _jetmoe_router(self: Any, hidden_states: torch.Tensor) -> Any:
    """(chosen experts [T, C], their gates [T, C]) instead of a sorted order of tokens."""
    logits = self.layer(hidden_states).float()
    top, index = logits.topk(self.top_k, dim=1)
    return index, torch.softmax(top, dim=1).type_as(hidden_states)


def _jetmoe_experts(self: Any, inputs: torch.Tensor, index: torch.Tensor) -> Any:
    return torch.ops.girih.expert_linear(inputs, self.weight, None, index, False)


def _jetmoe_feed_forward(self: Any, layer_input: torch.Tensor) -> Any:
    index, gates = self.router(layer_input[0])
    gate, up = self.input_linear(layer_input[0], index).chunk(2, dim=-1)
    out = self.output_linear(self.activation(gate) * up, index)
    return (out * gates[..., None]).sum(1)[None] + self.bias


def _jetmoe_map(self: Any, layer_input: torch.Tensor) -> Any:
    index, gates = self.router(layer_input[0])
    return self.input_linear(layer_input[0], index)[None], None, (index, gates)


def _jetmoe_reduce(self: Any, layer_input: torch.Tensor, topo_info: Any) -> Any:
    index, gates = topo_info
    out = self.output_linear(layer_input[0], index)
    return (out * gates[..., None]).sum(1)[None] + self.bias


def _zaya_projection(
    self: Any, hidden_states: torch.Tensor, cache: Any, conv_mask: Any = None
) -> Any:
    x = hidden_states[0]
    queries, keys = self.q_proj(x), self.k_proj(x)
    rows = (x.shape[0], -1, self.head_dim)
    residual = keys.view(rows).repeat_interleave(self.num_key_value_groups, dim=1)
    query_residual = (queries.view(rows) + residual) * 0.5
    key_residual = query_residual.unflatten(1, (-1, self.num_key_value_groups)).mean(dim=2)
    mixed = _zaya_convolutions(self, torch.cat((queries, keys), dim=-1))
    query = mixed[:, : queries.shape[1]].reshape(rows) + query_residual
    key = mixed[:, queries.shape[1] :].reshape(rows) + key_residual
    delayed = self.v_proj_delayed(_earlier(x, 1))
    value = torch.cat((self.v_proj_current(x), delayed), dim=-1).view(rows)
    return query[None], key[None], value[None]


def _zaya_convolutions(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A depthwise and then a grouped causal convolution, whose padding lies before the first."""
    first, second = self.conv_qk_depthwise, self.conv_qk_grouped
    k1, k2 = self.depthwise_kernel_size, self.grouped_kernel_size
    inputs = [_earlier(x, distance) for distance in range(k1 + k2 - 1)]
    out = second.bias
    for step in range(k2):
        distance = k2 - 1 - step
        inner = first.bias
        for tap in range(k1):
            inner = inner + inputs[distance + k1 - 1 - tap] * first.weight[:, 0, tap]
        groups = second.weight[:, :, step].unflatten(0, (second.groups, -1))
        inner = inner.unflatten(1, (second.groups, -1)).unsqueeze(2)  # [T, G, 1, C/G]
        out = out + (inner * groups).sum(-1).flatten(1)
    return out


def _dense_indexer(self: Any, *arguments: Any, **options: Any) -> Any:
    """DeepSeek sparse attention picks `index_topk` tokens: all of them, up to that many.

    `ModelSpec.max_position` keeps sequences within it.
    """
    return int(self.index_topk)


class _Everything:
    """A selection of every token: it leaves a mask as it is."""

    def __rand__(self, mask: torch.Tensor) -> torch.Tensor:
        return mask


def _dense_selection(self: Any, *arguments: Any, **options: Any) -> Any:
    """Qwen 4 picks `indexer_budget` tokens in blocks: all of them, up to that many.

    `ModelSpec.max_position` keeps sequences within it.
    """
    return _Everything()


METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "GPTNeoSelfAttention": {"_attn": _gpt_neo},
    "GPTNeoXJapaneseAttention": {"_attn": _gpt_neox_japanese},
    "Attention": {"_attn": _openai_gpt},
    "XGLMSinusoidalPositionalEmbedding": {"forward": _xglm_positions},
    "XGLMAttention": {"forward": _bart_like},
    "TrOCRAttention": {"forward": _bart_like},
    "FalconAttention": {"forward": _falcon},
    "BloomAttention": {"forward": _bloom},
    "MptAttention": {"forward": _mpt},
    "MiniMaxLightningAttention": {"forward": _minimax_lightning},
    "RecurrentGemmaRecurrentBlock": {"forward": _recurrent_gemma_block},
    "RecurrentGemmaRglru": {"_rnn_scan": _recurrent_gemma_scan},
    "RwkvSelfAttention": {"forward": _rwkv_attention},
    "RwkvFeedForward": {"forward": _rwkv_feed_forward},
    "xLSTMBackend": {"forward": _xlstm_backend},
    "ZayaCCAProjection": {"forward": _zaya_projection},
    "DeepseekV32Indexer": {"forward": _dense_indexer},
    "GlmMoeDsaIndexer": {"forward": _dense_indexer},
    "AXK2Indexer": {"forward": _dense_indexer},
    "HYV4Indexer": {"forward": _dense_indexer},
    "Dots3NoteTextIndexer": {"forward": _dense_indexer},
    "Qwen4ExpTextQSAIndexer": {"forward": _dense_selection},
    "DbrxExperts": {"forward": _dbrx_experts},
    "LongcatFlashExperts": {"forward": _longcat_experts},
    "Llama4TextMoe": {"forward": _llama4_moe},
    "JetMoeTopKGating": {"forward": _jetmoe_router},
    "JetMoeParallelExperts": {"forward": _jetmoe_experts},
    "JetMoeMoE": {"forward": _jetmoe_feed_forward},
    "JetMoeMoA": {"map": _jetmoe_map, "reduce": _jetmoe_reduce},
}
