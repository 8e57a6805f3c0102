"""The critic: a value model plus the two calls that the program makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl.config import CriticConfig
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching, TrainEngine
from verl.parallel.register import Dispatch, register
from verl.roles.objectives import ValueObjective
from verl.roles.step_guard import StepGuard
from verl.roles.trained import Keeping, TrainedWorker
from verl.roles.updates import MiniBatchSchedule, Updates


class CriticWorker(TrainedWorker):
    def __init__(
        self,
        engine: TrainEngine,
        config: CriticConfig,
        objective: ValueObjective,
        *,
        micro: MicroBatching,
        forward_micro: MicroBatching,
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
        self.forward_micro = forward_micro
        self.schedule = schedule

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False, objects=())
    def values(self, batch: DataProto) -> DataProto:
        """Column values [batch, response]: the value before each response token."""
        return DataProto.from_dict(self.engine.forward(batch, ("values",), self.forward_micro))

    @register(dispatch_mode=Dispatch.ND_MINI_BATCHES, blocking=False, objects=())
    def update(self, batch: DataProto, step: int, mini_batches: Sequence[Sequence[int]] | None = None) -> Updates:
        """All optimizer steps on `batch`, see ActorWorker.update."""
        rows = self.schedule.rows(len(batch), step) if mini_batches is None else mini_batches
        found = []
        for index, mini in enumerate(self.mini_batches(batch, rows)):
            self.guard.begin(index, len(mini))
            found.append(
                self.engine.train_batch(mini, self.objective, self.objective.outputs, self.micro, check=self.guard)
            )
        self.measure(step, found)
        rate = self.engine.end_step(advance=not self.guard.refused_all(len(found)))
        return Updates("critic", found, rate, findings=self.guard.take())
