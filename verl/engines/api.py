"""The contract of training engines. Each engine has a file in this folder; `ENGINES` names them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from verl.distributions import require_part
from verl.errors import MissingExtraError
from verl.families import TRAINING_ENGINES as ENGINES  # noqa: F401 - the name in this contract

if TYPE_CHECKING:
    import torch

    from verl.data_proto.metrics import Metric
    from verl.data_proto.proto import DataProto
    from verl.engines.routing import EngineRouting
    from verl.models.optim import AdamStep

# engine -> its module, its package
_LIBRARIES = {"deepspeed": ("deepspeed", "deepspeed"), "megatron": ("megatron.core", "megatron-core")}


def require_library(engine: str) -> None:
    """Raise MissingExtraError if a training engine or its library is not installed."""
    require_part(f"verl.engines.{engine}", f"strategy={engine}")
    module, package = _LIBRARIES.get(engine, ("torch", ""))
    if importlib.util.find_spec(module.partition(".")[0]) is None or importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"strategy={engine}", engine, package, "set strategy=fsdp2 or trainer.engine_fallback=fsdp"
        )


@dataclass(frozen=True)
class MicroBatching:
    """Limits of the part of a mini-batch that one forward and backward computes: tokens (`use_dynamic_bsz`), or rows.

    `max_tokens` counts the tokens that are computed: a prompt shared by several rows of a micro-batch counts once.

    >>> MicroBatching(max_tokens=16384)
    MicroBatching(max_tokens=16384, max_rows=None)
    """

    max_tokens: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True)
class BatchTotals:
    """Sizes of the mini-batch over all ranks: the denominators of the loss, so that neither the micro-batch split nor
    the number of ranks changes it.

    >>> BatchTotals(num_tokens=2048, num_sequences=16, num_units=16).num_chosen_tokens
    0
    """

    num_tokens: int  # response_mask.sum()
    num_sequences: int  # rows with a token in response_mask
    num_units: int  # of the objective: rows, or groups of rows that belong together
    num_chosen_tokens: int = 0  # response_mask.sum() of the rows with `chosen`


class LossFn(Protocol):
    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """The loss of one micro-batch, already divided by the totals (micro-batch losses are summed), and its metrics.
        `outputs` holds tensors with gradient as verl.models.outputs describes them: [batch, response], zero where
        response_mask is false, or [batch]."""
        ...


class StepCheck(Protocol):
    """A check of an optimizer step before it is taken."""

    @property
    def names(self) -> Mapping[str, str]:
        """Metrics of the loss that it reads, each with its reduction over the mini-batch: sum, mean or max."""
        ...

    def __call__(self, metrics: Mapping[str, float], /) -> bool:
        """Whether the step may be taken. `metrics` are of the mini-batch, equal on all ranks: `grad_norm`, and the metrics in
        `names` that a loss has given."""
        ...


@runtime_checkable
class TrainEngine(Protocol):
    """A model with its optimizer. Rows come as a DataProto with the columns prompts, prompt_mask, responses,
    attention_mask, response_mask and the columns of the loss; results are [batch, response] or [batch] tensors in row order.

    In an engine of several ranks, every rank calls the same methods in the same order. Each data-parallel rank gets its
    own rows (their numbers may differ). The ranks of one tensor or sequence parallel group get the same rows. Metrics are
    of the rank's rows."""

    module: Any  # torch.nn.Module, shared with rollout
    head: str  # a row of verl.models.heads.HEADS
    compute_dtype: torch.dtype
    routing: EngineRouting  # the experts of its forwards, in a mixture of experts

    def forward(
        self, batch: DataProto, outputs: Sequence[str], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The named outputs, rows of verl.models.outputs.OUTPUTS, without gradient, float32 or wider, on the CPU. Raises
        ModelError for an output that the model's head does not have."""
        ...

    def train_batch(
        self,
        batch: DataProto,
        loss: LossFn,
        outputs: Sequence[str],
        micro: MicroBatching,
        temperature: float = 1.0,
        check: StepCheck | None = None,
        rows: Sequence[int] | None = None,
        unit: str = "row",
    ) -> dict[str, Metric]:
        """One optimizer step on `batch` (gradients accumulated over micro-batches, clipped). Rows that are equal in the column
        `unit` reach the loss in one micro-batch; "row": each by itself. Only `rows` (default: all; never a part of a unit) are
        computed: the loss is zero and has a zero gradient on all further rows. Those count in the totals. A rank may have none
        of them, as long as another one has some. A gradient norm that is not finite, or `check`, skips the step on all ranks
        alike, and is reported: weights, optimizer and random state stay as they were. Metrics of the loss are merged; adds
        `grad_norm` and `loss`."""
        ...

    def forward_backward(
        self, batch: DataProto, loss: LossFn, outputs: Sequence[str], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Metric]:
        """Add the gradient of the loss on `batch` to the gradients of earlier calls since the last `optim_step`; returns the
        metrics of the loss. The totals that the loss gets are of this call. Raises ConfigError if the engine takes one call per
        step."""
        ...

    def forget_gradients(self) -> None:
        """Drop the gradients that `forward_backward` has added up."""
        ...

    def optim_step(self, learning_rate: float | AdamStep | None = None) -> dict[str, Metric]:
        """One optimizer step on the gradients of `forward_backward`, clipped, at the schedule's rate by default; forgets them.
        An AdamStep also sets the step's other values.
        Returns `grad_norm`; a norm that is not finite skips the step as in `train_batch`. Raises ConfigError without
        gradients."""
        ...

    def end_step(self, *, advance: bool = True) -> float:
        """Advance the learning-rate schedule by one trainer step, unless nothing was trained; returns the rate that was in
        force."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Inside, `forward` computes the frozen model under the adapters: the reference policy of LoRA training
        without a second copy. Raises ConfigError without adapters."""
        ...

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter name, full tensor in the compute dtype), adapters merged in, tied weights once, for a rollout engine with
        its own weights. Collective: every rank takes every tensor, in the same order."""
        ...

    def reconfigure(self, changes: Mapping[str, object]) -> None:
        """Other values for keys of the engine's config that may change between two steps (verl/engines/hybrid_3d.py): they
        change memory and communication, and no loss. Raises ConfigError for another key or a wrong value."""
        ...

    def visible_update_ratio(self) -> float | None:
        """The fraction of the masters' movement since the start of the run that the weights in the compute dtype show (see
        verl.models.visible), measured on a sample of each tensor. None if nothing is rounded, or nothing has moved."""
        ...

    def free_cached_memory(self) -> None:
        """Free memory that is kept from one training call to the next and can be allocated again."""
        ...

    # -- read by weight sync (verl/reshard/update.py) and by the switch to generation (verl/runtime/mode_switch.py) ----------

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken; 0 for a frozen model."""
        ...

    def weight_layout(self) -> WeightLayout | None:
        """A description of the weights that a sync transfers: all of them, or the adapters of LoRA training. None if other
        parameters train in addition to adapters: then `gather_weights` is the only way."""
        ...

    def local_weights(self) -> Mapping[str, torch.Tensor]:
        """This rank's part of each parameter by Hugging Face name, tied ones once, not copied: the weights that compute. With
        adapters: the masters, merged before their rounding."""
        ...

    def trained_weights(self) -> Mapping[str, torch.Tensor]:
        """This rank's part of the parameters that train, not copied, as `module` holds them; {} for a frozen model."""
        ...

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Copies on the CPU of this rank's part of the master weights that train."""
        ...

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        """Write a `snapshot` back into masters and module, bit for bit."""
        ...

    def state(self) -> EngineState:
        """Everything that resuming needs, without copying (read it before the next train_batch)."""
        ...

    def load_state(self, state: EngineState) -> None:
        """The inverse of `state`: afterwards the engine continues bit for bit."""
        ...


