"""The images in chunks of prompts: their places, the positions behind them, and their features.

The features of each prompt are computed by themselves, so that their bits do not depend on other prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.models.vision import ImageFeatures, PlacedMedia, image_features, positions_within
from verl.rollout.layout import Chunk
from verl.rollout.native.batch import Group


def place_images(
    module: Any, chunks: Sequence[tuple[Group, Chunk]], first: int, device: torch.device
) -> tuple[list[PlacedMedia], list[int]]:
    """Images in `chunks`, whose tokens lie back to back from token `first` on, and the shift of positions where each chunk
    starts, behind images whose keys are stored; sets the shifts of the groups."""
    placed, shifts, start = [], [], first
    for group, chunk in chunks:
        end = start + chunk.end - chunk.start
        group.shift = before = 0
        for span in group.request.placed:
            ids = torch.tensor(group.request.token_ids[span.start : span.start + span.length], device=device)
            shift = positions_within(module, ids, span.media)[1]
            group.shift += shift
            if span.start < chunk.start:
                before += shift
            else:
                placed.append(PlacedMedia(start + span.start - chunk.start, span.length, end, span.media))
        shifts.append(before)
        start = end
    return placed, shifts


def features_of(module: Any, tokens: torch.Tensor, placed: Sequence[PlacedMedia]) -> ImageFeatures | None:
    """The features of the images `placed` in `tokens` (int64 [tokens]); None without images."""
    parts = (image_features(module, tokens[None], [item]) for item in placed)
    return ImageFeatures.joined([part for part in parts if part is not None])
