"""Activations of sampled tokens, which the sampler records and the update of the same weights reads in place of its forward.

    sampler   each forward ──compiled kernels──► a slot of every token, in all layers
    trainer   packed batch ──tokens of its sequences──► slots ──► activations of a layer, when its backward begins

Both compute the same bits where `Kernels.equals_trainer` holds. A store belongs to one module and one state of its weights.
Its memory stays from step to step, since new pages take longer than the forward that they would save.

One device samples and trains with one module. On several ranks the sampler has a module of its own, and lends its store
to the module that trains.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from verl.config.active_keys import MOST_REUSED_TOKENS
from verl.data_proto.metrics import Metric
from verl.models.decoder.weights import DenseDecoder
from verl.models.lora import is_adapter
from verl.models.packing import PackedBatch

log = logging.getLogger(__name__)


class LayerActivations(NamedTuple):
    """Of tokens in one layer, or of slots in all layers [layers, slots, ...]; bfloat16 but for `lse`."""

    x: torch.Tensor  # [..., hidden], the input; a store has the last layer's output as one layer more
    qkv: torch.Tensor  # before norms of heads and rotary embedding
    attended: torch.Tensor
    middle: torch.Tensor
    gate_up: torch.Tensor
    lse: torch.Tensor  # float32 [..., heads]


class ActivationStore:
    """Slots for the activations of as many tokens of `decoder` as fit `num_bytes`; `free` are those without a token."""

    def __init__(self, decoder: DenseDecoder, num_bytes: int):
        widths = _widths(decoder)
        self.capacity, layers = min(num_bytes // bytes_per_token(decoder), MOST_REUSED_TOKENS), len(decoder.layers)
        halves = [
            torch.empty(layers + (name == "x"), self.capacity, width, dtype=torch.bfloat16)
            for name, width in widths.items()
        ]
        lse = torch.empty(layers, self.capacity, decoder.num_heads)
        self.parts = LayerActivations._make([*halves, lse])
        self.is_checked, self.fails = False, False
        self.num_tokens = self.num_reused = 0  # of gradients
        self.begin(-1, -1)

    def begin(self, version: int, step: int) -> None:
        """Forget all tokens. From now on tokens of trainer step `step` are recorded, under weights of `version_of`."""
        self.version, self.step, self.free = version, step, list(range(self.capacity - 1, -1, -1))
        self.has_output = torch.zeros(self.capacity, dtype=torch.bool)  # of the last layer
        self._slots: dict[bytes, np.ndarray] = {}

    def note(self, slots: torch.Tensor, keep: torch.Tensor) -> None:
        """Tokens with `slots`, int64 [tokens], are recorded, with the outputs of those whose indices `keep` holds."""
        outputs = slots[keep]
        self.has_output[slots[slots >= 0]] = False
        self.has_output[outputs[outputs >= 0]] = True

    def add(self, prompt: Sequence[int], response: Sequence[int], slots: np.ndarray) -> None:
        """The slots of a sample, int64 [tokens], of its prompt and of `response`, the tokens that were inputs."""
        ids = np.array([*prompt, *response], dtype=np.int64)
        self._slots[ids.tobytes()] = slots
        self._slots[ids[: len(prompt)].tobytes()] = slots[: len(prompt)]

    def slots_of(self, packed: PackedBatch) -> torch.Tensor | None:
        """int64 [tokens], or None unless all tokens are recorded, and outputs of those whose hidden states are read."""
        ids, slots = packed.input_ids[0].numpy(), torch.empty(packed.num_tokens, dtype=torch.int64)
        for s in packed.layout.segments:
            prefix = ids[s.prefix_start : s.prefix_start + s.prefix_length]
            recorded = self._slots.get(np.concatenate([prefix, ids[s.start : s.start + s.length]]).tobytes())
            if recorded is None:
                return None
            slots[s.start : s.start + s.length] = torch.from_numpy(recorded[s.prefix_length :])
        return slots if bool(self.has_output[slots[packed.hidden_index]].all()) else None


def bytes_per_token(decoder: DenseDecoder) -> int:
    """Of the activations of one token."""
    widths, layers = _widths(decoder), len(decoder.layers)
    return layers * (2 * sum(widths.values()) + 4 * decoder.num_heads) + 2 * widths["x"]


def _widths(decoder: DenseDecoder) -> dict[str, int]:
    first = decoder.layers[0]
    (qkv, hidden), heads, inner = first.qkv.weight.shape, first.o.weight.shape[1], first.gate_up.weight.shape[0]
    return {"x": hidden, "qkv": qkv, "attended": heads, "middle": hidden, "gate_up": inner}


@dataclass(frozen=True)
class RecordedBatch:
    """The activations of a packed batch: its tokens have the `slots` of `store`."""

    store: ActivationStore
    slots: torch.Tensor

    def layer(self, index: int) -> LayerActivations:
        """A copy of the activations [tokens, ...] of layer `index`."""
        return LayerActivations(*(part[index].index_select(0, self.slots) for part in self.store.parts))

    def outputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of the last layer, for `tokens`."""
        return self.store.parts.x[-1].index_select(0, self.slots[tokens])


