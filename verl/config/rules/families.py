"""Values that name a member of a family, and what to set for names that are known elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from verl.config.schema import Problem, error
from verl.errors import nearest

OWN = "One of your own is named as path/to/file.py:name, or registered by actor_rollout_ref.model.external_lib."
_NOTHING: Mapping[str, str] = MappingProxyType({})


def named(
    key: str, what: str, values: Sequence[Any], known: Sequence[str], own: str = "", meant: Mapping[str, str] = _NOTHING
) -> Iterator[Problem]:
    """An error for the first of `values` that is neither built in nor path/to/file.py:name. `own` says how to name one of
    the user's own, `meant` what to set for names that are known elsewhere."""
    name = next((v for v in values if v is not None and v not in known and ":" not in v), None)
    if name is None:
        return
    hint = nearest(name, known) or "; there are " + ", ".join(known) + "."
    if name in meant:
        hint, own = f"; {meant[name]}.", ""
    elif "," in name:
        hint = f"; several are given as [{name}]."
    yield error(key, f"{key}: there is no {what} {name!r}{hint} {own}".rstrip())


_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"use grpo with {_ACTOR}.policy_loss.loss_mode={{}}"
_PREFERENCES = (
    "training on pairs of answers is not available in this version. Give a reward function or a reward model and train "
    "with grpo, or train with another library and continue from its model folder"
)
NAMED_ELSEWHERE: dict[str, dict[str, str]] = {
    "algorithm.adv_estimator": {
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
        "sft": "supervised fine-tuning is `verl sft`",
    },
    f"{_ACTOR}.policy_loss.loss_mode": {
        name: f"the clipped loss of {name.upper()} is vanilla" for name in ("ppo", "grpo", "dapo", "clip")
    },
    "actor_rollout_ref.rollout.name": {
        **dict.fromkeys(
            ("vllm_async", "vllm_rollout"), "it is spelled vllm, with actor_rollout_ref.rollout.mode=async"
        ),
        "sglang_async": "it is spelled sglang",
        **dict.fromkeys(("transformers", "huggingface"), "it is spelled hf"),
    },
}
