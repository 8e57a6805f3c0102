"""The actor and the reference policy: a training engine plus the few calls that the program makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from verl.config import ActorConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching, Output, TrainEngine
from verl.parallel.memory import give_back_holes
from verl.parallel.register import Dispatch, register
from verl.roles.objectives import PolicyObjective
from verl.roles.step_guard import StepGuard
from verl.roles.trained import Keeping, TrainedWorker
from verl.roles.updates import MiniBatchSchedule, Updates


class ReferenceWorker:
    """A frozen policy; only scores tokens. `without_adapters`: it is the actor's engine with its adapters off."""

    def __init__(
        self, engine: TrainEngine, micro: MicroBatching, temperature: float, *, without_adapters: bool = False
    ):
        self.engine = engine
        self.micro = micro
        self.temperature = temperature
        self.without_adapters = without_adapters

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reconfigure(self, changes: dict[str, Any]) -> None:
        """See TrainEngine."""
        self.engine.reconfigure(changes)

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False, objects=())
    def log_probs(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob [batch, response]."""
        with self.engine.reference() if self.without_adapters else nullcontext():
            out = self.engine.forward(batch, ("log_probs",), self.micro, self.temperature)
        return DataProto.from_dict({"ref_log_prob": out["log_probs"]})


class ActorWorker(TrainedWorker):
    """The policy being trained."""

    def __init__(
        self,
        engine: TrainEngine,
        config: ActorConfig,
        objective: PolicyObjective,
        *,
        micro: MicroBatching,
        log_prob_micro: MicroBatching,
        temperature: float,
        schedule: MiniBatchSchedule,
        keeping: Keeping,
        guard: StepGuard,
        measures: Callable[[int], bool] = lambda step: False,
    ):
        super().__init__(engine, keeping, measures)
        self.config = config
        self.objective = objective
        self.guard = guard
        self.micro = micro
        self.log_prob_micro = log_prob_micro
        self.temperature = temperature
        self.schedule = schedule

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, objects=())
    def log_probs(self, batch: DataProto, *, sum_pi_squared: bool = False) -> DataProto:
        """Columns old_log_probs and entropys (and sum_pi_squared) [batch, response] under the current weights."""
        outputs: list[Output] = ["log_probs", "entropy"]
        if sum_pi_squared:
            outputs.append("sum_pi_squared")
        out = self.engine.forward(batch, outputs, self.log_prob_micro, self.temperature)
        names = {"log_probs": "old_log_probs", "entropy": "entropys", "sum_pi_squared": "sum_pi_squared"}
        return DataProto.from_dict({names[k]: v for k, v in out.items()})

    @register(dispatch_mode=Dispatch.ND_MINI_BATCHES, blocking=False, objects=())
    def update(self, batch: DataProto, step: int, mini_batches: Sequence[Sequence[int]] | None = None) -> Updates:
        """All optimizer steps on `batch`; advances the schedule of the learning rate by one, unless guards have refused all.

        `mini_batches` are the rows of each optimizer step; without them the worker's own schedule says which.
        """
        rows = self.schedule.rows(len(batch), step) if mini_batches is None else mini_batches
        found: list[dict[str, Metric]] = []
        for index, mini in enumerate(self.mini_batches(batch, rows)):
            seed = (self.config.data_loader_seed * 1_000_003 + step) * 1_009 + index
            self.objective.begin(seed, is_first=index == 0)
            self.guard.begin(index, len(mini))
            computed = self.schedule.computed(mini)
            metrics = self.engine.train_batch(
                mini, self.objective, self.objective.outputs, self.micro, self.temperature, self.guard, rows=computed
            )
            if len(mini):
                metrics["skipped_row_ratio"] = Metric.mean(1 - len(computed) / len(mini), len(mini))
            found.append(metrics)
        observed = self.objective.take_observed()
        self.measure(step, found)
        rate = self.engine.end_step(advance=not self.guard.refused_all(len(found)))
        give_back_holes(step)
        return Updates("actor", found, rate, [] if observed is None else list(observed), self.guard.take())
