"""What a run knows besides its weights and its samples; saved with every checkpoint as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from verl.algorithms.kl import AdaptiveKLController, FixedKLController, make_kl_controller
from verl.config import VerlConfig


@dataclass
class TrainerState:
    """`step` is the step being taken (1-based); after it succeeds everything here describes its end."""

    step: int
    weight_version: int
    kl_controller: FixedKLController | AdaptiveKLController
    seconds: float = 0.0  # of training so far, over all restarts
    num_tokens: int = 0
    first_validation: dict[str, float] = field(default_factory=dict)

    @classmethod
    def fresh(cls, config: VerlConfig) -> TrainerState:
        return cls(
            step=0,
            weight_version=0,
            kl_controller=make_kl_controller(**asdict(config.algorithm.kl_ctrl)),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "weight_version": self.weight_version,
            "kl_controller": self.kl_controller.state_dict(),
            "seconds": self.seconds,
            "num_tokens": self.num_tokens,
            "first_validation": self.first_validation,
        }

    def load_json(self, saved: dict[str, Any]) -> None:
        """Continue where `to_json` was taken."""
        self.kl_controller.load_state_dict(saved["kl_controller"])
        for name in ("step", "weight_version", "seconds", "num_tokens", "first_validation"):
            setattr(self, name, saved[name])
