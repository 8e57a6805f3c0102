"""The root of the config tree, and the index of all its keys."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.config.actor import ActorConfig, RefConfig
from verl.config.algorithm import AlgorithmConfig
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.keys import Key, Section, section, used
from verl.config.model import ModelConfig
from verl.config.reward import RewardConfig
from verl.config.rollout import RolloutConfig
from verl.config.services import GlobalProfilerConfig, RayKwargsConfig, SkipConfig, TransferQueueConfig
from verl.config.trainer import TrainerConfig


@dataclass(frozen=True)
class ActorRolloutRefConfig(Section):
    model: ModelConfig = section(ModelConfig, "the model")
    actor: ActorConfig = section(ActorConfig, "the policy being trained")
    rollout: RolloutConfig = section(RolloutConfig, "how samples are drawn")
    ref: RefConfig = section(RefConfig, "the frozen policy that KL terms compare with", when="reference")
    hybrid_engine: bool = used(True, "training and rollout share devices and weights")
    nccl_timeout: int = used(600, "deadline of collectives in seconds", sizing=True)


@dataclass(frozen=True)
class VerlConfig(Section):
    """The whole configuration of a reinforcement-learning run."""

    data: DataConfig = section(DataConfig, "training and validation rows")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "policy, reference policy and rollout")
    critic: CriticConfig = section(CriticConfig, "the value model")
    reward: RewardConfig = section(RewardConfig, "how a response becomes a number")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "advantages, KL, corrections, filters")
    trainer: TrainerConfig = section(TrainerConfig, "length, logging, saving, devices")
    distillation: DistillationConfig = section(DistillationConfig, "learning from a teacher")
    transfer_queue: TransferQueueConfig = section(TransferQueueConfig, "service that holds samples")
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig, "profilers")
    skip: SkipConfig = section(SkipConfig, "stages taken from a former run")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray")
    model_engine: str = used("dp", "family of training engines: dp (PyTorch-native)")


@dataclass(frozen=True)
class Leaf:
    """One key of the tree with what holds for it, its sections' declarations included."""

    path: str
    default: Any
    annotation: Any
    key: Key
    inert: str
    conditions: tuple[tuple[str, str], ...]  # (condition, path of the section whose keys it looks at)
    sizing: bool
    free: bool  # a mapping whose own keys are free


@functools.cache
def hints(cls: Any) -> dict[str, Any]:
    """The evaluated annotations of a section."""
    return typing.get_type_hints(cls)


@functools.cache
def leaves() -> dict[str, Leaf]:
    """Every key by its full path, in the order of the tree."""
    return {leaf.path: leaf for leaf in _walk(VerlConfig(), "", "", (), False)}


@functools.cache
def sections() -> dict[str, str]:
    """Every section's full path -> its meaning."""
    found: dict[str, str] = {}

    def walk(node: Section, prefix: str) -> None:
        for f in dataclasses.fields(node):  # type: ignore[arg-type]
            child = getattr(node, f.name)
            if isinstance(child, Section):
                found[prefix + f.name] = f.metadata["key"].meaning
                walk(child, prefix + f.name + ".")

    walk(VerlConfig(), "")
    return found


def _walk(
    node: Section, prefix: str, reason: str, conditions: tuple[tuple[str, str], ...], sizing: bool
) -> Iterator[Leaf]:
    types = hints(type(node))  # type: ignore[arg-type]
    for f in dataclasses.fields(node):  # type: ignore[arg-type]
        key: Key = f.metadata["key"]
        value = getattr(node, f.name)
        path = prefix + f.name
        own = (*conditions, (key.when, prefix.rstrip("."))) if key.when else conditions
        if isinstance(value, Section):
            yield from _walk(value, path + ".", key.inert or reason, own, key.sizing or sizing)
        else:
            free = "dict[" in str(types[f.name])
            yield Leaf(path, value, types[f.name], key, key.inert or reason, own, key.sizing or sizing, free)


def value_at(root: Any, path: str) -> Any:
    """The value or section at a dotted path; "" is the root itself."""
    for name in path.split(".") if path else ():
        root = root[name]
    return root
