"""This machine's accelerator, and the environment of Ray workers: `verl.utils.device`, `verl.utils.memory_utils`,
`verl.trainer.constants_ppo`."""

from __future__ import annotations

import gc
import json
import logging
import os
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger(__name__)

is_cuda_available: bool = torch.cuda.is_available()
is_npu_available: bool = False  # no engine here computes on one


def get_device_name() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if is_cuda_available else "cpu"


def get_torch_device() -> ModuleType:
    """The module of torch for that device: `torch.cuda` or `torch.cpu`."""
    return torch.cuda if is_cuda_available else torch.cpu


def get_device_id() -> Any:
    """The current device as torch names it: an index on GPUs, "cpu" on a CPU."""
    return get_torch_device().current_device()


def get_nccl_backend() -> str:
    """The communication backend of that device: "nccl" for GPUs, "gloo" for a CPU."""
    return "nccl" if is_cuda_available else "gloo"


def get_visible_devices_keyword() -> str:
    """The environment variable that restricts a process to some devices."""
    return "CUDA_VISIBLE_DEVICES"


def auto_set_device(config: object) -> None:
    """Set `config.trainer.device` to this machine's device if it names another accelerator; "cpu" and "auto" stay."""
    trainer: Any = getattr(config, "trainer", None)
    chosen = getattr(trainer, "device", None)
    if chosen in (None, "cpu", "auto", get_device_name()):
        return
    log.warning("trainer.device=%s is not on this machine; it is set to %s.", chosen, get_device_name())
    trainer.device = get_device_name()


def set_expandable_segments(enable: bool) -> None:
    """Turn expandable segments of CUDA's allocator on or off. No effect on a CPU."""
    if is_cuda_available:
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Free cached device memory until a round frees less than 1 GiB, at most `max_retries` rounds; on a CPU, only collect
    Python's garbage."""
    for _ in range(max_retries):
        gc.collect()
        if not is_cuda_available:
            return
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        if force_sync:
            torch.cuda.synchronize()
        if before - torch.cuda.memory_reserved() < 2**30:
            return


# settings of libraries that all processes of a run should share; the Ray runtime here sets its own
_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """A `runtime_env` for `ray.init`: variables that this process has not set, and no working directory unless the Ray
    job names one."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    environment: dict[str, object] = {"env_vars": {k: v for k, v in _VARIABLES.items() if k not in os.environ}}
    if job.get("runtime_env", {}).get("working_dir") is None:
        environment["working_dir"] = None
    return environment
