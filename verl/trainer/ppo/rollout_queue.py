"""Batches of samples that are made ahead of training, oldest first.

    queue.advance(ordinal, step)                 unfinished responses go on, new batches begin
    queue.take(ordinal, step, version, max_age)  the finished batch whose first prompt has that number
    queue.forget_before(ordinal)                 what has trained

What a batch contains depends on the order of these calls alone: a rollout carries out what it is asked to in the order in
which it is asked, so how fast it is changes no sample. Where rollout has devices of its own, its answers are futures and it
works while others train.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoint.files import FileRecord, record_of, sync_file
from verl.controller.group import wait
from verl.data.loader import PromptLoader
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams

log = logging.getLogger(__name__)

_INDEX = "queue.json"


@dataclass
class Batch:
    """Prompts `ordinal` to `ordinal + count - 1` and what has been sampled from them. It began in `step`, whose number keys
    the draws, and was last worked on at the beginning of step `advanced`."""

    ordinal: int
    count: int
    step: int
    advanced: int
    split: str
    prompts: DataProto
    rows: DataProto | None = None  # the rollout's columns, and token_weight_version
    asked: Any = None  # a result to come: all rows, or `going_on` of them anew
    going_on: np.ndarray | None = None
    scoring: Any = None  # of a batch whose scores are being made ahead: a result to come

    def settle(self) -> DataProto:
        """The rows, once everything that was asked has come."""
        if self.asked is not None:
            found, self.asked = wait(self.asked), None
            if self.rows is None:
                self.rows = _with_token_versions(found)
            else:
                assert self.going_on is not None
                _put(self.rows, self.going_on, found)
                self.going_on = None
        assert self.rows is not None
        return self.rows

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
        self, rollout: Any, loader: PromptLoader, params: SamplingParams, *, count: int, depth: int, partial: bool
    ):
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
                self._go_on(batch, self.part)
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
        batch = next((b for b in self._batches if b.ordinal == ordinal), None)
        if batch is None:
            batch = self._begin(ordinal, step)
            self._batches.append(batch)
        self._go_on(batch, self.limit)
        rows = batch.settle()
        num_evicted = 0
        if version - int(rows.batch["weight_version"].min()) > max_age:
            num_evicted = len(rows)
            fresh = self._begin(ordinal, step, split=f"anew-{version}")
            self._batches[self._batches.index(batch)] = fresh
            self._go_on(fresh, self.limit)
            batch = fresh
            self.figures = self.rollout.end_generation()
        wait(batch.scoring)
        return batch.prompts, self._joined(batch), num_evicted

    def _begin(self, ordinal: int, step: int, split: str = "train") -> Batch:
        prompts = self.loader.take(ordinal, self.count)
        params = replace(self.params, max_new_tokens=self.part)
        asked = self.rollout.generate(prompts, step=step, split=split, params=params, limit=self.limit)
        return Batch(ordinal, self.count, step, step, split, prompts, asked=asked)

    def _go_on(self, batch: Batch, max_new_tokens: int) -> None:
        """Ask for more of the unfinished responses; they are all equally long, since each part was as long for all."""
        chosen = batch.unfinished(self.limit)
        if len(chosen) == 0:
            return
        rows = self._joined(batch).select_idxs(chosen)
        done = int(rows.batch["response_mask"][0].sum())
        batch.going_on = chosen
        batch.asked = self.rollout.go_on(
            rows, step=batch.step, split=batch.split, max_new_tokens=min(max_new_tokens, self.limit - done),
            limit=self.limit,
        )  # fmt: skip

    def _joined(self, batch: Batch) -> DataProto:
        return batch.prompts.repeat(self.params.n, interleave=True).union(batch.settle())

    # -- in a checkpoint, since what older weights made cannot be made again

    def num_bytes(self) -> int:
        """Of the tensors that `write` writes; waits for them."""
        return sum(t.numel() * t.element_size() for batch in self._batches for t in batch.settle().batch.values())

    def write(self, folder: Path | None) -> dict[str, FileRecord]:
        """What is in the queue as files in the new folder `folder`; returns their records by name. None: somebody else
        writes them."""
        if folder is None:
            return {}
        folder.mkdir()
        for number, batch in enumerate(self._batches):
            batch.settle().save_to_disk(folder / f"{number}.safetensors")
        names = ("ordinal", "count", "step", "advanced", "split")
        index = [{name: getattr(batch, name) for name in names} for batch in self._batches]
        (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        files = sorted(folder.iterdir())
        for file in files:
            sync_file(file)
        return {file.name: record_of(file) for file in files}

    def restore(self, folder: Path) -> None:
        """Go on with what `write` wrote, as far as it fits to this run; does nothing where nothing was saved."""
        if not (folder / _INDEX).is_file():
            return
        for number, known in enumerate(json.loads((folder / _INDEX).read_text(encoding="utf-8"))):
            prompts = self.loader.take(known["ordinal"], known["count"])
            rows = DataProto.load_from_disk(folder / f"{number}.safetensors")
            if not self._fits(known, prompts, rows):
                log.warning(
                    "The samples that the checkpoint holds ahead of training are of other prompts or lengths than this "
                    "run's; from prompt %d on they are made anew.", known["ordinal"],
                )  # fmt: skip
                return
            self._batches.append(Batch(**known, prompts=prompts, rows=rows))

    def _fits(self, known: dict[str, Any], prompts: DataProto, rows: DataProto) -> bool:
        if known["count"] != self.count or len(rows) != self.count * self.params.n:
            return False
        if rows.batch["responses"].shape[1] != self.limit:
            return False
        ids, mask = rows.batch["prompts"], rows.batch["prompt_mask"]
        return all(
            ids[i * self.params.n][mask[i * self.params.n]].tolist() == list(wanted)
            for i, wanted in enumerate(prompts.non_tensor_batch["prompt_token_ids"])
        )


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
