"""The roles that a program talks to. A runtime builds them; the program cannot tell which runtime did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def _nothing() -> None:
    pass


@dataclass
class Roles:
    """Handles of one run: workers of this process, or groups of workers with the same methods (verl/runtime/worker_group.py).
    `critic` and `reference` are None where the algorithm has no use for them; `actor` is None when nothing trains
    (evaluation)."""

    rollout: Any
    reward: Any
    actor: Any = None
    critic: Any = None
    reference: Any = None
    facts: dict[str, Any] = field(default_factory=dict)  # device, dtype, parameters: what the header shows
    num_devices: int = 1
    end: Callable[[], None] = _nothing

    def trained(self) -> dict[str, Any]:
        """Roles whose weights change, by name, in the order in which they are saved."""
        found = {"actor": self.actor, "critic": self.critic}
        return {name: worker for name, worker in found.items() if worker is not None}

    def close(self) -> None:
        """End every child process."""
        self.end()
