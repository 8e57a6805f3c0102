"""Samples with scores, for training (with the greedy baseline and the group filter) and for validation.

If rewards train, rows without a score (column is_scored) get an empty response_mask and do not train.
"""

import logging
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import compress
from typing import ClassVar

import numpy as np
import torch

from verl.algorithms.filters import filter_groups
from verl.algorithms.validation_metrics import validation_metrics
from verl.config import PPOConfig
from verl.data.loader import PromptLoader, ValidationLoader
from verl.data.order import prompts_per_generation
from verl.data_proto.batch_metrics import count_metrics, number_parts, scored_rows
from verl.data_proto.columns import COLUMNS, ends_with_rewards
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import sample_rows
from verl.data_proto.samples import SamplingParams
from verl.data_proto.stored_column import keep_values
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DataError, RewardError
from verl.families import SCORE_METRICS, UNSHAPED
from verl.programs.api import RunContext
from verl.programs.ppo_roles import Needs, PPORoles
from verl.programs.stages import Stages
from verl.registry import match_all
from verl.roles.api import RolloutHandle
from verl.roles.rollout import greedy, sampling_params
from verl.tracking.ledger.records import issued_prompts, scores_of, segments_of
from verl.tracking.ledger.tracker import SampleTracker

_ADDED = re.compile(r"rollout/(num_(?!replicas|graphs)\w+|seconds|\w+_s)")  # metrics that a further generation adds to
_MOST_UNSCORED = 3  # rounds in a row without a score; a judge may be down for a while


