"""One generation on a GPU: the host stays a step behind the device.

    device   | step t          | step t + 1      | step t + 2 ...
    host      launches t + 1    reads t, ends and starts samples, launches t + 2

A sample that ended in step t takes part in step t + 1 in vain; what it draws there is dropped. Where the length alone ends
a sample, the host knows beforehand and nothing is in vain. Samples are those of the other engines: a draw depends on what
it is for, not on when it is made.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import NumericsError
from verl.rollout.api import OnFinish
from verl.rollout.cuda.device import DRAWN, KEY, OWN_LENGTH, OWN_START, POSITION, DeviceRows, Readback, next_power
from verl.rollout.cuda.rows import Group, Results, RowTable
from verl.rollout.stopping import StopRules
from verl.rollout.uniforms import sample_keys

_LAG = 1  # steps that the device is ahead of what the host has read


class DeviceRun:
    """Admits samples, launches steps, reads them, hands out completions. `settings` are those of the engine's config."""

    def __init__(
        self,
        device: DeviceRows,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        stop: StopRules,
        *,
        step: int,
        weight_version: int,
        max_num_batched_tokens: int,
        on_finish: OnFinish | None,
    ):
        self.device, self.params, self.stop = device, params, stop
        self.step, self.weight_version, self.on_finish = step, weight_version, on_finish
        self.budget = max_num_batched_tokens
        self.waiting = deque(
            sorted((Group(i, p) for i, p in enumerate(prompts)), key=lambda g: -len(g.request.token_ids))
        )
        self.ready: deque[Group] = deque()
        self.rows = RowTable(device.sizes.num_rows)
        self.results = Results(params.n * len(prompts), params.max_new_tokens)
        self.groups = {g.index: g for g in self.waiting}
        self.free_prefixes = list(range(device.sizes.num_prefixes))[::-1]
        self.flight: deque[tuple[np.ndarray, Readback]] = deque()
        self.num_rows = self.num_prompts = 0  # of a step, and in the device's shared table
        self.completions: list[Completion | None] = [None] * (params.n * len(prompts))
        self.started_at = time.perf_counter()
        self.figures: dict[str, Any] = {
            "num_prompt_tokens": sum(len(p.token_ids) for p in prompts),
            "num_prompt_tokens_computed": 0,
            "num_generated_tokens": 0,
            "num_decode_steps": 0,
            "max_running": 0,
            "kv_cache_bytes": device.num_bytes,
            "weight_copy_bytes": 0,
        }

    def finish(self) -> list[Completion]:
        """Run until every sample has ended."""
        while self.waiting or self.ready or self.rows.num_running or self.flight:
            self._admit()
            running = self.rows.num_running > 0
            if running:
                self._launch()
            while len(self.flight) > (_LAG if running else 0):
                self._read()
        return [c for c in self.completions if c is not None]

    def stats(self) -> dict[str, Any]:
        return {**self.figures, "num_graphs": self.device.graphs.num_graphs,
                "seconds": time.perf_counter() - self.started_at}  # fmt: skip

    # -- samples start

    def _admit(self) -> None:
        """Compute prompts for the rows that are free, and start their samples."""
        changed = False
        while self._prefill() or self.ready:
            started = self._start()
            changed = changed or started
            if not started:
                break
        if not (self.waiting or self.ready) and self._step_rows(self.rows.num_running) < self.num_rows:
            sources, targets = self.rows.close_holes()
            if len(sources):
                self.device.move(sources, targets)
            changed = True
        if changed:
            self.num_rows = self._step_rows(self.rows.end)
            self.device.retire(np.flatnonzero(self.rows.sample[: self.num_rows] < 0))
            self._share()

    def _step_rows(self, num_used: int) -> int:
        """Rows that a step computes: few different numbers, since each has graphs of its own."""
        return min(next_power(num_used), self.rows.num_rows)

    def _prefill(self) -> bool:
        """One wave of prompts: for as many as have rows (and a prefix slot) free, at most `budget` tokens, at least one
        prompt."""
        free = self.rows.num_rows - self.rows.num_running - sum(self.params.n - g.num_started for g in self.ready)
        wave: list[Group] = []
        num_tokens = 0
        while self.waiting and free > 0 and (self.free_prefixes or not self.device.sizes.num_prefixes):
            num_tokens += len(self.waiting[0].request.token_ids)
            if wave and num_tokens > self.budget:
                break
            group = self.waiting.popleft()
            group.slot = self.free_prefixes.pop() if self.device.sizes.num_prefixes else self.rows.take_slot()
            free -= self.params.n
            wave.append(group)
        if not wave:
            return False
        prompts = [g.request.token_ids for g in wave]
        logits = self.device.prefill(prompts, [g.slot for g in wave])
        self.figures["num_prompt_tokens_computed"] += sum(map(len, prompts))
        for group, row in zip(wave, logits, strict=True):
            group.logits = row
        self.ready.extend(wave)
        return True

    def _start(self) -> bool:
        """Start samples of the prompts that are computed, as many as rows are free."""
        started: list[tuple[Group, int]] = []
        while self.ready and len(started) < self.rows.num_rows - self.rows.num_running:
            group = self.ready[0]
            started.append((group, group.num_started))
            group.num_started += 1
            if group.num_started == self.params.n:
                self.ready.popleft()
        if not started:
            return False
        logits = torch.stack([g.logits for g, _ in started if g.logits is not None])
        samples = np.array([g.index * self.params.n + number for g, number in started])
        rows, columns = self._place(started, samples)
        self.flight.append((samples, self.device.begin(rows, columns, logits)))
        for group, _ in started:
            if group.num_started == self.params.n:
                group.logits = None
        self.figures["max_running"] = max(self.figures["max_running"], self.rows.num_running)
        self._free(samples[self.rows.left[rows] == 0])
        return True

    def _place(self, started: list[tuple[Group, int]], samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows for the samples, and what the device must know about them."""
        sizes, columns = self.device.sizes, np.zeros((6, len(started)), dtype=np.int64)
        lengths = np.array([len(g.request.token_ids) for g, _ in started])
        slots = [self.rows.take_slot() if sizes.num_prefixes else g.slot for g, _ in started]
        rows = [
            self.rows.place(group, sample, slot, self.params.max_new_tokens - 1)
            for (group, _), sample, slot in zip(started, samples.tolist(), slots, strict=True)
        ]
        names = [[g.request.ordinal, g.request.first_sample + number] for g, number in started]
        ordinals, numbers = torch.tensor(names).unbind(1)
        columns[POSITION] = lengths
        columns[OWN_START] = np.array(slots) * sizes.own_capacity
        columns[OWN_LENGTH] = 0 if sizes.num_prefixes else lengths
        columns[KEY] = sample_keys(self.params.seed, self.step, ordinals, numbers).numpy()
        columns[DRAWN] = [g.request.num_drawn + 1 for g, _ in started]
        return np.array(rows), columns

    def _share(self) -> None:
        """Tell the device which prompt each row belongs to."""
        if not self.device.sizes.num_prefixes or not self.rows.num_running:
            return
        groups = self.rows.groups
        running = list(dict.fromkeys(g for g in groups if g is not None))
        number = {group: i for i, group in enumerate(running)}
        members = np.array([-1 if g is None else number[g] for g in groups])
        lengths = np.array([len(g.request.token_ids) for g in running])
        self.num_prompts = self.device.share(np.array([g.slot for g in running]), lengths, members)

    # -- steps

    def _launch(self) -> None:
        """One decode step of all rows; samples that it brings to their full length leave their rows at once."""
        num_rows = self.num_rows
        samples = self.rows.sample[:num_rows].copy()
        self.flight.append((samples, self.device.launch(num_rows, self.num_prompts)))
        self.figures["num_decode_steps"] += 1
        running = samples >= 0
        self.rows.left[:num_rows] -= running
        self._free(samples[running & (self.rows.left[:num_rows] == 0)])

    def _free(self, samples: np.ndarray) -> None:
        for sample in samples.tolist():
            group = self.rows.free(sample)
            if group is None or not self.device.sizes.num_prefixes:
                continue
            if group.num_running == 0 and group.num_started == self.params.n:
                self.free_prefixes.append(group.slot)

    def _read(self) -> None:
        """Take in the oldest step: its tokens, and which samples end with them."""
        samples, readback = self.flight.popleft()
        samples, tokens = self.results.record(samples, *readback.wait())
        stopped, finished = self.stop.finished(tokens, self.results.length[samples])
        if self.stop.has_strings:
            by_string = [self.stop.ends_string(self.results.tokens[s, : self.results.length[s]]) for s in samples]
            stopped |= np.array(by_string, dtype=bool)
            finished |= stopped
        self._free(samples[finished])
        for sample, by_stop in zip(samples[finished].tolist(), stopped[finished].tolist(), strict=True):
            self._end(sample, by_stop)

    def _end(self, sample: int, stopped: bool) -> None:
        self.results.ended[sample] = True
        index, number = divmod(sample, self.params.n)
        request, length = self.groups[index].request, int(self.results.length[sample])
        ordinal, number = request.ordinal, request.first_sample + number
        log_probs = self.results.log_probs[sample, :length]
        if not np.isfinite(log_probs).all():
            raise NumericsError(
                f"Sample {number} of prompt {ordinal} has a log-probability that is not finite: the logits of weight "
                f"version {self.weight_version} overflow or are NaN. Go back to an earlier checkpoint."
            )
        completion = Completion(
            ordinal=ordinal,
            sample=number,
            token_ids=self.results.tokens[sample, :length].tolist(),
            log_probs=log_probs.tolist(),
            finish_reason=StopRules.reason(stopped),
            weight_version=self.weight_version,
        )
        self.completions[sample] = completion
        self.figures["num_generated_tokens"] += length
        if self.on_finish is not None:
            self.on_finish(completion)
