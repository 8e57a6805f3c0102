"""Validation: the held-out prompts sampled as val_kwargs say, scored like training samples, and greedily too if asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from verl.algorithms.validation_metrics import validation_metrics
from verl.config import PPOConfig
from verl.data.loader import ValidationLoader
from verl.data_proto.batch_metrics import count_metrics
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import sample_rows
from verl.data_proto.samples import SamplingParams
from verl.programs.collect import generate_samples
from verl.programs.ppo_roles import PPORoles
from verl.roles.rollout import greedy, sampling_params

# The step number of validation samples, which no training step has: every validation of a run uses the same random numbers,
# so a change between two of them is a change of the policy.
VALIDATION_STEP = 0
MAX_PARTS = 256  # parts of the reward that are averaged, the most frequent ones: the model's text may name some


class Validator:
    """`run(step)` returns the metrics of compat's `val-core/*` and `val-aux/*`, and the means `val/reward` and `val/greedy`
    over all held-out prompts."""

    def __init__(
        self,
        config: PPOConfig,
        roles: PPORoles,
        loader: ValidationLoader,
        tokenizer: Any,
        log_samples: Callable[[str, int, list[dict[str, Any]]], None],
    ):
        self.params = sampling_params(config.actor_rollout_ref.rollout, validation=True)
        self.greedy = greedy(sampling_params(config.actor_rollout_ref.rollout))
        self.also_greedy = config.actor_rollout_ref.rollout.val_kwargs.also_greedy
        self.roles = roles
        self.loader = loader
        self.tokenizer = tokenizer
        self.log_samples = log_samples

    def run(self, step: int) -> dict[str, float]:
        """Metrics of the held-out prompts under the current weights; the samples are logged."""
        sampled = self._collect(self.params, "val")
        metrics = _summarise(sampled)
        metrics |= count_metrics(sampled, "val-aux/num_turns", "__num_turns__")
        metrics["val/reward"] = float(np.mean(_scores(sampled)))
        self.log_samples("val", step, sample_rows(sampled, self.tokenizer))
        if self.params.temperature == 0:
            metrics["val/greedy"] = metrics["val/reward"]
        elif self.also_greedy:
            best = self._collect(self.greedy, "val-greedy")
            metrics["val/greedy"] = float(np.mean(_scores(best)))
            metrics.update(_summarise(best, suffix="/greedy"))
            self.log_samples("val-greedy", step, sample_rows(best, self.tokenizer))
        self.roles.rollout.end_generation().get()
        return metrics

    def _collect(self, params: SamplingParams, split: str) -> DataProto:
        parts = []
        for prompts in self.loader:
            batch = generate_samples(self.roles.rollout, prompts, params, step=VALIDATION_STEP, split=split)
            parts.append(batch.union(self.roles.reward.collect(batch)))
        return DataProto.concat(parts) if len(parts) > 1 else parts[0]


def _scores(batch: DataProto) -> list[float]:
    return batch.batch["token_level_scores"].sum(dim=1).tolist()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _summarise(batch: DataProto, suffix: str = "") -> dict[str, float]:
    """Per data source: mean@n, best@n, ... of the reward and of every number that the reward function returned."""
    scores, parts = _scores(batch), batch.non_tensor_batch["reward_parts"]
    values: dict[str, list[float]] = {"reward": scores}
    names = Counter(k for found in parts for k, v in found.items() if _is_number(v) and k != "score")
    for name, _ in names.most_common(MAX_PARTS):
        values[name] = [
            float(found[name]) if _is_number(found.get(name)) else math.nan if error is None else score
            for found, error, score in zip(parts, batch.non_tensor_batch["reward_error"], scores, strict=True)
        ]
    predictions = [found.get("pred") for found in parts]
    return validation_metrics(
        [f"{source}{suffix}" for source in batch.non_tensor_batch["data_source"]],
        list(batch.non_tensor_batch["uid"]),
        values,
        predictions=predictions if any(p is not None for p in predictions) else None,
    )
