"""Bookkeeping of a paged KV cache: blocks of tokens, their limit, and the share of them that is empty."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.config import full_key
from verl.errors import ConfigError
from verl.rollout.native.batch import Group
from verl.rollout.native.scheduler import Scheduler

_KEYS = full_key("rollout.kv_cache_config")
UNLIMITED = 1 << 40


@dataclass
class Paging:
    """Blocks of the sequences of `scheduler`. A block has `block_size` tokens; `max_tokens` limits all sequences together
    (None: no limit). A row's next step may store `ahead` tokens more than the host has read. With `is_pool` the limit is
    strict. Else a preempted sample may exceed it while it starts again."""

    scheduler: Scheduler
    block_size: int
    max_tokens: int | None
    ahead: int = 1
    is_pool: bool = False
    num_steps: int = 0
    sum_unused: float = 0.0

    @property
    def num_blocks(self) -> int:
        return UNLIMITED if self.max_tokens is None else self.max_tokens // self.block_size

    def blocks(self, lengths: np.ndarray | Sequence[int]) -> int:
        """Blocks of sequences of `lengths` tokens."""
        return int((-(-np.asarray(lengths, dtype=np.int64) // self.block_size)).sum())

    def require(self, longest_prompt: int) -> None:
        """Raise ConfigError unless the longest sample fits by itself. Without shared prompts its prompt is stored twice when it
        starts, and so are all its tokens when it starts again."""
        max_new_tokens = self.scheduler.params.max_new_tokens
        prefix, row = longest_prompt, max_new_tokens + self.ahead - 1
        if not self.scheduler.shared:
            prefix, row = prefix + max_new_tokens * self.is_pool, row + longest_prompt
        needed = self.blocks([prefix, row]) + 1
        if needed > self.num_blocks:
            raise ConfigError(
                f"{_KEYS}.max_tokens={self.max_tokens} cannot hold one sample of {longest_prompt} prompt tokens and "
                f"{max_new_tokens} new ones; raise it to at least {needed * self.block_size}."
            )

    def admits(self, group: Group) -> bool:
        """Whether the blocks of a group are free, in addition to one block for each row."""
        return self._num_free() >= self.blocks([group.num_tokens]) + self.scheduler.rows.num_running + 1

    def room(self) -> int:
        """See Backend."""
        scheduler, prompt = self.scheduler, 0
        if not scheduler.shared:
            again = (group.num_tokens for group in scheduler.prompts.ready if self.is_pool)
            prompt = max([scheduler.longest_prompt, *again])
        return self._num_free() // (self.blocks([prompt]) + 1)

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Two int64 arrays: tokens of each row below the end after its next step, 0 for a hole; tokens of each prefix slot."""
        rows = self.scheduler.rows
        running = np.array([group is not None for group in rows.groups[: rows.end]], dtype=bool)
        prompts = [group.num_tokens for group in self.scheduler.prompts.by_slot]
        return (rows.own_lengths() + self.ahead + rows.num_drafts()) * running, np.array(prompts, dtype=np.int64)

    def _num_free(self) -> int:
        return self.num_blocks - sum(map(self.blocks, self.lengths()))

    def stats(self) -> dict[str, float]:
        """See Generation.close."""
        return {"kv_fragmentation": self.fragmentation, "num_preempted": self.scheduler.num_preempted}

    def record(self, lengths: np.ndarray) -> None:
        """Note the sequences of a step."""
        held = self.blocks(lengths) * self.block_size
        self.sum_unused += 1 - float(lengths.sum()) / held if held else 0.0
        self.num_steps += 1

    @property
    def fragmentation(self) -> float:
        """The share of the held blocks' tokens that is empty, as a mean over steps."""
        return self.sum_unused / self.num_steps if self.num_steps else 0.0
