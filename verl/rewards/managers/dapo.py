"""Reward manager dapo: soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from verl.data_proto.samples import Score, ScoreRequest
from verl.errors import ConfigError, nearest
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.pool import RewardPool


@dataclass(frozen=True)
class OverlongBuffer:
    """Penalty of up to `penalty_factor` on the last `len` tokens before the limit; `log` adds it to the sample's parts."""

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0
    log: bool = False


def overlong_penalty(response_length: int, max_response_length: int, buffer: OverlongBuffer) -> float:
    """min(-(length - (max - len)) / len * penalty_factor, 0): 0 up to max - len tokens, -penalty_factor at max."""
    exceeded = response_length - (max_response_length - buffer.len)
    return min(-exceeded / buffer.len * buffer.penalty_factor, 0.0)


class DapoRewardManager(NaiveRewardManager):
    """Adds the overlong penalty. `max_resp_len` defaults to the rollout's response length; raises ConfigError for a longer
    buffer."""

    def __init__(
        self,
        pool: RewardPool,
        *,
        max_response_length: int,
        overlong_buffer_cfg: Mapping[str, object] | None = None,
        max_resp_len: int | None = None,
    ):
        super().__init__(pool, max_response_length=max_resp_len or max_response_length)
        settings: Mapping[str, Any] = overlong_buffer_cfg or {}
        names = [f.name for f in fields(OverlongBuffer)]
        if unknown := next((name for name in settings if name not in names), None):
            raise ConfigError(
                f"There is no key reward_kwargs.overlong_buffer_cfg.{unknown}{nearest(str(unknown), names)}"
            )
        self.buffer = OverlongBuffer(**{k: v for k, v in settings.items() if v is not None})
        if self.buffer.enable and not 0 < self.buffer.len <= self.max_response_length:
            raise ConfigError(
                f"reward_kwargs.overlong_buffer_cfg.len={self.buffer.len} must lie between 1 and max_resp_len="
                f"{self.max_response_length}: it is the number of last tokens that are punished."
            )

    def shape(self, request: ScoreRequest, score: Score) -> Score:
        if not self.buffer.enable:
            return score
        penalty = overlong_penalty(request.response_length, self.max_response_length, self.buffer)
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if self.buffer.log else {}
        return replace(score, score=score.score + penalty, parts={**score.parts, **logged})
