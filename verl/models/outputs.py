"""Quantities that a packed forward computes for a loss, by name.

    log_probs        token  log-probability of the target in softmax(logits / temperature)
    entropy          token  of that distribution
    sum_pi_squared   token  its sum of squared probabilities
    correct          token  1 if no other token has a greater logit than the target, else 0; no gradient
    mean_logit       token  mean of the final logits over the vocabulary, not divided by the temperature; no gradient
    values           token  the scalar head's output at the state before the token
    sequence_scores  row    the scalar head's output at the last trained token

    candidate_log_probs  token  [..., n]  of the tokens in the column candidate_ids [batch, response, n]
    top_log_probs@n      token  [..., n]  of the n most probable tokens, descending; no gradient
    top_ids@n            token  [..., n]  those tokens, int64

Token outputs are [batch, response], zero if response_mask is false; row outputs are [batch]. Both are float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch

from verl.errors import ModelError
from verl.models.log_probs import OPTIONAL, TokenStats
from verl.models.packing import PackedBatch, Reads
from verl.registry import Registry


@dataclass
class HeadInputs:
    """Hidden states [positions, hidden_size] that a packed forward has read, and what turns them into outputs. `hidden` is
    logits [positions, vocabulary] for a model that computes these by itself."""

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
    """`compute` gives values [positions] or [positions, n]. A "token" output has the values of predicted tokens, a "row"
    output the values at the last tokens of rows. It reads the field `statistic` of TokenStats and the batch's `column`.
    `count` is the n of a name with @n. Models with one of `heads` have the output."""

    per: Literal["token", "row"]
    heads: tuple[str, ...]
    compute: Callable[[HeadInputs], torch.Tensor]
    statistic: str | None = None
    column: str | None = None
    count: int = 0

    def scatter(self, packed: PackedBatch, values: torch.Tensor) -> torch.Tensor:
        """[positions, ...] -> the output's shape."""
        return packed.scatter(values) if self.per == "token" else packed.scatter_rows(values)

    def empty(self, packed: PackedBatch) -> torch.Tensor:
        """The output of a batch without computation: zeros."""
        below = packed.columns[self.column].shape[1:] if self.column else (self.count,) if self.count else ()
        shape = (*(packed.shape if self.per == "token" else packed.shape[:1]), *below)
        dtype = torch.int64 if self.statistic == "top_ids" else torch.float32
        return torch.zeros(shape, dtype=dtype, device=packed.row.device)


def _statistic(name: str) -> OutputKind:
    return OutputKind("token", ("lm",), lambda inputs: getattr(inputs.statistics, name), name)


def _scalar(inputs: HeadInputs) -> torch.Tensor:
    return cast("torch.Tensor", inputs.module.value(inputs.hidden))


OUTPUTS = Registry(
    "model output",
    {
        **{name: _statistic(name) for name in ("log_probs", *OPTIONAL, "top_log_probs", "top_ids")},
        "candidate_log_probs": replace(_statistic("candidate_log_probs"), column="candidate_ids"),
        "values": OutputKind("token", ("token_value",), _scalar),
        "sequence_scores": OutputKind("row", ("sequence_score",), _scalar),
    },
)


def output_kind(name: str) -> OutputKind:
    """The output `name`, or `name@count`."""
    base, _, count = name.partition("@")
    kind: OutputKind = OUTPUTS.get(base)
    return replace(kind, count=int(count)) if count else kind


class RequestedOutputs(NamedTuple):
    """Outputs that a call asks of a forward pass, and the positions that it reads for them."""

    outputs: Sequence[str]
    reads: Reads
    temperature: float

    @classmethod
    def of(cls, outputs: Sequence[str], head: str, temperature: float) -> RequestedOutputs:
        """`outputs` of a model with `head`. Raises ModelError for an output that it does not have."""
        for name in outputs:
            base = name.partition("@")[0]
            if base not in OUTPUTS or head not in OUTPUTS.get(base).heads:
                available = ", ".join(other for other in OUTPUTS if head in OUTPUTS.get(other).heads)
                raise ModelError(f"A model with head {head!r} has no output {name!r}; it has {available}.")
        kinds = [output_kind(name) for name in outputs]
        per, columns = {kind.per for kind in kinds}, dict.fromkeys(kind.column for kind in kinds if kind.column)
        reads = Reads(predictions="token" in per, last_token="row" in per, columns=tuple(columns))
        return cls(outputs, reads, temperature)


def statistics_wanted(outputs: Sequence[str], columns: Mapping[str, torch.Tensor], vocabulary: int) -> dict[str, Any]:
    """Arguments of token_log_probs for `outputs` of a model with so large a `vocabulary`, and `columns` of a packed batch."""
    kinds = [output_kind(name) for name in outputs]
    read = {kind.statistic for kind in kinds}
    top = max((kind.count for kind in kinds if kind.statistic in ("top_log_probs", "top_ids")), default=0)
    return {
        "optional": [name for name in OPTIONAL if name in read],
        "candidates": columns["candidate_ids"] if "candidate_log_probs" in read else None,
        "top": min(top, vocabulary),
    }
