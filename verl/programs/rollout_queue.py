"""Batches of samples that are made ahead of training, oldest first.

    queue.advance(ordinal, step, num_left)       resume unfinished responses, start new batches
    queue.take(ordinal, step, version, max_age)  the finished batch whose first prompt has that index
    queue.forget_before(ordinal)                 drop what has trained

The content of a batch depends only on the order of these calls: a rollout carries out calls in order, so its speed changes no
sample. A rollout with separate devices works while the models train.

The sample ledger holds everything in the queue too, part by part with the step that asked for it. A resumed run fills its queue
from there, since samples of older weights cannot be generated again.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from verl.data.loader import PromptLoader
from verl.data_proto.extras import media_of
from verl.data_proto.future import DataProtoFuture, Future
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.data_proto.trajectory import Segment, Source, Status, Trajectory, response_lengths, to_columns
from verl.distributions import load_part
from verl.roles.api import RewardHandle, RolloutHandle
from verl.roles.rollout import episode_columns, sample_names
from verl.tracking.ledger.records import OpenSample, issued_prompts, prompt_digest, segments_of
from verl.tracking.ledger.tracker import SampleTracker

log = logging.getLogger(__name__)


@dataclass
class Batch:
    """Prompts `ordinal` to `ordinal + count - 1` and their samples. It started in `step` (the number keys the random numbers),
    and was last resumed in step `advanced`. Results are recorded in `samples`."""

    ordinal: int
    count: int
    step: int
    advanced: int
    split: str
    prompts: DataProto
    samples: SampleTracker
    rows: DataProto | None = None  # the rollout's columns
    pending: Future[DataProto] | None = None  # all rows, or longer versions of the rows `resumed`
    resumed: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    scoring: Future[object] | None = None  # of a batch that is scored before its turn
    has_kv: bool = False  # whether the ranks of unfinished rows have their keys and values

    def wait(self) -> DataProto:
        """Wait for the pending result; the rows."""
        if self.pending is not None:
            rows, self.pending = self.pending.get(), None
            group_size = len(rows if self.rows is None else self.rows) // self.count
            ordinals = np.repeat(np.arange(self.ordinal, self.ordinal + self.count), group_size)
            if self.rows is not None:
                ordinals = ordinals[self.resumed]
            self.samples.generate(self.advanced, partial(segments_of, ordinals, rows.slice()))
            if self.rows is None:
                self.rows = rows
            else:
                _replace_rows(self.rows, self.resumed, rows)
        assert self.rows is not None
        return self.rows

    def is_complete(self, limit: int) -> bool:
        """Whether every response is there and finished; does not wait."""
        if self.pending is not None and not self.pending.ready():
            return False
        return len(self.unfinished(limit)) == 0

    def unfinished(self, limit: int) -> np.ndarray:
        """Indices of the rows that can be resumed: their part is full, and they are shorter than `limit` tokens."""
        rows = self.wait()
        lengths = response_lengths(rows.batch).numpy()
        return np.flatnonzero((rows.non_tensor_batch["finish_reason"] == "length") & (lengths < limit))


@dataclass(eq=False)
class RolloutQueue:
    """Holds `depth` batches of `count` prompts after `advance`, and fewer before the run ends. The oldest is about to train.
    With `partial`, responses are made in `depth` parts; first parts are shorter and begin last, so that few slots are empty at
    the end of a generation. With `keeps_kv` ranks read keys and values of earlier parts that they made, unless a checkpoint
    lies between. With `in_flight` a generation lasts until the batch of the next step is complete and a slot lacks a sample.
    `agents_folder`: of the run, if samples are episodes of agents."""

    rollout: RolloutHandle
    loader: PromptLoader
    params: SamplingParams
    samples: SampleTracker
    count: int
    depth: int
    partial: bool
    keeps_kv: bool = False
    in_flight: bool = False
    agents_folder: Path | None = None
    records_experts: bool = False

    def __post_init__(self) -> None:
        self.limit = self.params.max_new_tokens
        self.first = self.part = self.limit  # of the first part, and of each other part
        if self.partial and self.depth > 1:
            self.first = max(1, self.limit // (self.depth * min(self.depth, 4)))
            self.part = max(1, -(-(self.limit - self.first) // (self.depth - 1)))
        self.metrics = list[Future[dict[str, Metric]]]()  # of each generation of the step
        self._batches: list[Batch] = []

    def qsize(self) -> int:
        """Number of batches that are finished or being generated."""
        return len(self._batches)

    def forget_before(self, ordinal: int) -> None:
        """Drop the batches of prompts before `ordinal`: they have trained."""
        self._batches = [b for b in self._batches if b.ordinal >= ordinal]

    def advance(self, ordinal: int, step: int, num_left: int) -> None:
        """At the beginning of `step`, with `ordinal` as its first prompt: resume unfinished responses, start new batches.
        Nothing is generated beyond the `num_left` batches that the steps from this one on need at least."""
        # a batch of this step was resumed before the step was abandoned
        earlier = [batch for batch in self._batches[:num_left] if batch.advanced < step]
        following = self._batches[-1].ordinal + self._batches[-1].count if self._batches else ordinal
        num_new = max(0, min(self.depth, num_left) - self.qsize())
        started = [self._issued(following + number * self.count, step) for number in range(num_new)]
        self._batches += started
        # the batch of this step is complete, except in the first step
        due = ordinal + 2 * self.count if self.in_flight else None
        generates = self._generate(started, earlier, self.part, step, self.first, due)
        self.metrics = [self.rollout.end_generation()] if generates else []

    def start_scoring(self, reward: RewardHandle) -> None:
        """Score complete batches before their turn, while the models train. If rollout and reward share their devices, samples
        went from one to the other as they ended."""
        for batch in self._batches[1:]:
            if batch.scoring is None and batch.is_complete(self.limit):
                batch.scoring = reward.start_scoring(self._joined(batch))

    def take(self, ordinal: int, step: int, version: int, max_age: int) -> tuple[DataProto, DataProto, int]:
        """(prompts, rows, number of evicted samples): the batch that starts at `ordinal`, every response finished.

        When a sample's oldest token was made by weights more than `max_age` versions before `version`, the batch is evicted,
        and its prompts are sampled again under the current weights. The batch stays in the queue until it has trained.
        """
        begun, num_evicted = [b for b in self._batches if b.ordinal == ordinal], 0
        started = [] if begun else [self._issued(ordinal, step)]
        self._batches += started
        generates = self._generate(started, begun, self.limit, step, self.limit)
        (batch,) = begun or started
        rows = batch.wait()
        if version - int(rows.batch["weight_version"].min()) > max_age:
            num_evicted = len(rows)
            fresh = self._issued(ordinal, step, split=f"again-{version}")
            self._batches[self._batches.index(batch)] = fresh
            self._generate([fresh], [], self.limit, step, self.limit)
            batch, generates = fresh, True
        if generates:
            self.metrics.append(self.rollout.end_generation())
        if batch.scoring is not None:
            batch.scoring.get()
        return batch.prompts, self._joined(batch), num_evicted

    def _issued(self, ordinal: int, step: int, split: str = "train") -> Batch:
        """A batch without samples yet."""
        prompts = self.loader.take(ordinal, self.count)
        issued = issued_prompts(prompts, self.loader.order)
        self.samples.issue(step, issued, num_samples=self.params.n, split=split, limit=self.limit)
        return Batch(ordinal, self.count, step, step, split, prompts, self.samples)

    def _generate(
        self, started: Sequence[Batch], begun: Sequence[Batch], part: int, step: int, first: int, due: int | None = None
    ) -> bool:
        """Start batches of one split, with responses of at most `first` tokens, and make a part of the unfinished responses of
        begun batches, in one generation: short parts fill the places that long ones leave. Returns whether there are any."""
        for batch in begun:
            batch.resumed, batch.advanced = batch.unfinished(self.limit), step
        resumed = [batch for batch in begun if len(batch.resumed)]
        if not (started or resumed):
            return False
        rows = [self._unfinished_rows(batch, part) for batch in resumed]
        prompts = [batch.prompts for batch in started] or [resumed[0].prompts.slice(0, 0)]
        params, split = replace(self.params, max_new_tokens=part), started[0].split if started else "train"
        both = self.samples.lengths.expected(DataProto.concat(prompts)), DataProto.concat(rows) if rows else DataProto()
        future = self.rollout.advance(
            *both, step=step, params=params, first=first, split=split, limit=self.limit, due=due
        )
        sizes = [self.count * self.params.n] * len(started), list(map(len, rows))
        for kind, batches in enumerate((started, resumed)):
            for batch, end, size in zip(batches, itertools.accumulate(sizes[kind]), sizes[kind], strict=True):
                batch.has_kv = self.keeps_kv
                batch.pending = DataProtoFuture(partial(_part, kind, end - size, end), [future])
        return True

    def _unfinished_rows(self, batch: Batch, max_new_tokens: int) -> DataProto:
        """The rows to resume, as RolloutHandle.advance takes them."""
        lengths, chosen = response_lengths(batch.wait().batch).numpy(), batch.resumed
        max_part = min(max_new_tokens, self.limit - int(lengths[chosen].min()))
        expected = expected_tokens(lengths[chosen], np.delete(lengths, chosen), max_part)
        rows = self._joined(batch).select_idxs(chosen)
        rows.batch["expected_tokens"] = torch.from_numpy(expected)
        rows.batch["begun_step"] = torch.full((len(rows),), batch.step)
        if self.keeps_kv:
            rows.batch["kv_rank"] = rows.batch["rollout_rank"] if batch.has_kv else torch.full((len(rows),), -1)
        return rows

    def _joined(self, batch: Batch) -> DataProto:
        return batch.prompts.repeat(self.params.n, interleave=True).union(batch.wait())

    # -- before a checkpoint, and after one

    def drain(self) -> None:
        """Wait until all results are in the ledger. Keys and values are not, and a resumed run has none."""
        for batch in self._batches:
            batch.wait()
            batch.has_kv = False

    def restore(self, waiting: Sequence[OpenSample]) -> None:
        """Fill the queue with the open samples of the ledger, as far as they fit this run."""
        self._batches = []
        groups: dict[int, list[OpenSample]] = defaultdict(list)
        for sample in waiting:
            groups[sample.ordinal].append(sample)
        ordinal = self.samples.cursor
        while any(begun >= ordinal for begun in groups):
            prompts = self.loader.take(ordinal, self.count)
            open_samples = [groups.get(number, []) for number in range(ordinal, ordinal + self.count)]
            if not self._fits(open_samples, prompts):
                log.warning(
                    "The checkpoint's samples ahead of training have other prompts or lengths than this run; from prompt %d "
                    "on they are sampled again.", ordinal,
                )  # fmt: skip
                return
            first = open_samples[0][0]
            try:
                rows = self._rows([sample for group in open_samples for sample in group], prompts)
            except LookupError as error:
                log.warning("%s; from prompt %d on samples ahead of training are made again.", error, ordinal)
                return
            self._batches.append(
                Batch(
                    ordinal, self.count, first.step, self.samples.offset.step, first.split, prompts, self.samples, rows
                )
            )
            ordinal += self.count

    def _fits(self, groups: Sequence[Sequence[OpenSample]], prompts: DataProto) -> bool:
        """Whether every prompt has its samples, started together, of this run's length."""
        media = media_of(prompts) or [None] * len(prompts)
        for samples, *prompt in zip(groups, prompts.non_tensor_batch["prompt_token_ids"], media, strict=True):
            if [sample.sample for sample in samples] != list(range(self.params.n)):
                return False
            digest = prompt_digest(*prompt)
            if any(not s.segments or s.limit != self.limit or s.prompt != digest for s in samples):
                return False
        return len({(sample.step, sample.split) for samples in groups for sample in samples}) == 1

    def _rows(self, samples: Sequence[OpenSample], prompts: DataProto) -> DataProto:
        """The rollout's columns as they were, see RolloutWorker. Raises LookupError if the journal of agents lacks one, and if
        experts are needed: the ledger does not hold them."""
        if self.records_experts:
            raise LookupError("The sample ledger has no experts for routing replay")
        ids = prompts.repeat(self.params.n, interleave=True).non_tensor_batch["prompt_token_ids"]
        trajectories = [_trajectory(sample, prompt_ids) for sample, prompt_ids in zip(samples, ids, strict=True)]
        episodes: dict[str, np.ndarray] = {}
        if self.agents_folder is not None:
            recorded, images_of = (load_part(f"verl.agents.{name}") for name in ("recorded", "images"))
            images = images_of.EpisodeImages(self.loader.image_encoder, self.agents_folder / recorded.FOLDER)
            prompt_media = {media.digest: media for media in media_of(prompts) or () if media is not None}
            records = recorded.recorded(
                self.agents_folder,
                trajectories,
                step=samples[0].step,
                split=samples[0].split,
                limit=self.limit,
                images=lambda digest: prompt_media.get(digest) or images.of_journal(digest),
            )
            trajectories, episodes = [done.trajectory for done in records], episode_columns(records, images)
        sampled = (s.log_probs for sample in samples for s in sample.segments if s.log_probs is not None)
        log_probs = next(sampled, np.empty(0, np.float32))
        columns = to_columns(
            trajectories,
            pad_token_id=self.loader.pad_token_id,
            prompt_width=self.loader.max_prompt_length,
            response_width=self.limit,
            dtype=torch.float64 if log_probs.dtype == np.float64 else torch.float32,
        )
        columns["rollout_rank"] = torch.tensor([sample.segments[-1].rank for sample in samples])
        return DataProto.from_dict(columns, {**sample_names([(t, samples[0].split) for t in trajectories]), **episodes})


