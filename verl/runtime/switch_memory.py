"""Peak memory of the switch from training to generation on one rank, against the weights that the rank generates with.

    ratio = 1 + (peak during the switch - memory before it) / bytes of those weights

A ratio of 1 means that only the weights themselves were held, 2 that a second copy was. The allocator counts on a GPU.
Elsewhere the kernel counts the resident memory of the process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from verl.config import full_key
from verl.parallel import memory
from verl.parallel.device import reset_peak_memory

log = logging.getLogger(__name__)

LIMIT = 1.2
_MIN_BYTES = 64 << 20  # next to a tiny model, everything is large


class SwitchMemory:
    """Of switches on `device`, after which the rank generates with `weight_bytes`."""

    def __init__(self, device: torch.device, weight_bytes: int):
        self._device, self._weight_bytes = device, weight_bytes
        self._largest = 0
        self.extra_bytes: int | None = None  # of the last switch; None where the system does not tell

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures what runs inside."""
        before = self._start()
        yield
        if before is not None:
            self.extra_bytes = max(0, self._peak() - before)
            self._report(self.extra_bytes)

    def metrics(self) -> dict[str, float]:
        """switch_peak_gb (memory held in addition to everything else) and switch_peak_ratio; {} where nothing was measured."""
        if self.extra_bytes is None or not self._weight_bytes:
            return {}
        return {"switch_peak_gb": self.extra_bytes / 1e9, "switch_peak_ratio": self._ratio(self.extra_bytes)}

    def _ratio(self, extra: int) -> float:
        return 1 + extra / self._weight_bytes

    def _report(self, extra: int) -> None:
        if extra <= self._largest * 1.05 or not self._weight_bytes:
            return
        self._largest, ratio = extra, self._ratio(extra)
        words = "The switch to generation needed up to %.1f MB more: %.2f times the weights of this rank"
        if ratio > LIMIT and extra > _MIN_BYTES:
            log.warning(
                words + f". Lower {full_key('rollout.checkpoint_engine.update_weights_bucket_megabytes')}, or gather fewer "
                "layers at a time: fsdp_config.use_3d_hybrid=True with layer_per_group=1.", extra / 1e6, ratio,
            )  # fmt: skip
        else:
            log.info(words + ".", extra / 1e6, ratio)

    def _start(self) -> int | None:
        """Memory now, with the record of its peak started again."""
        if self._device.type == "cuda":
            reset_peak_memory(self._device)
            return torch.cuda.memory_allocated(self._device)
        return memory.resident_bytes() if memory.reset_peak() else None

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else memory.peak_bytes()
