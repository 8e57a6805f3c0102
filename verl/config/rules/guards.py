"""Guards against numbers that go wrong."""

from __future__ import annotations

from typing import Any

from verl.config.rules.api import Rule

_GUARDS = "trainer.guards"
_LIMITED = ("grad_norm", "policy_kl", "reference_kl", "ratio", "entropy", "mismatch")


def _rolls_back(c: Any, name: str) -> bool:
    guard = c.trainer.guards[name]
    return guard.action == "rollback" and (name == "nonfinite" or guard.limit is not None)


def _needs_checkpoints(name: str) -> Rule:
    key = f"{_GUARDS}.{name}.action"
    return Rule(
        key,
        "error",
        lambda c, given: _rolls_back(c, name) and c.trainer.save_freq <= 0,
        f"{key}=rollback goes back to the newest checkpoint, and trainer.save_freq={{c.trainer.save_freq}} saves none. Set "
        "trainer.save_freq above 0.",
    )


def _needs_fresh_samples(name: str) -> Rule:
    key = f"{_GUARDS}.{name}.action"
    return Rule(
        key,
        "error",
        lambda c, given: _rolls_back(c, name) and c.actor_rollout_ref.rollout.prefetch_num > 0,
        f"{key}=rollback is not available where samples are made ahead of training "
        "(actor_rollout_ref.rollout.prefetch_num={rollout.prefetch_num}). Choose skip or stop.",
    )


def _above_zero(name: str) -> Rule:
    key = f"{_GUARDS}.{name}.limit"

    def broken(c: Any, given: set[str]) -> bool:
        limit = c.trainer.guards[name].limit
        return limit is not None and not limit > 0

    return Rule(key, "error", broken, lambda c: f"{key}={c.trainer.guards[name].limit} must be above 0.")


def _not_negative(name: str) -> Rule:
    key = f"{_GUARDS}.{name}"
    return Rule(
        key,
        "error",
        lambda c, given: c.trainer.guards[name] < 0,
        lambda c: f"{key}={c.trainer.guards[name]} must be at least 0.",
    )


GUARDS = [
    *(_needs_checkpoints(name) for name in ("nonfinite", *_LIMITED)),
    *(_needs_fresh_samples(name) for name in ("nonfinite", *_LIMITED)),
    *(_above_zero(name) for name in _LIMITED),
    *(_not_negative(name) for name in ("max_skips_in_row", "max_rollbacks")),
    Rule(
        f"{_GUARDS}.ratio.limit",
        "error",
        lambda c, given: c.trainer.guards.ratio.limit is not None and c.trainer.guards.ratio.limit <= 1,
        f"{_GUARDS}.ratio.limit={{c.trainer.guards.ratio.limit}} is a probability ratio or its inverse, which is never below "
        "1; choose one above 1.",
    ),
]
