"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) as a module of Megatron's layers."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from verl.engines.megatron.layers import PackedAttention, RMSNorm
from verl.engines.megatron.library import (
    ColumnParallelLinear,
    MegatronModule,
    RowParallelLinear,
    TransformerConfig,
    mappings,
)

_EPS = 1e-6  # of the norms of latents in transformers, for every model


class LatentAttention(MegatronModule):
    """Heads are divided over tensor parallel ranks; each rank computes the latents of its tokens. Modules have the checkpoint's
    names, and `config.latent` is the transformers config."""

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any = None, **_: object):
        super().__init__(config=config)
        hf = config.latent
        self.nope, self.rope, self.value = hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim
        self.latent, self.is_interleaved, num_heads = hf.kv_lora_rank, hf.rope_interleave, hf.num_attention_heads
        shared: dict[str, object] = {"config": config, "init_method": None, "bias": False, "tp_group": pg_collection.tp}
        queries, hidden = num_heads * (self.nope + self.rope), config.hidden_size
        if hf.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, queries, **shared)
        else:
            self.q_a_proj = _whole(config, hidden, hf.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config, hf.q_lora_rank, _EPS)
            self.q_b_proj = ColumnParallelLinear(hf.q_lora_rank, queries, **shared)
        self.kv_a_proj_with_mqa = _whole(config, hidden, self.latent + self.rope)
        self.kv_a_layernorm = RMSNorm(config, self.latent, _EPS)
        self.kv_b_proj = ColumnParallelLinear(self.latent, num_heads * (self.nope + self.value), **shared)
        self.o_proj = RowParallelLinear(
            num_heads * self.value, hidden, input_is_parallel=True, skip_bias_add=True, **shared
        )
        self.core_attention = PackedAttention(config, layer_number)

    def forward(
        self,
        hidden: torch.Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: object,
        **_: object,
    ) -> object:
        """hidden [tokens of this rank, 1, hidden_size], angles [tokens, 1, 1, rope] -> (the same shape, no bias)."""
        if hasattr(self, "q_proj"):
            query, _ = self.q_proj(hidden)
        else:
            query, _ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query = query.unflatten(-1, (-1, self.nope + self.rope))
        latent, turned = self.kv_a_proj_with_mqa(hidden).split([self.latent, self.rope], dim=-1)
        keys_values, _ = self.kv_b_proj(self.kv_a_layernorm(latent))
        key, value = keys_values.unflatten(-1, (-1, self.nope + self.value)).split([self.nope, self.value], dim=-1)
        turned = self._rotated(self._of_all_tokens(turned).unsqueeze(2), rotary_pos_emb)
        query = torch.cat([query[..., : self.nope], self._rotated(query[..., self.nope :], rotary_pos_emb)], dim=-1)
        key = torch.cat([key, turned.expand(-1, -1, key.shape[2], -1)], dim=-1)
        return self.o_proj(self.core_attention(query, key, value, attention_mask, packed_seq_params))

    def _of_all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The part of keys that all heads share: its gradient is the sum over ranks with some heads each. Megatron needs
        sequence parallelism for experts."""
        if not self.config.sequence_parallel:
            return x
        return cast("torch.Tensor", mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True))

    def _rotated(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """x [tokens, 1, heads, rope] -> the same; the model's pairs are neighbours, or in two halves."""
        half = angles[..., : self.rope // 2]
        cos, sin = half.cos().to(x.dtype), half.sin().to(x.dtype)
        first, second = (x[..., 0::2], x[..., 1::2]) if self.is_interleaved else x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _whole(config: TransformerConfig, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that is complete on every rank."""
    linear = nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype)
    linear.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return linear
