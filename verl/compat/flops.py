"""`verl.utils.flops_counter`: floating-point operations of a training step over a Hugging Face decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig

from verl.parallel.device import named_peak_flops

_UNITS = {"B": 1e9, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """The peak of a device (default: this machine's) in `unit` operations per second; infinite for an unknown device, so
    that its utilisation is 0."""
    if device_name is None:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (named_peak_flops(device_name) or float("inf")) / _UNITS[unit]


class FlopsCounter:
    """Operations from the shapes in a transformers `config` of a dense or mixture-of-experts decoder.

    Forward and backward: 6 operations per token and active weight (of the experts, the routed ones), and 6 s^2 per layer
    and attention dimension for a causal sequence of s tokens.
    """

    def __init__(self, config: PreTrainedConfig):
        self.config = getattr(config, "text_config", config)

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float, **_: object) -> tuple[float, float]:
        """(achieved, peak) in units of 10^12 operations per second, for one pass over sequences of `batch_seqlens` tokens in
        `delta_time` seconds."""
        config = self.config
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        weights = self._layer_weights(heads, head_dim) + 2 * config.vocab_size * config.hidden_size
        squares = sum(length * length for length in batch_seqlens)
        attention = 6 * squares * head_dim * heads * config.num_hidden_layers
        total = 6 * weights * sum(batch_seqlens) + attention
        return total / delta_time / 1e12, get_device_flops("T")

    def _layer_weights(self, heads: int, head_dim: int) -> int:
        """Active weights per token, over all layers."""
        config = self.config
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        attention = config.hidden_size * head_dim * (2 * heads + 2 * kv_heads)
        dense = 3 * config.hidden_size * config.intermediate_size
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        if not experts:
            return config.num_hidden_layers * (attention + dense)
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        routed = 3 * config.hidden_size * width * config.num_experts_per_tok + config.hidden_size * experts
        return config.num_hidden_layers * (attention + routed)
