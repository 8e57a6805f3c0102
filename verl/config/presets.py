"""Named algorithms: the keys that `verl train --preset NAME`, and `algorithm="NAME"` in Python, set below the user's."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from verl.errors import ConfigError, nearest

_ACTOR = "actor_rollout_ref.actor"
_LOSS, _MEAN, _LOW, _HIGH = (
    f"{_ACTOR}.{name}" for name in ("policy_loss.loss_mode", "loss_agg_mode", "clip_ratio_low", "clip_ratio_high")
)


class Preset(NamedTuple):
    """An algorithm: its paper, its idea in one sentence, and the keys that choose it."""

    paper: str
    idea: str
    estimator: str
    keys: Mapping[str, Any] = {}

    @property
    def settings(self) -> dict[str, Any]:
        return {"algorithm.adv_estimator": self.estimator, **self.keys}


PRESETS: Mapping[str, Preset] = {
    "ppo": Preset("1707.06347", "a critic estimates the value of each token; updates are clipped", "gae"),
    "grpo": Preset("2402.03300", "a sample is compared with the samples of its prompt, in place of a critic", "grpo"),
    "dapo": Preset(
        "2503.14476",
        "GRPO without groups of equal rewards, with more room for unlikely tokens and a mean over tokens",
        "grpo",
        {
            _LOW: 0.2,
            _HIGH: 0.28,
            _MEAN: "token-mean",
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.max_num_gen_batches": 10,
        },
    ),
    "dr_grpo": Preset(
        "2503.20783",
        "GRPO without its two biases: no division by the standard deviation, nor by the length of a response",
        "grpo",
        {"algorithm.norm_adv_by_std_in_grpo": False, _MEAN: "seq-mean-token-sum-norm"},
    ),
    "gspo": Preset(
        "2507.18071",
        "ratios and clips of whole responses, for long responses and mixtures of experts",
        "grpo",
        {_LOSS: "gspo", _MEAN: "seq-mean-token-mean", _LOW: 3e-4, _HIGH: 4e-4},
    ),
    "cispo": Preset(
        "2506.13585",
        "the importance weight is clipped, so every token keeps its gradient",
        "grpo",
        {_LOSS: "cispo", _LOW: 1.0, _HIGH: 4.0, _MEAN: "token-mean"},
    ),
    "sapo": Preset("2511.20347", "a soft gate in place of the clip", "grpo", {_LOSS: "sapo"}),
    "rloo": Preset("2402.14740", "the baseline of a sample is the mean reward of the others of its prompt", "rloo"),
    "reinforce++": Preset(
        "2501.03262",
        "returns of tokens, whitened over the batch; one sample of a prompt is enough",
        "reinforce_plus_plus",
    ),
    "reinforce++-baseline": Preset(
        "2501.03262", "the mean of a prompt is the baseline, whitened over the batch", "reinforce_plus_plus_baseline"
    ),
}


# key of a preset -> key of the user's that says it more briefly, and goes before it
BRIEFER = {_LOW: f"{_ACTOR}.clip_ratio", _HIGH: f"{_ACTOR}.clip_ratio"}


def preset_name(spelled: str) -> str | None:
    """The preset that `spelled` names, in any case and without regard to `_`, `-`, `.` and spaces; None if there is none."""
    names = {re.sub(r"[\W_]", "", name.replace("++", "plusplus")): name for name in PRESETS}
    return names.get(re.sub(r"[\W_]", "", spelled.lower().replace("++", "plusplus")))


def preset_settings(name: str) -> dict[str, Any]:
    """The keys of the preset `name`, spelled as in `preset_name`. Raises ConfigError."""
    if (preset := preset_name(name)) is None:
        hint = nearest(name.lower(), PRESETS) or f"; there are {', '.join(PRESETS)}."
        raise ConfigError(f"There is no preset {name!r}{hint}")
    return PRESETS[preset].settings
