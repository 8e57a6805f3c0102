"""Steps that the host drives: one forward over [newest token and drafts of each row | chunks of new prompts].

A plain dense decoder is computed by torch/forward.py or by the compiled kernels of compiled/, any other model by its module.
The layout (verl.rollout.layout) stores keys and values and gives each token the keys that it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from verl.models.adapter_weights import AdapterWeights
from verl.models.decoder.reuse import ActivationStore
from verl.models.hf_module import HFModule
from verl.models.routing import Routing
from verl.models.vision import PlacedMedia, is_vision_model, language_states, placed_positions
from verl.rollout.layout import Chunk, StepLayout
from verl.rollout.native.adapters import TokenAdapters
from verl.rollout.native.batch import Group, StepInputs, features_of, place_images
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.paged_store import PagedStore
from verl.rollout.native.compiled.store import BlockStore
from verl.rollout.native.compiled.tokens import DecodeTiles, StepTokens
from verl.rollout.native.paging import Paging
from verl.rollout.native.scheduler import Scheduler
from verl.rollout.native.torch.decode_attention import DecodeRows, Members
from verl.rollout.native.torch.forward import DenseForward
from verl.rollout.native.torch.kv_cache import SlotStore
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms_at


class HostSampled(NamedTuple):
    """See Sampled; the host has waited already."""

    tokens: np.ndarray
    log_probs: np.ndarray

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens, self.log_probs

    def in_place(self, order: np.ndarray) -> HostSampled:
        """The tokens, which are in this order, by their numbers."""
        place = np.argsort(order)
        return HostSampled(self.tokens[place], self.log_probs[place])


class HostBackend:
    """See Backend. `dense` is the fused forward of `module`; None calls the module. `stores` are the row and the prefix store;
    they outlive a generation. `paging` bounds the tokens of both. `adapters` are the adapters of requests by name."""

    lag = ahead = 0

    def __init__(
        self,
        scheduler: Scheduler,
        module: HFModule,
        dense: DenseForward | CpuForward | None,
        stores: tuple[SlotStore, SlotStore],
        *,
        paging: Paging | None = None,
        adapters: Mapping[str | None, AdapterWeights | None] | None = None,
    ):
        self.paging, self.adapters = paging, adapters or {}
        self.joins_prompts = paging is None  # pages of a slot are not copied
        self.scheduler, self.rows, self.prompts = scheduler, scheduler.rows, scheduler.prompts
        self.module, self.dense = module, dense
        self.row_store, self.prefix = stores
        self.device = next(module.parameters()).device
        self.reads_images = is_vision_model(module)
        self.num_computed = self.num_bytes = 0
        self._decoding: DecodeRows | DecodeTiles | None = None  # of the rows as they are

    def reserve(self, num_rows: int, longest_prompt: int) -> int:
        """See Backend: stores grow as they are written."""
        if self.paging is not None:
            self.paging.require(longest_prompt)
        return num_rows

    def admits(self, group: Group) -> bool:
        return self.paging is None or self.paging.admits(group)

    def copy_prompt(self, source: int, target: int, length: int) -> None:
        self._reserve_prefix()
        self.prefix.put(target, self.prefix.take(source, length))

    def room(self) -> int:
        return self.rows.num_rows if self.paging is None else self.paging.room()

    def load(self, group: Group) -> None:
        self._reserve_prefix()
        self.prefix.put(group.slot, group.saved.values)

    def save(self, row: int) -> object:
        length, group = int(self.rows.own_start[row] + self.rows.length[row]) - 1, self.rows.groups[row]
        if group is None or not self.scheduler.shared:
            return self.row_store.take(row, length, copy=True)
        prompt = self.prefix.take(group.slot, group.num_tokens)
        response = self.row_store.take(row, length) if length else {}
        return self.row_store.joined(prompt, group.num_tokens, response, length)

    def start(self, rows: np.ndarray, logits: torch.Tensor) -> HostSampled:
        if not self.scheduler.shared or self.prefix.has_states:
            groups = [g for g in (self.rows.groups[r] for r in rows) if g is not None]
            lengths = [0 if self.scheduler.shared else g.num_tokens for g in groups]
            self._reserve_own(max(lengths) + 1)
            for row, group, length in zip(rows.tolist(), groups, lengths, strict=True):
                self.row_store.put(row, self.prefix.take(group.slot, length))
        return self._sample(rows, self.rows.length[rows], logits)

    def step(self, chunks: list[tuple[Group, Chunk]]) -> tuple[HostSampled | None, torch.Tensor]:
        inputs = self.rows.inputs()
        order = self._by_adapter(inputs)
        rows, ahead = inputs.rows[order], inputs.ahead[order]
        num_inputs, own_lengths = len(rows), self.rows.own_lengths()[rows] + ahead
        positions = self.rows.positions()[rows] + ahead
        if num_inputs:
            self._reserve_own(int(own_lengths.max()) + 1)
        self._reserve_prefix()
        if self.paging is not None:
            self._keep()
        self.num_bytes = max(self.num_bytes, self.row_store.num_bytes + self.prefix.num_bytes)
        layout = self._layout(rows, own_lengths, positions, [c for _, c in chunks], has_drafts=bool(ahead.any()))
        recorder = self.scheduler.experts
        if recorder is not None:
            layout.routing = Routing()
        ids = [inputs.ids[order], *(np.array(g.request.token_ids[c.start : c.end]) for g, c in chunks)]
        media, shifts = place_images(self.module, chunks, num_inputs, self.device)
        if self.reads_images:
            positions = positions + self.rows.shifts()[rows]
        places = [positions, *(np.arange(c.start, c.end) + s for s, (_, c) in zip(shifts, chunks, strict=True))]
        ends = np.cumsum([num_inputs, *(c.end - c.start for _, c in chunks)])[1:] - 1
        completed = [e for (g, c), e in zip(chunks, ends, strict=True) if c.end == g.num_tokens]
        records = self.scheduler.slots
        recorded = None if records is None else (records.store, records.assign(self.rows, inputs, chunks))
        logits = self._logits(ids, places, completed, layout, media, self._token_adapters(rows, chunks), recorded)
        if self.scheduler.drafter is not None and isinstance(self.dense, CpuForward) and self.dense.states is not None:
            states, place = self.dense.states, np.arange(len(self.dense.states))
            place[:num_inputs] = np.argsort(order)
            self.scheduler.drafter.see(states[torch.from_numpy(place)], inputs, chunks)
        if recorder is not None and layout.routing is not None:
            recorder.add(layout.routing, self.rows, chunks)
        self.num_computed += sum(c.end - c.start for _, c in chunks)
        sampled = None
        if num_inputs:
            sampled = self._sample(rows, self.rows.length[rows] + ahead, logits[:num_inputs]).in_place(order)
        return sampled, logits[num_inputs:].clone() if completed else logits[:0]  # the next forward overwrites them

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        self.row_store.move(sources, targets, int(self.rows.own_lengths()[targets].max()))

    def move_prompt(self, source: int, target: int, length: int) -> None:
        self.prefix.move([source], [target], length)

    def rows_changed(self) -> None:
        self._decoding = None

    def stats(self) -> dict[str, float]:
        """Bytes of the KV cache at its largest, and of the copy of the weights."""
        copied = self.dense.num_copied_bytes if self.dense is not None else 0
        stats: dict[str, float] = {"kv_cache_bytes": self.num_bytes, "weight_copy_bytes": copied}
        if self.paging is not None:
            stats |= self.paging.stats()
        return stats

    def _keep(self) -> None:
        """Set the length of every slot of both stores; memory behind a length is freed."""
        assert self.paging is not None
        assert isinstance(self.row_store, PagedStore)
        assert isinstance(self.prefix, PagedStore)
        rows, prompts = self.paging.lengths()
        self.row_store.keep(rows)
        self.prefix.keep(prompts)
        self.paging.record(np.concatenate([rows, prompts]))

    def _reserve_own(self, length: int) -> None:
        longest_prompt = 0 if self.scheduler.shared else self.scheduler.longest_prompt
        self.row_store.reserve(self.rows.num_rows, length, self.scheduler.params.max_new_tokens + longest_prompt)

    def _reserve_prefix(self) -> None:
        longest, slots = self.scheduler.longest_prompt, len(self.prompts.by_slot)
        if self.paging is not None:  # a preempted sample is a prompt with its tokens; addresses cost nothing
            longest, slots = longest + self.scheduler.params.max_new_tokens, max(slots, self.rows.num_rows)
        self.prefix.reserve(slots, longest, longest)

    def _by_adapter(self, inputs: StepInputs) -> np.ndarray:
        """int64: all `inputs`, in the order of a step. For the compiled kernels, tokens with equal adapters are neighbours."""
        if not isinstance(self.dense, CpuForward) or len(self.adapters) < 2:
            return np.arange(len(inputs.rows))
        return np.argsort(self._adapter_numbers(self.rows.groups[: self.rows.end])[inputs.rows], kind="stable")

    def _token_adapters(self, rows: np.ndarray, chunks: list[tuple[Group, Chunk]]) -> TokenAdapters | None:
        if not self.adapters:
            return None
        numbers = self._adapter_numbers(self.rows.groups[: self.rows.end])[rows]
        in_chunks = np.repeat(self._adapter_numbers([g for g, _ in chunks]), [c.end - c.start for _, c in chunks])
        return TokenAdapters(list(self.adapters.values()), np.concatenate([numbers, in_chunks]))

    def _adapter_numbers(self, groups: Sequence[Group | None]) -> np.ndarray:
        numbers = {name: number for number, name in enumerate(self.adapters)}
        return np.array([numbers[g.request.adapter] for g in groups if g is not None], dtype=np.int64)

    def _layout(
        self,
        rows: np.ndarray,
        own_lengths: np.ndarray,
        positions: np.ndarray,
        chunks: list[Chunk],
        *,
        has_drafts: bool,
    ) -> StepLayout | StepTokens:
        num_rows, shared = self.rows.end, self.scheduler.shared
        if isinstance(self.dense, CpuForward):
            tiles = self._decoding
            if has_drafts or not isinstance(tiles, DecodeTiles):
                slots, lengths = self._row_prompts() if shared else (None, None)
                slots = None if slots is None else slots[rows]
                prompt_lengths = None if slots is None or lengths is None else lengths[slots]
                tiles = self.dense.tiles(rows, slots, prompt_lengths)
                self._decoding = self._decoding if has_drafts else tiles
            assert isinstance(self.row_store, BlockStore)
            assert isinstance(self.prefix, BlockStore)
            return StepTokens.of(
                (self.row_store, self.prefix), tiles, own_lengths, positions, chunks, self.dense.max_tile
            )
        if not num_rows:
            return StepLayout(None, self.prefix, chunks)
        if not isinstance(self._decoding, DecodeRows):
            members = Members(*self._row_prompts(), self.device) if shared else None
            self._decoding = DecodeRows(self.row_store, self.prefix, num_rows, members, self.device)
        self._decoding.advance(own_lengths, positions)
        return StepLayout(self._decoding, self.prefix, chunks)

    def _row_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """(slot of each row's prompt in the prefix store, tokens of each slot)."""
        slots = [g.slot for g in self.rows.groups[: self.rows.end] if g is not None]
        return np.array(slots, dtype=np.int64), np.array([g.num_tokens for g in self.prompts.by_slot], dtype=np.int64)

    def _logits(
        self,
        ids: list[np.ndarray],
        places: list[np.ndarray],
        completed: list[int],
        layout: StepLayout | StepTokens,
        media: list[PlacedMedia],
        adapters: TokenAdapters | None,
        recorded: tuple[ActivationStore, np.ndarray] | None,
    ) -> torch.Tensor:
        """[rows + completed, vocab]: logits after the decode rows and after the tokens at `completed`."""
        tokens = torch.from_numpy(np.concatenate(ids)).to(self.device)
        positions = torch.from_numpy(np.concatenate(places)).to(self.device)
        keep = None
        if len(ids) > 1:
            keep = torch.tensor([*range(len(ids[0])), *completed], dtype=torch.int64, device=self.device)
        at = placed_positions(self.module, tokens[None], positions[None], media)
        images = features_of(self.module, tokens, media)
        if recorded is not None and isinstance(self.dense, CpuForward) and isinstance(layout, StepTokens):
            return self.dense.logits(tokens, at.squeeze(-2), keep, layout, recorded=recorded)
        if self.dense is not None:
            return self.dense.logits(tokens, at.squeeze(-2), keep, layout, adapters, images)  # type: ignore[arg-type]
        if self.reads_images:
            states = language_states(self.module, tokens[None], at, layout, images)
            logits: torch.Tensor = self.module.get_output_embeddings()(states if keep is None else states[keep])
            return logits
        settings = {"layout": layout, "use_cache": False, "logits_to_keep": 0 if keep is None else keep}
        logits = self.module(input_ids=tokens[None], position_ids=at, **settings).logits
        return logits[0]

    def _sample(self, rows: np.ndarray, lengths: np.ndarray, logits: torch.Tensor) -> HostSampled:
        """The next tokens of `rows` behind `lengths` tokens of their requests, from `logits` [rows, vocab]."""
        keys = torch.from_numpy(self.rows.key[rows]).to(self.device)
        u = uniforms_at(keys, torch.from_numpy(lengths + self.rows.num_drawn[rows]).to(self.device))
        tokens, log_probs = sample(logits, self.scheduler.params, u)
        if self.scheduler.grammars is not None:
            self.scheduler.grammars.apply(self.rows, rows, logits, self.scheduler.params, u, tokens, log_probs)
        return HostSampled(tokens.cpu().numpy(), log_probs.cpu().numpy())
