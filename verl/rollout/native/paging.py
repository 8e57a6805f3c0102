"""Bookkeeping of a paged KV cache: blocks of tokens against a limit, and how much of them is in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.errors import ConfigError

_KEYS = "actor_rollout_ref.rollout.kv_cache_config"
UNLIMITED = 1 << 40


@dataclass
class Paging:
    """`block_size` tokens are the unit of allocation; `max_tokens` is the limit of all sequences together (None: no limit)."""

    block_size: int
    max_tokens: int | None
    num_steps: int = 0
    sum_unused: float = 0.0

    @property
    def num_blocks(self) -> int:
        return UNLIMITED if self.max_tokens is None else self.max_tokens // self.block_size

    def blocks(self, lengths: np.ndarray | Sequence[int]) -> int:
        """Blocks of sequences of `lengths` tokens."""
        return int((-(-np.asarray(lengths, dtype=np.int64) // self.block_size)).sum())

    def require(self, longest_prompt: int, max_new_tokens: int, *, shared: bool) -> None:
        """Raise ConfigError unless the longest sample fits alone; without `shared` its prompt is there twice as it starts."""
        own = max_new_tokens if shared else longest_prompt + max_new_tokens
        needed = self.blocks([longest_prompt, own]) + 1
        if needed > self.num_blocks:
            raise ConfigError(
                f"{_KEYS}.max_tokens={self.max_tokens} cannot hold one sample of {longest_prompt} prompt tokens and "
                f"{max_new_tokens} new ones; raise it to at least {needed * self.block_size}."
            )

    def record(self, lengths: np.ndarray) -> None:
        """Note the sequences of a step."""
        held = self.blocks(lengths) * self.block_size
        self.sum_unused += 1 - float(lengths.sum()) / held if held else 0.0
        self.num_steps += 1

    @property
    def fragmentation(self) -> float:
        """The share of the held blocks' tokens that is empty, as a mean over steps."""
        return self.sum_unused / self.num_steps if self.num_steps else 0.0
