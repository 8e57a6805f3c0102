"""The `plan.*` keys, and their meaning next to a training config: cluster, dataflow, workload, choices of the search.

plan.cluster: {gpu: h100_sxm, nodes: 4, gpus_per_node: 8, hbm_gb, inter_gbps}
plan.workload: {prompt_mean: 300, image_tokens: 0, response: [200, 800, 2000, 4096]} or {samples: step_000010.jsonl}
plan.asynchronous: off | auto | on;  plan.engine: fsdp | megatron;  plan.apply: false
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from verl.cli.checklist.resources import reused_bytes
from verl.config import LoadedConfig, PPOConfig, PreferenceConfig, RunConfig
from verl.config.active_keys import LABELLED_LOSSES, uses_critic, uses_reference
from verl.config.roots.preference import has_reference_role
from verl.config.roots.reward_model import PAIR_LOSSES, RMConfig
from verl.config.values import parse_override
from verl.errors import ConfigError, nearest
from verl.families import engine_facts
from verl.models.shapes import ModelShape, known_shape
from verl.parallel.memory import available_memory
from verl.planner.cluster import Cluster, cluster_facts, measure_cpu
from verl.planner.options import Space
from verl.planner.search import Rules
from verl.planner.step_time import layer_matmuls, mlp_matmuls
from verl.planner.workload import Dataflow, Lengths, Workload
from verl.regular_files import require_regular

_SPACES = {
    "fsdp": Space(zero=(3,), pipelines=(1,), recompute=("none", "selective", "full", "host")),
    "megatron": Space(zero=(1,), contexts=(1,), same_sizes=True),
}
_CHOICES = {"asynchronous": ("off", "auto", "on"), "engine": tuple(_SPACES)}
_SPELLINGS = {"async": "asynchronous"}
_SAMPLE_BYTES, _CONFIG_BYTES = 1 << 30, 1 << 24


@dataclass
class ClusterRequest:
    gpu: str = "h100_sxm"
    nodes: int | None = None
    gpus_per_node: int | None = None
    hbm_gb: float | None = None
    inter_gbps: float | None = None


@dataclass
class WorkloadRequest:
    prompt_mean: float | None = None
    image_tokens: float | None = None
    response: list[float] | None = None
    samples: str | None = None


@dataclass
class PlanRequest:
    """The `plan.*` keys."""

    cluster: ClusterRequest = field(default_factory=ClusterRequest)
    workload: WorkloadRequest = field(default_factory=WorkloadRequest)
    asynchronous: str = "auto"
    engine: str | None = None
    apply: bool = False

    @classmethod
    def parse(cls, settings: Sequence[str]) -> PlanRequest:
        """From `plan.key=value`. Raises ConfigError for an unknown key and a value that does not fit."""
        request = cls()
        for setting in settings:
            override = parse_override(setting)
            request._set(override.key.removeprefix("plan.").split("."), override.value, override.key)
        return request

    def _set(self, names: list[str], value: object, path: str) -> None:
        target: object = self
        for name in names[:-1]:
            target = getattr(target, _known(target, name, path))
            if not isinstance(target, ClusterRequest | WorkloadRequest):
                raise ConfigError(f"{path}: {name} has no keys below it.")
        name = _known(target, names[-1], path)
        if isinstance(getattr(target, name), ClusterRequest | WorkloadRequest):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{path} takes a mapping, such as {path}={{{fields(getattr(target, name))[0].name}: ...}}."
                )
            for key, inner in value.items():
                self._set([*names, str(key)], inner, f"{path}.{key}")
            return
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigError(f"{path}={value} is none of {', '.join(_CHOICES[name])}.")
        _check(path, name, value)
        setattr(target, name, value)


def _known(target: Any, name: str, path: str) -> str:
    names = [f.name for f in fields(target)]
    name = _SPELLINGS.get(name, name)
    if path == "plan.objective":  # of earlier versions
        raise ConfigError(
            "plan.objective=gpu_hours also tried fewer devices; verl plan takes the fastest step now. Remove the key, and "
            "compare gpu_hours of --json between values of plan.cluster."
        )
    if name not in names:
        raise ConfigError(f"There is no key {path}{nearest(name, names) or '.'} There are: {', '.join(names)}.")
    return name


def _check(path: str, name: str, value: object) -> None:
    if name in ("gpu", "samples", *_CHOICES):
        fits = isinstance(value, str)
    elif name == "apply":
        fits = isinstance(value, bool)
    elif name == "response":
        fits = isinstance(value, list) and len(value) == 4 and all(isinstance(v, int | float) for v in value)
    elif name in ("nodes", "gpus_per_node"):
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not fits:
        accepted = {"response": "four lengths [p10, p50, p90, longest]", "apply": "true or false", "gpu": "a name"}
        raise ConfigError(f"{path}={value} does not fit: it takes {accepted.get(name, 'a positive number')}.")


def shape_of(path: str) -> ModelShape:
    """The shape of a model folder, or of a published model by its name. Raises ConfigError."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return known_shape(path)
    try:
        if file.stat().st_size > _CONFIG_BYTES:
            raise ValueError("it has more than 16 MiB")
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no mapping; give the folder of a decoder in Hugging Face's format.")
    return ModelShape.from_config(config, Path(path).name)


