"""The roles that a program talks to. A runtime builds them; the program cannot tell which runtime did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from verl.config import CheckpointConfig
from verl.workers.critic import CriticWorker
from verl.workers.policy import ActorWorker, ReferenceWorker
from verl.workers.reward import RewardWorker
from verl.workers.rollout import RolloutWorker


@dataclass
class Roles:
    """Handles of one run. `critic` and `reference` are None where the algorithm has no use for them; `actor` is None when
    nothing trains (evaluation)."""

    rollout: RolloutWorker
    reward: RewardWorker
    actor: ActorWorker | None = None
    critic: CriticWorker | None = None
    reference: ReferenceWorker | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # device, dtype, parameters: what the header shows
    checkpoints: dict[str, CheckpointConfig] = field(default_factory=dict)  # role -> which parts are saved and loaded
    save_pretrained: dict[str, Callable[..., None]] = field(default_factory=dict)

    def engines(self) -> dict[str, Any]:
        """Training engines by role name, in the order in which they are saved."""
        found = {"actor": self.actor, "critic": self.critic}
        return {name: worker.engine for name, worker in found.items() if worker is not None}

    def close(self) -> None:
        """End every child process."""
        self.reward.close()
