"""Sections that only distributed runs and profilers read: `transfer_queue`, `global_profiler`, `skip`, `ray_kwargs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Section, inert, section, used

IN_PROCESS = "samples stay in the run's own process"
NO_PROFILER = "each step reports where its time went; no profiler is attached in this version"


@dataclass(frozen=True)
class QueueMetricsConfig(Section):
    enabled: bool = inert(False, "metrics of the queue", IN_PROCESS)
    port: int = inert(0, "their port", IN_PROCESS)


@dataclass(frozen=True)
class SimpleStorageConfig(Section):
    total_storage_size: int = inert(100000, "samples held", IN_PROCESS)
    num_data_storage_units: int = inert(8, "processes that hold them", IN_PROCESS)


@dataclass(frozen=True)
class MooncakeStoreConfig(Section):
    auto_init: bool = inert(False, "start the service", IN_PROCESS)
    metadata_server: str = inert("localhost:50123", "address", IN_PROCESS)
    master_server_address: str = inert("localhost:50124", "address", IN_PROCESS)
    local_hostname: str = inert("localhost", "own address", IN_PROCESS)
    protocol: str = inert("tcp", "transport", IN_PROCESS)
    global_segment_size: int = inert(4294967296, "bytes of a segment", IN_PROCESS)
    local_buffer_size: int = inert(1073741824, "bytes of the buffer", IN_PROCESS)
    device_name: str = inert("", "network device", IN_PROCESS)


@dataclass(frozen=True)
class QueueBackendConfig(Section):
    storage_backend: str = inert("SimpleStorage", "where samples are held", IN_PROCESS)
    SimpleStorage: SimpleStorageConfig = section(SimpleStorageConfig, "processes of our own")
    MooncakeStore: MooncakeStoreConfig = section(MooncakeStoreConfig, "Mooncake")


@dataclass(frozen=True)
class TransferQueueConfig(Section):
    enable: bool = inert(False, "hold samples in a service", IN_PROCESS)
    metrics: QueueMetricsConfig = section(QueueMetricsConfig, "metrics of the queue")
    backend: QueueBackendConfig = section(QueueBackendConfig, "where samples are held")


@dataclass(frozen=True)
class GlobalProfilerConfig(Section):
    tool: str | None = inert(None, "profiler", NO_PROFILER)
    steps: list[int] | None = inert(None, "profiled steps", NO_PROFILER)
    profile_continuous_steps: bool = inert(False, "one file for neighbouring steps", NO_PROFILER)
    save_path: str = inert("outputs/profile", "folder", NO_PROFILER)
    relocate_results: bool = inert(False, "move the results", NO_PROFILER)
    finish_hook_cmd: str | None = inert(None, "command at the end", NO_PROFILER)
    finish_hook_all_ranks: bool = inert(False, "on every rank", NO_PROFILER)
    finish_hook_ranks: list[int] = inert([], "on these ranks", NO_PROFILER)
    global_tool_config: dict[str, Any] = inert({}, "settings by profiler", NO_PROFILER)


@dataclass(frozen=True)
class SkipStageConfig(Section):
    enable: bool = used(False, "take samples from a former run")
    dump_dir: str = used("~/.verl/rollout_dump", "folder of that run", when="skips", sizing=True)
    steps: list[int] = used([], "steps", when="skips")
    action: str = used("cache", "what to do", when="skips")


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