def expected_tokens(lengths: np.ndarray, finished: np.ndarray, limit: int) -> np.ndarray:
    """`[sample]`, float32: tokens that unfinished responses of `lengths` will likely have yet in a part of `limit` tokens.

    The mean excess (at most `limit`) of longer `finished` responses of the batch over that length; `limit` if none is longer.
    """
    beyond = finished[None, :] - lengths[:, None]  # [unfinished, finished]
    longer = beyond > 0
    total = np.where(longer, np.minimum(beyond, limit), 0).sum(axis=1)
    return np.where(longer.any(axis=1), total / np.maximum(longer.sum(axis=1), 1), limit).astype(np.float32)


def _part(kind: int, start: int, end: int, results: Sequence[tuple[DataProto, DataProto]]) -> DataProto:
    return results[0][kind].slice(start, end)


def _trajectory(sample: OpenSample, prompt_ids: Sequence[int]) -> Trajectory:
    """An open sample of the ledger."""
    segments = [Segment(s.tokens, s.log_probs, s.version, cast(Source, s.source)) for s in sample.segments]
    status = cast(Status, sample.segments[-1].finish_reason)
    return Trajectory(sample.ordinal, sample.sample, prompt_ids, segments, status)


def _replace_rows(rows: DataProto, chosen: np.ndarray, extended: DataProto) -> None:
    """Replace the rows `chosen` by `extended`, the same samples with more tokens. The ledger may still read earlier columns."""
    order = torch.arange(len(rows))
    order[torch.from_numpy(chosen)] = torch.arange(len(chosen)) + len(rows)
    for name, values in extended.batch.items():
        rows.batch[name] = torch.cat([rows.batch[name], values])[order]
    for name, objects in extended.non_tensor_batch.items():
        rows.non_tensor_batch[name] = np.concatenate([rows.non_tensor_batch[name], objects])[order.numpy()]
