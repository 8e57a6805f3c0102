"""The native rollout engine: continuous batching over the training module itself, on whatever device it lies.

Every step is one forward over [all running samples' newest tokens | pieces of new prompts]: straight through the weights
of a plain dense decoder (dense.py), else by the unpatched module. The layout (layout.py) stores keys and values and says
who sees whom. A prompt is computed once for its n samples. A sample that ends frees its row at once, and the next one takes
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import NumericsError
from verl.rollout.api import OnFinish
from verl.rollout.cpu.forward import CpuForward
from verl.rollout.cpu.store import BlockStore
from verl.rollout.cpu.tokens import DecodeTiles, StepTokens
from verl.rollout.cuda.engine import DeviceSampler
from verl.rollout.cuda.run import DeviceRun
from verl.rollout.layout import Piece, StepLayout
from verl.rollout.members import Members
from verl.rollout.native.batch_invariance import Invariance, examine
from verl.rollout.native.decode_attention import DecodeRows
from verl.rollout.native.forward import DenseForward
from verl.rollout.native.kv_cache import SlotStore
from verl.rollout.native.scheduler import Group, Rows, Schedule
from verl.rollout.requests import borrowed, check_requests, vocab_size
from verl.rollout.sampling import sample
from verl.rollout.stopping import StopRules
from verl.rollout.uniforms import sample_keys, uniforms_at


class NativeRollout:
    """See RolloutEngine. `module` is a Hugging Face causal language model built with attn_implementation="verl", or a part of
    one (verl.rollout.rollout_model); then all ranks of its group make the same calls, and their own forward computes.

    Reads from `config`: max_num_seqs (rows), max_num_batched_tokens (tokens of one forward while prompts are computed),
    max_model_len, prepack_weights (whether a copy of the weights may be kept that multiplies faster, until `publish` or
    `release`), batch_invariant and, on a GPU, enforce_eager (no CUDA graphs, nothing compiled). Where `invariance` holds,
    samples do not depend on max_num_seqs nor on each other; elsewhere but for the rounding of matrix products of other
    shapes. Raises ConfigError when batch_invariant=require cannot be kept.
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        config: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int | None = None,
    ):
        del pad_token_id  # nothing is padded
        self.module = module
        self.tokenizer = tokenizer
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.weight_version = 0
        self.own: SlotStore = SlotStore(keys_as_columns=True)
        self.prefix: SlotStore = SlotStore()
        self._sampler: DeviceSampler | None = None
        self._dense: DenseForward | CpuForward | None = None
        self._dense_of = -1
        self._stats: dict[str, Any] = {}
        self._invariance: Invariance | None = None
        if config.batch_invariant == "require":
            self.invariance()

    def invariance(self) -> Invariance:
        """Whether a sample's bits depend on which others are computed beside it; found out at the first call."""
        if self._invariance is None:
            self._invariance = examine(self.module, self.config)
        return self._invariance

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """See RolloutEngine. Raises NumericsError when a sampled log-prob is not finite."""
        check_requests(prompts, params, self.module, self.config.max_model_len)
        with borrowed(self.module):
            run = self._begin(prompts, params, step, on_finish)
            try:
                return run.finish()
            except BaseException:
                self.release()  # what it holds may not be finite
                raise
            finally:
                self._stats = run.stats()

    def _begin(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, step: int, on_finish: OnFinish | None
    ) -> _Run | DeviceRun:
        """Steps that the host drives, or, for a plain decoder on a GPU, steps that the device drives (cuda/run.py)."""
        if not DeviceSampler.fits(self.module, prompts, params):
            return _Run(self, prompts, params, step, on_finish)
        if self._sampler is None:
            self._sampler = DeviceSampler(self.module, eager=self.config.enforce_eager)
        return self._sampler.start(
            prompts,
            params,
            step=step,
            weight_version=self.weight_version,
            config=self.config,
            eos_token_ids=self.eos_token_ids,
            tokenizer=self.tokenizer,
            on_finish=on_finish,
        )

    def publish(self, version: int) -> None:
        """See RolloutEngine. Keys and values never outlive the `generate` that made them; a copy of the weights goes."""
        self.weight_version = version
        self._dense = None

    def release(self) -> None:
        """Free the memory of both stores and of the copy of the weights."""
        self.own.clear()
        self.prefix.clear()
        self._dense = None
        if self._sampler is not None:
            self._sampler.release()

    def stats(self) -> dict[str, Any]:
        """See RolloutEngine; besides, weight_copy_bytes."""
        return dict(self._stats)

    def stores(self, dense: DenseForward | CpuForward | None) -> tuple[SlotStore, SlotStore]:
        """The stores of rows and of prompts, in the form that `dense` reads."""
        shape = dense.store_shape if isinstance(dense, CpuForward) else None
        if shape != getattr(self.own, "shape", None):
            self.own = SlotStore(keys_as_columns=True) if shape is None else BlockStore(shape)
            self.prefix = SlotStore() if shape is None else BlockStore(shape)
        return self.own, self.prefix

    def dense(self) -> DenseForward | CpuForward | None:
        """The straight forward of the module as it is now, or None when the module's own must be called."""
        # an optimizer that writes in place counts up the versions; `publish` covers every other way to change weights
        now = sum(p._version for p in self.module.parameters())
        if self._dense is None or self._dense_of != now:
            self._dense = None  # before the next copy is made
            self._dense = DenseForward.of(
                self.module,
                prepack=self.config.prepack_weights,
                invariant=self.invariance().holds,
                required=self.config.batch_invariant == "require",
            )
            self._dense_of = sum(p._version for p in self.module.parameters())
        return self._dense


