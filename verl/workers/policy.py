"""The actor and the reference policy: a training engine plus the few calls that the program makes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from verl.algorithms.correction import rollout_gap_metrics
from verl.config import ActorConfig
from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching, Output, TrainEngine
from verl.errors import NumericsError
from verl.workers.objectives import PolicyObjective


def mini_batches(batch: DataProto, size: int, epochs: int, shuffle: bool, seed: int) -> Iterator[DataProto]:
    """`epochs` passes over `batch` in mini-batches of `size` rows (the last may be short). The order of a shuffled pass
    depends on (seed, pass) alone. Unshuffled, the samples of a prompt stay together and share its computation."""
    for epoch in range(epochs):
        rows = np.arange(len(batch))
        if shuffle:
            rows = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(batch))
        for start in range(0, len(batch), size):
            chosen = rows[start : start + size]
            yield batch if len(chosen) == len(batch) and not shuffle else batch.select_idxs(chosen)


class ReferenceWorker:
    """A frozen policy; only scores tokens."""

    def __init__(self, engine: TrainEngine, micro: MicroBatching, temperature: float):
        self.engine = engine
        self.micro = micro
        self.temperature = temperature

    def log_probs(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob [batch, response]."""
        out = self.engine.forward(batch, ("log_probs",), self.micro, self.temperature)
        return DataProto.from_dict({"ref_log_prob": out["log_probs"]})


class ActorWorker:
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
        rollout_n: int,
    ):
        self.engine = engine
        self.config = config
        self.objective = objective
        self.micro = micro
        self.log_prob_micro = log_prob_micro
        self.temperature = temperature
        self.mini_batch_rows = config.ppo_mini_batch_size * rollout_n

    def log_probs(self, batch: DataProto, *, sum_pi_squared: bool = False) -> DataProto:
        """Columns old_log_probs and entropys (and sum_pi_squared) [batch, response] under the current weights."""
        outputs: list[Output] = ["log_probs", "entropy"]
        if sum_pi_squared:
            outputs.append("sum_pi_squared")
        out = self.engine.forward(batch, outputs, self.log_prob_micro, self.temperature)
        names = {"log_probs": "old_log_probs", "entropy": "entropys", "sum_pi_squared": "sum_pi_squared"}
        return DataProto.from_dict({names[k]: v for k, v in out.items()})

    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """All optimizer steps on `batch`; returns `actor/*` and `training/rollout_*` metrics. Advances the schedule by one."""
        found: list[dict[str, Metric]] = []
        config = self.config
        minis = mini_batches(
            batch, self.mini_batch_rows, config.ppo_epochs, config.shuffle, config.data_loader_seed + step
        )
        for index, mini in enumerate(minis):
            self.objective.begin(seed=(config.data_loader_seed * 1_000_003 + step) * 1_009 + index)
            found.append(
                self.engine.train_batch(mini, self.objective, self.objective.outputs, self.micro, self.temperature)
            )
        metrics = {f"actor/{k}": v for k, v in mean_over_updates(found).items()}
        observed = self.objective.take_observed()
        if observed is not None:
            metrics.update(rollout_gap_metrics(*observed))
        metrics["actor/lr"] = Metric.last(self.engine.end_step())
        return metrics


def mean_over_updates(found: list[dict[str, Metric]]) -> dict[str, Metric]:
    """Each update's figures are totals of a mini-batch; a step reports their mean over its updates."""
    return merge_metrics([{k: Metric.mean(m.value) for k, m in metrics.items()} for metrics in found])


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
