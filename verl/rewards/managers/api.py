"""What a reward manager is. One file per manager beside this one; `REWARD_MANAGERS` names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from verl.data_proto.samples import Score, ScoreRequest
from verl.registry import Registry

REWARD_MANAGERS = Registry(
    "reward manager",
    {
        "naive": "verl.rewards.managers.naive:NaiveRewardManager",
        "prime": "verl.rewards.managers.naive:NaiveRewardManager",  # elsewhere: naive, in parallel; here naive is
        "batch": "verl.rewards.managers.batch:BatchRewardManager",
        "dapo": "verl.rewards.managers.dapo:DapoRewardManager",
        "gdpo": "verl.rewards.managers.gdpo:GdpoRewardManager",
    },
)


@runtime_checkable
class RewardManager(Protocol):
    """Turns requests into scores. Constructed as `Manager(pool, max_response_length=..., **reward.reward_kwargs)`
    with a RewardPool that is not started; an attribute `batched = True` of the class makes the pool call the function
    with lists.
    """

    def start(self, data_sources: Sequence[str] = ()) -> None:
        """Start the workers. Raises RewardError when the function cannot be loaded or called, or has no scorer for
        one of these data sources."""
        ...

    def submit(self, request: ScoreRequest) -> None:
        """Begin to score one sample; returns at once. Its key must not be waiting already."""
        ...

    def collect(self, keys: Sequence[str]) -> dict[str, Score]:
        """Wait for submitted samples and forget them. Raises KeyError for a key that was not submitted."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests."""
        ...

    @property
    def num_defaulted(self) -> int:
        """Samples so far that got the default score because their scorer failed."""
        ...

    def close(self) -> None:
        """Kill the workers. May be called again."""
        ...