class _Run:
    """One `generate`: admits samples, runs forwards, draws tokens, hands out completions."""

    def __init__(
        self,
        engine: NativeRollout,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        step: int,
        on_finish: OnFinish | None,
    ):
        self.engine, self.params, self.step, self.on_finish = engine, params, step, on_finish
        self.started_at = time.perf_counter()
        self.device = next(engine.module.parameters()).device
        self.invariant = engine.invariance().holds
        self.dense = engine.dense() if prompts else None
        # the kernels' sums do not depend on where a prompt is cut
        cuts = self.invariant and not isinstance(self.dense, CpuForward)
        self.piece_tokens = engine.config.max_num_batched_tokens if cuts else None
        self.own, self.prefix = engine.stores(self.dense)
        self.schedule = Schedule(prompts, params.n)
        self.rows = Rows(min(engine.config.max_num_seqs, params.n * len(prompts)), params.max_new_tokens)
        self.stop = StopRules(params, engine.eos_token_ids, vocab_size(engine.module), engine.tokenizer)
        self.shared = params.n > 1  # else a prompt moves into its only sample's slot, and attention has one part
        self.longest_prompt = max((len(p.token_ids) for p in prompts), default=0)
        self.own_limit = params.max_new_tokens + (0 if self.shared else self.longest_prompt)
        self.decoding: DecodeRows | DecodeTiles | None = None  # of the rows as they are
        self.completions: list[Completion | None] = [None] * (params.n * len(prompts))
        self.figures = {
            "num_prompt_tokens": sum(len(p.token_ids) for p in prompts),
            "num_prompt_tokens_computed": 0,
            "num_generated_tokens": 0,
            "num_decode_steps": 0,
            "max_running": 0,
            "kv_cache_bytes": 0,
            "weight_copy_bytes": self.dense.num_copied_bytes if self.dense is not None else 0,
        }

    def finish(self) -> list[Completion]:
        """Run until every sample has ended."""
        while self.schedule.pending or self.rows.num_running:
            self._admit()
            budget = max(self.engine.config.max_num_batched_tokens - self.rows.num_running, 0)
            if self.rows.num_running == 0:
                budget = max(budget, 1)
            pieces = self.schedule.take_pieces(self.rows.num_free, budget, self.piece_tokens)
            if pieces or self.rows.num_running:
                self._forward(pieces)
        return [c for c in self.completions if c is not None]

    def stats(self) -> dict[str, Any]:
        return {**self.figures, "seconds": time.perf_counter() - self.started_at}

    # -- samples start and end

    def _admit(self) -> None:
        """Start samples whose prompt is computed, as many as rows are free; draw their first tokens."""
        while self.schedule.ready and self.rows.num_free:
            started = self.schedule.start(self.rows.num_free)
            logits = torch.stack([g.logits for g, _ in started if g.logits is not None])
            placed = self._place(started)
            for group, _ in started:
                if group.num_started == self.params.n:
                    group.logits = None
            self._draw(placed, logits)
        moves = self.rows.close_holes()
        if moves:
            sources, targets = [s for s, _ in moves], [t for _, t in moves]
            self.own.move(sources, targets, int(self.rows.own_lengths()[targets].max()))
            self.decoding = None

    def _place(self, started: list[tuple[Group, int]]) -> np.ndarray:
        ordinals = torch.tensor([g.request.ordinal for g, _ in started])
        numbers = torch.tensor([g.request.first_sample + s for g, s in started])
        keys = sample_keys(self.params.seed, self.step, ordinals, numbers).tolist()
        if not self.shared:
            self.own.reserve(self.rows.num_rows, max(g.num_tokens for g, _ in started) + 1, self.own_limit)
        placed = []
        for (group, number), key in zip(started, keys, strict=True):
            row = self.rows.place(group, number, key, 0 if self.shared else group.num_tokens)
            if not self.shared:
                self.own.copy_from(self.prefix, group.slot, row, group.num_tokens)
                self._leave_prefix(group)
            placed.append(row)
        self.decoding = None
        self.figures["max_running"] = max(self.figures["max_running"], self.rows.num_running)
        return np.array(placed)

    def _leave_prefix(self, group: Group) -> None:
        last_slot = len(self.schedule.by_slot) - 1
        moved = self.schedule.leave_slot(group)
        if moved is not None:
            self.prefix.move([last_slot], [moved.slot], moved.num_computed)

    def _end(self, row: int, stopped: bool) -> None:
        """Turn a row into a Completion and free it."""
        group, length, number = self.rows.groups[row], int(self.rows.length[row]), int(self.rows.sample[row])
        assert group is not None
        log_probs = self.rows.log_probs[row, :length]
        if not np.isfinite(log_probs).all():
            raise NumericsError(
                f"Sample {number} of prompt {group.request.ordinal} has a log-probability that is not finite: the logits "
                f"of weight version {self.engine.weight_version} overflow or are NaN. Go back to an earlier checkpoint."
            )
        completion = Completion(
            ordinal=group.request.ordinal,
            sample=group.request.first_sample + number,
            token_ids=self.rows.tokens[row, :length].tolist(),
            log_probs=log_probs.tolist(),
            finish_reason=StopRules.reason(stopped),
            weight_version=self.engine.weight_version,
        )
        self.completions[group.index * self.params.n + number] = completion
        self.figures["num_generated_tokens"] += length
        self.rows.remove(row)
        self.decoding = None
        group.num_ended += 1
        if self.shared and group.num_ended == self.params.n:
            self._leave_prefix(group)
        if self.on_finish is not None:
            self.on_finish(completion)

    # -- tokens

    def _forward(self, pieces: list[tuple[Group, Piece]]) -> None:
        """Compute the running rows and `pieces`; draw the rows' next tokens, keep the logits of completed prompts."""
        num_rows = self.rows.end
        own_lengths, positions = self.rows.own_lengths(), self.rows.positions()
        self._reserve(own_lengths)
        layout = self._layout(own_lengths, positions, [p for _, p in pieces])
        ids = [self.rows.newest(), *(np.array(g.request.token_ids[p.start : p.end]) for g, p in pieces)]
        places = [positions, *(np.arange(p.start, p.end) for _, p in pieces)]
        ends = np.cumsum([num_rows, *(p.end - p.start for _, p in pieces)])[1:] - 1
        completed = [(g, e) for (g, p), e in zip(pieces, ends, strict=True) if p.end == g.num_tokens]
        logits = self._logits(ids, places, [e for _, e in completed], layout)
        for (group, _), row in zip(completed, logits[num_rows:], strict=True):
            group.logits = row.clone()  # the next forward overwrites them
        self.figures["num_prompt_tokens_computed"] += sum(p.end - p.start for _, p in pieces)
        if num_rows:
            self.figures["num_decode_steps"] += 1
            self._draw(np.arange(num_rows), logits[:num_rows])

    def _layout(self, own_lengths: np.ndarray, positions: np.ndarray, pieces: list[Piece]) -> StepLayout | StepTokens:
        num_rows = self.rows.end
        if isinstance(self.dense, CpuForward):
            if not isinstance(self.decoding, DecodeTiles):
                slots, lengths = self._prompts() if self.shared else (None, None)
                of_rows = None if slots is None or lengths is None else lengths[slots]
                self.decoding = self.dense.tiles(num_rows, slots, of_rows)
            assert isinstance(self.own, BlockStore)
            assert isinstance(self.prefix, BlockStore)
            stores, most = (self.own, self.prefix), self.dense.max_tile
            return StepTokens.of(stores, self.decoding, own_lengths, positions, pieces, most)
        if not num_rows:
            return StepLayout(None, self.prefix, pieces)
        if not isinstance(self.decoding, DecodeRows):
            places = self.rows.sample[:num_rows] if self.invariant else None
            members = Members(*self._prompts(), self.device, places, self.params.n) if self.shared else None
            self.decoding = DecodeRows(self.own, self.prefix, num_rows, members, self.device, self.invariant)
        self.decoding.advance(own_lengths, positions)
        return StepLayout(self.decoding, self.prefix, pieces)

    def _prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """(slot of each row's prompt in the prefix store, tokens of each slot)."""
        slots = [g.slot for g in self.rows.groups[: self.rows.end] if g is not None]
        return np.array(slots, dtype=np.int64), np.array([g.num_tokens for g in self.schedule.by_slot], dtype=np.int64)

    def _reserve(self, own_lengths: np.ndarray) -> None:
        if len(own_lengths):
            self.own.reserve(self.rows.num_rows, int(own_lengths.max()) + 1, self.own_limit)
        self.prefix.reserve(len(self.schedule.by_slot), self.longest_prompt, self.longest_prompt)
        self.figures["kv_cache_bytes"] = max(self.figures["kv_cache_bytes"], self.own.num_bytes + self.prefix.num_bytes)

    def _logits(
        self,
        ids: list[np.ndarray],
        places: list[np.ndarray],
        completed: list[int],
        layout: StepLayout | StepTokens,
    ) -> torch.Tensor:
        """[rows + completed, vocab]: logits after the decode rows and after the tokens at `completed`."""
        tokens = torch.from_numpy(np.concatenate(ids)).to(self.device)
        positions = torch.from_numpy(np.concatenate(places)).to(self.device)
        keep = None
        if len(ids) > 1:
            keep = torch.tensor([*range(len(ids[0])), *completed], dtype=torch.int64, device=self.device)
        if self.dense is not None:
            return self.dense.logits(tokens, positions, keep, layout)  # type: ignore[arg-type]
        logits: torch.Tensor = self.engine.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            layout=layout,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        ).logits
        return logits[0]

    def _draw(self, rows: np.ndarray, logits: torch.Tensor) -> None:
        """Draw the next token of `rows` from `logits` [rows, vocab]; end the rows that are finished."""
        keys = torch.from_numpy(self.rows.key[rows]).to(self.device)
        u = uniforms_at(keys, torch.from_numpy(self.rows.length[rows] + self.rows.num_drawn[rows]).to(self.device))
        tokens, log_probs = sample(logits, self.params, u)
        drawn = tokens.cpu().numpy()
        self.rows.record(rows, drawn, log_probs.cpu().numpy())
        stopped, finished = self.stop.finished(drawn, self.rows.length[rows])
        if self.stop.has_strings:
            by_string = [self.stop.ends_string(self.rows.tokens[r, : self.rows.length[r]]) for r in rows]
            stopped |= np.array(by_string)
            finished |= stopped
        for i in np.flatnonzero(finished).tolist():
            self._end(int(rows[i]), bool(stopped[i]))
