"""The overrides that a plan stands for, and the plan as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from verl.config import PPOConfig
from verl.planner.dataflow import ROLLOUT
from verl.planner.layout import ParallelLayout
from verl.planner.search import RunPlan

_GROUP = "actor_rollout_ref"
_ENGINE = {"actor": f"{_GROUP}.actor", "reference": f"{_GROUP}.ref", "critic": "critic"}
_FSDP = {"actor": f"{_GROUP}.actor.fsdp_config", "reference": f"{_GROUP}.ref.fsdp_config", "critic": "critic.fsdp"}
_ON_GIVEN_ROWS = ("sft", "preference", "rm")  # programs with one engine, whose keys are engine.* and data.*


def overrides(plan: RunPlan, engine: str) -> list[str]:
    """`key=value` for every choice of the plan."""
    found = [*_devices(plan)]
    if plan.flow.name in _ON_GIVEN_ROWS:
        layout = plan.option("actor").layout
        assert layout is not None
        return [*found, *_one_engine(layout, engine)]
    found += _rollout(plan)
    for role in plan.flow.roles:
        layout = plan.option(role).layout
        if layout is not None and role in _ENGINE:
            found += _fsdp(_FSDP[role], layout) if engine == "fsdp" else _megatron(_ENGINE[role], layout)
            found += _offload(_FSDP[role] if engine == "fsdp" else f"{_ENGINE[role]}.megatron", role, layout)
            found += _batches(role, layout)
    return found


def _devices(plan: RunPlan) -> Iterator[str]:
    cluster = plan.cluster
    per_node = min(cluster.gpus_per_node, cluster.num_devices)
    yield f"trainer.nnodes={cluster.num_devices // per_node}"
    yield f"trainer.n_gpus_per_node={per_node}"
    if len(plan.groups) == 1:
        return
    first = 0
    places = []
    for roles, count in zip(plan.groups, plan.devices, strict=True):
        listed = ",".join(str(first + i) for i in range(count))
        places += [f"{role}:[{listed}]" for role in roles]
        first += count
    yield f"trainer.placement={{{','.join(places)}}}"
    if plan.asynchronous:
        yield "trainer.v1.trainer_mode=separate_async"


def _rollout(plan: RunPlan) -> Iterator[str]:
    option = plan.option(ROLLOUT if plan.asynchronous else "actor")
    if option.rollout is None:
        return
    yield f"{_GROUP}.rollout.tensor_model_parallel_size={option.rollout.tensor}"
    yield f"{_GROUP}.rollout.max_num_seqs={option.rollout.slots}"


def _one_engine(layout: ParallelLayout, engine: str) -> Iterator[str]:
    """Of a program that trains on given rows."""
    yield from _fsdp("engine", layout) if engine == "fsdp" else _megatron("engine", layout)
    yield from _offload("engine" if engine == "fsdp" else "engine.megatron", "actor", layout)
    yield "data.use_dynamic_bsz=True"
    yield f"data.max_token_len_per_gpu={max(layout.micro_batch // layout.context, 1)}"
    yield f"model.enable_gradient_checkpointing={layout.recompute == 'full'}"


def _fsdp(key: str, layout: ParallelLayout) -> Iterator[str]:
    for name, size in (
        ("tensor_parallel_size", layout.tensor),
        ("expert_parallel_size", layout.expert),
        ("ulysses_sequence_parallel_size", layout.context),
    ):
        if size > 1:
            yield f"{key}.{name}={size}"


def _megatron(key: str, layout: ParallelLayout) -> Iterator[str]:
    yield f"{key}.strategy=megatron"
    for name, size in (
        ("tensor_model_parallel_size", layout.tensor),
        ("pipeline_model_parallel_size", layout.pipeline),
        ("expert_model_parallel_size", layout.expert),
    ):
        if size > 1:
            yield f"{key}.megatron.{name}={size}"


def _offload(key: str, role: str, layout: ParallelLayout) -> Iterator[str]:
    if layout.offload:
        yield f"{key}.param_offload=True"
        if role != "reference":
            yield f"{key}.optimizer_offload=True"


def _batches(role: str, layout: ParallelLayout) -> Iterator[str]:
    # micro-batches of a data parallel group; its context ranks divide them
    tokens = max(layout.micro_batch // layout.context, 1)
    if role == "reference":
        yield f"{_GROUP}.ref.log_prob_use_dynamic_bsz=True"
        yield f"{_GROUP}.ref.log_prob_max_token_len_per_gpu={tokens}"
        return
    key = _ENGINE[role]
    yield f"{key}.use_dynamic_bsz=True"
    yield f"{key}.ppo_max_token_len_per_gpu={tokens}"
    model = f"{_GROUP}.model" if role == "actor" else "critic.model"
    yield f"{model}.enable_gradient_checkpointing={layout.recompute == 'full'}"


def contradicted(config: Any, plan: RunPlan) -> list[str]:
    """`key=value` for keys of `config` that would start other devices or another mode than the plan."""
    if not isinstance(config, PPOConfig):
        return []
    found = [f"{_GROUP}.rollout.nnodes=0"] if config.actor_rollout_ref.rollout.nnodes else []
    found += ["distillation.nnodes=0"] if config.distillation.enabled and config.distillation.nnodes else []
    if not plan.asynchronous and config.trainer.v1.trainer_mode == "separate_async":
        found.append("trainer.v1.trainer_mode=sync")
    return found


def plan_as_json(plan: RunPlan) -> dict[str, Any]:
    """Everything of a plan but its overrides, in seconds and bytes."""
    groups = []
    for roles, count, chosen in zip(plan.groups, plan.devices, plan.options, strict=True):
        found = {
            option.role: {
                "layout": asdict(option.layout) if option.layout else None,
                "rollout": asdict(option.rollout) if option.rollout else None,
                "seconds": {
                    kind: {"total": t.seconds, "bound": t.bound, **t.parts} for kind, t in option.times.items()
                },
                "bytes": {kind: asdict(part) for kind, part in option.parts.items()},
            }
            for option in chosen
        }
        groups.append({"roles": list(roles), "devices": count, "choices": found})
    return {
        "step_s": plan.step_s,
        "gpu_hours": plan.gpu_hours,
        "asynchronous": plan.asynchronous,
        "weight_sync_s": plan.sync_s,
        "stages_s": list(plan.stages),
        "placement": groups,
    }
