"""What a training engine is. One file per engine beside this one; `ENGINES` names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from verl.registry import Registry

if TYPE_CHECKING:
    import torch

    from verl.data_proto.metrics import Metric
    from verl.data_proto.proto import DataProto

ENGINES = Registry("training engine", {"local": "verl.engines.local:LocalEngine"})

Output = Literal["log_probs", "entropy", "sum_pi_squared", "values"]


@dataclass(frozen=True)
class MicroBatching:
    """How a mini-batch is cut for one forward and backward: by token count (`use_dynamic_bsz`), or by rows.

    `max_tokens` counts the tokens that are computed: a prompt shared by several rows of a micro-batch counts once.
    """

    max_tokens: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class BatchTotals:
    """Sizes of the whole mini-batch over all ranks: the denominators of the loss, so that neither the micro-batch
    split nor the number of ranks changes it."""

    num_tokens: int  # response_mask.sum()
    num_sequences: int  # rows
    dp_size: int = 1


class LossFn(Protocol):
    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The loss of one micro-batch, already divided by the totals (micro-batch losses are summed), and its metrics.
        `outputs` holds [batch, response] tensors with gradient, zero where response_mask is false."""
        ...


@runtime_checkable
class TrainEngine(Protocol):
    """A model with its optimizer. Rows come as a DataProto with the columns prompts, prompt_mask, responses,
    attention_mask, response_mask and whatever the loss reads; results are [batch, response] tensors in row order."""

    module: Any  # torch.nn.Module, the one that rollout shares

    def forward(
        self, batch: DataProto, outputs: Sequence[Output], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The asked outputs without gradient, float32, on the CPU, zero outside the response."""
        ...

    def train_batch(
        self, batch: DataProto, loss: LossFn, outputs: Sequence[Output], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Metric]:
        """One optimizer step on the whole of `batch` (gradients accumulated over micro-batches, clipped). A gradient
        norm that is not finite skips the step and is reported. Metrics of the loss are merged; adds `grad_norm` and
        `loss`."""
        ...

    def end_step(self) -> float:
        """Advance the learning-rate schedule by one trainer step; returns the rate that was in force."""
        ...

    def state(self) -> EngineState:
        """Everything that a resumed run needs, without copying (read it before the next train_batch)."""
        ...

    def load_state(self, state: EngineState) -> None:
        """The inverse of `state`: afterwards the engine continues bit for bit."""
        ...


@dataclass
class EngineState:
    """Model and optimizer tensors by Hugging Face parameter name, plus what JSON can hold."""

    model: dict[str, torch.Tensor]  # float32 master weights
    optimizer: dict[str, torch.Tensor]  # "{parameter name}/exp_avg", ...
    extra: dict[str, Any]  # schedule position, optimizer steps taken
