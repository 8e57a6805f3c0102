"""The rollout engine of a rank whose replica is run by another rank: it takes part in what all ranks do together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.rollout.api import OnFinish, Weights


class PassiveRollout:
    """See RolloutEngine. The samples of its prompts are those that the owner of the replica answers with."""

    holds_weights = True

    def __init__(self, module: Any, *args: Any, **settings: Any):
        self.skeleton = module
        self.weight_version = 0

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """No samples."""
        return []

    def load(self, weights: Weights) -> None:
        """Take part in gathering the weights, tensor by tensor."""
        deque(weights, maxlen=0)

    def publish(self, version: int) -> None:
        """See RolloutEngine."""
        self.weight_version = version

    def release(self) -> None:
        """There is nothing to free."""

    def stats(self) -> dict[str, Any]:
        """There are none."""
        return {}