_stores: WeakKeyDictionary[nn.Module, ActivationStore] = WeakKeyDictionary()
_samplers: WeakKeyDictionary[nn.Module, nn.Module | None] = WeakKeyDictionary()  # by module that trains


def borrow_records(trained: nn.Module) -> None:
    """Updates of `trained` may read what another module records."""
    _samplers[trained] = None


def lend_records(sampler: nn.Module, trained: nn.Module) -> None:
    """`sampler` has got the weights of `trained`. What it records from now on may be read until `forget_records`."""
    if trained in _samplers:
        _samplers[trained] = sampler
        forget_records(trained)


def forget_records(trained: nn.Module) -> None:
    """`trained` has other weights than its sampler."""
    if (store := _store_of(trained)) is not None:
        store.begin(-1, -1)


def _store_of(module: nn.Module) -> ActivationStore | None:
    """The store that updates of `module` read."""
    return _stores.get(_samplers.get(module) or module)


def store_for(module: nn.Module, decoder: DenseDecoder, num_bytes: Callable[[], int], step: int) -> ActivationStore:
    """The store of `module`, made for `num_bytes` at the first call; without tokens of other weights or steps."""
    store = _stores.get(module)
    if store is None:
        store = _stores[module] = ActivationStore(decoder, num_bytes())
    if (store.version, store.step) != (version_of(module), step):
        store.begin(version_of(module), step)
    return store


def recorded_batch(module: nn.Module, packed: PackedBatch) -> RecordedBatch | None:
    """The recorded activations of a batch whose gradients are taken; None where its forward must be computed."""
    store = _store_of(module)
    if store is None:
        return None
    store.num_tokens += packed.num_tokens
    differs = packed.noise is not None or packed.media or packed.layout.chunk_tokens is not None
    if store.fails or differs or store.version != version_of(_samplers.get(module) or module):
        return None
    slots = store.slots_of(packed)
    if slots is None:
        return None
    store.num_reused += packed.num_tokens
    return RecordedBatch(store, slots)


def reuse_metrics(module: nn.Module) -> list[dict[str, Metric]]:
    """The share of reused tokens in the gradients since the last call; empty where the sampler has recorded nothing."""
    store = _store_of(module)
    if store is None or not store.num_tokens:
        return []
    share, store.num_tokens, store.num_reused = store.num_reused / store.num_tokens, 0, 0
    return [{"reused_activations_ratio": Metric.last(share)}]


def is_equal(batch: RecordedBatch, computed: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Whether the `recorded` hidden states of a batch equal the `computed` ones of the trainer; if not, its store is not read
    again."""
    store = batch.store
    store.is_checked, store.fails = True, not torch.equal(computed, recorded)
    if store.fails:
        log.warning(
            "The sampler's hidden states are not the training forward's to the bit (largest difference: %.3g), so updates "
            "compute their forward. Set actor_rollout_ref.rollout.reuse_activations_gb=0 to save the memory.",
            float((computed.float() - recorded.float()).abs().max()),
        )
    return not store.fails


def version_of(module: nn.Module) -> int:
    """A number that grows when an optimizer writes into weights: all but adapters."""
    return sum(p._version for name, p in module.named_parameters() if not is_adapter(name))
