"""Training over several ranks: FSDP2, tensor, sequence and expert parallelism, in any combination.

Losses are divided by totals over all ranks, and their gradients are summed over all ranks. So a step is the same as on
one device with all the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.data_proto.metrics import Metric
from verl.engines.api import BatchTotals, EngineState
from verl.engines.base import TrainedEngine
from verl.engines.fsdp_units import GatheredGradients, Gathering, shard_places, sharded_units
from verl.engines.groups import ProcessGroups, mesh_of
from verl.engines.host_units import HostGroup, share_units
from verl.engines.loading import build_module, build_skeleton
from verl.engines.mapped import MappedWeights, check_place
from verl.engines.sharding import from_first, shard_model
from verl.engines.shards import GradientNorm, ShardedParameters, add_up_partial_gradients, sum_over_shards
from verl.engines.state import TrainedState
from verl.errors import ConfigError
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.decoder.reuse import borrow_records, forget_records
from verl.models.forward import keep_fused
from verl.models.load import load_external, load_model_config
from verl.models.lora import LoRASpec
from verl.models.loss_scale import LossScale
from verl.models.optim import MasterOptimizer
from verl.models.optimizers import steps_parts
from verl.models.packing import PackedBatch
from verl.models.padded import KINDS, forward_kind, require_packed
from verl.models.parallel.collectives import local
from verl.models.parallel.experts import check_experts
from verl.models.parallel.forward import empty_batch
from verl.models.parallel.sequence import check_heads
from verl.models.parallel.tensor import check_divisible
from verl.models.vision import freeze_towers
from verl.parallel.device import move_module
from verl.parallel.mesh import Mesh


class FSDPEngine(TrainedEngine):
    """The TrainEngine of several ranks. `mesh` is their arrangement (default: all ranks of the default process
    group, as `engine` asks); the process group exists before.

    The first rank reads the model and sends it to the other ranks layer by layer, so none of those ever has more than its part
    and one layer. `module` has the shards; call it through the engine only.
    """

    goes_together = True
    _mapped: MappedWeights | None = None

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: FSDPConfig,
        device: torch.device,
        mesh: Mesh | None = None,
        timeout_s: float | None = None,
        memory_map: bool = False,
        freezes_vision_tower: bool = False,
        **settings: Any,
    ):
        """Other settings: see TrainedEngine. With `memory_map`, map_weights follows: a GPU gathers layers from the host."""
        if memory_map and device.type != "cpu":
            engine = replace(engine, offload_policy=True)
        super().__init__(model=model, engine=engine, device=device, **settings)
        mesh = mesh_of(engine, dist.get_world_size()) if mesh is None else mesh
        _check_layout(model, engine, mesh, self.optim, self.compute_dtype)
        self.groups = ProcessGroups(mesh, device.type, engine.expert_parallel_size, timeout_s)
        self.computes_images = self.groups.tensor.size() * self.groups.sequence.size() == 1
        head, narrow, rounding, trains = self.head, self.compute_dtype, self.rounding, self.optim is not None
        kind: dict[str, Any] = {"trains": trains, "adapts_head": self.adapts_head}
        source = from_first(
            self.groups, device, lambda: build_module(model, head, torch.device("cpu"), narrow, rounding, **kind)
        )
        chosen = torch.tensor([0 if source is None else KINDS.index(forward_kind(source))], device=device)
        forward = KINDS[int(self.groups.broadcast_(chosen))]
        self.module = build_skeleton(model, head, narrow, forward, **kind)
        if self.groups.tensor.size() * self.groups.sequence.size() * engine.expert_parallel_size > 1:
            keys = "tensor_parallel_size, ulysses_sequence_parallel_size or expert_parallel_size"
            require_packed(self.module, f"fsdp_config.{keys}")
        if self.groups.tensor.size() > 1:
            keep_fused(self.module, "tensor parallel ranks have parts of the vocabulary")
        self._keep_prompts_apart(forward)
        if freezes_vision_tower:
            freeze_towers(self.module)
        if not trains:
            self.module.requires_grad_(False)
        self.model, self.shards = shard_model(
            self.module, source, self.groups, engine, narrow, device, rounding, pins=not memory_map
        )
        del source
        self._hosts = self._share_weights() if device.type == "cpu" and not memory_map else []
        self.gathering = Gathering(self.model, engine)
        self.optimizer: MasterOptimizer | None = None
        parameters = ShardedParameters(self.shards, self.groups, device)
        if self.optim is not None:
            wide = torch.promote_types(narrow, torch.float32)
            norm = GradientNorm(self.shards, self.groups, device)
            rounded = {name: shard.rounded for name, shard in self.shards.items() if shard.rounded is not None}
            scale = LossScale.of(narrow)
            self.optimizer = MasterOptimizer(
                self.module, self.optim, wide, norm, rounding, rounded, loss_scale=scale, divided=parameters
            )
            if self.model.in_units and device.type == "cpu":
                self.model.gradients = self.optimizer.gradients = GatheredGradients(sharded_units(self.model))
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path, rounding)
        self._leave_device()

    def _share_weights(self) -> list[HostGroup]:
        hosts = share_units(sharded_units(self.model))
        if hosts and self.groups.sequence.size() * self.groups.tensor.size() == 1:
            borrow_records(self.module)  # a forward in which ranks take part together can be left out by none
        return hosts

    def map_weights(self, folder: Path, kind: str) -> None:
        """See LocalEngine: every rank keeps its shards in a separate file, and gathers layers from it."""
        check_place(folder, kind)
        self._mapped = MappedWeights(shard_places(self.model), folder)

    @torch.no_grad()  # a local part then comes without a graph, in a tenth of the time
    def local_weights(self) -> dict[str, torch.Tensor]:
        if self.spec is not None:
            return {name: local(shard.parameter).detach() for name, shard in self.shards.items()}
        return {name: shard.computing for name, shard in self.shards.items()}

    def _outputs(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = self.model(
            packed if packed.num_tokens else empty_batch(packed), outputs, temperature
        )
        return values

    def _before_micro_batch(self, number: int, count: int, *, trains: bool) -> None:
        before = self.gathering.before_training if trains else self.gathering.before_forward
        before(number, count, self.dimensions.batch_group_size)

    def _step(self, *args: Any, **options: Any) -> dict[str, Metric]:
        metrics = super()._step(*args, **options)
        forget_records(self.module)
        return metrics

    def _complete_gradients(self, totals: BatchTotals) -> None:
        if not totals.num_tokens and self.optimizer is not None:  # nothing trained on any rank: no step
            self.optimizer.optimizer.zero_grad(set_to_none=True)
        add_up_partial_gradients(self.shards, self.groups, self.device)

    def _sum_over_parameters(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sum_over_shards({name: value.to(self.device) for name, value in sums.items()}, self.shards, self.groups)

    def _over_ranks(self, numbers: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        return self.groups.over_data_(numbers.to(self.device), op)

    def free_cached_memory(self) -> None:
        super().free_cached_memory()
        self._free_gathered()

    def load_state(self, state: EngineState) -> None:
        """See TrainEngine. Without reshard_after_forward, parameters that a forward pass has gathered are still there."""
        with self._on_device(trains=True):  # the optimizer's step counts are to lie there: they are not offloaded
            super().load_state(state)
        self._free_gathered()

    def _free_gathered(self) -> None:
        for unit in sharded_units(self.model):
            unit.reshard()

    @contextmanager
    def _ready(self, *, trains: bool = False) -> Iterator[None]:
        with self._on_device(trains=trains), chunked_feed_forward(self.module, self.dimensions.chunk_tokens):
            self._meet()
            yield
            assert isinstance(self.model, FSDPModule)
            self.model.reshard()  # the root stays gathered after a forward
            self._meet()

    def _meet(self) -> None:
        """All ranks that share weights have written theirs, and have read them."""
        for host in self._hosts:
            host.meet()

    def _leave_device(self) -> None:
        if self._mapped is not None:
            self._free_gathered()
            self._mapped.release()
        super()._leave_device()

    def _move_parameters(self, device: torch.device) -> None:
        move_module(self.model, device)
        for shard in self.shards.values():
            if shard.rounded is not None:
                shard.rounded.to(device)

    @property
    def _offloads(self) -> tuple[bool, bool]:
        moves = self.device.type != "cpu" and not self.config.offload_policy  # with it all is on the CPU already
        return moves and self.config.param_offload, moves and self.config.optimizer_offload


def _check_layout(
    model: ModelConfig, engine: FSDPConfig, mesh: Mesh, optim: OptimConfig | None, dtype: torch.dtype
) -> None:
    """Raise ConfigError for a layout that the model's shape forbids, before a weight is read."""
    load_external(model.external_lib)
    config = load_model_config(model.path, model.trust_remote_code, model.override_config)
    sizes = dict(mesh.axes)
    tensor = sizes.get("tp", 1)
    check_divisible(config, tensor)
    check_heads(config, sizes.get("sp", 1), tensor)
    check_experts(config, engine.expert_parallel_size)
    # lengths of rows stay wide, units do not; a tensor parallel rank has parts of rows
    if model.lora_rank and model.use_dora and (dtype.itemsize < 4 or tensor > 1):
        raise ConfigError(
            "model.use_dora trains with FSDP2 in float32 only, and without tensor_parallel_size. Set fsdp_config.dtype="
            "float32, train on one device or with strategy=megatron, or set use_dora=False."
        )
    spec = LoRASpec.of(model) if optim is not None else None
    if spec is not None and spec.dropout and tensor * sizes.get("sp", 1) * engine.expert_parallel_size > 1:
        raise ConfigError(
            "model.lora_dropout trains on one device or with FSDP2 by itself. Set tensor_parallel_size, "
            "ulysses_sequence_parallel_size and expert_parallel_size to 1, or lora_dropout=0."
        )
    if optim is not None and not steps_parts(optim) and tensor * engine.expert_parallel_size > 1:
        raise ConfigError(
            f"optim.optimizer={optim.optimizer} may look at whole matrices, which tensor and expert parallel ranks do not "
            "have. Use AdamW or Muon, or shard only with FSDP."
        )
