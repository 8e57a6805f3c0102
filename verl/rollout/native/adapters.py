"""The adapters of the tokens of a forward. Neighbours with equal adapters are multiplied together (S-LoRA, Sheng et al. 2023,
arXiv:2311.03285); the base model's products have all tokens."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from verl.models.adapter_weights import AdapterWeights, LowRank
from verl.models.decoder.projection import Projection

Arranged = TypeVar("Arranged")


class TokenAdapters:
    """`adapters[numbers[i]]` is the adapter of token i; None: the base model."""

    def __init__(self, adapters: Sequence[AdapterWeights | None], numbers: np.ndarray):
        self.adapters, self.numbers = adapters, numbers

    def runs(self) -> tuple[np.ndarray, list[AdapterWeights | None]]:
        """(ends, adapter of each) of the runs of neighbours with equal adapters."""
        ends = np.append(np.flatnonzero(np.diff(self.numbers)) + 1, len(self.numbers)).astype(np.int64)
        return ends, [self.adapters[self.numbers[end - 1]] for end in ends]

    def groups(self) -> list[tuple[AdapterWeights, torch.Tensor]]:
        """Each adapter with the indices of its tokens."""
        present = [(a, np.flatnonzero(self.numbers == i)) for i, a in enumerate(self.adapters) if a is not None]
        return [(adapter, torch.from_numpy(rows)) for adapter, rows in present if len(rows)]


class ArrangedAdapters(Generic[Arranged]):
    """Adapters in the layout of a forward, cached until the adapter is garbage. `arrange` gets a list with the joined
    adapter of each product of `projections`, or None for a product without one."""

    def __init__(
        self, module: nn.Module, projections: Sequence[Projection], arrange: Callable[[list[LowRank | None]], Arranged]
    ):
        names = {part: name for name, part in module.named_modules()}
        self._layers = [([names[p] for p in q.parts], [p.out_features for p in q.parts]) for q in projections]
        self._dtype, self._arrange = projections[0].weight.dtype, arrange
        self._arranged: WeakKeyDictionary[AdapterWeights, Arranged] = WeakKeyDictionary()

    def of(self, adapter: AdapterWeights) -> Arranged:
        """The adapter, arranged when it is first used."""
        if adapter not in self._arranged:
            self._arranged[adapter] = self._arrange(
                [adapter.joined(names, outputs, self._dtype) for names, outputs in self._layers]
            )
        return self._arranged[adapter]
