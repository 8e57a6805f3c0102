"""The critic: a value model plus the two calls that the program makes."""

from __future__ import annotations

from verl.config import CriticConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import MicroBatching, TrainEngine
from verl.workers.objectives import ValueObjective
from verl.workers.policy import mean_over_updates, mini_batches


class CriticWorker:
    def __init__(
        self,
        engine: TrainEngine,
        config: CriticConfig,
        objective: ValueObjective,
        *,
        micro: MicroBatching,
        forward_micro: MicroBatching,
        rollout_n: int,
    ):
        self.engine = engine
        self.config = config
        self.objective = objective
        self.micro = micro
        self.forward_micro = forward_micro
        self.mini_batch_rows = config.ppo_mini_batch_size * rollout_n

    def values(self, batch: DataProto) -> DataProto:
        """Column values [batch, response]: the value before each response token."""
        return DataProto.from_dict(self.engine.forward(batch, ("values",), self.forward_micro))

    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        """All optimizer steps on `batch`; returns `critic/*` metrics and advances the schedule by one."""
        config = self.config
        found = [
            self.engine.train_batch(mini, self.objective, self.objective.outputs, self.micro)
            for mini in mini_batches(
                batch, self.mini_batch_rows, config.ppo_epochs, config.shuffle, config.data_loader_seed + step
            )
        ]
        metrics = {f"critic/{k}": v for k, v in mean_over_updates(found).items()}
        metrics["critic/lr"] = Metric.last(self.engine.end_step())
        return metrics
