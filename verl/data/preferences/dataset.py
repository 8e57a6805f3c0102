"""Files of preferences as training sequences: two for a pair, the chosen one first, or one for a labelled completion.

A pair's sequences share their prompt token by token, so a packed forward computes it once. Their rows of a batch are
adjacent and have the same `ordinal`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.config.sections.data import PreferenceDataConfig
from verl.data.conversations.dataset import ConversationDataset, read_into, training_batch
from verl.data.conversations.formats import Example
from verl.data.conversations.store import FileSummary, shortened
from verl.data.conversations.tokens import ConversationEncoder, TrainingSequence
from verl.data.order import PromptOrder
from verl.data.preferences.formats import Preference, preference_of
from verl.data.schema import Messages, at
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.data.dataset import Files
    from verl.data_proto.media import Media
    from verl.data_proto.proto import DataProto


_SEARCHED = 1024  # rows outside of a batch, for one with another prompt


@dataclass(frozen=True)
class PreferenceSequence(TrainingSequence):
    """A prompt with one completion. `chosen`: it is the better one of its pair, or desirable. `completion_mask` bool [tokens]
    is true on the completion if `loss_mask` says more; None: they are equal."""

    chosen: bool = True
    margin: float = 0.0
    completion_mask: np.ndarray | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.completion.argmax())

    @property
    def completion(self) -> np.ndarray:
        return self.loss_mask if self.completion_mask is None else self.completion_mask

    def digest(self, media: Media | None) -> bytes:
        """A name for the sequence by its tokens, its completion and its images, 16 bytes."""
        name = hashlib.blake2b(self.input_ids.astype("<i4").tobytes(), digest_size=16)
        name.update(self.completion.tobytes())
        if media is not None:
            name.update(media.digest.encode())
        return name.digest()


@dataclass
class PreferenceSummary(FileSummary):
    """See FileSummary. The two completions of a pair are cut to the same prompt, and are not a row that was split."""

    num_completions_cut: int = 0

    def sentences(self) -> list[str]:
        lines = super().sentences()
        if self.num_completions_cut:
            lines.insert(
                1,
                f"Completions of which data.max_length={self.settings.max_length} leaves only a part: "
                f"{self.num_completions_cut:,}.",
            )
        return lines

    def fit_row(self, sequences: list[Any], place: str, stops: Sequence[int]) -> list[Any]:
        """See FileSummary; empty when a completion keeps no token. Raises DataError for a pair that becomes equal."""
        short = cut_together(sequences, self.settings.max_length, self.settings.truncation)
        if len(short) == 2 and short[0].num_trained and np.array_equal(short[0].input_ids, short[1].input_ids):
            limit = f" within data.max_length={self.settings.max_length}" if short is not sequences else ""
            raise DataError(
                f"{place}: the chosen and the rejected completion have the same tokens{limit}, so that there is nothing to "
                "prefer. Raise data.max_length, or leave the row out."
            )
        trainable = [self.count(*both, place, stops) for both in zip(sequences, short, strict=True)]
        self.num_completions_cut += sum(
            0 < after.num_trained < before.num_trained for before, after in zip(sequences, short, strict=True)
        )
        return trainable if all(trainable) else []


def cut_together(sequences: list[Any], limit: int | None, truncation: str) -> list[Any]:
    """The sequences of a row within `limit` tokens, with the same prompt. `left` cuts the start of the prompt and, when only
    one prompt token is left, the ends of the completions; `right` cuts only the ends."""
    excess = max(len(sequence.input_ids) for sequence in sequences) - (limit or 0)
    if limit is None or excess <= 0:
        return sequences
    if truncation == "left":
        start = min(excess, sequences[0].num_prompt_tokens - 1)
        sequences = [shortened(sequence, len(sequence.input_ids) - start, "left") for sequence in sequences]
    return [shortened(s, limit, "right") if len(s.input_ids) > limit else s for s in sequences]


class PreferenceDataset(ConversationDataset):
    """Rows of preferences. `paired`: every row is a pair; else every row is one completion, and a pair becomes two rows.
    `trains_prompts`: the prompt of a chosen completion trains too (ORPO)."""

    summary_class = PreferenceSummary
    sequence_class = PreferenceSequence

    def __init__(self, *, paired: bool = True, trains_prompts: bool = False):
        super().__init__()
        self.paired, self.trains_prompts = paired, trains_prompts

    def sequences_of(
        self, row: Mapping[str, object], encoder: ConversationEncoder, place: str
    ) -> tuple[str, list[TrainingSequence], Messages]:
        assert isinstance(encoder.settings, PreferenceDataConfig)
        with at(place):
            preference = preference_of(row, encoder.settings, images=encoder.images is not None)
            if self.trains_prompts and preference.images:
                raise DataError(
                    "the row has images, whose tokens cannot train, and the loss orpo trains on prompts. Choose another loss."
                )
            if self.paired and preference.label is not None:
                raise DataError(
                    "the row is a labelled completion, and this training needs pairs. Train on it with `verl kto`, or give "
                    f"the row {encoder.settings.chosen_key!r} and {encoder.settings.rejected_key!r}."
                )
        messages = [m for part in (preference.prompt, *preference.completions) if isinstance(part, list) for m in part]
        sequences = [_encoded(preference, index, encoder, place) for index in range(len(preference.completions))]
        return preference.row_format, [*sequences], messages

    def image_sources(self, row: Mapping[str, Any], settings: Any) -> list[object]:
        return preference_of(row, settings, images=True).images

    def rows_of(self, sequences: list[Any]) -> list[list[object]]:
        if self.trains_prompts:
            sequences = [_with_trained_prompt(s) if s.chosen else s for s in sequences]
        return [sequences] if self.paired else [[sequence] for sequence in sequences]

    def __getitem__(self, item: int) -> list[Any]:  # of PreferenceSequence
        return super().__getitem__(item)

    def sequences(self, rows: Sequence[int]) -> list[PreferenceSequence]:
        """The sequences of `rows`, in the order of `batch`."""
        return [sequence for row in rows for sequence in self[row]]

    def batch(self, rows: Sequence[int]) -> DataProto:
        """See ConversationDataset; sample_index is 0 for the chosen and 1 for the rejected completion of a pair. Adds chosen
        (bool) and margin (float32) [batch], and completion_mask [batch, response] if prompts train."""
        batch, sequences = super().batch(rows), self.sequences(rows)
        batch.batch["chosen"] = torch.tensor([sequence.chosen for sequence in sequences])
        batch.batch["margin"] = torch.tensor([sequence.margin for sequence in sequences])
        if self.trains_prompts:
            mask = torch.zeros_like(batch.batch["response_mask"])
            for row, sequence in enumerate(sequences):
                completion = torch.from_numpy(sequence.completion[sequence.loss_mask.argmax() :].copy())
                width = min(len(completion), mask.shape[1])
                mask[row, :width] = completion[:width]
            batch.batch["completion_mask"] = mask
        return batch

    def prompts(self) -> list[int]:
        """A number for the prompt of each row; rows with equal prompts have equal numbers."""
        first = (self._rows[row][0] for row in range(len(self)))
        return [hash(sequence.input_ids[: sequence.num_prompt_tokens].tobytes()) for sequence in first]

    def mismatched(
        self, rows: Sequence[int], partners: Sequence[int], max_length: int | None
    ) -> list[PreferenceSequence]:
        """The prompt of each row with the completion of row `partners[row]`, at most `max_length` tokens of both (KTO's
        estimate of the KL divergence needs completions that are not of the prompt)."""
        sequences = []
        for row in rows:
            (sequence,), (other,) = self[row], self._rows[partners[row]]
            prompt, start = sequence.input_ids[: sequence.num_prompt_tokens], other.num_prompt_tokens
            ids = np.concatenate([prompt, other.input_ids[start:]])[:max_length]
            mask = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), other.loss_mask[start:]])[:max_length]
            sequences.append(PreferenceSequence(ids, mask, images=sequence.images))
        return sequences


def partners_of(prompts: Sequence[object], batch_size: int, *, seed: int, shuffle: bool) -> list[int]:
    """The last row with another prompt before each row in its batch of the first epoch, a ring. If all of the batch has
    one prompt, the search continues in the order of all rows. A last batch that is incomplete counts too, a single row as part
    of the batch before it."""
    num_rows = len(prompts)
    order = PromptOrder(num_rows, seed, shuffle)
    rows = [order.row(number)[1] for number in range(num_rows)]
    starts = [start for start in range(0, num_rows, batch_size) if start == 0 or start < num_rows - 1]
    partners = [0] * num_rows
    for start, end in zip(starts, [*starts[1:], num_rows], strict=True):
        for place in range(start, end):
            inside = chain(range(place - 1, start - 1, -1), range(end - 1, place, -1))
            outside = chain(range(start - 1, -1, -1), range(num_rows - 1, end - 1, -1))
            current, before = rows[place], rows[place - 1 if place > start else end - 1]
            near = (rows[other] for other in islice(chain(inside, outside), batch_size + _SEARCHED))
            partners[current] = next((row for row in near if prompts[row] != prompts[current]), before)
    return partners


def _encoded(preference: Preference, index: int, encoder: ConversationEncoder, place: str) -> PreferenceSequence:
    completion = preference.completions[index]
    marks = (None,) * (0 if isinstance(completion, str) else len(preference.prompt) + len(completion))
    example = Example(
        "prompt_completion", preference.prompt, completion, marks, preference.tools, preference.template_kwargs,
        preference.images,
    )  # fmt: skip
    sequence, *further = encoder.encode(example, place)
    if further:
        raise DataError(
            f"{place}: the chat template renders an earlier turn of the completion otherwise once a later turn follows, so "
            "the completion is not a single sequence. Move all but the last turn to the prompt."
        )
    chosen = index == 0 if preference.label is None else preference.label
    return PreferenceSequence(**vars(sequence), chosen=chosen, margin=preference.margin)


def _with_trained_prompt(sequence: PreferenceSequence) -> PreferenceSequence:
    mask = sequence.loss_mask.copy()
    mask[1 : sequence.num_prompt_tokens] = True
    return replace(sequence, loss_mask=mask, completion_mask=sequence.loss_mask)


def load_preferences(
    files: Files,
    tokenizer: Tokenizer,
    settings: PreferenceDataConfig,
    *,
    paired: bool = True,
    trains_prompts: bool = False,
    **selects: Any,
) -> PreferenceDataset:
    """Read, tokenize and cut every row of `files`; PreferenceDataset and `read_into` describe the arguments."""
    dataset = PreferenceDataset(paired=paired, trains_prompts=trains_prompts)
    return read_into(dataset, files, tokenizer, settings, **selects)


def sequence_batch(sequences: Sequence[PreferenceSequence]) -> DataProto:
    """The batch of sequences that are no rows of a data set, see `training_batch`; `ordinal` counts them."""
    batch = training_batch(sequences)
    batch.batch["ordinal"] = torch.arange(len(sequences))
    return batch