@dataclass(eq=False)
class Collector:
    """Turns prompts into scored samples, and records each in `samples`. Checks for a stop after every round."""

    config: PPOConfig
    roles: PPORoles
    loader: PromptLoader
    run: RunContext
    samples: SampleTracker
    stages: Stages | None = None
    reads_data: bool = True  # whether columns of the data are read behind the rewards
    syncs: ClassVar[bool] = True  # whether the engine's weights may go when a step has its samples

    def __post_init__(self) -> None:
        self.spans, self.check_stop = self.run.spans, self.run.check_stop
        self.params = sampling_params(self.config.actor_rollout_ref.rollout)
        self.needs = Needs.of(self.config)
        self.reads_data |= bool(self.stages or self.config.distillation.enabled or self.config.data.sampler.class_path)
        self.num_unscored = _MOST_UNSCORED - 1  # rounds in a row without a score; none may be before the first score

    def collect(self, step: int, ordinal: int) -> tuple[DataProto, dict[str, Metric], int]:
        """(samples of data.train_batch_size prompts from `ordinal` on, metrics, the next ordinal). With a group filter,
        or stages that leave rows out, generates until enough groups remain."""
        data, rule = self.config.data, self.config.algorithm.filter_groups
        num_prompts, count = data.train_batch_size, prompts_per_generation(self.config)
        batches: list[DataProto] = []
        num_groups, num_rounds, scores = 0, 0, list[torch.Tensor]()
        while num_groups < num_prompts:
            self._check_rounds(num_rounds, num_groups)
            batch = self._round(step, ordinal, count)
            scores.append(batch.batch["token_level_scores"].sum(dim=1)[batch.batch["is_scored"]])
            if self.stages is not None:
                batch = self.stages.scored(batch, step)
            if rule.enable:
                kept_rows = filter_groups(
                    self._filter_metric(batch), batch.non_tensor_batch["uid"], batch.batch["is_scored"]
                )
                batch = batch.select_idxs(kept_rows)
            batches.append(batch)
            num_groups += len(set(batch.non_tensor_batch["uid"]))
            num_rounds, ordinal = num_rounds + 1, ordinal + count
            self.check_stop()
        metrics = self.end_generation()
        if rule.enable or self.stages:
            metrics["training/filter_groups/num_gen_batches"] = Metric.last(num_rounds)
            metrics["training/filter_groups/num_groups_kept"] = Metric.last(num_groups)
            metrics["training/filter_groups/score/mean"] = Metric.last(torch.cat(scores).mean())
        batch = DataProto.concat(batches) if len(batches) > 1 else batches[0]
        if not self.reads_data:
            batch = batch.select(non_tensor_batch_keys=[n for n in batch.non_tensor_batch if not ends_with_rewards(n)])
        return first_groups(batch, num_prompts), metrics, ordinal

    def sample(self, step: int, ordinal: int, count: int) -> tuple[DataProto, DataProto]:
        """Prompts `ordinal` to `ordinal + count - 1`, and the samples of each."""
        with self.spans("gen"):
            prompts = self.loader.take(ordinal, count)
            return prompts, self.samples_of(prompts, step, self.params)

    def samples_of(self, prompts: DataProto, step: int, params: SamplingParams) -> DataProto:
        """`params.n` samples of each of the loader's `prompts`."""
        issued = issued_prompts(prompts, self.loader.order)
        self.samples.issue(step, issued, num_samples=params.n, split="train", limit=params.max_new_tokens)
        to_sample = self.samples.lengths.expected(prompts)
        sampled = self.roles.rollout.generate(to_sample, step=step, split="train", params=params).get()
        # rewards read no further columns
        names = [n for n in prompts.non_tensor_batch if self.reads_data or n in COLUMNS]
        batch = prompts.select(non_tensor_batch_keys=names).repeat(params.n, interleave=True).union(sampled)
        # on a thread: of a batch that gets no further columns meanwhile
        generated = batch.select(non_tensor_batch_keys=["finish_reason"])
        self.samples.generate(step, partial(segments_of, batch.batch["ordinal"].numpy(), generated.slice()))
        return batch

    def scored(self, batch: DataProto, step: int) -> DataProto:
        """The samples with their scores."""
        with self.spans("reward"):
            batch = batch.union(self.roles.reward.collect(batch))
            keep_values(batch.batch["token_level_scores"])  # for five passes, from here to the metrics
        self.samples.score(step, scores_of(batch))
        return batch

    def end_generation(self) -> dict[str, Metric]:
        """The rollout's metrics of this step, after its last call."""
        return rollout_metrics(self.roles.rollout.end_generation(syncs=self.syncs).get())

    def _round(self, step: int, ordinal: int, count: int) -> DataProto:
        prompts, batch = self.sample(step, ordinal, count)
        batch = self.scored(batch, step)
        if self.needs.greedy_baseline:
            batch = batch.union(self.greedy_baseline(prompts, step, batch))
            batch.batch["is_scored"] = batch.batch["is_scored"] & ~batch.batch["reward_baselines"].isnan()
        if self.needs.credit:
            self._check_scores(batch, step)
            if not batch.batch["is_scored"].all():  # a pass over all tokens
                batch.batch["response_mask"] = batch.batch["response_mask"] & batch.batch["is_scored"][:, None]
        return batch

    def _check_scores(self, batch: DataProto, step: int) -> None:
        """Raises RewardError if no sample of the round has a score: at once if the process has not seen one, else after
        _MOST_UNSCORED rounds in a row."""
        self.num_unscored = 0 if batch.batch["is_scored"].any() else self.num_unscored + 1
        if self.num_unscored >= _MOST_UNSCORED:
            raise unscored(batch, f"Step {step}")

    def greedy_baseline(self, prompts: DataProto, step: int, batch: DataProto) -> DataProto:
        """Column reward_baselines [batch]: the score of the greedy sample of the row's prompt (ReMax), NaN without one."""
        with self.spans("gen_max"):
            best = generate_samples(self.roles.rollout, prompts, greedy(self.params), step=step, split="greedy")
        with self.spans("reward"):
            rewards = self.roles.reward.collect(best)
            scores = rewards.batch["token_level_scores"].sum(dim=1).where(scored_rows(rewards), torch.nan)
        by_uid = dict(zip(best.non_tensor_batch["uid"], scores.tolist(), strict=True))
        baselines = torch.tensor([by_uid[u] for u in batch.non_tensor_batch["uid"]])
        return DataProto.from_dict({"reward_baselines": baselines})

    def _filter_metric(self, batch: DataProto) -> list[float]:
        """[batch] values that the group filter compares: the score, or a part that the reward function returned."""
        name = self.config.algorithm.filter_groups.metric or "score"
        rows = batch.non_tensor_batch["reward_parts"]
        if name in SCORE_METRICS:
            scores: list[float] = batch.batch["token_level_scores"].sum(dim=1).tolist()
            shaped = name != "score"  # "score" is the number that the reward function returned
            return scores if shaped else [parts.get(UNSHAPED, s) for parts, s in zip(rows, scores, strict=True)]
        for parts in compress(rows, batch.batch["is_scored"]):
            match_all(
                "algorithm.filter_groups.metric", [name], ["score", *parts], "value that the reward function returns"
            )
        return [float(parts.get(name, 0.0)) for parts in rows]

    def _check_rounds(self, num_rounds: int, num_groups: int) -> None:
        limit = self.config.algorithm.filter_groups.max_num_gen_batches or 100
        if num_rounds >= limit:
            raise DataError(
                f"After {num_rounds} generation batches only {num_groups} of {self.config.data.train_batch_size} groups "
                f"{'were left by algorithm.stages' if self.stages else 'had rewards that differ within the group'}. "
                "The task is too easy or too hard for this model, or a stage is too strict; raise "
                "algorithm.filter_groups.max_num_gen_batches or rollout.n, or change the data."
            )


