"""The switch between training and generation in a process that does both, in its order.

    to_generation   note the random state and the weights, hand the weights over tensor by tensor, free what training kept
    to_training     (the KV cache has been freed) see that the weights are what they were, bring the random state back

Offloaded parameters and optimizer state come back by themselves when the engine is called (verl/engines/fsdp.py). Weights that
changed while samples were made would train as if the optimizer had changed them; they are found by a few numbers of some
tensors each time (other tensors the next time), or by a checksum of all. With a copy they are put right, else the run stops.
"""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.config import RolloutConfig
from verl.engines.api import TrainEngine
from verl.errors import ModelError

log = logging.getLogger(__name__)

MOST_DRIFT = 1e-5  # relative to the largest of the numbers that are compared
_TENSORS, _NUMBERS = 32, 16  # looked at by a sampled check: so many tensors, so many numbers of each


@dataclass(frozen=True)
class RandomState:
    """The generators that training draws from: torch's, on the device too, numpy's and Python's."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_gpu, np.random.get_state(), random.getstate())

    def restore(self, device: torch.device) -> None:
        """Draw on from here."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@dataclass
class _Seen:
    """What the weights were when training ended."""

    num_steps: int
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)  # of the tensors that are looked at
    checksums: dict[str, int] = field(default_factory=dict)
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Switch:
    """`engine` is the TrainEngine of this process, None where nothing trains here. Reads drift_check and keep_weights_copy
    of `config`."""

    def __init__(self, engine: TrainEngine | None, config: RolloutConfig, device: torch.device):
        self._engine, self._config, self._device = engine, config, device
        self._random: RandomState | None = None
        self._seen = _Seen(0)
        self._count = 0

    def to_generation(self, hand_over: Callable[[], None]) -> None:
        """Training has ended; `hand_over` brings the weights to the rollout engine and publishes their version."""
        self._random = RandomState.of(self._device)
        self._seen = self._look()
        hand_over()
        if self._engine is not None:
            self._engine.free_cached_memory()

    @torch.no_grad()
    def to_training(self) -> None:
        """Generation has ended; it may begin and end again before something trains. Raises ModelError when weights have
        changed and there is no copy of them."""
        if self._random is None or self._num_steps() != self._seen.num_steps:
            return  # nothing was handed over yet, or training has gone on since
        drifted = self._drifted()
        if drifted:
            self._put_right(*next(iter(drifted.items())))
        self._random.restore(self._device)

    def _weights(self) -> Mapping[str, torch.Tensor]:
        """The parameters that train on this rank, which a rollout engine may share."""
        return {} if self._engine is None else self._engine.trained_weights()

    def _num_steps(self) -> int:
        return 0 if self._engine is None else self._engine.num_steps

    @torch.no_grad()
    def _look(self) -> _Seen:
        weights, seen, check = self._weights(), _Seen(self._num_steps()), self._config.drift_check
        if check == "sampled":
            seen.numbers = {name: _numbers(weights[name]) for name in self._next_names(weights)}
        elif check == "full":
            seen.checksums = {name: _checksum(p) for name, p in weights.items()}
        if self._config.keep_weights_copy and self._engine is not None:
            seen.copies = self._engine.snapshot()
        return seen

    def _next_names(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Some of the tensors; in a few switches it is the turn of each."""
        names = list(weights)
        stride = max(1, -(-len(names) // _TENSORS))
        self._count += 1
        return names[self._count % stride :: stride]

    def _drifted(self) -> dict[str, float]:
        """Name -> by how much (relative; infinite where a checksum alone tells) of the tensors that have changed."""
        weights, seen = self._weights(), self._seen
        found = {}
        for name, before in seen.numbers.items():
            now = _numbers(weights[name])
            if not torch.equal(now, before):
                found[name] = float((now - before).abs().max() / before.abs().max().clamp(min=1e-30))
        found = {name: amount for name, amount in found.items() if not amount < MOST_DRIFT}
        changed = [name for name, before in seen.checksums.items() if _checksum(weights[name]) != before]
        return {**found, **dict.fromkeys(changed, float("inf"))}

    def _put_right(self, name: str, amount: float) -> None:
        words = f"The training weight {name} changed while samples were made (relative difference {amount:.3g})"
        if not self._seen.copies:
            raise ModelError(
                f"{words}; the rollout engine wrote into it. Resume from the last checkpoint, with "
                "actor_rollout_ref.rollout.keep_weights_copy=True if the engine must stay."
            )
        log.warning("%s; all weights are taken back from the copy.", words)
        assert self._engine is not None
        self._engine.restore(self._seen.copies)


def around(switch: Switch, rollout: Any) -> None:
    """Make `publish` and `end_generation` of a rollout worker of this process the two moments of `switch`."""
    publish, end_generation = rollout.publish, rollout.end_generation

    def published(version: int, weights: Any = None) -> None:
        switch.to_generation(lambda: publish(version, weights))

    def ended() -> Any:
        figures = end_generation()
        switch.to_training()
        return figures

    rollout.publish, rollout.end_generation = published, ended


def _numbers(weight: torch.Tensor) -> torch.Tensor:
    """A few numbers of a tensor, from all over it; float64, on the CPU."""
    flat = weight.flatten()
    return flat[:: max(1, flat.numel() // _NUMBERS)].to("cpu", torch.float64, copy=True)


def _checksum(weight: torch.Tensor) -> int:
    return zlib.crc32(weight.flatten().cpu().view(torch.uint8).numpy().data)
