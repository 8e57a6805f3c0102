"""Files of completions with a rating (labelled rows with a rating in place of the label), and of solutions with a label for
each step, as training sequences of reward models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.config.roots.reward_model import RMDataConfig
from verl.data.conversations.dataset import ConversationDataset
from verl.data.conversations.formats import named
from verl.data.conversations.tokens import ConversationEncoder, TrainingSequence
from verl.data.images import ConversationImages, image_messages
from verl.data.messages import messages_in, refuse_media, template_kwargs_of, text_in, tools_in, unfilled, with_system
from verl.data.preferences.dataset import PreferenceDataset
from verl.data.prompts import encode_text, render_chat
from verl.data.schema import Messages, at, number_in
from verl.data_proto.proto import DataProto
from verl.data_proto.token_ids import token_mask
from verl.errors import DataError


@dataclass(frozen=True)
class RatedSequence(TrainingSequence):
    """A prompt with one completion and its rating."""

    rating: float = 0.0


class RatedDataset(ConversationDataset):
    """Rows of rated completions."""

    sequence_class = RatedSequence

    def __init__(self) -> None:
        super().__init__()
        self._reader = PreferenceDataset(paired=False)

    def sequences_of(
        self, row: Mapping[str, object], encoder: ConversationEncoder, place: str
    ) -> tuple[str, list[TrainingSequence], Messages]:
        settings = encoder.settings
        assert isinstance(settings, RMDataConfig)
        with at(place):
            rating = number_in(row.get(settings.rating_key), settings.rating_key)
        name, (sequence,), messages = self._reader.sequences_of(_labelled(row, settings), encoder, place)
        rated = RatedSequence(
            sequence.input_ids, sequence.loss_mask, rating, num_behind=sequence.num_behind, images=sequence.images
        )
        return name.replace("label", "rating"), [rated], messages

    def image_sources(self, row: Mapping[str, Any], settings: Any) -> list[object]:
        return self._reader.image_sources(_labelled(row, settings), settings)

    def batch(self, rows: Sequence[int]) -> DataProto:
        """See ConversationDataset; adds rating float32 [batch]."""
        batch = super().batch(rows)
        batch.batch["rating"] = torch.tensor([sequence.rating for row in rows for sequence in self._rows[row]])
        return batch


def _labelled(row: Mapping[str, object], settings: RMDataConfig) -> dict[str, object]:
    """A rated row as a labelled one, also if it has a pair too."""
    return {**row, settings.label_key: True, settings.chosen_key: None}


@dataclass(frozen=True)
class StepSequence(TrainingSequence):
    """A prompt with the steps of a solution. `loss_mask` is true on the token after each labelled step, where the score of the
    state at the step's end is read; `labels` bool [labelled steps]."""

    labels: np.ndarray

    def kept_labels(self, truncation: str) -> np.ndarray:
        """The labels of the steps that a cut has left."""
        lost = len(self.labels) - self.num_trained
        return self.labels[lost:] if truncation == "left" else self.labels[: self.num_trained]


class StepDataset(ConversationDataset):
    """Rows of labelled steps. A step ends with `separator`, the last one is followed by the token that ends generation.
    `last_step_only`: the labels of earlier steps do not train."""

    sequence_class = StepSequence

    def __init__(self, separator: str, *, last_step_only: bool = False):
        super().__init__()
        self.separator, self.last_step_only = separator, last_step_only

    def sequences_of(
        self, row: Mapping[str, object], encoder: ConversationEncoder, place: str
    ) -> tuple[str, list[TrainingSequence], Messages]:
        settings, tokenizer, row = encoder.settings, encoder.tokenizer, unfilled(row)
        assert isinstance(settings, RMDataConfig)
        with at(place):
            refuse_media(row, settings, images=encoder.images is not None)
            steps, labels = _steps(row, settings)
            prompt = row.get(settings.prompt_key)
            messages: Messages = []
            images = ConversationImages([], encoder.images, place)
            if isinstance(prompt, str):
                prompt = with_system(text_in(prompt, settings.prompt_key), row, settings)
                ids = encode_text(tokenizer, prompt, place)
            else:
                messages, sources = _asked(row, settings, images=encoder.images is not None)
                images = ConversationImages(sources, encoder.images, place)
                tools = tools_in(row.get(settings.tools_key), settings.tools_key)
                kwargs = template_kwargs_of(row, settings) | ({"tools": tools} if tools else {})
                if encoder.checks is not None:
                    encoder.checks.check_chat(messages, place, add_generation_prompt=True, **kwargs)
                text = render_chat(tokenizer, messages, place, add_generation_prompt=True, **kwargs)
                ids = encode_text(tokenizer, images.expanded(text), place, add_special_tokens=False)
        ids, after = list(ids), []
        for step in steps:
            ids += encode_text(tokenizer, step + self.separator, place, add_special_tokens=False)
            after.append(len(ids))
        mask = np.zeros(len(ids) + 1, dtype=np.bool_)
        first = len(steps) - 1 if self.last_step_only else 0
        mask[after[first:]] = True
        input_ids = np.array([*ids, encoder.ends.token(place, after_chat=bool(messages))], dtype=np.int32)
        sequence = StepSequence(input_ids, mask, np.array(labels[first:], dtype=np.bool_))
        return "labelled_steps", images.attached([sequence]), messages

    def image_sources(self, row: Mapping[str, Any], settings: Any) -> list[object]:
        return _asked(unfilled(row), settings, images=True)[1]

    def batch(self, rows: Sequence[int]) -> DataProto:
        """See ConversationDataset; adds step_labels float32 [batch, response], 1 in response_mask behind a right step."""
        batch = super().batch(rows)
        mask = batch.batch["response_mask"]
        labels = torch.zeros(mask.shape)
        row_labels = [s.kept_labels(self.settings.truncation) for row in rows for s in self._rows[row]]
        labels[mask] = torch.from_numpy(np.concatenate(row_labels)).float()
        batch.batch["step_labels"] = labels
        return batch


def _asked(row: Mapping[str, object], settings: RMDataConfig, *, images: bool) -> tuple[Messages, list[object]]:
    """The messages of the prompt, and the sources of their images. Raises DataError."""
    messages = with_system(messages_in(row.get(settings.prompt_key), settings.prompt_key, images=images), row, settings)
    return image_messages(messages, row, settings) if images else (messages, [])


def _steps(row: Mapping[str, Any], settings: RMDataConfig) -> tuple[list[str], list[bool]]:
    keys = (settings.steps_key, settings.labels_key)
    lists = [row.get(key) for key in keys]
    if not all(isinstance(value, list | tuple | np.ndarray) and len(value) for value in lists):
        raise DataError(f"fields {named(keys)} must be lists of the steps of a solution and of their labels.")
    steps, labels = ([*value] for value in lists if value is not None)
    if len(steps) != len(labels):
        raise DataError(f"field {keys[0]!r} has {len(steps)} steps, but field {keys[1]!r} has {len(labels)} labels.")
    return [text_in(step, keys[0]) for step in steps], token_mask(labels, keys[1], len(labels)).tolist()
