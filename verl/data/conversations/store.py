"""Training sequences of rows in flat arrays, in memory or as a memory map of the user's cache, and the counts of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.check import NUM_PROBLEMS_SHOWN
from verl.data.prompts import truncate
from verl.errors import DataError, UnavailableRowError

if TYPE_CHECKING:
    from verl.config.sections.data import TextDataConfig
    from verl.data.conversations.tokens import TrainingSequence


# fields of sequences: arrays with a value for each token or step, and numbers
_ARRAYS = {"input_ids": np.int32, "loss_mask": np.bool_, "completion_mask": np.bool_, "labels": np.bool_}
_NUMBERS = {"num_behind": np.int64, "chosen": np.bool_, "margin": np.float64, "rating": np.float64}
_Columns = Mapping[str, np.ndarray]


def columns_of(kind: type[object], rows: Sequence[Sequence[object]]) -> dict[str, np.ndarray]:
    """The sequences of `rows`, of the dataclass `kind`, as columns: num_sequences [rows], and for each field its values
    [sequences], or its arrays end to end with NAME_sizes [sequences]."""
    sequences = [sequence for row in rows for sequence in row]
    columns = {"num_sequences": np.array([len(row) for row in rows], dtype=np.int32)}
    for name in _names(kind):
        values = [getattr(sequence, name) for sequence in sequences]
        if name in _NUMBERS:
            columns[name] = np.array(values, dtype=_NUMBERS[name])
        else:
            arrays = [np.empty(0, dtype=_ARRAYS[name]) if value is None else value for value in values]
            columns[name] = np.concatenate([np.empty(0, dtype=_ARRAYS[name]), *arrays]).astype(
                _ARRAYS[name], copy=False
            )
            columns[f"{name}_sizes"] = np.array([len(array) for array in arrays], dtype=np.int32)
    return columns


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "images"]  # the rows of the files have them


class SequenceStore(Sequence[list[object]]):
    """The list of sequences of each row, of the dataclass `kind`; columns of several files follow each other."""

    def __init__(self, kind: type[object]):
        self.kind = kind
        self._files: list[dict[str, np.ndarray]] = []
        self._ends: list[int] = []  # rows up to the end of each file

    def add(self, columns: _Columns) -> None:
        starts = {
            f"{name}_starts": np.concatenate([[0], np.cumsum(columns[sizes], dtype=np.int64)])
            for name in ("row", *_names(self.kind))
            if (sizes := "num_sequences" if name == "row" else f"{name}_sizes") in columns
        }
        self._files.append({**columns, **starts})
        self._ends.append(len(self) + len(columns["num_sequences"]))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, row: int) -> tuple[int, int]:
        """(file, row in it) of a row."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        file = int(np.searchsorted(self._ends, row, side="right"))
        return file, row - (self._ends[file - 1] if file else 0)

    def __getitem__(self, row: Any) -> Any:
        file, number = self.locate(row)
        columns = self._files[file]
        first, end = columns["row_starts"][number : number + 2].tolist()
        return [self._sequence(columns, index) for index in range(first, end)]

    def _sequence(self, columns: _Columns, index: int) -> object:
        values: dict[str, object] = {}
        for name in _names(self.kind):
            if name in _NUMBERS:
                values[name] = columns[name][index].item()
            else:
                start, end = columns[f"{name}_starts"][index : index + 2].tolist()
                values[name] = columns[name][start:end].copy() if end > start else None  # the store is never written
        return self.kind(**values)


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
    num_endless: int = 0  # sequences without a trained token that ends generation
    num_behind: int = 0  # sequences with text behind a token that ends generation
    num_plain: int = 0  # rows with a text prompt though the tokenizer has a chat template
    num_control: int = 0  # rows with control tokens in the contents of their messages
    first_control: str = ""  # the first of these tokens, and its row
    longest: int = 0
    longest_place: str = ""
    num_problems: int = 0  # rows that would stop a run
    problems: list[str] = field(default_factory=list)  # a sentence for each of the first of them
    features: Counter[str] = field(default_factory=Counter)  # what is not available -> the rows among them that need it

    def sentences(self) -> list[str]:
        """The summary for people; the first sentence is always present, each other one when its count is not 0."""
        formats = ", ".join(f"{name} (rows: {count:,})" for name, count in self.formats.most_common()) or "none"
        place = f" ({self.longest_place})" if self.longest_place else ""
        first = (
            f"{self.file}: format {formats}; rows that train: {self.num_rows:,}, as sequences: {self.num_sequences:,}, "
            f"tokens: {self.num_tokens:,}, trained tokens: {self.num_trained:,}, longest sequence: {self.longest:,}{place}."
        )
        counts = {
            f"Sequences longer than data.max_length={self.settings.max_length}, cut on the {self.settings.truncation}: "
            f"{self.num_truncated:,}; tokens lost: {self.num_tokens_cut:,}, trained tokens among them: "
            f"{self.num_trained_cut:,}.": self.num_truncated,
            f"Sequences left out because the cut leaves no token that trains: {self.num_untrainable_sequences:,}; rows left "
            f"out with them: {self.num_untrainable_rows:,}. Raise data.max_length or change "
            "data.truncation.": self.num_untrainable_sequences,
            f"Rows that become several sequences: {self.num_split:,}. An earlier turn has other tokens once a later one "
            "follows, mostly because the chat template rewrites history; each turn trains after the prompt that the "
            "sampler would see.": self.num_split,
            f"Sequences that train no token which ends generation: {self.num_endless:,}. The model does not learn to stop "
            "from them; compare the chat template with the tokenizer's eos_token.": self.num_endless,
            f"Sequences with text behind a token that ends generation: {self.num_behind:,}. Sampling would stop there, so "
            "that text does not train.": self.num_behind,
            f"Rows of plain text: {self.num_plain:,}. They train without the chat template, by which `verl train`, `generate` "
            "and `chat` render a text prompt; write messages to train with it.": self.num_plain,
            f"Rows with control tokens in their messages: {self.num_control:,}, the first {self.first_control}. The model "
            "reads them as such, not as text.": self.num_control,
            f"Rows that cannot be used: {self.num_problems:,}.": self.num_problems,
        }
        return [first, *(sentence for sentence, count in counts.items() if count)]

    def add_problem(self, error: DataError) -> None:
        self.num_problems += 1
        if isinstance(error, UnavailableRowError):
            self.features[error.feature] += 1
        elif len(self.problems) < NUM_PROBLEMS_SHOWN:
            self.problems.append(str(error))

    def counts(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in ("file", "settings")}

    def add_counts(self, counts: Mapping[str, Any]) -> None:
        if counts["longest"] > self.longest:
            self.longest, self.longest_place = counts["longest"], counts["longest_place"]
        self.first_control = self.first_control or counts["first_control"]
        self.formats.update(counts["formats"])
        self.features.update(counts.get("features", {}))
        self.problems = [*self.problems, *counts["problems"]][:NUM_PROBLEMS_SHOWN]
        for name, count in counts.items():
            if name.startswith("num_"):
                setattr(self, name, getattr(self, name) + count)

    def fit_row(self, sequences: list[TrainingSequence], place: str, stops: Sequence[int]) -> list[TrainingSequence]:
        """Cut a row's sequences to data.max_length, drop those without a trained token, and count both."""
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
        self, full: TrainingSequence, short: TrainingSequence, place: str, stops: Sequence[int]
    ) -> TrainingSequence | None:
        """Count `short`, a truncation of `full` or `full` itself, and return it; None if no token of it trains."""
        length, num_cut = len(full.input_ids), len(full.input_ids) - len(short.input_ids)
        if length > self.longest:
            self.longest, self.longest_place = length, place
        self.num_behind += full.num_behind > 0
        self.num_endless += not np.isin(full.input_ids[full.loss_mask], stops).any()
        if num_cut:
            self.num_truncated += 1
            self.num_tokens_cut += num_cut
            self.num_trained_cut += full.num_trained - short.num_trained
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
