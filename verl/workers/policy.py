"""The actor and the reference policy: a training engine plus the few calls that the program makes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from verl.config import ActorConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching, Output, TrainEngine
from verl.errors import NumericsError
from verl.parallel.register import Dispatch, register
from verl.workers.objectives import PolicyObjective
from verl.workers.trained import Keeping, TrainedWorker
from verl.workers.updates import MiniBatchSchedule, Updates


class ReferenceWorker:
    """A frozen policy; only scores tokens. `without_adapters`: it is the actor's engine with its adapters off."""

    def __init__(
        self, engine: TrainEngine, micro: MicroBatching, temperature: float, *, without_adapters: bool = False
    ):
        self.engine = engine
        self.micro = micro
        self.temperature = temperature
        self.without_adapters = without_adapters

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
    ):
        super().__init__(engine, keeping)
        self.config = config
        self.objective = objective
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
        """All optimizer steps on `batch`; advances the schedule of the learning rate by one.

        `mini_batches` are the rows of each optimizer step; without them the worker's own schedule says which.
        """
        rows = self.schedule.rows(len(batch), step) if mini_batches is None else mini_batches
        found: list[dict[str, Metric]] = []
        for index, mini in enumerate(self.mini_batches(batch, rows)):
            self.objective.begin(seed=(self.config.data_loader_seed * 1_000_003 + step) * 1_009 + index)
            found.append(
                self.engine.train_batch(mini, self.objective, self.objective.outputs, self.micro, self.temperature)
            )
        observed = self.objective.take_observed()
        return Updates("actor", found, self.engine.end_step(), [] if observed is None else list(observed))


def require_finite(batch: DataProto, column: str, place: str) -> None:
    """Raise NumericsError naming the first row of `column` that holds NaN or Inf on a response token."""
    values = batch.batch[column]
    bad = ~torch.isfinite(values) & batch.batch["response_mask"]
    if bad.any():
        row = int(bad.any(dim=1).nonzero()[0])
        uid = batch.non_tensor_batch["uid"][row] if "uid" in batch.non_tensor_batch else row
        raise NumericsError(
            f"{place} gave a value that is not finite in column '{column}' for prompt {uid} (row {row}); nothing was trained "
            "on this batch. Lower the learning rate, or use float32 (actor.fsdp_config.dtype=float32), and resume."
        )
