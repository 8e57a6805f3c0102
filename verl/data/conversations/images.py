"""The images of a conversation on its way to training sequences: all of them stand before its first trained token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verl.data.images import ImageEncoder, RowImages
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.data.conversations.tokens import TrainingSequence


class ConversationImages:
    """Images at `sources` in the conversation of a row; `encoder` is None for a model that reads text."""

    def __init__(self, sources: Sequence[object], encoder: ImageEncoder | None, place: str):
        self.encoder, self.place = encoder, place
        self.row = RowImages(sources, encoder, place) if sources and encoder is not None else None
        self._read = None if self.row is None else self.row.read()

    def expanded(self, text: str) -> str:
        """The rendering of the first messages, with the text of each of their images."""
        return text if self._read is None else self._read.expanded(text, whole=False)

    def refuse_markers(self) -> None:
        """Raise DataError in a row with images: their tokens are not in the rendering that has the markers of a template."""
        if self.row is not None:
            raise DataError(
                f"{self.place}: the template has generation markers, which are not read in rows with images. Set "
                "data.loss_on=completion."
            )

    def attached(self, sequences: list[TrainingSequence]) -> list[TrainingSequence]:
        """The sequences of the row with its images. Raises DataError where one follows the first token that trains, or where a
        row without images has a token that stands for one."""
        if self.encoder is None:
            return sequences
        for sequence in sequences:
            if self._read is None:
                self.encoder.require_none(sequence.input_ids.tolist(), self.place)
            else:
                self._require_before(sequence)
        return [replace(sequence, images=self.row) for sequence in sequences]

    def _require_before(self, sequence: TrainingSequence) -> None:
        assert self._read is not None
        before = sequence.input_ids[: int(sequence.loss_mask.argmax())]
        if self._read.num_tokens(before.tolist()) != self._read.num_parts(*self._read.media.texts):
            raise DataError(
                f"{self.place}: an image follows the first token that trains, which is not available in this version. Give the "
                "images in messages before the first answer that trains, or train only on the last answer (loss_mask)."
            )
