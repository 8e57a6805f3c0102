"""`distillation`, `skip` and `ray_kwargs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, section, used


@dataclass(frozen=True)
class SkipStageConfig(Section):
    enable: bool = used(False, "take samples from a former run")
    dump_dir: str = used("~/.verl/rollout_dump", "folder of that run", when=".enable", sizing=True)
    steps: list[int] = used([], "steps", when=".enable")
    action: str = used("cache", "what to do", when=".enable")


@dataclass(frozen=True)
class SkipConfig(Section):
    rollout: SkipStageConfig = section(SkipStageConfig, "generation")
    rollout_tq: SkipStageConfig = section(SkipStageConfig, "generation through the queue")
    async_rollout: SkipStageConfig = section(SkipStageConfig, "asynchronous generation")


@dataclass(frozen=True)
class RayKwargsConfig(Section):
    ray_init: dict[str, Any] = used(
        {"num_cpus": None, "runtime_env": {"py_executable": None}},
        "arguments of ray.init",
        when="several_devices",
        sizing=True,
    )
    timeline_json_file: str | None = used(
        None, "file for Ray's timeline of the run", when="several_devices", sizing=True
    )


@dataclass(frozen=True)
class DistillationConfig(Section):
    enabled: bool = used(False, "learn from a teacher")
