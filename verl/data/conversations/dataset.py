"""Files of conversations as training sequences: every row read, cut and counted before a run, then batches by step."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data.check import NUM_PROBLEMS_SHOWN
from verl.data.conversations.formats import example_of
from verl.data.conversations.settings import ConversationSettings
from verl.data.conversations.tokens import ConversationEncoder, TrainingSequence
from verl.data.dataset import Files
from verl.data.files import Rows, read_rows
from verl.data.order import PromptOrder
from verl.data.prompts import truncate
from verl.data.schema import at
from verl.errors import DataError


@dataclass
class FileSummary:
    """What one file holds. Tokens are counted after truncation; lengths are those of sequences before it."""

    file: str
    settings: ConversationSettings
    num_rows: int = 0  # rows that train
    formats: Counter[str] = field(default_factory=Counter)  # rows of each format
    num_sequences: int = 0
    num_tokens: int = 0
    num_trained: int = 0  # tokens
    num_split: int = 0  # rows that are several sequences
    num_truncated: int = 0  # sequences that are cut, the ones that train nothing afterwards included
    num_tokens_cut: int = 0
    num_trained_cut: int = 0
    num_untrainable_sequences: int = 0  # none of their trained tokens is left by the cut
    num_untrainable_rows: int = 0  # rows without any other sequence; they are left out
    num_endless: int = 0  # sequences that train no token which ends generation
    longest: int = 0
    longest_place: str = ""
    num_problems: int = 0  # rows that would stop a run
    problems: list[str] = field(default_factory=list)  # a sentence for each of the first of them

    def sentences(self) -> list[str]:
        """The summary for people; the first sentence is always there, the others when there is something to tell."""
        formats = ", ".join(f"{name} (rows: {count:,})" for name, count in self.formats.most_common()) or "none"
        told = [
            f"{self.file}: format {formats}; rows that train: {self.num_rows:,}, as sequences: {self.num_sequences:,}, "
            f"tokens: {self.num_tokens:,}, trained tokens: {self.num_trained:,}, longest sequence: {self.longest:,}"
            + (f" ({self.longest_place})." if self.longest_place else ".")
        ]
        if self.num_truncated:
            told.append(
                f"Sequences longer than data.max_length={self.settings.max_length}, cut on the "
                f"{self.settings.truncation}: {self.num_truncated:,}; tokens lost: {self.num_tokens_cut:,}, trained "
                f"tokens among them: {self.num_trained_cut:,}."
            )
        if self.num_untrainable_sequences:
            told.append(
                f"Sequences left out because the cut leaves no token that trains: {self.num_untrainable_sequences:,}; "
                f"rows left out with them: {self.num_untrainable_rows:,}. Raise data.max_length or change data.truncation."
            )
        if self.num_split:
            told.append(
                f"Rows that become several sequences: {self.num_split:,}. An earlier turn has other tokens once a later one "
                "follows, mostly because the chat template rewrites history; each turn trains after the prompt that the "
                "sampler would see."
            )
        if self.num_endless:
            told.append(
                f"Sequences that train no token which ends generation: {self.num_endless:,}. The model does not learn "
                "to stop from them; compare the chat template with the tokenizer's eos_token."
            )
        return told + ([f"Rows that cannot be used: {self.num_problems:,}."] if self.num_problems else [])

    def add_problem(self, sentence: str) -> None:
        self.num_problems += 1
        if len(self.problems) < NUM_PROBLEMS_SHOWN:
            self.problems.append(sentence)


class ConversationDataset:
    """The rows of files that train; `dataset[i]` is the list of sequences of row i, at most max_length tokens each."""

    def __init__(self) -> None:
        self.summaries: list[FileSummary] = []
        self._rows: list[list[TrainingSequence]] = []
        self._places: list[str] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> list[TrainingSequence]:
        return self._rows[item]

    def place(self, item: int) -> str:
        """File and row number of a row, for messages."""
        return self._places[item]

    def add_file(self, name: str, rows: Rows, encoder: ConversationEncoder, *, keep_going: bool = False) -> None:
        """Read all `rows`. Raises DataError for the first bad one; with `keep_going` the summary describes them."""
        summary = FileSummary(name, encoder.settings)
        self.summaries.append(summary)
        stops = {encoder.tokenizer.eos_token_id, *encoder.settings.stop_token_ids}
        for number in range(len(rows)):
            place = rows.place(number)
            try:
                with at(place):
                    example = example_of(rows[number], encoder.settings)
                whole = encoder.encode(example, place)
                _check_length(max(len(sequence.input_ids) for sequence in whole), encoder.settings, place)
            except DataError as error:
                if not keep_going:
                    raise
                summary.add_problem(str(error))
                continue
            summary.formats[example.row_format] += 1
            summary.num_split += len(whole) > 1
            kept = [short for sequence in whole if (short := _fitted(sequence, summary, place, stops))]
            summary.num_untrainable_rows += not kept
            if kept:
                self._rows.append(kept)
                self._places.append(place)
                summary.num_rows += 1
                summary.num_sequences += len(kept)


def load_conversations(
    files: Files,
    tokenizer: Any,
    settings: ConversationSettings,
    *,
    max_samples: int = -1,
    shuffle: bool = False,
    seed: int = 42,
    keep_going: bool = False,
) -> ConversationDataset:
    """Read, tokenize and cut every row of `files`.

    With `max_samples` only so many rows are read: the first ones, or with `shuffle` some that `seed` selects. Raises
    DataError for files that cannot be read and for the first bad row; with `keep_going` bad rows are left out, and
    `dataset.summaries` describes them, which is how `verl check` looks at data.
    """
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    tables = [read_rows(name) for name in names] or [read_rows([])]
    chosen = _chosen(sum(map(len, tables)), max_samples, seed if shuffle else None)
    encoder = ConversationEncoder(tokenizer, settings)
    dataset, start = ConversationDataset(), 0
    for name, rows in zip(names, tables, strict=True):
        inside = chosen[(chosen >= start) & (chosen < start + len(rows))] - start
        dataset.add_file(str(name), rows.select(inside), encoder, keep_going=keep_going)
        start += len(rows)
    if not len(dataset) and not keep_going:
        raise DataError(
            f"None of the {len(chosen)} rows of {', '.join(map(str, names))} keeps a token that trains within "
            f"data.max_length={settings.max_length}; raise it, or change data.truncation."
        )
    return dataset


def _chosen(num_rows: int, max_samples: int, seed: int | None) -> np.ndarray:
    if not 0 < max_samples < num_rows:
        return np.arange(num_rows)
    order = PromptOrder(num_rows, seed or 0, shuffle=seed is not None)
    return np.sort([order.row(number)[1] for number in range(max_samples)])


def _check_length(length: int, settings: ConversationSettings, place: str) -> None:
    if settings.max_length is not None and length > settings.max_length and settings.truncation == "error":
        raise DataError(
            f"{place}: a sequence has {length} tokens, more than data.max_length={settings.max_length}. Raise the limit, "
            "or set data.truncation to left or right to cut such rows."
        )


def _fitted(sequence: TrainingSequence, summary: FileSummary, place: str, stops: set[int]) -> TrainingSequence | None:
    """The sequence within data.max_length, counted; None when no token that trains is left."""
    settings, length = summary.settings, len(sequence.input_ids)
    if length > summary.longest:
        summary.longest, summary.longest_place = length, place
    trained = sequence.input_ids[sequence.loss_mask]
    summary.num_endless += not np.isin(trained, [stop for stop in stops if stop is not None]).any()
    if settings.max_length is not None and length > settings.max_length:
        sequence = _cut(sequence, settings.max_length, settings.truncation)
        summary.num_truncated += 1
        summary.num_tokens_cut += length - len(sequence.input_ids)
        summary.num_trained_cut += len(trained) - sequence.num_trained
        if not sequence.num_trained:
            summary.num_untrainable_sequences += 1
            return None
    summary.num_tokens += len(sequence.input_ids)
    summary.num_trained += sequence.num_trained
    return sequence


def _cut(sequence: TrainingSequence, limit: int, mode: str) -> TrainingSequence:
    mask = np.array(truncate(sequence.loss_mask.tolist(), limit, mode), dtype=np.bool_)
    mask[0] = False  # the token that it was predicted from may be gone
    return TrainingSequence(np.array(truncate(sequence.input_ids.tolist(), limit, mode), dtype=np.int32), mask)


class ConversationLoader:
    """Batches of `batch_size` rows by step; their order is a function of (seed, epoch), so resuming needs the step only.

    Steps count from 1. Every epoch leaves out its incomplete last batch. Raises DataError when there are fewer rows
    than a batch has.
    """

    def __init__(self, dataset: ConversationDataset, batch_size: int, *, seed: int = 42, shuffle: bool = True):
        if not 1 <= batch_size <= len(dataset):
            raise DataError(
                f"data.train_batch_size is {batch_size}, but {len(dataset)} rows train; lower it or add rows."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.order = PromptOrder(len(dataset), seed, shuffle, batch_size)
        self.num_steps_per_epoch = len(dataset) // batch_size

    def rows(self, step: int) -> list[int]:
        """Numbers of the rows of a step."""
        first = (step - 1) * self.batch_size
        return [self.order.row(number)[1] for number in range(first, first + self.batch_size)]

    def batch(self, step: int) -> list[TrainingSequence]:
        """The sequences of a step; a row's sequences stay together."""
        return [sequence for row in self.rows(step) for sequence in self.dataset[row]]
