"""The overrides that a plan stands for, and the plan as JSON."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from verl.config import PPOConfig, RunConfig
from verl.config.schema import value_at
from verl.foreign_text import clean
from verl.models.memory import ParallelLayout
from verl.models.shapes import ModelShape
from verl.planner.search import RunPlan
from verl.planner.workload import ROLLOUT

_GROUP = "actor_rollout_ref"
_ENGINE = {"actor": f"{_GROUP}.actor", "reference": f"{_GROUP}.ref", "critic": "critic"}
_FSDP = {"actor": f"{_GROUP}.actor.fsdp_config", "reference": f"{_GROUP}.ref.fsdp_config", "critic": "critic.fsdp"}
_ON_GIVEN_ROWS = ("sft", "preference", "rm")  # programs with one engine: their keys are engine.* and data.*


def overrides(plan: RunPlan, engine: str, config: RunConfig | None = None) -> list[str]:
    """`key=value` for every choice of the plan. Sizes of 1 and disabled options are left out, unless the run's `config` (if
    given) has another value."""
    texts = list(_devices(plan))
    if plan.flow.name in _ON_GIVEN_ROWS:
        layout = plan.option("actor").layout
        assert layout is not None
        return [*texts, *_needed(_one_engine(layout, engine, plan.flow.shapes["actor"]), config)]
    texts += _rollout(plan)
    for role in plan.flow.roles:
        layout = plan.option(role).layout
        if layout is not None and role in _ENGINE:
            texts += _needed(_sizes(role, layout, engine, plan.flow.shapes[role]), config)
            texts += _batches(role, layout)
    return [*texts, *(_contradicted(config, plan) if isinstance(config, PPOConfig) else [])]


def _needed(settings: Iterable[tuple[str, object]], config: RunConfig | None) -> list[str]:
    """`key=value` for settings that differ from the default or from `config`."""
    texts = []
    for key, value in settings:
        same = ("fsdp", "fsdp2") if value == "fsdp" else (value,)  # two names of one engine
        default = value is False or value == "fsdp" or (value == 1 and value is not True)
        if not default or (config is not None and value_at(config, key) not in same):
            texts.append(f"{key}={value}")
    return texts


def _contradicted(config: PPOConfig, plan: RunPlan) -> list[str]:
    """`key=value` for keys of `config` that would start other devices or another mode than the plan."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    texts = [f"{_GROUP}.rollout.nnodes=0"] if rollout.nnodes else []
    texts += ["distillation.nnodes=0"] if config.distillation.enabled and config.distillation.nnodes else []
    texts += ["trainer.placement={}"] if trainer.placement and len(plan.groups) == 1 else []
    if not plan.asynchronous and trainer.v1.trainer_mode == "separate_async":
        texts.append("trainer.v1.trainer_mode=sync")
    return texts


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


def _one_engine(layout: ParallelLayout, engine: str, shape: ModelShape) -> Iterator[tuple[str, object]]:
    """Settings of a program that trains on given rows."""
    yield from _sizes("", layout, engine, shape)
    yield "data.use_dynamic_bsz", "True"
    yield "data.max_token_len_per_gpu", max(layout.micro_batch // layout.context, 1)
    yield "model.enable_gradient_checkpointing", _checkpointing(layout)
    yield "model.enable_activation_offload", layout.recompute == "host"


def _checkpointing(layout: ParallelLayout) -> str:
    return str(layout.recomputes_layers) if layout.recompute != "selective" else "selective"


def _sizes(role: str, layout: ParallelLayout, engine: str, shape: ModelShape) -> Iterator[tuple[str, object]]:
    """Sizes and offload of a role; "" is the only engine of a program."""
    section, fsdp = _ENGINE.get(role, "engine"), _FSDP.get(role, "engine")
    yield f"{section}.strategy", engine
    key = fsdp if engine == "fsdp" else f"{section}.megatron"
    if engine == "fsdp":
        yield f"{key}.tensor_parallel_size", layout.tensor
        yield f"{key}.expert_parallel_size", layout.expert
        yield f"{key}.ulysses_sequence_parallel_size", layout.context
    else:
        yield f"{key}.tensor_model_parallel_size", layout.tensor
        yield f"{key}.pipeline_model_parallel_size", layout.pipeline
        yield f"{key}.expert_model_parallel_size", layout.expert
        if layout.expert > 1 and layout.tensor > 1:
            yield f"{key}.expert_tensor_parallel_size", "1"
        if shape.num_layers % layout.pipeline:
            last = shape.num_layers - (layout.pipeline - 1) * -(-shape.num_layers // layout.pipeline)
            yield f"{key}.override_transformer_config.num_layers_in_last_pipeline_stage", str(last)
    yield f"{key}.param_offload", layout.offload
    if role != "reference":
        yield f"{key}.optimizer_offload", layout.offload


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
    yield f"{model}.enable_gradient_checkpointing={_checkpointing(layout)}"
    if layout.recompute == "host":
        yield f"{model}.enable_activation_offload=True"


def plan_as_json(plan: RunPlan) -> dict[str, object]:
    """Everything of a plan but its overrides, in seconds and bytes."""
    groups = []
    for roles, count, chosen in zip(plan.groups, plan.devices, plan.options, strict=True):
        choices = {
            option.role: {
                "text": "; ".join(part.text() for part in (option.layout, option.rollout) if part),
                "layout": asdict(option.layout) if option.layout else None,
                "rollout": asdict(option.rollout) if option.rollout else None,
                "seconds": {
                    kind: {"total": t.seconds, "bound": t.bound, **t.parts} for kind, t in option.times.items()
                },
                "bytes": {kind: asdict(part) for kind, part in option.parts.items()},
            }
            for option in chosen
        }
        peak = sum(option.resident for option in chosen) + max(option.peak for option in chosen)
        groups.append({"roles": list(roles), "devices": count, "peak_bytes": peak, "choices": choices})
    return {
        "run": plan.flow.name,
        "model": clean(plan.flow.shapes["actor"].name),
        "device": {"name": plan.cluster.device.name, "bytes": plan.cluster.memory},
        "step_s": plan.step_s,
        "gpu_hours": plan.gpu_hours,
        "asynchronous": plan.asynchronous,
        "weight_sync_s": plan.sync_s,
        "stages_s": list(plan.stages),
        "placement": groups,
    }
