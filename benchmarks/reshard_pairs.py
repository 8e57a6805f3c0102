"""Pairs of layouts that reshard.py measures, and their training engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pair:
    """Training layout (keys of fsdp_config; of a section `megatron` where `engine` says so) -> copies of `size` ranks each.
    `interval`: a copy's ranks hold neighbouring parts in training (HybridFlow's grouping), else they are neighbours."""

    name: str
    num_ranks: int
    training: dict[str, int] = field(default_factory=dict)
    size: int = 1
    interval: bool = False
    is_mixture: bool = False  # whose experts are divided over the ranks of a copy
    engine: str = "fsdp"


PAIRS = (
    Pair("FSDP 2 -> TP 2", 2, size=2),
    Pair("FSDP 2 -> 2 copies", 2),
    Pair("TP 2 -> TP 2", 2, {"tensor_parallel_size": 2}, size=2),
    Pair("TP 2 -> 2 copies", 2, {"tensor_parallel_size": 2}),
    Pair("EP 2 -> TP 2", 2, {"expert_parallel_size": 2}, size=2, is_mixture=True),
    Pair("TP 4 -> TP 2 x 2, neighbours", 4, {"tensor_parallel_size": 4}, size=2),
    Pair("TP 4 -> TP 2 x 2, intervals", 4, {"tensor_parallel_size": 4}, size=2, interval=True),
    Pair("TP 2 x FSDP 2 -> TP 2 x 2", 4, {"tensor_parallel_size": 2}, size=2),
    Pair("FSDP 4 -> TP 2 x 2, intervals", 4, size=2, interval=True),
    Pair("FSDP 2 x 2 replicas -> 4 copies", 4, {"fsdp_size": 2}),
    Pair("EP 2 x FSDP 2 -> TP 2 x 2", 4, {"expert_parallel_size": 2}, size=2, interval=True, is_mixture=True),
    Pair("EP 2 x FSDP 2 -> 4 copies", 4, {"expert_parallel_size": 2}, is_mixture=True),
)
_TENSOR, _STAGES, _EXPERTS = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
MEGATRON_PAIRS = (  # the stages of a pipeline become separate copies
    Pair("Megatron TP 2 x PP 2 -> TP 2 x 2", 4, {_TENSOR: 2, _STAGES: 2}, size=2, interval=True, engine="megatron"),
    Pair("Megatron PP 4 -> 4 copies", 4, {_STAGES: 4}, interval=True, engine="megatron"),
    Pair(
        "Megatron EP 2 x PP 2 -> TP 2 x 2", 4, {_EXPERTS: 2, _STAGES: 2},
        size=2, interval=True, is_mixture=True, engine="megatron",
    ),
)  # fmt: skip


def build_engine(pair: Pair, model: str, dtype: str, device: Any) -> tuple[Any, Any]:
    """The training engine of a pair, and its layout."""
    from verl.config import FSDPConfig, ModelConfig, OptimConfig
    from verl.config.sections.megatron import MegatronConfig
    from verl.engines.api import ENGINES
    from verl.parallel.mesh import Mesh
    from verl.reshard.layout import TrainingLayout
    from verl.reshard.megatron_layout import MegatronLayout

    section = MegatronConfig(**pair.training) if pair.engine == "megatron" else None
    engine = ENGINES.get(pair.engine)(
        model=ModelConfig(path=model, enable_gradient_checkpointing=False),
        engine=FSDPConfig(dtype=dtype, **({} if section else pair.training)),
        optim=OptimConfig(),
        head="lm",
        device=device,
        total_steps=1,
        **({"section": section} if section else {}),
    )
    if section is None:
        return engine, TrainingLayout(engine.groups.mesh, pair.training.get("expert_parallel_size", 1))
    mesh = Mesh.grid(range(pair.num_ranks), **section.sizes(pair.num_ranks))
    stages = section.layers_per_stage(engine.weight_layout().num_layers)
    experts = {"expert_tensor_parallel": section.expert_tensor_size()}
    return engine, MegatronLayout(mesh, section.expert_model_parallel_size, stages, **experts)
