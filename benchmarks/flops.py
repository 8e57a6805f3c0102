"""Arithmetic that a dense decoder needs: floating-point operations (a multiply-add is two) and bytes, from its config.

The counts follow the mathematics, not an implementation: a shared prompt once, attention only to visible tokens, logits
only where a token is sampled or trained. Norms, activations, softmax and the optimizer are left out (below 1% for the
models measured here).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workload import Workload

BACKWARD_AND_FORWARD = 3  # the backward pass of a matrix product is two products of its size


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with gated MLPs (Llama, Qwen, Mistral, Gemma)."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Decoder:
        heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @classmethod
    def of_folder(cls, folder: str | Path) -> Decoder:
        return cls.of_config(json.loads((Path(folder) / "config.json").read_text()))

    def layer_matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the projections of one layer: q, k, v, o, gate, up, down."""
        own, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return [
            (self.hidden, own),
            (self.hidden, kv),
            (self.hidden, kv),
            (own, self.hidden),
            (self.hidden, self.intermediate),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        ]

    def joined_matrices(self) -> list[tuple[int, int]]:
        """The same with the projections of one input as one product: q+k+v, o, gate+up, down."""
        q, k, v, o, gate, up, down = self.layer_matrices()
        return [(q[0], q[1] + k[1] + v[1]), o, (gate[0], gate[1] + up[1]), down]

    @property
    def head_matrix(self) -> tuple[int, int]:
        return self.hidden, self.vocabulary

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices and the embedding; norms are left out."""
        layers = self.num_layers * sum(i * o for i, o in self.layer_matrices())
        return layers + self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def layers(self, tokens: float) -> float:
        """All projections of all layers for `tokens` tokens."""
        return 2.0 * tokens * self.num_layers * sum(i * o for i, o in self.layer_matrices())

    def head(self, tokens: float) -> float:
        """Logits of `tokens` tokens."""
        return 2.0 * tokens * self.hidden * self.vocabulary

    def attention(self, pairs: float) -> float:
        """Scores and weighted sums of `pairs` (query, key) pairs, all heads and layers."""
        return 4.0 * pairs * self.num_layers * self.num_heads * self.head_dim


def causal_pairs(tokens: float, before: float = 0.0) -> float:
    """(query, key) pairs of `tokens` new tokens that see `before` earlier ones, themselves and each other causally."""
    return tokens * before + tokens * (tokens + 1) / 2


def prefill_flops(model: Decoder, num_prompts: int, prompt_tokens: int) -> float:
    """Each prompt once, with logits of its last token."""
    tokens = num_prompts * prompt_tokens
    return model.layers(tokens) + model.head(num_prompts) + model.attention(num_prompts * causal_pairs(prompt_tokens))


def decode_flops(model: Decoder, num_sequences: int, context: float) -> float:
    """One token of each sequence, which sees `context` tokens (itself included)."""
    return model.layers(num_sequences) + model.head(num_sequences) + model.attention(num_sequences * context)


def generate_flops(model: Decoder, work: Workload) -> float:
    """Prompts once, then response_tokens - 1 decode steps (the first token falls out of the prompt)."""
    steps = work.response_tokens - 1
    mean_context = work.prompt_tokens + (steps + 1) / 2
    return prefill_flops(model, work.num_prompts, work.prompt_tokens) + steps * decode_flops(
        model, work.num_sequences, mean_context
    )


def training_tokens(work: Workload) -> int:
    """Tokens that a forward pass needs: each prompt once, and all but the last token of each response."""
    return work.num_prompts * (work.prompt_tokens + work.num_samples * (work.response_tokens - 1))


def training_flops(model: Decoder, work: Workload) -> float:
    """Forward and backward of one update: three times the forward."""
    inputs = work.response_tokens - 1
    pairs = work.num_prompts * causal_pairs(work.prompt_tokens)
    pairs += work.num_sequences * causal_pairs(inputs, work.prompt_tokens)
    forward = model.layers(training_tokens(work)) + model.head(work.num_new_tokens) + model.attention(pairs)
    return BACKWARD_AND_FORWARD * forward


def decode_bytes(model: Decoder, num_prompts: int, num_samples: int, prompt: int, own: float, width: int) -> float:
    """Bytes that one decode step must read: every weight once, each prompt's keys and values once, each sample's own."""
    weights = model.num_layers * sum(i * o for i, o in model.layer_matrices()) + model.hidden * model.vocabulary
    cached = model.kv_elements_per_token * (num_prompts * prompt + num_prompts * num_samples * own)
    return float(width * (weights + cached))