@dataclass(frozen=True)
class WeightLayout:
    """The weights that a sync transfers; equal on all ranks. `adapter_scales` is empty if all weights travel, else the factor
    of each adapted layer. `layers_at_a_time` limits the staging memory (fsdp_config.layer_per_group)."""

    shapes: dict[str, tuple[int, ...]]  # of full tensors, by Hugging Face name
    dtype: torch.dtype
    rounding: str  # fsdp_config.master_rounding
    adapter_scales: dict[str, float]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    layers_at_a_time: int | None = None


@dataclass(frozen=True)
class Deferred:
    """A tensor that is built when it is written: gathered from shards, merged with its adapter, or read from a file. All ranks
    build the same ones in the same order, since `build` may be collective, and the result is equal on all. Without
    `is_collective` only the rank that writes builds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[], torch.Tensor]
    is_collective: bool = True
    read: Callable[[torch.Tensor], None] | None = None  # from a file, into a contiguous tensor of host memory

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize


Tensors = Mapping[str, "torch.Tensor | Deferred"]


def whole(tensor: torch.Tensor | Deferred) -> torch.Tensor:
    """The tensor itself."""
    return tensor.build() if isinstance(tensor, Deferred) else tensor


def gather_adapters(engine: TrainEngine) -> Iterator[tuple[str, torch.Tensor]]:
    """(peft's name, full tensor), the masters of all adapters, for a rollout engine that computes with them. Collective, as
    `TrainEngine.gather_weights` is."""
    adapter = engine.state().adapter
    assert adapter is not None
    return ((name, whole(tensor)) for name, tensor in adapter.tensors.items())


@dataclass(frozen=True)
class AdapterState:
    """LoRA adapters under peft's names, and their adapter_config.json."""

    tensors: Tensors
    config: dict[str, Any]


@dataclass
class EngineState:
    """Model and optimizer tensors by Hugging Face parameter name, plus what JSON can hold.

    With adapters, `model` has them merged in, for readers of the checkpoint; resuming takes them from `adapter`.
    """

    model: Tensors  # float32 master weights
    optimizer: Tensors  # "{parameter name}/exp_avg", ...
    extra: dict[str, Any]  # schedule position, optimizer steps taken
    adapter: AdapterState | None = field(default=None)