def read_lengths(file: Path) -> list[float]:
    """Tokens of the response in each row of samples/train/STEP.jsonl of a run (`response_ids`), or its `response_length`."""
    fix = "Give samples/train/STEP.jsonl of an earlier run."
    require_regular(file, "The file plan.workload.samples", fix=fix)
    if file.stat().st_size > _SAMPLE_BYTES:
        raise ConfigError(f"plan.workload.samples={file} has more than 1 GiB; give one step of the run.")
    lengths = []
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        tokens = row.get("response_ids")
        length = len(tokens) if isinstance(tokens, list) else row.get("response_length")
        if isinstance(length, int | float) and length > 0:
            lengths.append(float(length))
    return lengths


def cluster_of(request: ClusterRequest, loaded: LoadedConfig[RunConfig]) -> Cluster:
    """The cluster of `plan.cluster`; numbers of nodes and devices that it does not give come from the config."""
    if request.gpu == "cpu":
        if request.gpus_per_node not in (None, 1) or request.nodes not in (None, 1):
            raise ConfigError(
                "plan.cluster.gpu=cpu is this machine's processor, one device. Leave out nodes and gpus_per_node."
            )
        return measure_cpu(request.hbm_gb * 1e9 if request.hbm_gb else available_memory())
    trainer, settings = loaded.config.trainer, loaded.settings
    per_node = request.gpus_per_node
    if per_node is None:
        listed = "trainer.n_gpus_per_node" in settings and trainer.n_gpus_per_node
        per_node = trainer.n_gpus_per_node if listed else int(cluster_facts(request.gpu)["gpus_per_node"])
    nodes = request.nodes
    if nodes is None:
        nodes = trainer.nnodes if "trainer.nnodes" in settings else 1
        if isinstance(loaded.config, PPOConfig):  # a pool of the rollout's own
            nodes += loaded.config.actor_rollout_ref.rollout.nnodes
    cluster = Cluster.of(
        request.gpu, nodes * per_node, gpus_per_node=per_node, hbm_gb=request.hbm_gb, inter_gbps=request.inter_gbps
    )
    return cluster.in_float32() if _dtype(loaded.config) in ("float32", "fp32") else cluster


def _dtype(config: RunConfig) -> str:
    """The compute dtype of the model that trains; frozen weights are held in it too."""
    return config.actor_rollout_ref.actor.fsdp_config.dtype if isinstance(config, PPOConfig) else config.engine.dtype


def engine_of(request: PlanRequest, config: RunConfig) -> str:
    """The family of layouts: `plan.engine`, else the family of the config's training engine."""
    strategy = config.actor_rollout_ref.actor.strategy if isinstance(config, PPOConfig) else config.engine.strategy
    return request.engine or ("megatron" if strategy == "megatron" else "fsdp")


def rules_of(request: PlanRequest, config: RunConfig, roles: tuple[str, ...]) -> Rules:
    """The choices of a search. Programs that train on given rows run all roles on the same devices, and so does Megatron: its
    process groups span a run. Raises ConfigError if a rollout is to run ahead there."""
    engine = engine_of(request, config)
    alike = not isinstance(config, PPOConfig) or engine == "megatron"
    if alike and request.asynchronous == "on":
        raise ConfigError(
            "plan.async=on needs separate devices for the rollout. strategy=megatron takes all devices of a run, and programs "
            "on given rows have no rollout. Set plan.async=off, or plan.engine=fsdp for a program that samples."
        )
    facts = engine_facts(config.actor_rollout_ref.rollout.name if isinstance(config, PPOConfig) else None)
    by_ranks = facts.is_in_run and facts.divides_model
    space = replace(_SPACES[engine], repeats_kv=not by_ranks, replica_in_node=not by_ranks)
    return Rules(
        asynchronous="off" if alike else request.asynchronous,  # type: ignore[arg-type]
        space=replace(space, offload=False, recompute=Space().recompute) if request.cluster.gpu == "cpu" else space,
        placements=((roles,),) if alike else None,
    )


