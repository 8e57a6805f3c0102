"""Values that name a member of a family."""

from __future__ import annotations

from typing import Any

from verl.config import names
from verl.config.rules.api import Rule
from verl.config.unavailable import MISSING, value_in
from verl.errors import nearest

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def _has_plugins(root: Any) -> bool:
    return root.actor_rollout_ref.model.external_lib is not None


def _named(key: str, what: str, known: tuple[str, ...], own: str = "") -> Rule:
    """The value(s) of `key` are built-in names, path/to/file.py:name, or registered by model.external_lib."""

    def unknown(root: Any) -> list[str]:
        value = value_in(root, key)
        values = value if isinstance(value, list) else [value]
        return [v for v in values if v is not None and v not in known and ":" not in v]

    def broken(root: Any, given: set[str]) -> bool:
        return bool(unknown(root)) and not (own and _has_plugins(root))

    def sentence(root: Any) -> str:
        name = unknown(root)[0]
        hint = nearest(name, known) or "; there are " + ", ".join(known) + "."
        return f"{key}: there is no {what} {name!r}{hint} {own}".rstrip()

    return Rule(key, "error", broken, sentence)


_OWN = "One of your own is named as path/to/file.py:name, or registered by actor_rollout_ref.model.external_lib."
_AVAILABLE_LATER = tuple(v for row in MISSING for v in ("trtllm",) if row.path == f"{_ROLLOUT}.name" and row.chosen(v))
_PARTS = ("model", "optimizer", "extra", "hf_model")

FAMILIES = [
    _named("algorithm.adv_estimator", "advantage estimator", names.ADV_ESTIMATORS, _OWN),
    _named(f"{_ACTOR}.policy_loss.loss_mode", "policy loss", names.POLICY_LOSSES, _OWN),
    _named(f"{_ROLLOUT}.name", "rollout engine", (*names.ROLLOUT_ENGINES, *_AVAILABLE_LATER), _OWN),
    _named(f"{_ACTOR}.strategy", "training engine", ("fsdp", "fsdp2"), _OWN),
    _named("trainer.logger", "tracker", names.LOGGERS),
    _named(f"{_ACTOR}.checkpoint.save_contents", "part of a checkpoint", _PARTS),
    _named(f"{_ACTOR}.checkpoint.load_contents", "part of a checkpoint", _PARTS),
    _named("critic.checkpoint.save_contents", "part of a checkpoint", _PARTS),
    _named("critic.checkpoint.load_contents", "part of a checkpoint", _PARTS),
    Rule(
        "reward.reward_manager.name",
        "error",
        lambda c, given: (
            c.reward.reward_manager.source == "register"
            and c.reward.reward_manager.name not in names.REWARD_MANAGERS
            and ":" not in c.reward.reward_manager.name
            and not _has_plugins(c)
        ),
        "There is no reward manager '{c.reward.reward_manager.name}'; there are "
        + ", ".join(names.REWARD_MANAGERS)
        + ". For a class of your own set reward.reward_manager.source=importlib and reward.reward_manager.module.path.",
    ),
]
