"""Protocol and registry of reward managers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from verl.data_proto.samples import Score, ScoreRequest


@runtime_checkable
class RewardManager(Protocol):
    """Converts requests to scores.

    Constructed as `Manager(pool, max_response_length=..., **reward.reward_kwargs)` with a RewardPool that is not started.
    The class attribute `batched = True` makes the pool call the function with lists.
    """

    def start(self, data_sources: Sequence[str] = ()) -> None:
        """Start the workers. Raises RewardError for a function that cannot be called, and a data source without scorer."""
        ...

    def submit(self, request: ScoreRequest) -> None:
        """Start to score one sample, without waiting. Raises ValueError for a key that was submitted already."""
        ...

    def collect(self, keys: Sequence[str]) -> dict[str, Score]:
        """Wait for submitted samples and remove them. Raises KeyError for a key that was not submitted."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores in the order of the requests."""
        ...

    @property
    def num_defaulted(self) -> int:
        """Number of samples so far whose scorer failed."""
        ...

    def close(self) -> None:
        """Kill the workers. May be called again."""
        ...
