"""Recipes that autograd keeps of a layer for its backward, in place of tensors that are cheap to compute again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

Recipe = Callable[[], torch.Tensor]


@contextmanager
def computed_again(*recipes: tuple[torch.Tensor, Recipe]) -> Iterator[None]:
    """Inside, autograd keeps the recipe of each tensor in place of the tensor and its views. The backward calls the recipe,
    whose result has the strides and values of the tensor."""
    by_memory = {_memory(tensor): recipe for tensor, recipe in recipes}

    def pack(saved: torch.Tensor) -> torch.Tensor | Recipe:
        recipe = by_memory.get(_memory(saved))
        if recipe is None:
            return saved
        return partial(_view, recipe, saved.size(), saved.stride(), int(saved.storage_offset()))

    with saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, torch.Tensor) else saved()):
        yield


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(recipe: Recipe, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return recipe().as_strided(size, stride, offset)
