"""A limit of the tokens of a micro-batch that follows the memory of its device.

    bytes per token = most memory beyond the resting state of a micro-batch / its tokens
    limit           = share of what can be allocated / bytes per token, at most doubled from one step to the next

Losses divide by the totals of the mini-batch, so the split changes no loss and no gradient but for the rounding of sums; since
memory decides, two runs may round differently.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from verl.engines.api import MicroBatching
from verl.parallel import memory
from verl.parallel.device import peak_memory, start_peak

log = logging.getLogger(__name__)

_SHARE = 0.8  # of the memory that is free; the next mini-batch may pack less well


class Headroom:
    """The limit of one rank, from the memory that its micro-batches took."""

    def __init__(self, device: torch.device):
        self._device = device
        self._resting: int | None = None  # bytes before the first micro-batch, on a CPU
        self._bytes_per_token = 0.0
        self.limit: int | None = None  # tokens; None before the first step

    def adapted(self, micro: MicroBatching) -> MicroBatching:
        """`micro` with the tokens that fit now, if it is cut by tokens; as it is before anything was measured."""
        if micro.max_tokens is None:
            return micro
        if self.limit is None or not self._bytes_per_token:
            self.limit = micro.max_tokens
            return micro
        fitting = max(1, int(_SHARE * self._free_bytes() / self._bytes_per_token))
        before, self.limit = self.limit, min(fitting, 2 * self.limit)
        if not 0.9 < self.limit / before < 1.1:
            log.info(
                "Micro-batches of at most %d tokens, after %d: %.0f KB a token were measured.",
                self.limit, before, self._bytes_per_token / 1e3,
            )  # fmt: skip
        return replace(micro, max_tokens=self.limit)

    @contextmanager
    def measuring(self, num_tokens: int) -> Iterator[None]:
        """Measures a micro-batch of so many computed tokens."""
        before = start_peak(self._device)
        if before is not None and self._device.type == "cpu":
            before = self._resting = before if self._resting is None else self._resting
        yield
        if num_tokens and before is not None:
            growth = max(0, peak_memory(self._device) - before)
            self._bytes_per_token = max(self._bytes_per_token, growth / num_tokens)

    def _free_bytes(self) -> int:
        """Bytes for a micro-batch: free memory, and memory that the allocator keeps from former micro-batches."""
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return memory.available_memory() + max(0, memory.resident_bytes() - (self._resting or 0))
