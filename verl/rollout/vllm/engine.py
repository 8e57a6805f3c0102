"""The rollout engine on vLLM: checks, versions and weights on the trainer's side; see the package."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.config import RolloutConfig
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams, TurnRequest
from verl.errors import VerlError
from verl.families import ROLLOUT_ENGINES
from verl.rollout.api import Stats, Weights
from verl.rollout.other_engines import OwnWeights, with_files
from verl.rollout.requests import OpenSamples, one_by_one, vocab_size
from verl.rollout.vllm.core import Core, Setup, require_vllm
from verl.rollout.vllm.process import FACTORY, RemoteCore, RestartingCore
from verl.rollout.vllm.settings import longest_sequence, make_setup
from verl.rollout.vllm.weights import Manifest
from verl.rollout.weight_version import checked_buckets

_POLL_S = 1.0  # of a call of the process: it must answer well before its deadline


@dataclass(eq=False)
class VLLMRollout(OwnWeights):
    """See RolloutEngine. `module` is a meta-device model.

    Reads from `config`: max_engine_restarts, seed, max_num_seqs, max_num_batched_tokens, max_model_len, prompt_length,
    response_length, the sizes of parallel groups, enable_prefix_caching, enable_chunked_prefill, enforce_eager,
    gpu_memory_utilization, free_cache_engine and engine_kwargs.vllm. Raises MissingExtraError without vLLM, ModelError when it
    does not start.
    """

    facts = ROLLOUT_ENGINES.facts["vllm"]
    factory = FACTORY  # makes the Core in a separate process

    @classmethod
    def require_package(cls, config: RolloutConfig, key: str = "rollout.name") -> None:
        """See RolloutEngine."""
        if cls.factory == FACTORY:
            require_vllm(key)

    def __post_init__(self) -> None:
        self.longest = longest_sequence(self.config, self.module)
        ends, size = tuple(self.eos_token_ids), vocab_size(self.module)
        setup = make_setup(self.config, self.transfer, self.module, eos_token_ids=ends, vocab_size=size)
        self.core = self._start(setup)

    def open(self, params: SamplingParams, *, step: int, keep: bool = False) -> VLLMGeneration:
        """See RolloutEngine. Raises ModelError when the last update of the weights did not end well."""
        self.require_whole()
        return VLLMGeneration(self, params, step, keep=keep)

    def load(self, weights: Weights) -> None:
        """Send all weights of the model, (name, tensor) pairs, to vLLM in the engine's dtype. Raises ModelError if a weight is
        missing, unknown or damaged on its way. Then nothing is generated until an update succeeds."""
        if self.transfer.probe is not None:
            self.transfer.probe(self.core.try_bucket)
        manifest = Manifest()
        with self.updating():
            try:
                self.core.begin_update()
                for bucket in checked_buckets(self.transfer.write_buckets(weights), self.module):
                    self.core.update(bucket)
                    manifest.add(bucket)
                self.core.finish_update(manifest.digest)
            except VerlError:
                with suppress(VerlError):  # what went wrong first is raised
                    self.core.abandon_update()
                raise

    def release(self) -> None:
        """See RolloutEngine. On a CPU vLLM keeps its cache. Weights that an update replaces are not copied to the host."""
        if self.syncs:
            self.discard()
        self.core.sleep(self.syncs)

    def close(self) -> None:
        """End vLLM."""
        self.core.close()

    def _start(self, setup: Setup) -> Any:
        """A Core in this process, or a proxy of a Core in a separate process."""
        if not self.transfer.in_process:
            return Core(setup)
        transfer, max_restarts = self.transfer, self.config.max_engine_restarts
        start = partial(
            RemoteCore,
            setup,
            start_timeout_s=transfer.start_timeout_s,
            call_timeout_s=transfer.call_timeout_s,
            factory=self.factory,
        )
        return RestartingCore(start, max_restarts, sleeps=setup.sleeps) if max_restarts else start()


class VLLMGeneration:
    """See Generation. vLLM finds the history of a sample that continues in its prefix cache (enable_prefix_caching)."""

    def __init__(self, engine: VLLMRollout, params: SamplingParams, step: int, *, keep: bool):
        self.core, self._version, self.tokenizer = engine.core, engine.weight_version, engine.tokenizer
        self.samples = OpenSamples(params, engine.module, engine.longest, keep=keep)
        self._poll_s = _POLL_S if engine.transfer.in_process else None
        self._num_requests = 0
        self._is_closed = False
        self.core.open(params, step)

    def add(self, request: PromptRequest | TurnRequest) -> None:
        requests = one_by_one(self.samples.admit(request))
        self._num_requests += len(requests)
        self.core.add([with_files(request, self.tokenizer) for request in requests])

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self.samples.running:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            limits = [limit for limit in (left_s, self._poll_s) if limit is not None]
            ended = self.core.poll(min(limits, default=None))
            completions = [
                self.samples.finish(d.key, d.token_ids, d.log_probs, d.finish_reason, self._version, d.experts)
                for d in ended
            ]
            if completions or left_s == 0.0:
                return completions
        return []

    def abort(self, keys: Iterable[SampleKey]) -> None:
        if running := self.samples.drop(keys):
            self.core.abort(running)

    def close(self) -> Stats:
        if not self._is_closed:
            self._is_closed = True
            try:
                stats = self.core.close_generation()
            except VerlError:  # the process is lost; the call before has raised that
                stats = {}
            counted = self.samples.stats(
                self.samples.num_prompt_tokens, self.samples.longest_response, self._num_requests
            )
            self._stats = {**counted, **stats}
        return dict(self._stats)
