"""Checks and versions of the weights of engines that hold their own weights."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from verl.config import RolloutConfig, full_key
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import ModelError
from verl.families import EngineFacts
from verl.models.hf_module import HFModule
from verl.rollout.api import OnFinish, RolloutEngine, Weights


def checked(weights: Weights, skeleton: HFModule, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` in `dtype`. Each name and shape is compared with `skeleton`, for example a meta-device model. Raises as
    `complete` does."""
    for name, tensor in complete(weights, *_expected(skeleton)):
        yield name, tensor.detach().to(dtype)


def checked_buckets(buckets: Iterable[dict[str, Any]], skeleton: HFModule) -> Iterator[dict[str, Any]]:
    """Descriptions of buckets, with the names and shapes of their entries compared as `checked` does."""
    received = _Received(*_expected(skeleton))
    for bucket in buckets:
        for name, _, shape, *_ in bucket["entries"]:
            received.add(name, torch.Size(shape))
        yield bucket
    received.end()


def complete(
    weights: Weights, shapes: Mapping[str, torch.Size], storages: Mapping[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` unchanged. Raises ModelError for an unknown name, a wrong shape or a repeated name, and at the end for a
    missing parameter. Tied parameters have one number in `storages`; one of their names is enough."""
    received = _Received(shapes, storages)
    for name, tensor in weights:
        received.add(name, tensor.shape)
        yield name, tensor
    received.end()


def _expected(skeleton: HFModule) -> tuple[dict[str, torch.Size], dict[str, int]]:
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    return {name: p.shape for name, p in parameters.items()}, {name: id(p) for name, p in parameters.items()}


class _Received:
    """The names of an update so far; see `complete`."""

    def __init__(self, shapes: Mapping[str, torch.Size], storages: Mapping[str, int]):
        self._shapes, self._storages = shapes, storages
        self._missing = {storage: name for name, storage in storages.items()}
        self._names: set[str] = set()

    def add(self, name: str, shape: torch.Size) -> None:
        if self._shapes.get(name) != shape or name in self._names:
            fault = "twice" if name in self._names else f"{tuple(shape)}, which the rollout model lacks"
            raise ModelError(
                f"Weight sync sent {name} {fault}. Both models must be built from the same {full_key('model')}."
            )
        self._names.add(name)
        self._missing.pop(self._storages[name], None)

    def end(self) -> None:
        if self._missing:
            raise missing(next(iter(self._missing.values())))


def missing(name: str) -> ModelError:
    """The error for a parameter that no weight came for."""
    return ModelError(
        f"Weight sync is missing parameter {name}; the rollout model would keep its old value. Both models must be built from "
        f"the same {full_key('model')}."
    )


class PassiveRollout(RolloutEngine):
    """The engine of a rank that shares a replica run by another rank. It only takes part in gathering the weights."""

    facts = EngineFacts(holds_weights=True)

    def __init__(self, module: HFModule, tokenizer: object, config: RolloutConfig, **settings: object):
        self.module, self.config, self.weight_version, self._stats = module, config, 0, {}

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """An empty list: the rank that runs the replica returns its samples."""
        return []

    def load(self, weights: Weights) -> None:
        """Take part in gathering the weights, tensor by tensor."""
        deque(weights, maxlen=0)
