"""Which sample sits in which row, on the host. Rows are dense up to the holes that ended samples leave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl.data_proto.samples import PromptRequest


@dataclass(eq=False)
class Group:
    """A prompt with its samples."""

    index: int  # position among the prompts of the call
    request: PromptRequest
    slot: int = -1  # of the prefix store, or of the own store where there is none
    num_started: int = 0
    num_running: int = 0
    logits: torch.Tensor | None = None  # [vocab], after the prompt, while samples are yet to start


class RowTable:
    """Rows and the slots of the own store; both go to samples and come back."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.sample = np.full(num_rows, -1, dtype=np.int64)  # number of the sample in each row, -1: a hole
        self.left = np.zeros(num_rows, dtype=np.int64)  # tokens that are yet to be asked of it
        self.groups: list[Group | None] = [None] * num_rows
        self._slot = np.zeros(num_rows, dtype=np.int64)
        self._free_slots = list(range(num_rows))[::-1]
        self._row_of: dict[int, int] = {}

    @property
    def num_running(self) -> int:
        return len(self._row_of)

    @property
    def end(self) -> int:
        """One more than the last row in use."""
        used = np.flatnonzero(self.sample >= 0)
        return int(used[-1]) + 1 if len(used) else 0

    def take_slot(self) -> int:
        return self._free_slots.pop()

    def place(self, group: Group, sample: int, slot: int, left: int) -> int:
        """Put a sample into the first free row; returns the row."""
        row = int(np.argmax(self.sample < 0))
        assert self.sample[row] < 0, "more samples were started than there are rows"
        self.sample[row], self.left[row], self._slot[row] = sample, left, slot
        self.groups[row] = group
        self._row_of[sample] = row
        group.num_running += 1
        return row

    def free(self, sample: int) -> Group | None:
        """Take a sample out of its row; returns its group, or None when it was out already."""
        row = self._row_of.pop(sample, None)
        if row is None:
            return None
        group = self.groups[row]
        assert group is not None
        group.num_running -= 1
        self._free_slots.append(int(self._slot[row]))
        self.sample[row], self.groups[row] = -1, None
        return group

    def close_holes(self) -> tuple[np.ndarray, np.ndarray]:
        """Move the last rows into the holes: (sources, targets)."""
        used = np.flatnonzero(self.sample >= 0)
        sources = used[used >= len(used)]
        targets = np.flatnonzero(self.sample[: len(used)] < 0)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for column in (self.sample, self.left, self._slot):
                column[target] = column[source]
            self.groups[target], self.groups[source] = self.groups[source], None
            self.sample[source] = -1
            self._row_of[int(self.sample[target])] = target
        return sources, targets


class Results:
    """Tokens and log-probs of all samples, as they come from the device; they come one step after the next one was
    launched, so tokens of samples that have ended meanwhile are dropped here."""

    def __init__(self, num_samples: int, max_new_tokens: int):
        self.tokens = np.zeros((num_samples, max_new_tokens), dtype=np.int64)
        self.log_probs = np.zeros((num_samples, max_new_tokens), dtype=np.float32)
        self.length = np.zeros(num_samples, dtype=np.int64)
        self.ended = np.zeros(num_samples, dtype=bool)

    def record(self, samples: np.ndarray, tokens: np.ndarray, log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append a token to each of `samples` (-1: none) that has not ended. Returns those samples and their tokens."""
        live = samples >= 0
        live[live] = ~self.ended[samples[live]]
        samples, tokens = samples[live], tokens[live].astype(np.int64)
        places = self.length[samples]
        self.tokens[samples, places], self.log_probs[samples, places] = tokens, log_probs[live]
        self.length[samples] += 1
        return samples, tokens
