"""Slots of the tokens of running samples in a store of activations (verl/models/decoder/reuse.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.config.active_keys import REUSED_SHARE, reuse_obstacle
from verl.data_proto.samples import SampleKey
from verl.models.decoder.reuse import ActivationStore, store_for
from verl.models.decoder.weights import DenseDecoder
from verl.models.vision import is_vision_model
from verl.parallel.memory import available_memory
from verl.rollout.native.compiled.library import kernels

if TYPE_CHECKING:
    from verl.config import RolloutConfig
    from verl.models.hf_module import HFModule
    from verl.rollout.layout import Chunk
    from verl.rollout.native.batch import BatchRows, Group, StepInputs


def obstacle(module: HFModule, config: RolloutConfig) -> str | None:
    """The reason why updates of `module` on a CPU compute their forward; None if they read the sampler's activations."""
    decoder, compiled = DenseDecoder.of(module), kernels()
    if setting := reuse_obstacle(config):
        return f"no: {setting}"
    is_plain = decoder is not None and not (decoder.has_experts or decoder.departures)
    if decoder is None or not is_plain or decoder.embed.dtype != torch.bfloat16 or is_vision_model(module):
        return "no: sampler and training forward have equal bits only for undivided dense text models in bfloat16"
    if compiled is None or not compiled.equals_trainer(decoder):
        return "no: sampler and training forward differ in the last bits on this processor"
    return None


def open_records(module: HFModule, config: RolloutConfig, step: int) -> SlotRecords | None:
    """The records of a generation of trainer step `step`; None if no activations are recorded."""
    decoder = DenseDecoder.of(module)
    if decoder is None or obstacle(module, config) is not None:
        return None
    max_bytes = int(config.reuse_activations_gb * 1e9)
    store = store_for(module, decoder, lambda: min(max_bytes, available_memory() // REUSED_SHARE), step)
    return None if store.fails or not store.capacity else SlotRecords(store)


class SlotRecords:
    """Slots of samples and, in groups, of prompts (-1: too few were free). If a step lacks free slots, the last samples
    give theirs back, and the update computes them again."""

    def __init__(self, store: ActivationStore):
        self.store = store
        self._slots: dict[SampleKey, list[int] | None] = {}

    def assign(self, rows: BatchRows, inputs: StepInputs, chunks: list[tuple[Group, Chunk]]) -> np.ndarray:
        """int64 [tokens]: the slots of a step, in the order of its tokens: `inputs`, then `chunks`."""
        free, input_slots = self.store.free, np.full(len(inputs.rows), -1)
        recorded: list[tuple[SampleKey, int, list[int]]] = []
        for number, row in enumerate(inputs.rows.tolist()):
            if (group := rows.groups[row]) is not None:
                key = (group.request.ordinal, group.request.first_sample + int(rows.sample[row]))
                if key not in self._slots:
                    self._slots[key] = [] if (np.concatenate(group.slots) >= 0).all() else None
                if (slots := self._slots[key]) is not None:
                    self._free_drafts(slots, int(rows.length[row]))
                    recorded.append((key, number, slots))
        while recorded and len(free) < len(recorded) + sum(chunk.end - chunk.start for _, chunk in chunks):
            key = recorded[-1][0]
            free.extend(self._slots[key] or ())
            self._slots[key] = None
            recorded = [entry for entry in recorded if entry[0] != key]
        for _, number, slots in recorded:
            input_slots[number] = free.pop()
            slots.append(int(input_slots[number]))
        return np.concatenate([input_slots, *(self._take_slots(group, chunk) for group, chunk in chunks)])

    def end(self, key: SampleKey, group: Group, response: list[int]) -> None:
        """Enter a finished sample into the store."""
        drawn, prompt = self._slots.pop(key, []), np.concatenate(group.slots)
        self._free_drafts(drawn or [], len(response))
        if drawn is not None and (prompt >= 0).all():
            self.store.add(group.request.token_ids, response[:-1], np.array([*prompt, *drawn], dtype=np.int64))

    def drop(self, key: SampleKey) -> None:
        """Give back the slots of a sample that has not finished."""
        self.store.free.extend(self._slots.pop(key, None) or ())

    def _free_drafts(self, slots: list[int], length: int) -> None:
        """Give back the slots of wrong drafts of a sample that has `length` tokens: its newest one has no slot yet."""
        while len(slots) >= length:
            self.store.free.append(slots.pop())

    def _take_slots(self, group: Group, chunk: Chunk) -> np.ndarray:
        size, free = chunk.end - chunk.start, self.store.free
        group.slots.append(np.array([free.pop() for _ in range(size)] if len(free) >= size else [-1] * size))
        return group.slots[-1]
