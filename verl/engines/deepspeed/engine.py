"""The training engine on DeepSpeed."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.config.sections.deepspeed import DeepSpeedConfig
from verl.engines.api import BatchTotals, require_library
from verl.engines.base import TrainedEngine
from verl.engines.deepspeed.library import load_deepspeed, start_deepspeed
from verl.engines.deepspeed.settings import ds_config
from verl.engines.deepspeed.zero import FlatShards, ZeroOptimizer, partition, partition_slice, whole_shape
from verl.engines.loading import build_module
from verl.engines.state import Parameters, TrainedState
from verl.errors import ConfigError
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.forward import packed_outputs
from verl.models.hf_module import HFModule
from verl.models.optim import MasterOptimizer
from verl.models.optimizers import ELEMENTWISE, build_optimizer
from verl.models.packing import PackedBatch
from verl.models.padded import forward_kind
from verl.models.parallel.forward import ParallelModel, empty_batch
from verl.parallel.device import parse_dtype
from verl.parallel.mesh import Mesh

log = logging.getLogger(__name__)


class DeepSpeedEngine(TrainedEngine):
    """The TrainEngine on all ranks of the default process group, each with its own rows. `settings` is a section
    `deepspeed`. Every rank reads the model, and holds all of it in float32 while the masters are filled."""

    goes_together = True

    def __init__(
        self,
        section: DeepSpeedConfig | None = None,
        mesh: Mesh | None = None,
        timeout_s: float | None = None,
        **settings: Any,
    ):
        """Other settings: see TrainedEngine. Waits end with the timeout of the default group."""
        super().__init__(**settings)
        model, device = self.model_config, self.device
        self.section = section or DeepSpeedConfig()
        self.stage, self.num_ranks = self.section.stage(), dist.get_world_size()
        self.accumulates_calls = self.stage == 0  # ZeRO sums gradients over ranks with the last micro-batch of a call
        self.check_role(model, self.config, self.optim, self.section, self.num_ranks)
        if mesh is not None and len(mesh.ranks) != self.num_ranks:
            raise ConfigError(
                f"The DeepSpeed engine takes all {self.num_ranks} devices of a run, and this role is placed on "
                f"{len(mesh.ranks)}. Leave it out of trainer.placement, or set strategy=fsdp2."
            )
        require_library("deepspeed")
        config = self._settings()
        trains = self.optim is not None
        self.module = build_module(model, self.head, device, self.compute_dtype, self.rounding, trains=trains)
        self._keep_prompts_apart(forward_kind(self.module))
        if not trains:
            self.module.requires_grad_(False)
        self.model = ParallelModel(self.module)
        self.deepspeed: Any = None
        self.optimizer: MasterOptimizer | None = None
        shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        if self.optim is not None and self.stage == 0:
            self.optimizer = MasterOptimizer(self.module, self.optim, self.compute_dtype, rounding=self.rounding)
        elif self.stage > 0 and (trains or self.stage == 3):
            self._start(config)
        flat = self.optimizer.flat if isinstance(self.optimizer, ZeroOptimizer) else None
        if not trains and self.stage == 3:
            slices = {name: partition_slice(p) for name, p in self.module.named_parameters()}
            flat = FlatShards(shapes, slices, device)
        parameters = _Parameters(self.module, self.optimizer, shapes, flat, device)
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path, self.rounding)

    @classmethod
    def check_role(
        cls, model: ModelConfig, engine: FSDPConfig, optim: OptimConfig | None, section: DeepSpeedConfig, num_ranks: int
    ) -> None:
        """Raise ConfigError for a role that this engine cannot have on `num_ranks` devices, before anything is started or a
        weight is read. `section` is the engine's own; `optim` None: the role is frozen."""
        stage, name = section.stage(), optim.optimizer if optim is not None else "AdamW"
        dtype = None if engine.dtype == "auto" else parse_dtype(engine.dtype)
        if dtype == torch.float16 or (stage and dtype == torch.float64):
            raise ConfigError(
                f"The DeepSpeed engine computes in float32 or bfloat16, not in {engine.dtype}. Set strategy=fsdp2, or "
                "another fsdp_config.dtype."
            )
        if stage and name not in ELEMENTWISE:
            raise ConfigError(
                f"optim.optimizer={name} may look at whole matrices, which ZeRO {stage} takes apart. Use AdamW, or "
                "deepspeed.zero_stage=0."
            )
        if optim is not None and model.lora_rank > 0 and model.use_dora:
            raise ConfigError("model.use_dora does not train with DeepSpeed. Set strategy=megatron, or use_dora=False.")
        if optim is not None and getattr(model, "lora_dropout", False):
            raise ConfigError(
                "model.lora_dropout does not train with DeepSpeed. Set strategy=fsdp2, or lora_dropout=0."
            )
        if stage and optim is not None and model.lora_rank > 0:
            raise ConfigError(
                f"model.lora_rank with ZeRO {stage}: adapters train with deepspeed.zero_stage=0 or strategy=fsdp2."
            )

    def _settings(self) -> dict[str, object]:
        """The configuration of DeepSpeed."""
        clip = self.optim.clip_grad if self.optim is not None else 1.0
        name = self.optim.optimizer if self.optim is not None else "AdamW"
        return ds_config(self.section, bfloat16=self.compute_dtype == torch.bfloat16, clip_grad=clip, optimizer=name)

    def _start(self, config: dict[str, object]) -> None:
        """Hand the module to DeepSpeed: it casts and divides the parameters in place."""
        named, section = dict(self.module.named_parameters()), self.section
        origin = "deepspeed.config" if section.config else "the default"
        origin = origin if section.zero_stage is None else "deepspeed.zero_stage"
        log.info(
            "ZeRO %d (%s), offload of optimizer %s, of parameters %s.",
            *(self.stage, origin, section.offload_optimizer, section.offload_param),
        )
        if self.optim is None:
            self.deepspeed = start_deepspeed(self.model, None, config, self.device)
        else:
            initial = {name: p.data for name, p in named.items()}
            for name, p in named.items():
                if not name.startswith("score."):
                    p.data = self.rounding.rounded(name, p.data, self.compute_dtype)
            optimizer = build_optimizer(self.optim, named, self.module)
            self.deepspeed = start_deepspeed(self.model, optimizer, config, self.device)
            self.optimizer = ZeroOptimizer(self.deepspeed, named, initial, self.optim, self.rounding)
        if self.stage == 3:
            head = self.module.get_output_embeddings() if self.head == "lm" else self.module.score
            for parameter in head.parameters():
                load_deepspeed(self.device).zero.register_external_parameter(self.model, parameter)

    @torch.no_grad()
    def local_weights(self) -> dict[str, torch.Tensor]:
        """See TrainEngine; with stage 3 undivided rows."""
        if self.stage < 3:
            return super().local_weights()
        return {name: _rows(p) for name, p in self.module.named_parameters()}

    def trained_weights(self) -> dict[str, torch.Tensor]:
        held = self.local_weights()
        return {} if self.optimizer is None else {name: held[name] for name in self.optimizer.parameters}

    def _ready(self, *, trains: bool = False) -> AbstractContextManager[None]:
        return chunked_feed_forward(self.module, self.dimensions.chunk_tokens)

    def _outputs(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        if not self.stage and len(packed.hidden_index):
            computed = packed_outputs(self.module, packed, outputs, temperature)
        else:  # by modules: DeepSpeed gathers and reduces around them, and they have a graph even if nothing is predicted
            packed = packed if packed.num_tokens else empty_batch(packed)
            computed = (self.deepspeed or self.model)(packed, outputs, temperature)
        # DeepSpeed holds one dtype, so that a scalar head computes in the decoder's dtype; losses get float32 all the same
        return {name: v.float() if v.dtype == torch.bfloat16 else v for name, v in computed.items()}

    def _before_micro_batch(self, number: int, count: int, *, trains: bool) -> None:
        if trains and self.deepspeed is not None:
            self.deepspeed.set_gradient_accumulation_boundary(number == count - 1)

    def _complete_gradients(self, totals: BatchTotals) -> None:
        assert self.optimizer is not None
        nothing = not totals.num_tokens
        if isinstance(self.optimizer, ZeroOptimizer):
            self.optimizer.skips_step = nothing
            return
        masters = self.optimizer.masters.values()
        for master in masters:
            if nothing:
                master.grad = None
            elif master.grad is not None:
                dist.all_reduce(master.grad)

    def _sum_over_parameters(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = super()._sum_over_parameters(sums).to(self.device)
        return self._over_ranks(total) if self.stage else total

    def _over_ranks(self, numbers: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        dist.all_reduce(numbers := numbers.to(self.device), op)
        return numbers


class _Parameters(Parameters):
    """Parameters with masters, and with stage 3 also weights, that are slices of the flattened tensor, as `flat` divides it.
    `flat` None: every rank has all of everything."""

    def __init__(
        self,
        module: HFModule,
        optimizer: MasterOptimizer | None,
        shapes: Mapping[str, tuple[int, ...]],
        flat: FlatShards | None,
        device: torch.device,
    ):
        self.module, self.optimizer, self.shapes = module, optimizer, dict(shapes)
        self.flat, self.device, self.are_parts = flat, device, flat is not None

    def named(self) -> dict[str, torch.Tensor]:
        masters = self.optimizer.masters if self.optimizer is not None else {}
        return {name: masters[name].detach() if name in masters else self.computing(name) for name in self.shapes}

    def computing(self, name: str) -> torch.Tensor:
        parameter = self.module.get_parameter(name)
        return partition(parameter) if hasattr(parameter, "ds_tensor") else parameter.detach()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def whole(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        parameter = self.module.get_parameter(name)
        is_whole = not hasattr(parameter, "ds_tensor") and value.data_ptr() == parameter.data_ptr()
        if self.flat is None or is_whole:
            return value.to(dtype)
        return self.flat.whole(name, value, self.device, dtype)

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        return full if self.flat is None else self.flat.part(name, full)


def _rows(parameter: object) -> torch.Tensor:
    """The slice of a parameter as rows if it consists of rows, else as it is."""
    held, shape = partition(parameter), whole_shape(parameter)
    row = math.prod(shape[1:])
    return held.view(-1, *shape[1:]) if row and held.numel() % row == 0 else held
