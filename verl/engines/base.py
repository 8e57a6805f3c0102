"""Micro-batches, the schedule, adapters, weights and state of training engines, wherever their parameters lie."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl.config import FSDPConfig, ModelConfig, OptimConfig, SFTModelConfig
from verl.data_proto.extras import BatchExtras
from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, EngineState, LossFn, MicroBatching, StepCheck, WeightLayout
from verl.engines.headroom import Headroom
from verl.engines.hybrid_3d import Dimensions, check_change, require_3d_hybrid
from verl.engines.micro_batches import BatchPlan, costs_of, plan_micro_batches, sizes_of
from verl.engines.routing import EngineRouting
from verl.engines.state import TrainedState
from verl.engines.step_check import PendingGradients, whole_batch_metrics
from verl.errors import ConfigError
from verl.models.adapter_dropout import dropping
from verl.models.decoder.reuse import reuse_metrics
from verl.models.lora import LoRASpec, adapters_off, is_adapter
from verl.models.neftune import noise_of
from verl.models.optim import AdamStep, MasterOptimizer, lr_at
from verl.models.outputs import RequestedOutputs
from verl.models.packing import PackedBatch, pack_rows, unpadded_rows
from verl.models.padded import ForwardKind
from verl.models.parallel.collectives import local
from verl.models.rounding import Rounding
from verl.models.visible import ratio
from verl.parallel.balance import unit_ids
from verl.parallel.device import compute_dtype, moved

log = logging.getLogger(__name__)


class TrainedEngine(ABC):
    """A TrainEngine without its device layout. Subclasses set the attributes that are declared here. A frozen model (no
    `optim`) is held only in the compute dtype."""

    module: Any
    optimizer: MasterOptimizer | None  # None: frozen
    adapts_head = False  # whether adapters are also put on the output projection
    accumulates_calls = True  # whether gradients of several `forward_backward` add up
    computes_images = False  # whether its forward reads images of prompts
    goes_together = False  # whether all ranks go backward together, through a zero if nothing trains
    _trained: TrainedState

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: FSDPConfig,
        optim: OptimConfig | None,
        head: str,
        device: torch.device,
        total_steps: int,
        share_prompts: bool = True,
    ):
        self.head, self.device, self.total_steps = head, device, total_steps
        self.config, self.dimensions = engine, Dimensions.of(engine)
        self.model_config, self.optim = model, optim
        if optim is not None:
            lr_at(0, optim, total_steps)  # it refuses a module that it cannot follow
        self.compute_dtype = compute_dtype(engine.dtype, device)
        self.rounding = Rounding(engine.master_rounding)
        self.spec = LoRASpec.of(model, self.adapts_head) if self.optim is not None else None
        self.neftune_alpha = model.neftune_alpha or 0.0 if isinstance(model, SFTModelConfig) else 0.0
        self.share_prompts = share_prompts and not self.neftune_alpha  # each row has its own noise
        self.headroom = Headroom(device) if engine.adapt_micro_batches and self.optim is not None else None
        self.pads, self.num_lr_steps, self.routing = False, 0, EngineRouting()
        self._pending: PendingGradients | None = None

    def _keep_prompts_apart(self, forward: ForwardKind) -> None:
        """Plan micro-batches by padded tokens if the forward pads, since padded rows share no prompt."""
        self.pads = forward != "packed"
        self.share_prompts = self.share_prompts and not self.pads

    @torch.no_grad()
    def forward(
        self, batch: DataProto, outputs: Sequence[str], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        requested = RequestedOutputs.of(outputs, self.head, temperature)
        columns: dict[str, torch.Tensor] = {}
        with self._ready():
            plan = self._plan(batch, requested, micro)
            for rows, result in zip(plan.parts, self._computed(plan), strict=True):
                for name, values in result.items():
                    if name not in columns:
                        wide = values.dtype if values.dtype in (torch.float64, torch.int64) else torch.float32
                        columns[name] = torch.zeros(len(batch), *values.shape[1:], dtype=wide)
                    if rows:
                        columns[name][rows] = values.to("cpu", columns[name].dtype)
        return columns

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
        """See TrainEngine. `num_skipped_updates` is added when the step was not taken."""
        assert self._pending is None, "gradients of forward_backward wait for optim_step"
        pending = PendingGradients.of(self.device)
        with self._ready(trains=True):
            metrics, totals = self._gradients(batch, loss, outputs, micro, temperature, rows, unit)
            self._complete_gradients(totals)
            return self._step(metrics, check, pending)

    def forward_backward(
        self, batch: DataProto, loss: LossFn, outputs: Sequence[str], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Metric]:
        if self._pending is None:
            self._pending = PendingGradients.of(self.device)
        elif not self.accumulates_calls:
            raise ConfigError("This engine takes one forward_backward a step; set strategy=fsdp2 for several.")
        with self._ready(trains=True):
            metrics, totals = self._gradients(batch, loss, outputs, micro, temperature)
        self._pending.totals.append(totals)
        return merge_metrics(metrics)

    def optim_step(self, learning_rate: float | AdamStep | None = None) -> dict[str, Metric]:
        if self._pending is None:
            raise ConfigError("There are no gradients to step on. Call forward_backward before optim_step.")
        pending, self._pending = self._pending, None
        with self._ready(trains=True):
            self._complete_gradients(pending.total())
            return self._step([{}], None, pending, learning_rate)

    def forget_gradients(self) -> None:
        if self._pending is not None and self.optimizer is not None:
            self.optimizer.forget_gradients()
        self._pending = None

    def end_step(self, *, advance: bool = True) -> float:
        assert self.optim is not None, "a frozen model has no learning rate"
        rate = lr_at(self.num_lr_steps, self.optim, self.total_steps)
        self.num_lr_steps += int(advance)
        return rate

    @contextmanager
    def reference(self) -> Iterator[None]:
        if self.spec is None or self.spec.full_modules:
            raise ConfigError("There are no adapters, or model.modules_to_save trains too; build a reference.")
        with adapters_off(self.module):
            yield

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._trained.weights(self.compute_dtype)

    @property
    def num_steps(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.num_steps

    def weight_layout(self) -> WeightLayout | None:
        parameters, scales, dtype = self._trained.parameters, self._trained.scales, self.compute_dtype
        names = list(parameters.named())
        if self.spec is not None:
            names = [name for name in names if name in self._trained.trains]
            if self.spec.dora or not all(map(is_adapter, names)):
                return None
            dtype = parameters.named()[names[0]].dtype
        config = self.module.config.get_text_config()
        return WeightLayout(
            shapes={name: parameters.shape(name) for name in names},
            dtype=dtype,
            rounding=self.rounding.kind,
            adapter_scales=scales,
            num_layers=getattr(config, "num_hidden_layers", 0),
            num_heads=getattr(config, "num_attention_heads", 1),
            num_kv_heads=getattr(config, "num_key_value_heads", 0) or getattr(config, "num_attention_heads", 1),
            layers_at_a_time=self.dimensions.layer_per_group if self.config.use_3d_hybrid else None,
        )

    @torch.no_grad()
    def local_weights(self) -> dict[str, torch.Tensor]:
        masters = self.optimizer.masters if self.optimizer is not None and self.spec is not None else {}
        return {name: masters.get(name, p).detach() for name, p in self.module.named_parameters()}

    @torch.no_grad()
    def trained_weights(self) -> dict[str, torch.Tensor]:
        parameters = {} if self.optimizer is None else self.optimizer.parameters
        return {name: local(p).detach() for name, p in parameters.items()}

    @torch.no_grad()
    def snapshot(self) -> dict[str, torch.Tensor]:
        masters = {} if self.optimizer is None else self.optimizer.masters
        return {name: moved(local(p), "cpu", copy=True) for name, p in masters.items()}

    @torch.no_grad()
    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        assert self.optimizer is not None, "a frozen model has no snapshot"
        for name, saved in snapshot.items():
            local(self.optimizer.masters[name]).detach().copy_(saved)
        self.optimizer.round_masters()

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        check_change(changes)
        require_3d_hybrid(self.config, changes)
        self.config = replace(self.config, **changes)
        self.dimensions = Dimensions.of(self.config)

    def visible_update_ratio(self) -> float | None:
        sums = self.optimizer.movement() if self.optimizer is not None else {}
        return ratio(self._sum_over_parameters(sums)) if sums else None

    def free_cached_memory(self) -> None:
        if self.optimizer is not None:
            self.optimizer.gradients.release()

    def state(self) -> EngineState:
        """See TrainEngine. Tied parameters appear once, under the name of the first."""
        return self._trained.save({"num_lr_steps": self.num_lr_steps})

    def load_state(self, state: EngineState) -> None:
        """See TrainEngine. Any number of ranks will do. Raises CheckpointError for names or shapes of another model."""
        self._trained.load(state)
        self.num_lr_steps = state.extra["num_lr_steps"] if state.extra else self.num_lr_steps

    # -- the device layout -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _ready(self, *, trains: bool = False) -> AbstractContextManager[None]:
        """Inside, micro-batches can be computed, and with `trains` the optimizer can step."""

    @abstractmethod
    def _outputs(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        """The named outputs, with a graph if gradients are enabled."""

    def _before_micro_batch(self, number: int, count: int, *, trains: bool) -> None:  # noqa: B027  (few layouts need it)
        """Called before micro-batch `number` of `count`."""

    def _complete_gradients(self, totals: BatchTotals) -> None:  # noqa: B027  (few layouts need it)
        """Called after the last micro-batch, before the step."""

    def _sum_over_parameters(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The sum of values that each rank has for its part of each parameter."""
        return torch.stack(list(sums.values())).sum(0)

    def _over_ranks(self, numbers: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """`numbers` reduced over the ranks that have their own rows."""
        return numbers

    def _move_parameters(self, device: torch.device) -> None:  # noqa: B027  (few layouts offload)
        """Keep the parameters on `device`."""

    @property
    def _offloads(self) -> tuple[bool, bool]:
        """Whether the host holds parameters and optimizer between calls."""
        return False, False

    @contextmanager
    def _on_device(self, *, trains: bool = False) -> Iterator[None]:
        """Inside, what `_offloads` names is on the device, the optimizer only with `trains`."""
        self._move(self.device, trains)
        try:
            yield
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        self._move(torch.device("cpu"), True)

    def _move(self, device: torch.device, and_optimizer: bool) -> None:
        offloads_parameters, offloads_optimizer = self._offloads
        if offloads_parameters:
            self._move_parameters(device)
        if offloads_optimizer and and_optimizer and self.optimizer is not None:
            self.optimizer.move_state(device)

    def _plan(
        self,
        batch: DataProto,
        requested: RequestedOutputs,
        micro: MicroBatching,
        units: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        noise: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> BatchPlan:
        """The micro-batches of the rows `rows` (None: all); as many on each rank, the last ones may be empty."""
        extras = BatchExtras.of(batch, replays=self.routing.replays, noise=noise)
        cost_of = costs_of(extras, self.module, self.computes_images)
        members = unpadded_rows(batch.batch, rows, requested.reads, extras, cost_of)
        parts = plan_micro_batches(members, micro, self.share_prompts, units, pads=self.pads)
        count = int(self._over_ranks(torch.tensor([len(parts)]), dist.ReduceOp.MAX))
        log.debug("Micro-batches of %s rows; %d on the rank with most", [len(part) for part in parts], count)
        return BatchPlan(batch, extras, requested, parts + [[] for _ in range(count - len(parts))])

    def _pack(self, plan: BatchPlan, rows: list[int]) -> tuple[DataProto, PackedBatch]:
        """The rows `rows` of a planned batch, one of its micro-batches, and their layout."""
        part, extras = plan.select(rows)
        packed = pack_rows(
            part.batch, share_prompts=self.share_prompts, device=self.device, chunk_tokens=self.dimensions.chunk_tokens,
            reads=plan.requested.reads, extras=extras,
        )  # fmt: skip
        return part, packed

    def _computed(self, plan: BatchPlan) -> Iterable[dict[str, torch.Tensor]]:
        """The named outputs of each micro-batch of `plan`, in its order."""
        for number, rows in enumerate(plan.parts):
            self._before_micro_batch(number, len(plan.parts), trains=False)
            _, packed = self._pack(plan, rows)
            self.routing.begin(packed)
            yield self._outputs(packed, plan.requested.outputs, plan.requested.temperature)
            self.routing.end(packed, plan, rows, self.share_prompts)

    def _gradients(
        self,
        batch: DataProto,
        loss: LossFn,
        outputs: Sequence[str],
        micro: MicroBatching,
        temperature: float,
        rows: Sequence[int] | None = None,
        unit: str = "row",
    ) -> tuple[list[dict[str, Metric]], BatchTotals]:
        """Add the gradients of a batch to the existing ones; returns metrics of micro-batches, and sizes over all ranks."""
        requested, units, noise = RequestedOutputs.of(outputs, self.head, temperature), unit_ids(batch, unit), None
        totals = BatchTotals(*self._over_ranks(torch.tensor(sizes_of(batch, units))).tolist())
        micro = micro if self.headroom is None else self.headroom.adapted(micro)
        if self.neftune_alpha:
            size = self.module.config.get_text_config().hidden_size
            noise = partial(noise_of, alpha=self.neftune_alpha, hidden_size=size, seed=self.num_steps)
        plan = self._plan(batch, requested, micro, units, rows, noise)
        metrics = [{"loss": Metric.sum(0.0)}, *self._sum_gradients(plan, loss, totals), *reuse_metrics(self.module)]
        if self.headroom is not None and self.headroom.limit is not None:
            metrics.append({"micro_batch_tokens": Metric.last(self.headroom.limit)})
        return metrics, totals

    def _sum_gradients(self, plan: BatchPlan, loss: LossFn, totals: BatchTotals) -> list[dict[str, Metric]]:
        """Forward and backward of each micro-batch of `plan`; returns their metrics."""
        metrics, outputs = [], (plan.requested.outputs, plan.requested.temperature)
        for number, rows in enumerate(plan.parts):
            self._before_micro_batch(number, len(plan.parts), trains=True)
            part, packed = self._pack(plan, rows)
            measured = nullcontext() if self.headroom is None else self.headroom.measuring(packed.input_ids.numel())
            with measured, dropping(self.module, packed, self.num_steps):
                metrics.append(self._backward(self._outputs(packed, *outputs), part, loss, totals))
        return metrics

    def _backward(
        self, named_outputs: dict[str, torch.Tensor], part: DataProto, loss: LossFn, totals: BatchTotals
    ) -> dict[str, Metric]:
        """The metrics of one micro-batch. Its gradients are added to the other micro-batches' gradients."""
        assert self.optimizer is not None, "a frozen model cannot be trained"
        skips = self.goes_together and not len(part)
        value, metrics = (None, {}) if skips else loss(named_outputs, part, totals)
        if value is not None and value.requires_grad:  # a micro-batch without trained tokens has no graph
            self.optimizer.backward(value)
        elif self.goes_together:
            self.optimizer.backward(torch.stack([v.sum() * 0 for v in named_outputs.values() if v.requires_grad]).sum())
        return metrics if value is None else {**metrics, "loss": Metric.sum(value.detach())}

    def _step(
        self,
        parts: Sequence[dict[str, Metric]],
        check: StepCheck | None,
        pending: PendingGradients,
        learning_rate: float | AdamStep | None = None,
    ) -> dict[str, Metric]:
        """The optimizer step; returns all metrics. A step that is not taken restores the random state before its gradients."""
        assert self.optimizer is not None, "a frozen model cannot be trained"
        metrics = merge_metrics(list(parts))
        accept = None if check is None else partial(self._accepts, check, metrics)
        result = self.optimizer.step(self.end_step(advance=False) if learning_rate is None else learning_rate, accept)
        is_finite = math.isfinite(result.grad_norm)
        if (scale := self.optimizer.loss_scale) is not None:
            metrics |= {"loss_scale": Metric.last(scale.value), "overflow_ratio": Metric.mean(float(not is_finite))}
        if scale is None or is_finite:  # an overflow would hide the norms of the other steps
            metrics["grad_norm"] = Metric.last(result.grad_norm)
        if not result.taken:
            metrics["num_skipped_updates"] = Metric.last(1.0)
            pending.random_state.restore(self.device)
        self._after_step(metrics, learning_rate)
        return metrics

    def _after_step(self, metrics: dict[str, Metric], learning_rate: float | AdamStep | None) -> None:  # noqa: B027
        """Called after a step with its metrics, to which it may add."""

    def _accepts(self, check: StepCheck, metrics: Mapping[str, Metric], grad_norm: float) -> bool:
        batch_metrics = whole_batch_metrics(metrics, check.names, self._over_ranks)
        scale = self.optimizer.loss_scale if self.optimizer else None
        overflows = scale is not None and scale.overflows(grad_norm)  # the scale falls; nothing looks wrong
        return check(batch_metrics if overflows else {**batch_metrics, "grad_norm": grad_norm})
