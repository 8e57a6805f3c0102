"""What training engines do alike, wherever their parameters lie: the schedule, adapters, weights and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from verl.config import OptimConfig
from verl.data_proto.metrics import Metric, merge_metrics
from verl.engines.api import EngineState
from verl.engines.state import TrainedState
from verl.errors import ConfigError
from verl.models.lora import LoRASpec, adapters_off
from verl.models.optim import MasterOptimizer, lr_at


class TrainedEngine:
    """The part of a TrainEngine that does not depend on the device layout. Subclasses set what is declared here."""

    module: Any
    optim: OptimConfig | None  # None: frozen
    optimizer: MasterOptimizer | None
    spec: LoRASpec | None
    compute_dtype: torch.dtype
    total_steps: int
    num_lr_steps: int = 0
    _trained: TrainedState

    def end_step(self) -> float:
        """See TrainEngine."""
        rate = self._learning_rate()
        self.num_lr_steps += 1
        return rate

    @contextmanager
    def reference(self) -> Iterator[None]:
        """See TrainEngine."""
        if self.spec is None:
            raise ConfigError("There are no adapters to leave out; set model.lora_rank, or build a reference policy.")
        with adapters_off(self.module):
            yield

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See TrainEngine."""
        return self._trained.weights(self.compute_dtype)

    def state(self) -> EngineState:
        """See TrainEngine. Tied parameters appear once, under the name of the first; tensors that lie on several ranks are
        gathered when they are asked for, by all of them."""
        return self._trained.save({"num_lr_steps": self.num_lr_steps})

    def load_state(self, state: EngineState) -> None:
        """See TrainEngine. Parts that were not saved or not asked for are empty and stay as they are. Every rank reads the
        whole tensors and keeps its part, so any number of ranks will do. Raises CheckpointError when names or shapes are
        not this model's."""
        self._trained.load(state)
        if state.extra:
            self.num_lr_steps = state.extra["num_lr_steps"]

    def _learning_rate(self) -> float:
        assert self.optim is not None, "a frozen model has no learning rate"
        return lr_at(self.num_lr_steps, self.optim, self.total_steps)

    def _step(self, parts: Sequence[dict[str, Metric]]) -> dict[str, Metric]:
        """The optimizer step on the gathered gradients, and the metrics of the micro-batches with its own."""
        assert self.optimizer is not None, "a frozen model cannot be trained"
        result = self.optimizer.step(self._learning_rate())
        metrics = merge_metrics(list(parts))
        metrics["grad_norm"] = Metric.last(result.grad_norm)
        if not result.taken:
            metrics["num_skipped_updates"] = Metric.last(1.0)
        return metrics
