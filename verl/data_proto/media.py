"""The images of a prompt as a model reads them: one object, which all samples of the prompt share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from verl.data_proto.proto import DataProto


@dataclass(frozen=True, eq=False)
class Media:
    """Images of one prompt. `tensors` are the inputs of the model's forward that its family's processor made, by name, such as
    pixel_values and image_grid_thw. `digest` names the images and the settings of the processor: Media of one digest are equal.
    `thumbnails` are small pictures of them as data URLs, for people.

        Media("9f2c...", {"pixel_values": [64, 1176], "image_grid_thw": [1, 3]})
    """

    digest: str
    tensors: dict[str, torch.Tensor]
    thumbnails: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def media_of(batch: DataProto) -> list[Media | None] | None:
    """The column `media` of a batch, a value for each row; None where the batch has no such column."""
    column = batch.non_tensor_batch.get("media")
    return None if column is None else list(column)
