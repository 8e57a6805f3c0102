"""From a training config and the `plan.*` keys to what the search needs: dataflow, cluster, workload, choices.

plan.cluster: {gpu: h100_sxm, nodes: 4, gpus_per_node: 8, hbm_gb, inter_gbps}
plan.workload: {prompt_mean: 300, response: [200, 800, 2000, 4096]}     or {samples: earlier/run/samples/train/10.jsonl}
plan.objective: step_s | gpu_hours;  plan.asynchronous: off | auto | on;  plan.engine: fsdp | megatron;  plan.apply: false
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from verl.config import PPOConfig
from verl.config.active_keys import uses_critic, uses_reference
from verl.errors import ConfigError, nearest
from verl.planner.cluster import Cluster
from verl.planner.dataflow import Dataflow
from verl.planner.options import Space
from verl.planner.search import Rules
from verl.planner.shapes import ModelShape, known_shape
from verl.planner.step_time import layer_matmuls, mlp_matmuls
from verl.planner.workload import Lengths, Workload

_SPACES = {
    "fsdp": Space(zero=(3,), pipelines=(1,)),
    "megatron": Space(zero=(1,), contexts=(1,)),
}
_CHOICES = {"objective": ("step_s", "gpu_hours"), "asynchronous": ("off", "auto", "on"), "engine": tuple(_SPACES)}
_SPELLINGS = {"async": "asynchronous"}
_SAMPLE_BYTES, _CONFIG_BYTES = 1 << 30, 1 << 24


@dataclass
class ClusterRequest:
    gpu: str = "h100_sxm"
    nodes: int = 1
    gpus_per_node: int | None = None
    hbm_gb: float | None = None
    inter_gbps: float | None = None


@dataclass
class WorkloadRequest:
    prompt_mean: float | None = None
    response: list[float] | None = None
    samples: str | None = None


@dataclass
class PlanRequest:
    """The `plan.*` keys."""

    cluster: ClusterRequest = field(default_factory=ClusterRequest)
    workload: WorkloadRequest = field(default_factory=WorkloadRequest)
    objective: str = "step_s"
    asynchronous: str = "auto"
    engine: str = "fsdp"
    apply: bool = False

    @classmethod
    def parse(cls, settings: Sequence[str]) -> PlanRequest:
        """From `plan.key=value`, values in YAML. Raises ConfigError for an unknown key and a value that does not fit."""
        import yaml

        found = cls()
        for setting in settings:
            path, _, text = setting.partition("=")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                raise ConfigError(f"{setting}: the value is not YAML.") from None
            # YAML 1.1 reads on and off as booleans
            value = text if text in ("on", "off") else value
            found._set(path.removeprefix("plan.").split("."), value, path)
        return found

    def _set(self, names: list[str], value: Any, path: str) -> None:
        target: Any = self
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
    if name not in names:
        raise ConfigError(f"There is no key {path}{nearest(name, names) or '.'} There are: {', '.join(names)}.")
    return name


def _check(path: str, name: str, value: Any) -> None:
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
        wanted = {"response": "four lengths [p10, p50, p90, longest]", "apply": "true or false", "gpu": "a name"}
        raise ConfigError(f"{path}={value} does not fit: it takes {wanted.get(name, 'a positive number')}.")


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


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters of `rank` on all matrices of attention and of the dense MLP."""
    sizes = [*layer_matmuls(shape, 1), *mlp_matmuls(shape, shape.shared_intermediate or shape.intermediate, 1)]
    return round(shape.num_layers * sum(rank * (n + k) for n, k in sizes))


def dataflow_of(config: PPOConfig) -> Dataflow:
    """The roles and calls of a config of `verl train`."""
    group = config.actor_rollout_ref
    actor = shape_of(group.model.path)
    rank = group.model.lora_rank
    critic = shape_of(config.critic.model.path) if uses_critic(config) else None
    reference = actor if uses_reference(config) and not rank else None
    judged = config.reward.reward_model
    reward = shape_of(judged.model_path) if judged.enable and judged.model_path else None
    several = config.data.train_batch_size > group.actor.ppo_mini_batch_size or group.actor.ppo_epochs > 1
    return Dataflow.ppo(
        actor,
        critic,
        reference,
        reward,
        old_log_probs=several,
        trainable=lora_parameters(actor, rank) if rank else None,
    )


def workload_of(config: PPOConfig, asked: WorkloadRequest) -> Workload:
    """The step of a config. Lengths that are not given are half the limits, with a wide distribution."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if asked.samples is not None:
        response = Lengths.from_samples(read_lengths(Path(asked.samples).expanduser()))
    elif asked.response is not None:
        response = Lengths.through(*asked.response)
    else:
        response = Lengths.of(rollout.response_length / 2, rollout.response_length)
    prompts = config.data.train_batch_size
    return Workload(
        prompts,
        rollout.n,
        asked.prompt_mean or rollout.prompt_length / 2,
        response,
        updates=max(1, prompts // actor.ppo_mini_batch_size),
        epochs=actor.ppo_epochs,
        prompt_longest=rollout.prompt_length,
    )


def read_lengths(file: Path) -> list[float]:
    """Tokens of the response in each row of samples/train/STEP.jsonl of a run (`response_ids`), or its `response_length`."""
    if not file.is_file():
        raise ConfigError(f"plan.workload.samples={file} is no file; give samples/train/STEP.jsonl of an earlier run.")
    if file.stat().st_size > _SAMPLE_BYTES:
        raise ConfigError(f"plan.workload.samples={file} has more than 1 GiB; give one step of the run.")
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        tokens = row.get("response_ids")
        length = len(tokens) if isinstance(tokens, list) else row.get("response_length")
        if isinstance(length, int | float) and length > 0:
            found.append(float(length))
    return found


def cluster_of(asked: ClusterRequest) -> Cluster:
    from verl.planner.cluster import cluster_facts

    per_node = asked.gpus_per_node or int(cluster_facts(asked.gpu)["gpus_per_node"])
    return Cluster.of(
        asked.gpu, asked.nodes * per_node, gpus_per_node=per_node, hbm_gb=asked.hbm_gb, inter_gbps=asked.inter_gbps
    )


def rules_of(asked: PlanRequest) -> Rules:
    return Rules(
        asynchronous=asked.asynchronous,  # type: ignore[arg-type]
        objective=asked.objective,  # type: ignore[arg-type]
        space=_SPACES[asked.engine],
    )
