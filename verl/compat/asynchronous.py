"""Commands of the fully asynchronous and the one-step-off trainer, by the asynchronous program here.

That program generates `rollout.prefetch_num` batches ahead, each with the newest weights at its start, on the rollout's own
devices if `rollout.nnodes` is above 0 (verl/programs/ppo_async.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from verl.cli.main import run_guarded
from verl.compat.commands import Arguments
from verl.errors import ConfigError

log = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"
_CONFIG_NAMES = ("fully_async_ppo_trainer", "one_step_off_ppo_trainer", "ppo_trainer")
_MEGATRON_NAMES = tuple(name.replace("ppo_", "ppo_megatron_") for name in _CONFIG_NAMES)
# keys of asynchronous training without effect -> reason
_NO_MEANING = {
    "async_training.use_trainer_do_validate": "validation samples on the rollout's devices",
    "async_training.concurrent_samples_per_replica": "max_num_seqs bounds the number of concurrent samples",
    "async_training.use_rollout_log_probs": "algorithm.rollout_correction sets the correction between sampler and trainer",
    "async_training.compute_prox_log_prob": "algorithm.rollout_correction sets the correction between sampler and trainer",
    "data.gen_batch_size": "prompts are generated one by one",
}
_OFF = ("async_training.use_dynamic_resource_scheduling",)


def main_fully_async(argv: Sequence[str]) -> int:
    """`python -m verl.experimental.fully_async_policy.fully_async_main`: the exit code of `verl train`."""
    return run_guarded("train", lambda arguments: _train(fully_async(arguments)), argv)


def main_one_step_off(argv: Sequence[str]) -> int:
    """`python -m verl.experimental.one_step_off_policy.main_ppo`: the exit code of `verl train`, one batch ahead."""
    return run_guarded("train", lambda arguments: _train(one_step_off(arguments)), argv)


def fully_async(argv: Sequence[str]) -> list[str]:
    """Translate overrides of the fully-asynchronous trainer to overrides of `verl train`. Raises ConfigError.

    It syncs weights after `trigger_parameter_sync_step` groups of `require_batches` x `ppo_mini_batch_size` prompts. That
    product is train_batch_size here, where each step ends with a weight sync. `rollout.total_rollout_steps` counts
    prompts. A `staleness_threshold` above 0 allows batches ahead: 1 batch up to 1, 2 up to 2.
    """
    arguments = _common(argv)
    for key in _OFF:
        if arguments.take(key, False):
            raise ConfigError(
                f"{key}=True is not available in this version: the role of a device is fixed. Set it to False."
            )
    for key in [k for k in arguments.texts if k.startswith("async_training.dynamic_schedule_")]:
        arguments.take(key)
    for key, reason in _NO_MEANING.items():
        if key in arguments.texts:
            log.warning("No effect: %s=%s (%s).", key, arguments.take(key), reason)
    sync = _number(arguments, "async_training.trigger_parameter_sync_step", 4)
    groups = _number(arguments, "async_training.require_batches", 1)
    staleness = _number(arguments, "async_training.staleness_threshold", 0.1)
    mini_batch = arguments.value("actor_rollout_ref.actor.ppo_mini_batch_size", 256)
    prompts = int(sync * groups * int(str(mini_batch)))
    if arguments.value("data.train_batch_size", 0) == 0:
        arguments.texts["data.train_batch_size"] = str(prompts)
    total = arguments.take("rollout.total_rollout_steps")
    if total is not None:
        steps = max(1, int(str(total)) // int(str(arguments.value("data.train_batch_size"))))
        arguments.default("trainer.total_training_steps", steps)
    ahead = math.ceil(staleness)
    arguments.default(f"{_ROLLOUT}.prefetch_num", ahead)
    partial = arguments.take("async_training.partial_rollout")
    if partial is not None and ahead:
        arguments.default(f"{_ROLLOUT}.partial_rollout", partial)
    return _placed(arguments)


def one_step_off(argv: Sequence[str]) -> list[str]:
    """Translate overrides of the one-step-off trainer to overrides of `verl train`: one batch ahead."""
    arguments = _common(argv)
    arguments.default(f"{_ROLLOUT}.prefetch_num", 1)
    return _placed(arguments)


def _common(argv: Sequence[str]) -> Arguments:
    arguments = Arguments(argv)
    if arguments.flag("--config-name", "-cn").removesuffix(".yaml") in _MEGATRON_NAMES:
        arguments.default("model_engine", "megatron")
    arguments.drop_config_flags((*_CONFIG_NAMES, *_MEGATRON_NAMES))
    arguments.take("actor_rollout_ref.hybrid_engine")  # these commands imply False
    return arguments


def _placed(arguments: Arguments) -> list[str]:
    """`rollout.*` of these commands describes the rollout's own devices: by default one node of 8."""
    arguments.rename("rollout.total_epochs", "trainer.total_epochs")
    arguments.rename("rollout.test_freq", "trainer.test_freq")
    arguments.rename("rollout.", f"{_ROLLOUT}.")
    arguments.default(f"{_ROLLOUT}.nnodes", 1)
    if arguments.value(f"{_ROLLOUT}.nnodes"):
        arguments.default(f"{_ROLLOUT}.n_gpus_per_node", 8)
    return arguments.argv()


def _number(arguments: Arguments, key: str, default: float) -> float:
    value: object = arguments.take(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigError(f"{key}={value} must be a non-negative number.")
    return value


def _train(argv: list[str]) -> int:
    from verl.cli.train import run_train

    return run_train(argv, supervised=True)