def generate_samples(
    rollout: RolloutHandle, prompts: DataProto, params: SamplingParams, *, step: int, split: str = "train"
) -> DataProto:
    """Generate `params.n` rows per prompt, with a prompt's samples adjacent. Returns the prompts' columns and the rollout's."""
    samples = rollout.generate(prompts, step=step, split=split, params=params).get()
    return prompts.repeat(params.n, interleave=True).union(samples)


def unscored(batch: DataProto, where: str) -> RewardError:
    """The error of a batch without any score. `where` begins the sentence."""
    first = next((error for error in batch.non_tensor_batch["reward_error"] if error is not None), None)
    return RewardError(
        f"{where}: none of the {len(batch)} samples could be scored. The first: "
        f"{first or 'the greedy sample of its prompt has no score.'} Repair the reward function, the judge or the agent, and "
        "run the same command again."
    )


def rollout_metrics(*generations: Mapping[str, Metric]) -> dict[str, Metric]:
    """The rollout's metrics as they are logged: counts and seconds of all generations, all else of the last one."""
    metrics = dict[str, Metric]()
    for name, metric in ((f"rollout/{name}", metric) for part in generations for name, metric in part.items()):
        is_added = name in metrics and _ADDED.fullmatch(name)
        metrics[name] = Metric.last(metrics[name].value + metric.value) if is_added else metric
    return metrics


def first_groups(batch: DataProto, count: int) -> DataProto:
    """The rows of the first `count` groups, in order."""
    groups: dict[str, None] = dict.fromkeys(batch.non_tensor_batch["uid"])
    if len(groups) <= count:
        return batch
    first = set(list(groups)[:count])
    return batch.select_idxs(np.array([uid in first for uid in batch.non_tensor_batch["uid"]]))


# The step number of validation samples; no training step has it: every validation of a run uses the same random numbers,
# so a change between two of them is a change of the policy.
VALIDATION_STEP = 0

log = logging.getLogger(__name__)


class Validator:
    """`run(step)` returns the metrics of compat's `val-core/*` and `val-aux/*`, and the means `val/reward` and `val/greedy`
    over all held-out samples that have a score. `val/num_unscored` and `val/num_unscored/greedy` count samples without a score,
    if any."""

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
        self.responses: bytes | None = None  # digest of the newest validation's; None if all have one reward above 0

    def run(self, step: int) -> dict[str, float]:
        """Metrics of the held-out prompts under the current weights; the samples are logged. Raises RewardError when none has a
        score before the first step, or in an evaluation."""
        sampled = self._collect(self.params, "val")
        scores = _scores(sampled)
        is_solved = scores.min() == scores.max() > 0
        self.responses = None if is_solved else sha256(sampled.batch["responses"].numpy().tobytes()).digest()
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
    """[batch], NaN without a usable score."""
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
