"""Modules that enter Megatron's decoder layers by its specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from verl.engines.megatron.library import MegatronModule, PackedSeqParams, SelfAttention, TransformerConfig
from verl.models.attention import Scoring
from verl.models.packed import PackedLayout
from verl.models.parallel.sequence import SequenceLayout
from verl.models.routing import Routing


@dataclass
class PackedTokens(PackedSeqParams):
    """A packed batch on its way through the layers, recomputation included. `routing` is of the tokens that a rank's routers
    see: with sequence parallelism a part of the layout's."""

    layout: PackedLayout | SequenceLayout | None = None
    routing: Routing | None = None


class Choice:
    """Chooses experts as `routing` says, in Megatron's place for a replay. A forward pre-hook of a decoder layer."""

    def __init__(self, layer: int):
        self.layer = layer
        self.routing: Routing | None = None

    def __call__(self, module: Any, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the routing that the layer is called with."""
        self.routing = kwargs["packed_seq_params"].routing
        module.mlp.router.router_replay = None if self.routing is None else self

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [tokens, experts] -> (scores, experts) of the choices [tokens, topk]. The name is Megatron's."""
        values, chosen = choose(scores, topk, groups, group_topk)
        assert self.routing is not None
        experts = self.routing.choose(self.layer, chosen)
        return (values, chosen) if experts is chosen else (scores.gather(1, experts), experts)


class RMSNorm(nn.Module):
    """As transformers computes it, in at least float32. Megatron's own refuses sequence parallelism without its kernels."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OrderedSelfAttention(SelfAttention):
    """Attention with this rank's rows [queries | keys | values] in its projection, each a block of the checkpoint's tensor.
    Megatron's interleaves them by group: every weight sync would need a copy."""

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        mixed, _ = self.linear_qkv(hidden_states)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition
        query, key, value = (
            part.unflatten(-1, (-1, size)) for part in mixed.split([heads * size, groups * size, groups * size], dim=-1)
        )
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


class PackedAttention(MegatronModule):
    """Attention of a packed batch. `config.sliding_windows` has the window of each layer, None for none, and
    `config.score_scale` the factor of scores."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: object):
        super().__init__(config=config)
        self.layer = layer_number - 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
        **_: object,
    ) -> torch.Tensor:
        """query [tokens, 1, heads, size], key and value [tokens, 1, groups, size] -> [tokens, 1, heads * size]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        scoring = Scoring(self.config.score_scale, self.config.sliding_windows[self.layer])
        out = packed_seq_params.layout.attend(self.layer, q, k, v, scoring)
        return cast("torch.Tensor", out.flatten(2).transpose(0, 1))


class Experts(MegatronModule):
    """This rank's experts as two tensors with the dimensions of the checkpoint's."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, name: str | None = None
    ):
        super().__init__(config=config)
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        shapes = {"gate_up_proj": (2 * width, config.hidden_size), "down_proj": (config.hidden_size, width)}
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.zeros(num_local_experts, *shape, dtype=config.params_dtype))
            parameter.allreduce = False  # type: ignore[attr-defined]  # summed only over ranks with the same experts
            self.register_parameter(name, parameter)

    def forward(
        self, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """hidden [tokens, hidden_size], ordered by expert; the probability of each token's choice [tokens]."""
        counts = [int(count) for count in tokens_per_expert]
        parts = []
        # every expert takes part, with no tokens too: then each parameter has a gradient on every rank
        for expert, (x, weight) in enumerate(zip(hidden.split(counts), probs.split(counts), strict=True)):
            gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
            weighted = self.config.activation_func(gate) * up * weight.unsqueeze(-1).to(x.dtype)
            parts.append(F.linear(weighted, self.down_proj[expert]))
        return torch.cat(parts), None
