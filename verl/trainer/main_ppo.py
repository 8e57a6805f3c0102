"""Command `python -m verl.trainer.main_ppo key=value ...`, which is `verl train`, and names that scripts import."""

import sys

from verl.compat.commands import main_ppo
from verl.compat.datasets import create_rl_dataset, create_rl_sampler
from verl.compat.sections import validate_config
from verl.compat.task_runner import TaskRunner, get_ppo_ray_runtime_env, need_critic, need_reference_policy, run_ppo

__all__ = [
    "TaskRunner", "create_rl_dataset", "create_rl_sampler", "get_ppo_ray_runtime_env", "need_critic", "need_reference_policy",
    "run_ppo", "validate_config",
]  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main_ppo(sys.argv[1:]))
