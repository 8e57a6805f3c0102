"""Training over several ranks: FSDP2, tensor, sequence and expert parallelism, in any combination.

Gradients are sums over all ranks of losses that are divided by totals over all ranks, so a step is that of one device with
all the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, EngineState, LossFn, MicroBatching, Output, StepCheck
from verl.engines.base import TrainedEngine
from verl.engines.fsdp_units import Gathering, sharded_units
from verl.engines.groups import Groups, mesh_of
from verl.engines.hybrid_3d import Dimensions
from verl.engines.loading import load_module, load_skeleton
from verl.engines.micro_batches import batch_totals, plan_micro_batches, sizes_of
from verl.engines.sharding import from_first, shard_model
from verl.engines.shards import GradientNorm, ShardedParameters, add_up_partial_gradients, sum_over_shards
from verl.engines.state import TrainedState
from verl.engines.step_check import random_state
from verl.errors import ConfigError
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.load import load_external, load_model_config
from verl.models.lora import LoRASpec
from verl.models.optim import MasterOptimizer
from verl.models.outputs import positions_read
from verl.models.packing import PackedBatch, Reads, pack_rows, read_rows
from verl.models.parallel.experts import check_experts
from verl.models.parallel.forward import empty_batch
from verl.models.parallel.sequence import check_heads
from verl.models.parallel.tensor import check_divisible
from verl.models.rounding import Rounding
from verl.parallel.balance import unit_ids
from verl.parallel.device import compute_dtype
from verl.parallel.mesh import Mesh

# optimizers that treat each number by itself, so that a part of a matrix is enough for them
_ELEMENTWISE = ("AdamW", "Adam", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")


class FSDPEngine(TrainedEngine):
    """The TrainEngine of several ranks. `mesh` says how they are arranged (default: all ranks of the default process
    group, as `engine` asks); the process group exists before.

    The first rank reads the model and hands it out layer by layer, so no other rank ever has more than its part and one
    layer. `module` has the shards; call it through the engine only.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: FSDPConfig,
        optim: OptimConfig | None,
        head: str,
        device: torch.device,
        total_steps: int,
        trainable: bool = True,
        share_prompts: bool = True,
        mesh: Mesh | None = None,
        timeout_s: float | None = None,
    ):
        self.head = head
        self.device = device
        self.total_steps = total_steps
        self.share_prompts = share_prompts
        self.config, self.dimensions = engine, Dimensions.of(engine)
        self.optim = optim if trainable else None
        mesh = mesh_of(engine, dist.get_world_size()) if mesh is None else mesh
        _check_layout(model, engine, mesh, self.optim)
        self.groups = Groups(mesh, device.type, engine.expert_parallel_size, timeout_s)
        narrow, trains = compute_dtype(engine.dtype, device), self.optim is not None
        self.rounding = rounding = Rounding(engine.master_rounding)
        source = from_first(
            self.groups, device, lambda: load_module(model, head, torch.device("cpu"), narrow, rounding, trains=trains)
        )
        self.module = load_skeleton(model, head, narrow, trains=trains)
        if not trains:
            self.module.requires_grad_(False)
        self.model, self.shards = shard_model(self.module, source, self.groups, engine, narrow, device, rounding)
        del source
        self.gathering = Gathering(self.model, engine)
        self.optimizer: MasterOptimizer | None = None
        self.model.train(trains)
        if self.optim is not None:
            wide = torch.promote_types(narrow, torch.float32)
            norm = GradientNorm(self.shards, self.groups, device)
            rounded = {name: shard.rounded for name, shard in self.shards.items() if shard.rounded is not None}
            self.optimizer = MasterOptimizer(self.module, self.optim, wide, norm, rounding, rounded)
        self.spec = LoRASpec.of(model) if trains else None
        self.compute_dtype = narrow
        parameters = ShardedParameters(self.shards, self.groups, device)
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path, rounding)
        self._leave_device()

    @torch.no_grad()
    def forward(
        self, batch: DataProto, outputs: Sequence[Output], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """See TrainEngine."""
        reads = positions_read(outputs, self.head)
        found: dict[str, torch.Tensor] = {}
        with self._on_device(), self._chunked():
            parts = list(self._micro_batches(batch, micro, reads))
            for number, (rows, part) in enumerate(parts):
                self.gathering.before_forward(number, len(parts), self.dimensions.batch_group_size)
                for name, values in self.model(self._pack(part, batch, reads), outputs, temperature).items():
                    if name not in found:
                        wide = values.dtype if values.dtype == torch.float64 else torch.float32
                        found[name] = torch.zeros(len(batch), *values.shape[1:], dtype=wide)
                    if part is not None:
                        found[name][rows] = values.to("cpu", found[name].dtype)
            self._free_root()
        return found

    def train_batch(
        self,
        batch: DataProto,
        loss: LossFn,
        outputs: Sequence[Output],
        micro: MicroBatching,
        temperature: float = 1.0,
        check: StepCheck | None = None,
        rows: Sequence[int] | None = None,
        unit: str = "row",
    ) -> dict[str, Metric]:
        """See TrainEngine. `batch` holds this rank's rows of the mini-batch. `num_skipped_updates` is added when the
        step was not taken."""
        assert self.optimizer is not None, "a frozen model cannot be trained"
        drawn = random_state(self.device)
        reads, totals = positions_read(outputs, self.head), self._totals(batch, rows, unit)
        merged: list[dict[str, Metric]] = [{"loss": Metric.sum(0.0)}]
        with self._on_device(optimizer=True), self._chunked():
            parts = list(self._micro_batches(batch, micro, reads, rows, unit))
            for number, (_, part) in enumerate(parts):
                self.gathering.before_training(number, len(parts), self.dimensions.batch_group_size)
                found = self.model(self._pack(part, batch, reads), outputs, temperature)
                merged.append(_backward(found, part, loss, totals))
            if not totals.num_tokens:  # nothing trained on any rank: no step, as on one device
                self.optimizer.optimizer.zero_grad(set_to_none=True)
            add_up_partial_gradients(self.shards, self.groups, self.device)
            metrics = self._step(merged, check, drawn)
            self._free_root()
        return metrics

    def _sum_over_parameters(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sum_over_shards({name: value.to(self.device) for name, value in sums.items()}, self.shards, self.groups)

    def _sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.groups.over_data_(numbers.to(self.device))

    def _largest_of_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.groups.over_data_(numbers.to(self.device), dist.ReduceOp.MAX)

    def _totals(self, batch: DataProto, rows: Sequence[int] | None, unit: str) -> BatchTotals:
        sizes = torch.tensor(sizes_of(batch, rows, unit), device=self.device)
        return batch_totals(self.groups.over_data_(sizes).tolist())

    def _micro_batches(
        self,
        batch: DataProto,
        micro: MicroBatching,
        reads: Reads,
        rows: Sequence[int] | None = None,
        unit: str = "row",
    ) -> Iterator[tuple[list[int], DataProto | None]]:
        """As many on each rank; where a rank's rows are used up, None."""
        chosen = read_rows(batch.batch, rows, reads)
        plan = plan_micro_batches(chosen, micro, self.share_prompts, unit_ids(batch, unit))
        most = torch.tensor([len(plan)], device=self.device)
        for number in range(int(self.groups.over_data_(most, dist.ReduceOp.MAX))):
            part = plan[number] if number < len(plan) else []
            yield part, (batch if len(part) == len(batch) else batch.select_idxs(part)) if part else None

    def _pack(self, part: DataProto | None, batch: DataProto, reads: Reads) -> PackedBatch:
        if part is not None:
            packed = pack_rows(
                part.batch,
                share_prompts=self.share_prompts,
                device=self.device,
                chunk_tokens=self.dimensions.chunk_tokens,
                reads=reads,
            )
            if packed.num_tokens:
                return packed
        num_rows, width = (batch if part is None else part).batch["responses"].shape
        return empty_batch((num_rows, width), self.device)

    def rest(self) -> None:
        """See TrainEngine."""
        super().rest()
        self._free_gathered()

    def load_state(self, state: EngineState) -> None:
        """See TrainEngine. Without reshard_after_forward, parameters that a forward pass has gathered are still there."""
        with self._on_device(optimizer=True):  # the optimizer's step counts, which are not offloaded, are to lie there
            super().load_state(state)
        self._free_gathered()

    def _chunked(self) -> AbstractContextManager[None]:
        return chunked_feed_forward(self.module, self.dimensions.chunk_tokens)

    def _free_root(self) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()

    def _free_gathered(self) -> None:
        for unit in sharded_units(self.model):
            unit.reshard()

    @contextmanager
    def _on_device(self, optimizer: bool = False) -> Iterator[None]:
        """Bring back what `param_offload` and `optimizer_offload` keep on the CPU between calls."""
        if self._may_offload and self.config.param_offload:
            self._move_parameters(self.device)
        if self._may_offload and optimizer and self.optimizer is not None and self.config.optimizer_offload:
            self.optimizer.move_state(self.device)
        try:
            yield
        finally:
            self._leave_device()

    def _leave_device(self) -> None:
        if self._may_offload and self.config.param_offload:
            self._move_parameters(torch.device("cpu"))
        if self._may_offload and self.config.optimizer_offload and self.optimizer is not None:
            self.optimizer.move_state(torch.device("cpu"))

    def _move_parameters(self, device: torch.device) -> None:
        self.model.to(device)
        for shard in self.shards.values():
            if shard.rounded is not None:
                shard.rounded.to(device)

    @property
    def _may_offload(self) -> bool:
        """With `offload_policy` everything is on the CPU already."""
        return self.device.type != "cpu" and not self.config.offload_policy


def _backward(
    found: dict[str, torch.Tensor], part: DataProto | None, loss: LossFn, totals: BatchTotals
) -> dict[str, Metric]:
    """Every rank goes backward through the whole model, with a gradient of zero where nothing trains."""
    value: torch.Tensor | None = None
    metrics: dict[str, Metric] = {}
    if part is not None:
        value, metrics = loss(found, part, totals)
        metrics = {**metrics, "loss": Metric.sum(value.detach())}
    if value is not None and value.requires_grad:
        value.backward()
    else:
        outputs = [v for v in found.values() if v.requires_grad]
        torch.autograd.backward(outputs, [torch.zeros_like(v) for v in outputs])
    return metrics


def _check_layout(model: ModelConfig, engine: FSDPConfig, mesh: Mesh, optim: OptimConfig | None) -> None:
    """What a model's shape forbids, before a weight is read."""
    load_external(model.external_lib)
    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    sizes = dict(mesh.axes)
    tensor = sizes.get("tp", 1)
    check_divisible(config, tensor)
    check_heads(config, sizes.get("sp", 1), tensor)
    check_experts(config, engine.expert_parallel_size)
    if optim is not None and optim.optimizer not in _ELEMENTWISE and tensor * engine.expert_parallel_size > 1:
        raise ConfigError(
            f"optim.optimizer={optim.optimizer} may look at whole matrices, which tensor and expert parallel ranks do not "
            "have. Use AdamW, or shard with FSDP alone."
        )
