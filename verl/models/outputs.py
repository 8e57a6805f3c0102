"""Quantities that a packed forward computes for a loss, by name.

    log_probs        token  log-probability of the target in softmax(logits / temperature)
    entropy          token  of that distribution
    sum_pi_squared   token  its sum of squared probabilities
    correct          token  1 where no other token has a greater logit than the target, else 0; no gradient
    values           token  the scalar head's output at the state before the token
    sequence_scores  row    the scalar head's output at the last trained token

Token outputs are [batch, response], zero where response_mask is false; row outputs are [batch]. Both are float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from verl.errors import ModelError
from verl.models.log_probs import TokenStats
from verl.models.packing import PackedBatch, Reads
from verl.registry import Registry


@dataclass
class HeadInputs:
    """Hidden states [positions, hidden_size] that a packed forward has read, and what turns them into outputs."""

    module: Any
    hidden: torch.Tensor
    targets: torch.Tensor  # [positions]
    temperature: float
    compute_statistics: Callable[[], TokenStats]

    @cached_property
    def statistics(self) -> TokenStats:
        """Statistics of softmax(logits / temperature), computed once for all outputs that use them."""
        return self.compute_statistics()


@dataclass(frozen=True)
class OutputKind:
    """`compute` gives values [positions]. A "token" output keeps those of predicted tokens, a "row" output those at the last
    tokens of rows. `statistic` names the field of TokenStats that it reads. Models with one of `heads` have it."""

    per: Literal["token", "row"]
    heads: tuple[str, ...]
    compute: Callable[[HeadInputs], torch.Tensor]
    statistic: str | None = None

    def shape(self, batch_shape: tuple[int, int]) -> tuple[int, ...]:
        """Of the output, for a (batch, response) shape."""
        return batch_shape if self.per == "token" else batch_shape[:1]

    def scatter(self, packed: PackedBatch, values: torch.Tensor) -> torch.Tensor:
        """[positions] -> the output's shape."""
        return packed.scatter(values) if self.per == "token" else packed.scatter_rows(values)


def _statistic(name: str) -> OutputKind:
    return OutputKind("token", ("lm",), lambda inputs: getattr(inputs.statistics, name), name)


def _scalar(inputs: HeadInputs) -> torch.Tensor:
    return inputs.module.value(inputs.hidden)


OUTPUTS = Registry(
    "model output",
    {
        **{name: _statistic(name) for name in ("log_probs", "entropy", "sum_pi_squared", "correct")},
        "values": OutputKind("token", ("token_value",), _scalar),
        "sequence_scores": OutputKind("row", ("sequence_score",), _scalar),
    },
)


def positions_read(outputs: Sequence[str], head: str) -> Reads:
    """Positions that `outputs` of a model with `head` need. Raises ModelError for an output that it does not have."""
    for name in outputs:
        if name not in OUTPUTS or head not in OUTPUTS.get(name).heads:
            known = ", ".join(other for other in OUTPUTS if head in OUTPUTS.get(other).heads)
            raise ModelError(f"A model with head {head!r} has no output {name!r}; it has {known}.")
    per = {OUTPUTS.get(name).per for name in outputs}
    return Reads(predictions="token" in per, last_token="row" in per)


def statistics_wanted(outputs: Sequence[str]) -> dict[str, bool]:
    """Arguments of token_log_probs for `outputs`."""
    read = {OUTPUTS.get(name).statistic for name in outputs}
    return {f"want_{name}": name in read for name in ("entropy", "sum_pi_squared", "correct")}