_UNLIMITED = 8192  # tokens of the longest row if data.max_length sets no limit


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters of `rank` on all matrices of attention and of the dense MLP."""
    sizes = [*layer_matmuls(shape, 1), *mlp_matmuls(shape, shape.shared_intermediate or shape.intermediate, 1)]
    return round(shape.num_layers * sum(rank * (n + k) for n, k in sizes))


def dataflow_of(config: RunConfig, *, on_cpu: bool = False) -> Dataflow:
    """The roles and calls of the config of a program. Raises ConfigError for a model of unknown shape."""
    if isinstance(config, PPOConfig):
        return replace(_ppo(config), reused_bytes=reused_bytes(config) if on_cpu else 0.0)
    shape, rank = shape_of(config.model.path), config.model.lora_rank
    trainable = lora_parameters(shape, rank) if rank else None
    if isinstance(config, PreferenceConfig):
        has_reference = has_reference_role(config) and bool(config.ref.model_path or not config.model.lends_its_base)
        reference = shape_of(config.ref.model_path or config.model.path) if has_reference else None
        return Dataflow.preference(shape, reference, trainable)
    return Dataflow.sft(shape, trainable, name="rm" if isinstance(config, RMConfig) else "sft")


def _ppo(config: PPOConfig) -> Dataflow:
    group = config.actor_rollout_ref
    actor = shape_of(group.model.path)
    rank = group.model.lora_rank
    critic = shape_of(config.critic.model.path) if uses_critic(config) else None
    reference = actor if uses_reference(config) and not group.model.lends_its_base else None
    judged = config.reward.reward_model
    reward = shape_of(judged.model_path) if judged.enable and judged.model_path else None
    taught = config.distillation.teachers() if config.distillation.enabled else {}
    several = config.data.train_batch_size > group.actor.ppo_mini_batch_size or group.actor.ppo_epochs > 1
    return Dataflow.ppo(
        actor,
        critic,
        reference,
        reward,
        {
            "teacher" if name == "teacher_model" else f"teacher_{name}": shape_of(str(one.model_path))
            for name, one in taught.items()
        },
        old_log_probs=several,
        trainable=lora_parameters(actor, rank) if rank else None,
    )


def workload_of(config: RunConfig, request: WorkloadRequest) -> Workload:
    """The step of a config. Lengths that are not given are half the limits, with a wide distribution. Programs that train on
    given rows have the lengths of complete rows, less the prompt if `prompt_mean` is given."""
    if isinstance(config, PPOConfig):
        return _sampled(config, request)
    longest = float(config.data.max_length or _UNLIMITED)
    prompt = request.prompt_mean or 0.0
    pairs = (isinstance(config, PreferenceConfig) and not set(config.preference.losses) & set(LABELLED_LOSSES)) or (
        isinstance(config, RMConfig) and config.rm.loss in PAIR_LOSSES
    )
    return Workload(
        config.data.train_batch_size,
        2 if pairs else 1,
        prompt,
        _lengths(request, max(longest - prompt, 1.0)),
        shares_prompts=True,
        image_tokens=request.image_tokens or 0.0,
    )


def _sampled(config: PPOConfig, request: WorkloadRequest) -> Workload:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompts, lengths = config.data.train_batch_size, request.response
    if lengths is not None and lengths[-1] > rollout.response_length:
        raise ConfigError(
            f"plan.workload.response={lengths} has longer responses than the run: data.max_response_length="
            f"{rollout.response_length}. Change one of them."
        )
    updates = max(1, -(-prompts // actor.ppo_mini_batch_size))
    return Workload(
        prompts,
        rollout.n,
        request.prompt_mean or rollout.prompt_length / 2,
        _lengths(request, rollout.response_length),
        updates=updates,
        epochs=actor.ppo_epochs,
        prompt_longest=rollout.prompt_length,
        # a shuffled pass parts the samples of a prompt
        shares_prompts=not (actor.shuffle and updates > 1),
        image_tokens=request.image_tokens or 0.0,
        kv_cache_dtype=rollout.kv_cache_dtype,
    )


def _lengths(request: WorkloadRequest, limit: float) -> Lengths:
    if request.samples is not None:
        return Lengths.from_samples(read_lengths(Path(request.samples).expanduser()))
    if request.response is not None:
        return Lengths.through(*request.response)
    return Lengths.of(limit / 2, limit)
