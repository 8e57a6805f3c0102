"""Files of conversations as training sequences: every row read, cut and counted before a run, then batches by step."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from verl.config.sections.data import SFTDataConfig
from verl.data.check import NUM_PROBLEMS_SHOWN
from verl.data.conversations.formats import example_of
from verl.data.conversations.tokens import ConversationEncoder, TrainingSequence
from verl.data.conversations.turn_ends import TurnEnds
from verl.data.dataset import Files, dataset_class
from verl.data.files import Rows, read_rows
from verl.data.order import PromptOrder
from verl.data.prompts import control_token_in, control_tokens, truncate
from verl.data.schema import Messages, at
from verl.data_proto.proto import DataProto
from verl.data_proto.token_ids import label_mask, num_embeddings, token_ids, token_mask
from verl.data_proto.trajectory import token_columns
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.config.sections.data import PreferenceDataConfig, TextDataConfig

_TOKENIZED = ("input_ids", "loss_mask", "labels", "attention_mask")  # columns of a row of token ids

# row number -> (file and row for messages, format, sequences before truncation, a control token in messages or "")
ReadRow = Callable[[int], tuple[str, str, list[TrainingSequence], str]]


@dataclass
class FileSummary:
    """Counts of one file. Tokens are counted after truncation; sequence lengths are measured before it."""

    file: str
    settings: TextDataConfig
    num_rows: int = 0  # rows that train
    formats: Counter[str] = field(default_factory=Counter)  # rows of each format
    num_sequences: int = 0
    num_tokens: int = 0
    num_trained: int = 0  # tokens
    num_split: int = 0  # rows that are several sequences
    num_truncated: int = 0  # sequences that are cut, also if nothing of them trains afterwards
    num_tokens_cut: int = 0
    num_trained_cut: int = 0
    num_untrainable_sequences: int = 0  # the cut leaves none of their trained tokens
    num_untrainable_rows: int = 0  # rows without any other sequence; they are left out
    num_endless: int = 0  # sequences that train no token which ends generation
    num_behind: int = 0  # sequences with text behind a token that ends generation
    num_control: int = 0  # rows with control tokens in the contents of their messages
    first_control: str = ""  # the first of these tokens, and its row
    longest: int = 0
    longest_place: str = ""
    num_problems: int = 0  # rows that would stop a run
    problems: list[str] = field(default_factory=list)  # a sentence for each of the first of them

    def sentences(self) -> list[str]:
        """The summary for people; the first sentence is always present, each other one when its count is not 0."""
        formats = ", ".join(f"{name} (rows: {count:,})" for name, count in self.formats.most_common()) or "none"
        lines = [
            f"{self.file}: format {formats}; rows that train: {self.num_rows:,}, as sequences: {self.num_sequences:,}, "
            f"tokens: {self.num_tokens:,}, trained tokens: {self.num_trained:,}, longest sequence: {self.longest:,}"
            + (f" ({self.longest_place})." if self.longest_place else ".")
        ]
        if self.num_truncated:
            lines.append(
                f"Sequences longer than data.max_length={self.settings.max_length}, cut on the "
                f"{self.settings.truncation}: {self.num_truncated:,}; tokens lost: {self.num_tokens_cut:,}, trained "
                f"tokens among them: {self.num_trained_cut:,}."
            )
        if self.num_untrainable_sequences:
            lines.append(
                f"Sequences left out because the cut leaves no token that trains: {self.num_untrainable_sequences:,}; "
                f"rows left out with them: {self.num_untrainable_rows:,}. Raise data.max_length or change data.truncation."
            )
        if self.num_split:
            lines.append(
                f"Rows that become several sequences: {self.num_split:,}. An earlier turn has other tokens once a later one "
                "follows, mostly because the chat template rewrites history; each turn trains after the prompt that the "
                "sampler would see."
            )
        if self.num_endless:
            lines.append(
                f"Sequences that train no token which ends generation: {self.num_endless:,}. The model does not learn "
                "to stop from them; compare the chat template with the tokenizer's eos_token."
            )
        if self.num_behind:
            lines.append(
                f"Sequences with text behind a token that ends generation: {self.num_behind:,}. Sampling would stop there, so "
                "that text does not train."
            )
        if self.num_control:
            lines.append(
                f"Rows with control tokens in their messages: {self.num_control:,}, the first {self.first_control}. The model "
                "reads them as such, not as text."
            )
        return lines + ([f"Rows that cannot be used: {self.num_problems:,}."] if self.num_problems else [])

    def add_problem(self, sentence: str) -> None:
        self.num_problems += 1
        if len(self.problems) < NUM_PROBLEMS_SHOWN:
            self.problems.append(sentence)

    def fit_row(self, sequences: list[TrainingSequence], place: str, stops: Sequence[int]) -> list[TrainingSequence]:
        """The sequences of a row that keep a token which trains, within data.max_length; counted."""
        self.num_split += len(sequences) > 1
        return [short for sequence in sequences if (short := self.fit(sequence, place, stops))]

    def fit(self, sequence: TrainingSequence, place: str, stops: Sequence[int]) -> TrainingSequence | None:
        """The sequence within data.max_length, counted; None when the cut leaves no token that trains."""
        limit = self.settings.max_length
        longer = limit is not None and len(sequence.input_ids) > limit
        return self.count(
            sequence, shortened(sequence, limit or 0, self.settings.truncation) if longer else sequence, place, stops
        )

    def count(
        self, whole: TrainingSequence, short: TrainingSequence, place: str, stops: Sequence[int]
    ) -> TrainingSequence | None:
        """Count `short`, which is `whole` or its truncation, and return it; None when no token of it trains."""
        length, num_cut = len(whole.input_ids), len(whole.input_ids) - len(short.input_ids)
        if length > self.longest:
            self.longest, self.longest_place = length, place
        self.num_behind += whole.num_behind > 0
        self.num_endless += not np.isin(whole.input_ids[whole.loss_mask], stops).any()
        if num_cut:
            self.num_truncated += 1
            self.num_tokens_cut += num_cut
            self.num_trained_cut += whole.num_trained - short.num_trained
            if not short.num_trained:
                self.num_untrainable_sequences += 1
                return None
        self.num_tokens += len(short.input_ids)
        self.num_trained += short.num_trained
        return short


def shortened(sequence: TrainingSequence, limit: int, mode: str) -> TrainingSequence:
    """At most `limit` tokens of the sequence: the last ones (`left`) or the first ones (`right`)."""
    mask = np.array(truncate(sequence.loss_mask.tolist(), limit, mode), dtype=np.bool_)
    mask[0] = False  # the token that it was predicted from may be gone
    ids = np.array(truncate(sequence.input_ids.tolist(), limit, mode), dtype=np.int32)
    return replace(sequence, input_ids=ids, loss_mask=mask)


class ConversationDataset:
    """The rows of files that train; `dataset[i]` is the list of sequences of row i, at most max_length tokens each.

    A subclass reads other rows: `summary_class` counts them, `sequences_of` makes their sequences.
    """

    summary_class = FileSummary

    def __init__(self) -> None:
        self.summaries: list[Any] = []  # of summary_class, one per file
        self._rows: list[list[TrainingSequence]] = []
        self._places: list[str] = []

    def sequences_of(
        self, row: Mapping[str, Any], encoder: ConversationEncoder, place: str
    ) -> tuple[str, list[TrainingSequence], Messages]:
        """Format of a row of a file, its sequences whole, and its messages. Raises DataError."""
        assert isinstance(encoder.settings, SFTDataConfig)
        if encoder.settings.row_format is None and "input_ids" in row:
            return "tokenized", [tokenized(row, place, num_embeddings(encoder.tokenizer))], []
        with at(place):
            example = example_of(row, encoder.settings)
        messages = [m for part in (example.prompt, example.completion) if isinstance(part, list) for m in part]
        return example.row_format, encoder.encode(example, place), messages

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> list[TrainingSequence]:
        return self._rows[item]

    def place(self, item: int) -> str:
        """File and row number of a row, for messages."""
        return self._places[item]

    def batch(self, rows: Sequence[int]) -> DataProto:
        """See `training_batch`; the sequences of a row are adjacent, and have its number as `ordinal`."""
        names = [(row, index) for row in rows for index in range(len(self._rows[row]))]
        batch = training_batch([self._rows[row][index] for row, index in names])
        batch.batch["ordinal"] = torch.tensor([row for row, _ in names])
        batch.batch["sample_index"] = torch.tensor([index for _, index in names])
        return batch

    def add(
        self, summary: FileSummary, num_rows: int, read: ReadRow, *, stop_token_ids: Sequence[int], keep_going: bool
    ) -> None:
        """Add the rows of `read`. Raises DataError for the first bad one; with `keep_going` the summary describes them."""
        self.summaries.append(summary)
        for number in range(num_rows):
            try:
                place, row_format, whole, control = read(number)
                _check_length(max(len(sequence.input_ids) for sequence in whole), summary.settings, place)
                sequences = summary.fit_row(whole, place, stop_token_ids)
            except DataError as error:
                if not keep_going:
                    raise
                summary.add_problem(str(error))
                continue
            summary.formats[row_format] += 1
            if control:
                summary.num_control += 1
                summary.first_control = summary.first_control or f"{control!r} in {place}"
            summary.num_untrainable_rows += not sequences
            if sequences:
                self._append(sequences, place)
                summary.num_rows += 1
                summary.num_sequences += len(sequences)

    def _append(self, sequences: list[Any], place: str) -> None:
        self._rows.append(sequences)
        self._places.append(place)


def _check_length(length: int, settings: TextDataConfig, place: str) -> None:
    if settings.max_length is not None and length > settings.max_length and settings.truncation == "error":
        raise DataError(
            f"{place}: a sequence has {length} tokens, more than data.max_length={settings.max_length}. Raise the limit, "
            "or set data.truncation to left or right to cut such rows."
        )


DatasetT = TypeVar("DatasetT", bound=ConversationDataset)


def load_conversations(files: Files, tokenizer: Any, settings: SFTDataConfig, **selects: Any) -> ConversationDataset:
    """Read, tokenize and cut every row of `files`, or of the class of `data.custom_cls` on them; see `read_into`."""
    return read_into(ConversationDataset(), files, tokenizer, settings, **selects)


def read_into(
    dataset: DatasetT,
    files: Files,
    tokenizer: Any,
    settings: SFTDataConfig | PreferenceDataConfig,
    *,
    max_samples: int = -1,
    seed: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    keep_going: bool = False,
) -> DatasetT:
    """The empty `dataset` with every row of `files`, tokenized and cut.

    With `max_samples` only so many rows are read: some that `seed` selects, or without a seed the first ones.
    `stop_token_ids` end generation (None: the tokenizer's eos). Raises DataError for files that cannot be read and for
    the first bad row; with `keep_going` bad rows are left out, and `dataset.summaries` describes them, for `verl check`.
    """
    names = [files] if isinstance(files, str | os.PathLike) else list(files)
    stops = sorted(TurnEnds(tokenizer, stop_token_ids).stops)
    for name, count, read in _sources(dataset, names, tokenizer, settings, max_samples, seed, stops):
        summary = dataset.summary_class(name, settings)
        dataset.add(summary, count, read, stop_token_ids=stops, keep_going=keep_going)
    if not len(dataset) and not keep_going:
        raise DataError(
            f"None of the rows of {', '.join(map(str, names))} keeps a token that trains within "
            f"data.max_length={settings.max_length}; raise it, or change data.truncation."
        )
    return dataset


def _sources(
    dataset: ConversationDataset,
    names: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    settings: SFTDataConfig | PreferenceDataConfig,
    max_samples: int,
    seed: int | None,
    stop_token_ids: Sequence[int],
) -> Iterator[tuple[str, int, ReadRow]]:
    """(name, number of rows, reader) of each file, or of the custom class."""
    if isinstance(settings, SFTDataConfig) and settings.custom_cls.path:
        source = dataset_class(settings)(
            parquet_files=names, tokenizer=tokenizer, config=settings, processor=None, max_samples=max_samples
        )
        yield type(source).__name__, len(source), partial(_row_of_class, source, num_embeddings(tokenizer))
        return
    tables = [read_rows(name) for name in names] or [read_rows([])]
    chosen, start = _chosen(sum(map(len, tables)), max_samples, seed), 0
    encoder, controls = ConversationEncoder(tokenizer, settings, stop_token_ids), control_tokens(tokenizer)
    for name, rows in zip(names, tables, strict=True):
        inside = rows.select(chosen[(chosen >= start) & (chosen < start + len(rows))] - start)
        yield str(name), len(inside), partial(_row_of_file, dataset, inside, encoder, controls)
        start += len(rows)


def _row_of_file(
    dataset: ConversationDataset,
    rows: Rows,
    encoder: ConversationEncoder,
    controls: re.Pattern[str] | None,
    number: int,
) -> tuple[str, str, list[TrainingSequence], str]:
    place = rows.place(number)
    row_format, sequences, messages = dataset.sequences_of(rows[number], encoder, place)
    return place, row_format, sequences, control_token_in(messages, controls)


def _row_of_class(dataset: Any, vocab_size: int, number: int) -> tuple[str, str, list[TrainingSequence], str]:
    name = type(dataset).__name__
    place = f"row {number} of {name}"
    return place, name, [tokenized(dataset[number], place, vocab_size)], ""


def tokenized(row: Mapping[str, Any], place: str, vocab_size: int) -> TrainingSequence:
    """The sequence of a row with input_ids [tokens] below `vocab_size`, and loss_mask or labels (-100: does not train)
    [tokens]; attention_mask where they are padded. Raises DataError naming `place`."""
    columns = {name: row[name] for name in _TOKENIZED if row.get(name) is not None}
    if "input_ids" not in columns or not {"loss_mask", "labels"} & set(columns):
        lacks = "loss_mask or labels" if "input_ids" in columns else "input_ids"
        raise DataError(f"{place} has no {lacks}; give it both.")
    with at(place):
        ids = token_ids(columns["input_ids"], "input_ids", vocab_size)
        mask = (
            token_mask(columns["loss_mask"], "loss_mask", len(ids))
            if "loss_mask" in columns
            else label_mask(columns["labels"], "labels", ids)
        )
        if "attention_mask" in columns:
            exists = token_mask(columns["attention_mask"], "attention_mask", len(ids))
            ids, mask = ids[exists], mask[exists]
    mask[:1] = False
    if not mask.any():
        raise DataError(f"{place} has no token that trains; leave it out.")
    return TrainingSequence(ids, mask)


def _chosen(num_rows: int, max_samples: int, seed: int | None) -> np.ndarray:
    if not 0 < max_samples < num_rows:
        return np.arange(num_rows)
    order = PromptOrder(num_rows, seed or 0, shuffle=seed is not None)
    return np.sort([order.row(number)[1] for number in range(max_samples)])


def training_batch(sequences: Sequence[TrainingSequence]) -> DataProto:
    """Columns prompts, prompt_mask, responses, response_mask and attention_mask of one row per sequence.

    The prompt is everything before the first trained token; tokens after the last trained one change no loss and are
    left out. Untrained tokens between are response tokens outside response_mask.
    """
    rows = []
    for sequence in sequences:
        ids, mask = sequence.input_ids, sequence.loss_mask
        first, last = mask.nonzero()[0][[0, -1]]
        rows.append((ids[:first], ids[first : last + 1], mask[first : last + 1]))
    return DataProto.from_dict(token_columns(rows))


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

    def batch(self, step: int) -> DataProto:
        """The sequences of a step, see `training_batch`; a row's sequences stay together."""
        return self.dataset.batch(self.rows(step))
