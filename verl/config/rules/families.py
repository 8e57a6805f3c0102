"""Values that name a member of a family."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from verl.config import names
from verl.config.rules.api import Rule
from verl.config.unavailable import MISSING, value_in
from verl.errors import nearest

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def _has_plugins(root: Any) -> bool:
    return root.actor_rollout_ref.model.external_lib is not None


def _named(
    key: str, what: str, known: tuple[str, ...], own: str = "", meant: Mapping[str, str] = MappingProxyType({})
) -> Rule:
    """The value(s) of `key` are built-in names, path/to/file.py:name, or registered by model.external_lib. `meant`: what to
    set for names that are known elsewhere."""

    def unknown(root: Any) -> list[str]:
        value = value_in(root, key)
        values = value if isinstance(value, list) else [value]
        return [v for v in values if v is not None and v not in known and ":" not in v]

    def broken(root: Any, given: set[str]) -> bool:
        return bool(unknown(root)) and not (own and _has_plugins(root))

    def sentence(root: Any) -> str:
        name = unknown(root)[0]
        if name in meant:
            return f"{key}: there is no {what} {name!r}; {meant[name]}."
        hint = nearest(name, known) or "; there are " + ", ".join(known) + "."
        if "," in name:
            hint = f"; several are given as [{name}]."
        return f"{key}: there is no {what} {name!r}{hint} {own}".rstrip()

    return Rule(key, "error", broken, sentence)


_OWN = "One of your own is named as path/to/file.py:name, or registered by actor_rollout_ref.model.external_lib."
_AVAILABLE_LATER = tuple(v for row in MISSING for v in ("trtllm",) if row.path == f"{_ROLLOUT}.name" and row.chosen(v))
_PARTS = ("model", "optimizer", "extra", "hf_model")


_PREFERENCES = (
    "training on pairs of answers is not available in this version. Give a reward function or a reward model and train "
    "with grpo, or train with another library and go on from its model folder"
)
_LOSS = f"use grpo with {_ACTOR}.policy_loss.loss_mode={{}}"
_ESTIMATORS_ELSEWHERE = {
    "ppo": "PPO is gae, which trains a critic",
    "dapo": f"DAPO is grpo with {_ACTOR}.clip_ratio_high=0.28, algorithm.filter_groups.enable=True and "
    "reward.reward_manager.name=dapo",
    "dr_grpo": "Dr. GRPO is grpo with algorithm.norm_adv_by_std_in_grpo=False and "
    f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    "reinforce": "use reinforce_plus_plus, or rloo for several samples of a prompt",
    "reinforce++": "it is spelled reinforce_plus_plus",
    "reinforce_baseline": "it is spelled reinforce_plus_plus_baseline",
    "group_norm": "it is spelled grpo",
    **{
        name: _LOSS.format(name)
        for name in ("gspo", "cispo", "sapo", "dro", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")
    },
    "gmpo": _LOSS.format("geo_mean"),
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo", "ipo"), _PREFERENCES),
    "sft": "supervised fine-tuning is not available in this version. Train with another library and go on from its model "
    "folder",
}
_LOSSES_ELSEWHERE = {name: f"the clipped loss of {name.upper()} is vanilla" for name in ("ppo", "grpo", "dapo", "clip")}
_ENGINES_ELSEWHERE = {
    **dict.fromkeys(("vllm_async", "vllm_rollout"), f"it is spelled vllm, with {_ROLLOUT}.mode=async"),
    "sglang_async": "it is spelled sglang",
    **dict.fromkeys(("transformers", "huggingface"), "it is spelled hf"),
}

FAMILIES = [
    _named("algorithm.adv_estimator", "advantage estimator", names.ADV_ESTIMATORS, _OWN, _ESTIMATORS_ELSEWHERE),
    _named(f"{_ACTOR}.policy_loss.loss_mode", "policy loss", names.POLICY_LOSSES, _OWN, _LOSSES_ELSEWHERE),
    _named(f"{_ROLLOUT}.name", "rollout engine", (*names.ROLLOUT_ENGINES, *_AVAILABLE_LATER), _OWN, _ENGINES_ELSEWHERE),
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
