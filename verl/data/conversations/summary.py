"""Counts of a file of conversations: rows, tokens, what a cut has removed, rows that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.check import NUM_PROBLEMS_SHOWN
from verl.data.conversations.tokens import TrainingSequence
from verl.data.prompts import truncate

if TYPE_CHECKING:
    from verl.config.sections.data import TextDataConfig


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

    def counts(self) -> dict[str, object]:
        """The fields that `add_counts` takes, as JSON."""
        return {name: value for name, value in vars(self).items() if name not in ("file", "settings")}

    def add_counts(self, counts: Mapping[str, Any]) -> None:
        """Count the rows behind the rows so far."""
        if counts["longest"] > self.longest:
            self.longest, self.longest_place = counts["longest"], counts["longest_place"]
        self.first_control = self.first_control or counts["first_control"]
        self.formats.update(counts["formats"])
        self.problems = [*self.problems, *counts["problems"]][:NUM_PROBLEMS_SHOWN]
        for name, count in counts.items():
            if name.startswith("num_"):
                setattr(self, name, getattr(self, name) + count)

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
