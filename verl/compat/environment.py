"""`verl.trainer.constants_ppo`: the environment that recipes give to Ray."""

from __future__ import annotations

import json
import os
from typing import Any

# settings of libraries that a run's processes should share; our own Ray runtime sets what it needs by itself
_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """A `runtime_env` for `ray.init`: the variables above but for those that this process has set, and no working directory
    unless the Ray job names one."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    environment: dict[str, Any] = {"env_vars": {k: v for k, v in _VARIABLES.items() if k not in os.environ}}
    if job.get("runtime_env", {}).get("working_dir") is None:
        environment["working_dir"] = None
    return environment
