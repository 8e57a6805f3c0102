"""The switch between training and generation in a process that does both, in its order.

    to_generation          record the random state and the weights
    (weight sync)          weights reach the rollout engine
    free_training_memory   free the memory that training keeps between its calls
    to_training            (the KV cache has been freed) check the weights, restore the random state

Offloaded parameters and optimizer state come back by themselves when the engine is called (verl/engines/fsdp.py). Weights that
changed during generation would train as if the optimizer had changed them. They are found by a few values of some tensors each
time (other tensors the next time), or by a checksum of all. With a copy they are restored, else the run stops.
"""

import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from verl.config import RolloutConfig, full_key
from verl.engines.api import TrainEngine
from verl.errors import ModelError
from verl.models.randomness import RandomState
from verl.parallel.device import give_back_cache, peak_memory, start_peak

log = logging.getLogger(__name__)

LIMIT = 1.2
_MIN_BYTES = 64 << 20  # next to a tiny model, everything is large


class SwitchMemory:
    """Of switches on `device` to generation with `weight_bytes`."""

    def __init__(self, device: torch.device, weight_bytes: int):
        self._device, self._weight_bytes = device, weight_bytes
        self._largest = 0
        self.extra_bytes: int | None = None  # of the last switch; None if the system does not tell

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measures what runs inside."""
        before = start_peak(self._device)
        yield
        if before is not None:
            self.extra_bytes = max(0, peak_memory(self._device) - before)
            self._report(self.extra_bytes)

    def metrics(self) -> dict[str, float]:
        """switch_peak_gb (memory held in addition to everything else) and switch_peak_ratio; {} if nothing was measured."""
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


MOST_DRIFT = 1e-5  # relative to the largest of the values that are compared
_TENSORS, _VALUES = 32, 16  # of a sampled check: tensors, and values of each


@dataclass
class _Seen:
    """The weights when training ended."""

    num_steps: int
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # of the sampled tensors
    checksums: dict[str, int] = field(default_factory=dict)
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)


class ModeSwitch:
    """`engine` is the TrainEngine of this process, None if nothing trains here; `gives_back`: the rollout engine has its own
    allocator. Reads drift_check and keep_weights_copy of `config`."""

    def __init__(
        self, engine: TrainEngine | None, config: RolloutConfig, device: torch.device, *, gives_back: bool = False
    ):
        self._engine, self._config, self._device, self._gives_back = engine, config, device, gives_back
        self._random: RandomState | None = None
        self._seen = _Seen(0)
        self._count = 0

    def to_generation(self) -> None:
        """Training has ended, and the weights are about to reach the rollout engine."""
        self._random = RandomState.of(self._device)
        self._seen = self._snapshot()

    def free_training_memory(self) -> None:
        """Free cached memory for the rollout engine, and the allocator's cache too if that engine has its own allocator."""
        if self._engine is not None:
            self._engine.free_cached_memory()
        if self._gives_back:
            give_back_cache(self._device)

    @torch.no_grad()
    def to_training(self) -> None:
        """Generation has ended; it may begin and end again before something trains. Raises ModelError when weights have
        changed and there is no copy of them."""
        if self._random is None or self._num_steps() != self._seen.num_steps:
            return  # there was no sync yet, or training has continued since
        drifted = self._drifted()
        if drifted:
            self._restore_weights(*next(iter(drifted.items())))
        self._random.restore(self._device)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        """The parameters that train on this rank, by name; a rollout engine may hold them too."""
        return {} if self._engine is None else self._engine.trained_weights()

    def _num_steps(self) -> int:
        return 0 if self._engine is None else self._engine.num_steps

    @torch.no_grad()
    def _snapshot(self) -> _Seen:
        weights, snapshot, check = self._weights(), _Seen(self._num_steps()), self._config.drift_check
        if check == "sampled":
            snapshot.values = {name: _sampled_values(weights[name]) for name in self._next_names(weights)}
        elif check == "full":
            snapshot.checksums = {name: _checksum(p) for name, p in weights.items()}
        if self._config.keep_weights_copy and self._engine is not None:
            snapshot.copies = self._engine.snapshot()
        return snapshot

    def _next_names(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """The tensors of this check; each has its turn within a few switches."""
        names = list(weights)
        stride = max(1, -(-len(names) // _TENSORS))
        self._count += 1
        return names[self._count % stride :: stride]

    def _drifted(self) -> dict[str, float]:
        """Name -> relative difference of each tensor that has changed; infinite if only a checksum reveals the change."""
        weights, snapshot = self._weights(), self._seen
        drifts = {}
        for name, before in snapshot.values.items():
            now = _sampled_values(weights[name])
            if not torch.equal(now, before):
                drifts[name] = float((now - before).abs().max() / before.abs().max().clamp(min=1e-30))
        drifts = {name: amount for name, amount in drifts.items() if not amount < MOST_DRIFT}
        changed = [name for name, before in snapshot.checksums.items() if _checksum(weights[name]) != before]
        return {**drifts, **dict.fromkeys(changed, float("inf"))}

    def _restore_weights(self, name: str, amount: float) -> None:
        words = f"The training weight {name} changed during generation (relative difference {amount:.3g})"
        if not self._seen.copies:
            raise ModelError(
                f"{words}; the rollout engine wrote into it. Resume from the last checkpoint, with "
                f"{full_key('rollout.keep_weights_copy')}=True if the engine must stay."
            )
        log.warning("%s; all weights are restored from the copy.", words)
        assert self._engine is not None
        self._engine.restore(self._seen.copies)


def _sampled_values(weight: torch.Tensor) -> torch.Tensor:
    """A few evenly spaced values of a tensor; float64, on the CPU."""
    flat = weight.flatten()
    return flat[:: max(1, flat.numel() // _VALUES)].to("cpu", torch.float64, copy=True)


def _checksum(weight: torch.Tensor) -> int:
    return zlib.crc32(weight.flatten().cpu().view(torch.uint8).numpy().data)
