"""Batches of samples that are made ahead of training, oldest first.

    queue.advance(ordinal, step)                 unfinished responses go on, new batches begin
    queue.take(ordinal, step, version, max_age)  the finished batch whose first prompt has that number
    queue.forget_before(ordinal)                 what has trained

What a batch contains depends on the order of these calls alone: a rollout carries out what it is asked to in the order in
which it is asked, so how fast it is changes no sample. Where rollout has devices of its own, its answers are futures and it
works while others train.

What is in the queue is in the sample ledger too, part by part with the step in which it was asked for. A run that goes on
from a checkpoint fills its queue from there, since what older weights made cannot be made again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl.data.loader import PromptLoader
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.roles.requests import sample_key
from verl.roles.rollout import pad_rows
from verl.runtime.worker_group import wait
from verl.tracking.ledger.records import OpenSample, issued_prompts, prompt_digest, segments_of
from verl.tracking.ledger.tracker import SampleTracker

log = logging.getLogger(__name__)


@dataclass
class Batch:
    """Prompts `ordinal` to `ordinal + count - 1` and what has been sampled from them. It began in `step`, whose number keys
    the draws, and was last worked on at the beginning of step `advanced`. What comes is written to `samples`."""

    ordinal: int
    count: int
    step: int
    advanced: int
    split: str
    prompts: DataProto
    samples: SampleTracker
    rows: DataProto | None = None  # the rollout's columns, and token_weight_version
    asked: Any = None  # a result to come: all rows, or `going_on` of them anew
    asked_step: int = 0
    going_on: np.ndarray | None = None
    scoring: Any = None  # of a batch whose scores are being made ahead: a result to come

    def settle(self) -> DataProto:
        """The rows, once everything that was asked has come."""
        if self.asked is not None:
            found, self.asked = wait(self.asked), None
            ordinals = np.repeat(np.arange(self.ordinal, self.ordinal + self.count), self._group_size(found))
            if self.rows is not None:
                ordinals = ordinals[self.going_on]
            self.samples.generate(self.asked_step, segments_of(ordinals.tolist(), found, self.samples.num_tokens))
            if self.rows is None:
                self.rows = _with_token_versions(found)
            else:
                assert self.going_on is not None
                _put(self.rows, self.going_on, found)
                self.going_on = None
        assert self.rows is not None
        return self.rows

    def _group_size(self, found: DataProto) -> int:
        return len(self.rows if self.rows is not None else found) // self.count

    def is_complete(self, limit: int) -> bool:
        """Whether every response is there and finished, found out without waiting."""
        if self.asked is not None and hasattr(self.asked, "ready") and not self.asked.ready():
            return False
        return len(self.unfinished(limit)) == 0

    def unfinished(self, limit: int) -> np.ndarray:
        """Numbers of the rows that may go on: their part is full, and they are shorter than `limit` tokens."""
        rows = self.settle()
        lengths = rows.batch["response_mask"].sum(dim=1).numpy()
        return np.flatnonzero((rows.non_tensor_batch["finish_reason"] == "length") & (lengths < limit))


class RolloutQueue:
    """Holds `depth` batches of `count` prompts after `advance`, of which the oldest is about to train. With `partial`,
    responses are made in `depth` parts."""

    def __init__(
        self,
        rollout: Any,
        loader: PromptLoader,
        params: SamplingParams,
        samples: SampleTracker,
        *,
        count: int,
        depth: int,
        partial: bool,
    ):
        self.samples = samples
        self.rollout = rollout
        self.loader = loader
        self.params = params
        self.count = count
        self.depth = depth
        self.limit = params.max_new_tokens
        self.part = -(-self.limit // depth) if partial else self.limit
        self.figures: Any = {}  # of what was generated last: metrics by name, or a result to come
        self._batches: list[Batch] = []

    def qsize(self) -> int:
        """Batches that are there or being made."""
        return len(self._batches)

    def forget_before(self, ordinal: int) -> None:
        """Prompts before `ordinal` have trained."""
        self._batches = [b for b in self._batches if b.ordinal >= ordinal]

    def advance(self, ordinal: int, step: int) -> None:
        """At the beginning of `step`, whose first prompt is `ordinal`: unfinished responses go on, new batches begin."""
        for batch in self._batches:
            if batch.advanced < step:  # else that was done before the step was abandoned, and is not done twice
                batch.advanced = step
                self._go_on(batch, self.part, step)
        following = self._batches[-1].ordinal + self._batches[-1].count if self._batches else ordinal
        while self.qsize() < self.depth:
            self._batches.append(self._begin(following, step))
            following += self.count
        self.figures = self.rollout.end_generation()

    def begin_scoring(self, reward: Any) -> None:
        """Batches that are complete before their turn are scored while others train. Where rollout and reward share their
        devices, samples went from one to the other as they ended."""
        for batch in self._batches[1:]:
            if batch.scoring is None and batch.is_complete(self.limit):
                batch.scoring = reward.begin(self._joined(batch))

    def take(self, ordinal: int, step: int, version: int, max_age: int) -> tuple[DataProto, DataProto, int]:
        """(prompts, rows, number of samples that were too old): the batch that begins at `ordinal`, every response finished.

        When a sample's oldest token was made by weights more than `max_age` versions before `version`, none of the batch is
        used, and its prompts are sampled anew under the weights of now. The batch stays in the queue until it has trained.
        """
        batch, num_evicted = next((b for b in self._batches if b.ordinal == ordinal), None), 0
        generates = batch is None
        if batch is None:
            batch = self._begin(ordinal, step)
            self._batches.append(batch)
        generates |= self._go_on(batch, self.limit, step)
        rows = batch.settle()
        if version - int(rows.batch["weight_version"].min()) > max_age:
            num_evicted = len(rows)
            fresh = self._begin(ordinal, step, split=f"anew-{version}")
            self._batches[self._batches.index(batch)] = fresh
            self._go_on(fresh, self.limit, step)
            batch, generates = fresh, True
        if generates:
            self.figures = self.rollout.end_generation()
        wait(batch.scoring)
        return batch.prompts, self._joined(batch), num_evicted

    def _begin(self, ordinal: int, step: int, split: str = "train") -> Batch:
        prompts = self.loader.take(ordinal, self.count)
        params = replace(self.params, max_new_tokens=self.part)
        issued = issued_prompts(prompts, self.loader.order)
        self.samples.issue(step, issued, num_samples=params.n, split=split, limit=self.limit)
        asked = self.rollout.generate(prompts, step=step, split=split, params=params, limit=self.limit)
        return Batch(ordinal, self.count, step, step, split, prompts, self.samples, asked=asked, asked_step=step)

    def _go_on(self, batch: Batch, max_new_tokens: int, step: int) -> bool:
        """Ask for more of the unfinished responses; they are all equally long, since each part was as long for all. Returns
        whether there are any."""
        chosen = batch.unfinished(self.limit)
        if len(chosen) == 0:
            return False
        rows = self._joined(batch).select_idxs(chosen)
        done = int(rows.batch["response_mask"][0].sum())
        batch.going_on, batch.asked_step = chosen, step
        batch.asked = self.rollout.go_on(
            rows, step=batch.step, split=batch.split, max_new_tokens=min(max_new_tokens, self.limit - done),
            limit=self.limit,
        )  # fmt: skip
        return True

    def _joined(self, batch: Batch) -> DataProto:
        return batch.prompts.repeat(self.params.n, interleave=True).union(batch.settle())

    # -- before a checkpoint, and after one

    def settle(self) -> None:
        """All that has been asked for has come and is in the ledger."""
        for batch in self._batches:
            batch.settle()

    def restore(self, waiting: Sequence[OpenSample]) -> None:
        """The queue holds what was open in the ledger, as far as it fits to this run."""
        self._batches = []
        groups: dict[int, list[OpenSample]] = defaultdict(list)
        for sample in waiting:
            groups[sample.ordinal].append(sample)
        ordinal = self.samples.cursor
        while any(known >= ordinal for known in groups):
            prompts = self.loader.take(ordinal, self.count)
            found = [groups.get(number, []) for number in range(ordinal, ordinal + self.count)]
            if not self._fits(found, prompts):
                log.warning(
                    "The samples that the checkpoint holds ahead of training are of other prompts or lengths than this "
                    "run's; from prompt %d on they are made anew.", ordinal,
                )  # fmt: skip
                return
            first = found[0][0]
            rows = self._rows([sample for group in found for sample in group], prompts)
            self._batches.append(
                Batch(
                    ordinal, self.count, first.step, self.samples.offset.step, first.split, prompts, self.samples, rows
                )
            )
            ordinal += self.count

    def _fits(self, found: Sequence[Sequence[OpenSample]], prompts: DataProto) -> bool:
        """Whether every prompt has its samples, begun together, of this run's length."""
        for samples, ids in zip(found, prompts.non_tensor_batch["prompt_token_ids"], strict=True):
            if [sample.sample for sample in samples] != list(range(self.params.n)):
                return False
            if any(not s.segments or s.limit != self.limit or s.prompt != prompt_digest(ids) for s in samples):
                return False
        return len({(sample.step, sample.split) for samples in found for sample in samples}) == 1

    def _rows(self, samples: Sequence[OpenSample], prompts: DataProto) -> DataProto:
        """The rollout's columns as they were: see RolloutWorker."""
        ids = [list(row) for row in prompts.repeat(self.params.n, interleave=True).non_tensor_batch["prompt_token_ids"]]
        pad, width = self.loader.pad_token_id, self.loader.max_prompt_length
        tokens = [np.concatenate([segment.tokens for segment in sample.segments]).tolist() for sample in samples]
        log_probs = [np.concatenate([segment.log_probs for segment in sample.segments]) for sample in samples]
        versions = [[s.version for s in sample.segments for _ in range(len(s.tokens))] for sample in samples]
        columns: dict[str, torch.Tensor] = {}
        columns["prompts"], columns["prompt_mask"] = pad_rows(ids, pad, width, left=True)
        columns["responses"], columns["response_mask"] = pad_rows(tokens, pad, self.limit, left=False)
        columns["attention_mask"] = torch.cat([columns["prompt_mask"], columns["response_mask"]], dim=1)
        values, _ = pad_rows([row.tolist() for row in log_probs], 0.0, self.limit, left=False)
        columns["rollout_log_probs"] = values.to(torch.from_numpy(log_probs[0]).dtype)
        columns["token_weight_version"], _ = pad_rows(versions, 0, self.limit, left=False)
        columns["sample_index"] = torch.tensor([sample.sample for sample in samples])
        columns["weight_version"] = torch.tensor([sample.segments[0].version for sample in samples])
        columns["rollout_rank"] = torch.tensor([sample.segments[-1].rank for sample in samples])
        objects = {
            "finish_reason": [sample.segments[-1].finish_reason for sample in samples],
            "sample_key": [sample_key(sample.split, sample.ordinal, sample.sample) for sample in samples],
        }
        return DataProto.from_dict(columns, {k: np.array(v, dtype=object) for k, v in objects.items()})


def _with_token_versions(rows: DataProto) -> DataProto:
    """Column token_weight_version [batch, response]: the version that made each token, 0 outside the response."""
    columns = rows.batch
    columns["token_weight_version"] = columns["weight_version"].unsqueeze(1) * columns["response_mask"]
    return rows


def _put(rows: DataProto, chosen: np.ndarray, found: DataProto) -> None:
    """Replace the rows `chosen` by `found`, which holds them longer; what they had keeps its versions."""
    at = torch.from_numpy(chosen)
    added = found.batch["response_mask"] & ~rows.batch["response_mask"][at]
    versions = torch.where(added, found.batch["weight_version"].unsqueeze(1), rows.batch["token_weight_version"][at])
    oldest = rows.batch["weight_version"][at]
    for name, values in found.batch.items():
        rows.batch[name][at] = values
    for name, values in found.non_tensor_batch.items():
        rows.non_tensor_batch[name][chosen] = values
    rows.batch["token_weight_version"][at] = versions
    rows.batch["weight_version"][at] = oldest
