"""Columns of a batch in addition to tokens: the images of its rows, and the experts that an earlier forward chose for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl.data_proto.media import Media, RowMedia

if TYPE_CHECKING:
    import numpy as np
    import torch

    from verl.data_proto.proto import DataProto

MEDIA_COLUMNS = ("media", "episode_media")
EXPERTS = "routed_experts"  # the record of each row (verl/models/routing.py), or None


def media_of(batch: DataProto) -> list[Media | None] | None:
    """The column `media` of a batch, the images of each data row; None if the batch has no such column."""
    column = batch.non_tensor_batch.get("media")
    return None if column is None else list(column)


def row_media_of(batch: DataProto) -> list[RowMedia] | None:
    """The images that each row's tokens have: the images of its episode, else of its data row. None if the batch has no
    such column."""
    episodes = batch.non_tensor_batch.get("episode_media")
    media = media_of(batch) if episodes is None else list(episodes)
    return None if media is None else list(media)


def experts_of(batch: DataProto) -> list[np.ndarray | None] | None:
    """The column EXPERTS of a batch; None if the batch has no such column."""
    column = batch.non_tensor_batch.get(EXPERTS)
    return None if column is None else list(column)


@dataclass(frozen=True)
class BatchExtras:
    """Images, experts and noise of the rows of a batch, on their way through plan and layout to the forward. None: no row has
    any.

    >>> import numpy as np
    >>> BatchExtras(experts=[None, np.zeros((5, 2, 1))]).select([0]).experts
    [None]

    `experts`: the experts [tokens, layers, k] that the forward of a row chooses, or None. `noise` gives the noise
    [tokens, hidden_size] on the embeddings of a row from its token ids.
    """

    media: Sequence[RowMedia] | None = None
    experts: Sequence[np.ndarray | None] | None = None
    noise: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def of(
        cls, batch: DataProto, *, replays: bool, noise: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> BatchExtras:
        """The extras of all rows of `batch`, with its experts if the forward `replays` them."""
        return cls(row_media_of(batch), experts_of(batch) if replays else None, noise)

    @property
    def has_images(self) -> bool:
        return self.media is not None and any(self.media)

    def select(self, rows: Sequence[int]) -> BatchExtras:
        """The extras of the rows `rows`."""
        media = None if self.media is None else [self.media[row] for row in rows]
        experts = None if self.experts is None else [self.experts[row] for row in rows]
        return replace(self, media=media, experts=experts)
