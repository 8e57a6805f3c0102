"""The training engine on Megatron-core."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.config.sections.megatron import MegatronConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, EngineState, LossFn, require_library
from verl.engines.base import TrainedEngine
from verl.engines.loading import build_module, build_skeleton
from verl.engines.megatron.groups import all_ranks, broadcast_value, computing, use_groups
from verl.engines.megatron.model_checks import check_model, transformer_settings
from verl.engines.megatron.placement import Grid, Placed, linears, place, router_biases
from verl.engines.micro_batches import BatchPlan
from verl.engines.state import TrainedState
from verl.errors import ConfigError, ModelError, VerlError
from verl.models.forward import keep_fused
from verl.models.load import load_external, load_model_config
from verl.models.optimizers import steps_parts
from verl.models.packing import PackedBatch
from verl.models.parallel.sequence import check_heads
from verl.parallel.mesh import Mesh

if TYPE_CHECKING:
    from verl.engines.megatron.library import TransformerConfig

log = logging.getLogger(__name__)

_ROUTER_BIAS = "e_score_correction_bias"  # they choose experts in a router; not trained

Part = tuple[DataProto, PackedBatch]  # the rows of a micro-batch, and their layout


class MegatronEngine(TrainedEngine):
    """The TrainEngine on the first ranks of the default process group, numbered as Megatron numbers them: tensor parallel ranks
    are neighbours, then data-parallel ones, then stages of the pipeline. `section` is a section `megatron`.

    `module` has names, shapes and the config of the complete model, and no weights. The first rank reads the model and sends it
    to all ranks tensor by tensor. Losses are computed on the last stage; then the earlier stages compute them from its outputs,
    for metrics and for what an objective remembers.
    """

    optimizer: Any = None
    accumulates_calls = False  # the pipeline's schedule sums gradients over ranks at its end

    def __init__(
        self,
        section: MegatronConfig | None = None,
        mesh: Mesh | None = None,
        timeout_s: float | None = None,
        **settings: Any,
    ):
        """Other settings: see TrainedEngine."""
        super().__init__(**settings)
        model, device = self.model_config, self.device
        self.section = section or MegatronConfig()
        self.checkpointing = model.recompute != "none"
        load_external(model.external_lib)
        num_ranks = dist.get_world_size() if mesh is None else len(mesh.ranks)
        assert mesh is None or tuple(mesh.ranks) == tuple(range(num_ranks)), mesh
        self.check_role(model, self.config, self.optim, self.section, num_ranks)
        require_library("megatron")
        hf = load_model_config(model.path, model.trust_remote_code, model.override_config).get_text_config()
        with computing(device):
            use_groups(self, num_ranks, self.section.group_sizes(), timeout_s)
            self._join_groups()
            self._build(model, hf)
        self._leave_device()

    @classmethod
    def check_role(
        cls, model: ModelConfig, engine: FSDPConfig, optim: OptimConfig | None, section: MegatronConfig, num_ranks: int
    ) -> None:
        """Raise ConfigError for a role that this engine cannot have on `num_ranks` devices, before anything is started or a
        weight is read. `section` is the engine's own; `optim` None: the role is frozen."""
        section.sizes(num_ranks)
        hf_config = load_model_config(model.path, model.trust_remote_code, model.override_config)
        check_model(section, hf_config.get_text_config())
        tensor, key = section.tensor_model_parallel_size, "megatron.context_parallel_size"
        check_heads(hf_config, section.context_parallel_size, tensor, key)
        refused = {
            "model.neftune_alpha": bool(getattr(model, "neftune_alpha", None)),
            "model.lora_dropout": bool(getattr(model, "lora_dropout", None)),
            "fsdp_config.adapt_micro_batches": optim is not None and engine.adapt_micro_batches,
        }
        for key, is_set in refused.items():
            if is_set:
                raise ConfigError(f"{key} is not available with strategy=megatron. Remove it, or set strategy=fsdp2.")
        if engine.dtype in ("float16", "fp16"):
            raise ConfigError(
                f"strategy=megatron has no loss scale, so it does not compute in {engine.dtype}. Set strategy=fsdp2, or "
                "fsdp_config.dtype=bfloat16."
            )
        if engine.use_3d_hybrid:
            raise ConfigError(
                "fsdp_config.use_3d_hybrid is of strategy=fsdp2. Remove it; pipeline stages divide layers here."
            )
        if optim is not None and not steps_parts(optim):
            raise ConfigError(
                f"optim.optimizer={optim.optimizer} may look at whole matrices, which these ranks do not have. Use AdamW "
                "or Muon."
            )

    def _join_groups(self) -> None:
        from verl.engines.megatron.library import parallel_state as groups

        self.data = groups.get_data_parallel_group()
        self.pipeline = groups.get_pipeline_model_parallel_group()
        names = ("tensor_model", "expert_model", "expert_tensor")
        kinds = [f"get_{name}_parallel_{what}" for name in names for what in ("world_size", "rank")]
        self.grid = Grid(*(getattr(groups, kind)() for kind in kinds))
        self.coordinates = {
            "tensor": self.grid.tensor_rank,
            "data": groups.get_data_parallel_group(with_context_parallel=True).rank(),
            "expert_data": groups.get_expert_data_parallel_group().rank(),
        }

    def _build(self, model: ModelConfig, hf: Any) -> None:
        """Stages on the meta device of names, filled from the first rank, and what trains them."""
        from verl.engines.megatron.adapters import adapt_linears
        from verl.engines.megatron.model import build_stages, transformer_config
        from verl.engines.megatron.optimizer import MegatronOptimizer, MegatronParameters, shares_of
        from verl.engines.megatron.schedule import PipelineSchedule

        trains, narrow = self.optim is not None, self.compute_dtype
        wide = torch.promote_types(narrow, torch.float32)
        self.module = build_skeleton(model, self.head, narrow, trains=trains)
        if not trains:
            self.module.requires_grad_(False)
        self.trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
        keep_fused(self.module, "Megatron's ranks may have parts of the vocabulary")
        shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        prefix = next(name for name in shapes if "embed_tokens" in name).removesuffix("embed_tokens.weight")
        decoder = self.module.get_decoder()
        rotary = type(decoder.rotary_emb)(config=decoder.config)
        if getattr(rotary, "attention_scaling", 1.0) != 1.0:
            raise ConfigError("strategy=megatron has no rotary embedding with attention_scaling. Set strategy=fsdp2.")
        config = transformer_config(
            hf, self.section, narrow, self.checkpointing and trains, decoder.layers[0].self_attn.scaling
        )
        self.stages = build_stages(config, hf, self.head, rotary)
        if self.spec is not None:
            adapt_linears(linears(self.stages, self.module, prefix), config)
        for stage in self.stages:
            stage.to(self.device).train(trains).requires_grad_(False)
        tied = self.head == "lm" and bool(hf.tie_word_embeddings)
        placed = place(self.stages, shapes, self.grid, prefix=prefix, tied=tied)
        for part in [part for part in placed if part.name in self.trained]:
            part.parameter.requires_grad_(True)
        self.placed = {p.name: p for p in placed if not p.is_copy}
        self.has_copies = tied and self.pipeline.size() > 1 and self.spec is None
        masters = self._fill(model, placed, shapes, wide, prefix)
        self.chunks: list[Any] = list(self.stages)
        if self.section.override_transformer_config:
            log.info("Settings of Megatron's layers that act: %s.", transformer_settings(self.section) or "none")
        if trains:
            self._buffer_gradients(config)
        shares = shares_of(placed, self.chunks if trains else None, self.coordinates)
        parameters = MegatronParameters(shares, shapes, self.device, narrow)
        if self.optim is not None:
            trained = [share for share in shares if share.placed.name in self.trained]
            self._check_stages(len(trained))
            names = [name for name in shapes if name in self.trained]
            self.optimizer = parameters.optimizer = MegatronOptimizer(
                trained, names, self.optim, self.rounding, self.chunks, self.module, parameters
            )
            for key, share in self.optimizer.by_key.items():
                if key in masters:
                    self.optimizer.masters[key].detach().copy_(masters[key].reshape(-1)[share.start : share.stop])
            self.optimizer.round_masters()
            self.optimizer.restart_measure()
        divides = self.grid.tensor if self.section.divides_sequence() else 1
        divides *= self.section.context_parallel_size
        self.schedule = PipelineSchedule(self.chunks, self.stages, self.pipeline, divides, self.device)
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path, self.rounding)
        self._keep_prompts_apart("packed")

    def _check_stages(self, num_trained: int) -> None:
        """Raise ConfigError, on all ranks, if one of them has nothing that trains."""
        fewest = torch.tensor([num_trained], device=self.device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=all_ranks())
        if not fewest:
            raise ConfigError(
                "A stage of the pipeline has no layer with an adapter, so nothing would train on its devices. Choose "
                "model.target_modules so that every stage has one."
            )

    def _buffer_gradients(self, config: TransformerConfig) -> None:
        """Put the stages into Megatron's buffers. These sum gradients over ranks once per optimizer step."""
        from verl.engines.megatron.library import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        divided = DistributedDataParallelConfig(
            use_distributed_optimizer=self.section.use_distributed_optimizer,
            grad_reduce_in_fp32=self.compute_dtype != torch.float64,
            overlap_grad_reduce=False,
        )
        last = len(self.stages) - 1
        self.chunks = [
            DistributedDataParallel(config, divided, stage, disable_bucketing=number < last or last > 0)
            for number, stage in enumerate(self.stages)
        ]
        config.finalize_model_grads_func = lambda models, num_tokens=None, **kwargs: finalize_model_grads(
            models, None, **kwargs
        )

    @torch.no_grad()
    def _fill(
        self,
        model: ModelConfig,
        placed: list[Placed],
        shapes: Mapping[str, tuple[int, ...]],
        wide: torch.dtype,
        prefix: str,
    ) -> dict[str, torch.Tensor]:
        """Weights from the first rank, tensor by tensor; returns this rank's parts in `wide` if they compute in less."""
        by_name: dict[str, list[Placed]] = {}
        for part in placed:
            by_name.setdefault(part.name, []).append(part)
        source, error = {}, ""
        biases = router_biases(self.stages, prefix)
        if dist.get_rank() == 0:
            try:
                cpu = torch.device("cpu")
                trains = self.optim is not None
                module = build_module(model, self.head, cpu, self.compute_dtype, self.rounding, trains=trains)
                source = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            except VerlError as caught:
                error = str(caught)
        if said := broadcast_value(error, 0, all_ranks(), self.device):
            raise ModelError(said)
        for name, buffer in self.module.named_buffers():
            if name.endswith(_ROUTER_BIAS):
                sent = torch.empty(buffer.shape, dtype=torch.float32, device=self.device)
                if source:
                    sent.copy_(source.pop(name))
                dist.broadcast(sent, src=0, group=all_ranks())
                if name in biases:
                    biases[name].copy_(sent)
        masters: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            sent = torch.empty(shape, dtype=wide, device=self.device)
            if source:
                sent.copy_(source.pop(name))
            dist.broadcast(sent, src=0, group=all_ranks())
            for part in by_name.get(name, []):
                piece = part.take(sent)
                part.view().copy_(piece)
                if name in self.trained and part.parameter.dtype != wide:
                    masters[f"{name}@end" if part.is_copy else name] = piece.clone()
        return masters

    # -- the device layout, see TrainedEngine ------------------------------------------------------------------------------

    def _plan(self, *args: Any) -> BatchPlan:
        plan = super()._plan(*args)
        return replace(plan, parts=self.schedule.filled(plan.parts))

    def _pack(self, plan: BatchPlan, rows: list[int]) -> Part:
        part, packed = super()._pack(plan, rows)
        return part, self.schedule.padded(packed)

    def _computed(self, plan: BatchPlan) -> list[dict[str, torch.Tensor]]:
        parts = [self._pack(plan, rows) for rows in plan.parts]
        for _, packed in parts:
            self.routing.begin(packed)
        outputs = self.schedule.forward(parts, plan.requested.outputs, plan.requested.temperature)
        for rows, (_, packed) in zip(plan.parts, parts, strict=True):
            self.schedule.share_choices(packed)
            if rows:
                self.routing.end(packed, plan, rows, self.share_prompts)
        return outputs

    def _sum_gradients(self, plan: BatchPlan, loss: LossFn, totals: BatchTotals) -> list[dict[str, Metric]]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        parts, requested = [self._pack(plan, rows) for rows in plan.parts], plan.requested
        return self.schedule.train(parts, requested.outputs, requested.temperature, loss, totals)

    def _complete_gradients(self, totals: BatchTotals) -> None:
        if totals.num_tokens:
            self.optimizer.take_gradients()

    def _outputs(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        raise AssertionError("a pipeline computes micro-batches together")

    @torch.no_grad()
    def local_weights(self) -> dict[str, torch.Tensor]:
        """See TrainEngine. Masters of adapters that compute in a narrower dtype are gathered, by all ranks together."""
        held, parameters = {name: part.view() for name, part in self.placed.items()}, self._trained.parameters
        if self.spec is not None and self.compute_dtype == torch.bfloat16:
            masters = parameters.named()
            for name in self.optimizer.names:
                full = parameters.whole(name, masters[name], masters[name].dtype)
                if name in held:
                    held[name] = self.placed[name].take(full)
        return held

    def trained_weights(self) -> dict[str, torch.Tensor]:
        return {name: part.view() for name, part in self.placed.items() if name in self.trained}

    def load_state(self, state: EngineState) -> None:
        """See TrainEngine. The copy of a tied embedding at the end of the pipeline gets the values of the first one."""
        with computing(self.device), self._on_device(trains=True):
            super().load_state(state)
            self._copy_embedding()

    def restore(self, snapshot: Mapping[str, torch.Tensor]) -> None:
        with computing(self.device), self._on_device(trains=True):
            super().restore(snapshot)

    def _copy_embedding(self) -> None:
        parameters = self._trained.parameters
        for name in [n for n in parameters.named() if "embed_tokens" in n] if self.has_copies else ():
            if self.optimizer is not None:
                self.optimizer.copy_from(name, lambda n, value: parameters.whole(n, value, value.dtype))
                self.optimizer.round_masters()

    def _sum_over_parameters(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = torch.stack(list(sums.values())).sum(0) if sums else torch.zeros(2, dtype=torch.float64)
        dist.all_reduce(total := total.to(self.device), group=all_ranks())
        return total

    def visible_update_ratio(self) -> float | None:
        """See TrainEngine; a rank may have nothing to measure."""
        from verl.models.visible import ratio

        if self.optimizer is None or self.compute_dtype == torch.promote_types(self.compute_dtype, torch.float32):
            return None
        return ratio(self._sum_over_parameters(self.optimizer.movement()))

    def _over_ranks(self, numbers: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        dist.all_reduce(numbers := numbers.to(self.device), op, group=self.data)
        return numbers

    @contextmanager
    def _ready(self, *, trains: bool = False) -> Iterator[None]:
        with computing(self.device), self._on_device(trains=trains):
            yield

    @property
    def _offloads(self) -> tuple[bool, bool]:
        on_gpu = self.device.type != "cpu"
        return on_gpu and self.section.param_offload, on_gpu and self.section.optimizer_offload

    def _move_parameters(self, device: torch.device) -> None:
        """Buffers keep their addresses in views, so that only a frozen model moves completely."""
        if self.optimizer is None:
            for stage in self.stages:
                stage.to(device)
