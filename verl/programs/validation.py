"""Validation: the held-out prompts sampled as val_kwargs say, scored like training samples, and greedily too if asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container

import numpy as np

from verl.algorithms.validation_metrics import validation_metrics
from verl.config import PPOConfig
from verl.data.loader import ValidationLoader
from verl.data_proto.batch_metrics import count_metrics, number_parts, scored_rows
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import sample_rows
from verl.data_proto.samples import SamplingParams
from verl.data_proto.tokenizer import Tokenizer
from verl.programs.collect import generate_samples, unscored
from verl.programs.ppo_roles import PPORoles
from verl.roles.rollout import greedy, sampling_params

# The step number of validation samples, which no training step has: every validation of a run uses the same random numbers,
# so a change between two of them is a change of the policy.
VALIDATION_STEP = 0

log = logging.getLogger(__name__)


class Validator:
    """`run(step)` returns the metrics of compat's `val-core/*` and `val-aux/*`, and the means `val/reward` and `val/greedy`
    over all held-out samples that have a score. `val/num_unscored` and `val/num_unscored/greedy` count the others, if any."""

    def __init__(
        self,
        config: PPOConfig,
        roles: PPORoles,
        loader: ValidationLoader,
        tokenizer: Tokenizer,
        log_samples: Callable[[str, int, list[dict[str, object]]], None],
    ):
        self.params = sampling_params(config.actor_rollout_ref.rollout, validation=True)
        self.greedy = greedy(sampling_params(config.actor_rollout_ref.rollout))
        self.also_greedy = config.actor_rollout_ref.rollout.val_kwargs.also_greedy
        self.roles = roles
        self.loader = loader
        self.tokenizer = tokenizer
        self.log_samples = log_samples

    def run(self, step: int) -> dict[str, float]:
        """Metrics of the held-out prompts under the current weights; the samples are logged. Raises RewardError when none has a
        score before the first step, or in an evaluation."""
        sampled = self._collect(self.params, "val")
        self.log_samples("val", step, sample_rows(sampled, self.tokenizer))
        metrics = self._summarised(sampled, step, "val/reward")
        metrics |= count_metrics(sampled, "val-aux/num_turns", "__num_turns__")
        if self.params.temperature == 0:
            metrics |= {"val/greedy": metrics["val/reward"]} if "val/reward" in metrics else {}
        elif self.also_greedy:
            best = self._collect(self.greedy, "val-greedy")
            self.log_samples("val-greedy", step, sample_rows(best, self.tokenizer))
            metrics |= self._summarised(best, step, "val/greedy", suffix="/greedy")
        self.roles.rollout.end_generation().get()
        return metrics

    def _summarised(self, batch: DataProto, step: int, mean: str, suffix: str = "") -> dict[str, float]:
        scores, num_unscored = _scores(batch), int((~scored_rows(batch)).sum())
        count: dict[str, float] = {f"val/num_unscored{suffix}": num_unscored} if num_unscored else {}
        if num_unscored == len(batch):
            error = unscored(batch, "Validation")
            if step == 0:
                raise error
            log.warning("%s", error)
            return count
        return {**_summarise(batch, scores, suffix), mean: float(np.nanmean(scores)), **count}

    def _collect(self, params: SamplingParams, split: str) -> DataProto:
        parts = []
        for prompts in self.loader:
            batch = generate_samples(self.roles.rollout, prompts, params, step=VALIDATION_STEP, split=split)
            parts.append(batch.union(self.roles.reward.collect(batch)))
        return DataProto.concat(parts) if len(parts) > 1 else parts[0]


def _scores(batch: DataProto) -> np.ndarray:
    """[batch], NaN where there is no usable score."""
    scores = batch.batch["token_level_scores"].sum(dim=1).double()
    return scores.where(scored_rows(batch), np.nan).numpy()  # type: ignore[no-any-return]


def _summarise(batch: DataProto, scores: np.ndarray, suffix: str) -> dict[str, float]:
    """Per data source: mean@n, best@n, ... of the reward and of every number that the reward function returned."""
    parts = list(batch.non_tensor_batch["reward_parts"])
    has_failed = np.array([error is not None for error in batch.non_tensor_batch["reward_error"]])
    values = {"reward": scores}
    for name, column in number_parts(parts).items():
        if name != "score":
            values[_variable(name, values)] = np.where(has_failed & np.isnan(column), scores, column)
    predictions = [row.get("pred") for row in parts]
    return validation_metrics(
        [f"{source}{suffix}" for source in batch.non_tensor_batch["data_source"]],
        list(batch.non_tensor_batch["uid"]),
        values,
        predictions=predictions if any(p is not None for p in predictions) else None,
    )


def _variable(part: str, taken: Container[str]) -> str:
    """The name of a part among the metrics of its data source. Metrics of the score itself end in /reward/{metric}: no part
    gets such a name."""
    name = f"{part}_part" if part.rpartition("/")[2] == "reward" else part
    while name in taken:
        name += "_part"
    return name
