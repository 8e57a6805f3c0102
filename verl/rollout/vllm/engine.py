"""The rollout engine on vLLM: checks, versions and weights on the trainer's side; see the package for the whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import VerlError
from verl.rollout.api import OnFinish, OwnCopy, Weights
from verl.rollout.requests import check_requests, vocab_size
from verl.rollout.vllm.core import Core, Setup
from verl.rollout.vllm.process import RemoteCore
from verl.rollout.vllm.restart import RebuiltCore
from verl.rollout.vllm.settings import longest_sequence, make_setup
from verl.rollout.vllm.versions import require_vllm
from verl.rollout.vllm.weights import Manifest
from verl.rollout.weight_version import CopyState, checked


class VLLMRollout:
    """See RolloutEngine. `module` is the model without numbers (meta device).

    Reads from `config`: max_engine_restarts, seed, max_num_seqs, max_num_batched_tokens, max_model_len, prompt_length,
    response_length, the sizes of parallel groups, enable_prefix_caching, enable_chunked_prefill, enforce_eager,
    gpu_memory_utilization, free_cache_engine and engine_kwargs.vllm. Raises MissingExtraError without vLLM, ModelError when it
    does not start.
    """

    holds_weights = True

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        config: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int | None = None,
        own: OwnCopy,
    ):
        del tokenizer, pad_token_id  # nothing is padded, and stop strings are looked for where vLLM is
        self.skeleton, self.config, self.own = module, config, own
        self.state = CopyState()
        self._longest = longest_sequence(config, module)
        self._stats: dict[str, Any] = {}
        setup = make_setup(config, own, module, eos_token_ids=tuple(eos_token_ids), vocab_size=vocab_size(module))
        require_vllm()
        self.core = self._start(setup)

    @property
    def weight_version(self) -> int:
        return self.state.version

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """See RolloutEngine. Raises ModelError when the last update of the weights did not end well."""
        check_requests(prompts, params, self.skeleton, self._longest)
        self.state.require_whole()
        if not prompts:
            return []
        found: dict[tuple[int, int], Completion] = {}

        def take(done: Completion) -> None:
            done.weight_version = self.state.version
            found[done.ordinal, done.sample] = done
            if on_finish is not None:
                on_finish(done)

        self._stats = self.core.generate(prompts, params, step=step, on_finish=take)
        return [found[p.ordinal, p.first_sample + number] for p in prompts for number in range(params.n)]

    def load(self, weights: Weights) -> None:
        """Take all weights of the model, by name, in the engine's number format. Raises ModelError when one is missing, is
        not the model's, or did not arrive as it was sent; nothing is generated then until an update succeeds."""
        if self.own.settle is not None:
            self.own.settle(self.core.try_bucket)
        self.state.begin()
        manifest = Manifest()
        try:
            self.core.begin_update()
            for bucket in self.own.portions(checked(weights, self.skeleton, self.own.dtype)):
                self.core.update(bucket)
                manifest.add(bucket)
            self.core.finish_update(manifest.digest)
        except VerlError:
            self._abandon()
            raise
        self.state.loaded()

    def publish(self, version: int) -> None:
        """See RolloutEngine. Raises ModelError when no new weights came for a new version."""
        self.state.publish(version)

    def release(self) -> None:
        """See RolloutEngine. On a CPU vLLM keeps its cache."""
        self.core.sleep()

    def stats(self) -> dict[str, Any]:
        """See RolloutEngine."""
        return dict(self._stats)

    def close(self) -> None:
        """End vLLM."""
        self.core.close()

    def _start(self, setup: Setup) -> Core | RemoteCore | RebuiltCore:
        if not self.own.in_process:
            return Core(setup)
        own, max_restarts = self.own, self.config.max_engine_restarts
        start = partial(RemoteCore, setup, start_timeout_s=own.start_timeout_s, call_timeout_s=own.call_timeout_s)
        return RebuiltCore(start, max_restarts) if max_restarts else start()

    def _abandon(self) -> None:
        try:
            self.core.abandon_update()
        except VerlError:  # what went wrong first is raised
            pass
