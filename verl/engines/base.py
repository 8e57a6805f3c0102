"""What training engines do alike, wherever their parameters lie: the schedule, adapters, weights and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl.config import FSDPConfig, OptimConfig
from verl.data_proto.metrics import Metric, merge_metrics
from verl.engines.api import EngineState, StepCheck
from verl.engines.hybrid_3d import Dimensions, check_change, require_3d_hybrid
from verl.engines.state import TrainedState
from verl.engines.step_check import figures_of_all, restore_random_state
from verl.errors import ConfigError
from verl.models.lora import LoRASpec, adapters_off
from verl.models.optim import MasterOptimizer, lr_at
from verl.models.visible import ratio


class TrainedEngine:
    """The part of a TrainEngine that does not depend on the device layout. Subclasses set what is declared here."""

    module: Any
    config: FSDPConfig
    dimensions: Dimensions
    optim: OptimConfig | None  # None: frozen
    optimizer: MasterOptimizer | None
    device: torch.device
    spec: LoRASpec | None
    compute_dtype: torch.dtype
    total_steps: int
    num_lr_steps: int = 0
    _trained: TrainedState

    def end_step(self, *, advance: bool = True) -> float:
        """See TrainEngine."""
        rate = self._learning_rate()
        self.num_lr_steps += int(advance)
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

    def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """See TrainEngine."""
        check_change(changes)
        require_3d_hybrid(self.config, changes)
        self.config = replace(self.config, **changes)
        self.dimensions = Dimensions.of(self.config)

    def visible_update_ratio(self) -> float | None:
        """See TrainEngine."""
        sums = self.optimizer.movement() if self.optimizer is not None else {}
        return ratio(self._sum_over_parameters(sums)) if sums else None

    def rest(self) -> None:
        """See TrainEngine."""
        if self.optimizer is not None:
            self.optimizer.gradients.release()

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

    def _step(
        self, parts: Sequence[dict[str, Metric]], check: StepCheck | None, drawn: list[torch.Tensor]
    ) -> dict[str, Metric]:
        """The optimizer step on the gathered gradients, and the metrics of the micro-batches with its own. `drawn` is the
        random state from before them, to which a step that is not taken goes back."""
        assert self.optimizer is not None, "a frozen model cannot be trained"
        metrics = merge_metrics(list(parts))
        accept = None if check is None else partial(self._accepts, check, metrics)
        result = self.optimizer.step(self._learning_rate(), accept)
        metrics["grad_norm"] = Metric.last(result.grad_norm)
        if not result.taken:
            metrics["num_skipped_updates"] = Metric.last(1.0)
            restore_random_state(drawn, self.device)
        return metrics

    def _accepts(self, check: StepCheck, metrics: Mapping[str, Metric], grad_norm: float) -> bool:
        figures = figures_of_all(metrics, check.names, self._sum_over_ranks, self._largest_of_ranks)
        return check({**figures, "grad_norm": grad_norm})

    def _sum_over_parameters(self, sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of values that each rank has for its part of each parameter."""
        return torch.stack(list(sums.values())).sum(0)

    def _sum_over_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def _largest_of_ranks(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers
