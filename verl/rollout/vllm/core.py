"""vLLM itself, in the process that runs this: requests in, samples out as they end, weights in buckets."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.data_proto.samples import Completion, FinishReason, PromptRequest, SamplingParams
from verl.errors import ModelError, NumericsError
from verl.rollout.api import OnFinish
from verl.rollout.stopping import StopRules
from verl.rollout.uniforms import sample_keys
from verl.rollout.vllm.sample import draw_arguments
from verl.rollout.vllm.versions import WORKING, check_version
from verl.rollout.vllm.weights import ELSEWHERE, Description

Figures = dict[str, Any]

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"
_REQUESTS = itertools.count()  # names of requests, each used once


@dataclass(frozen=True)
class Setup:
    """How vLLM is started; plain values, which can travel to another process."""

    llm: dict[str, Any]  # arguments of vllm.LLM
    environment: dict[str, str]  # of the process while vLLM starts
    eos_token_ids: list[int]
    vocab_size: int
    reader: str  # "module:function" that gives the tensors of a described bucket
    sleeps: bool  # whether `sleep` frees memory on this device
    in_ranks: bool = (
        False  # several processes have a process group already and make vLLM side by side, see library.Ranks
    )


class Core:
    """See the package. Raises ModelError when vLLM does not start, naming versions that are known to work."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self._asleep: set[str] = set()  # parts of vLLM's memory, by its names for them
        with undisturbed(setup.environment):
            try:
                from verl.rollout.vllm import library

                check_version(library.version)
                self._llm = library.LLM(**setup.llm)
            except Exception as error:  # vLLM may raise anything from here, and other versions differ
                raise ModelError(
                    f"vLLM could not start with {setup.llm['model']}: {type(error).__name__}: {_first_line(error)} ({WORKING})."
                ) from error
        self._library = library

    def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        step: int,
        on_finish: OnFinish,
        on_step: Callable[[], None] = lambda: None,
    ) -> Figures:
        """Hand each sample to `on_finish` as it ends (weight_version is left to the caller); returns the figures that
        RolloutEngine.stats names. `on_step` is called after each step of the engine."""
        self.wake()
        run = _Run(self._llm.llm_engine, self._library, self.setup, prompts, params, step, on_finish)
        try:
            while run.step():
                on_step()
        except BaseException:
            run.abandon()
            raise
        return run.figures()

    def try_bucket(self, bucket: Description) -> None:
        """Read a bucket and take nothing. Raises ModelError when it cannot be read here."""
        self._on_workers("verl_try", json.dumps({"reader": self.setup.reader, "bucket": bucket}))

    def begin_update(self) -> None:
        """New weights will come in buckets."""
        self.wake(_WEIGHTS)  # the KV cache would lie in memory that the update may need
        self._on_workers("verl_begin")

    def update(self, bucket: Description) -> None:
        """Take a bucket. Raises ModelError when it is not what was written, or does not fit the model."""
        self._on_workers("verl_load", json.dumps({"reader": self.setup.reader, "bucket": bucket}))

    def finish_update(self, manifest: str) -> None:
        """The weights are whole, see WeightReceiver.verl_finish; what was computed with the old ones is dropped."""
        self._on_workers("verl_finish", manifest)
        if not self._llm.reset_prefix_cache():
            raise ModelError("vLLM did not drop the prefixes that it computed with the old weights; restart the run.")

    def abandon_update(self) -> None:
        """Give an update up that went wrong; the weights are not usable until another one is whole."""
        self._on_workers("verl_abandon")

    def sleep(self) -> None:
        """Give memory of the device back, the KV cache foremost, where vLLM can."""
        if self.setup.sleeps and _WEIGHTS not in self._asleep:
            self.wake()  # vLLM puts nothing to sleep twice
            self._llm.sleep(level=1)
            self._asleep = {_WEIGHTS, _KV_CACHE}

    def wake(self, *parts: str) -> None:
        """Take memory again: of all that is without, or of those parts alone."""
        wanted = sorted(self._asleep.intersection(parts) if parts else self._asleep)
        if wanted:
            self._llm.wake_up(tags=wanted)
            self._asleep.difference_update(wanted)

    def close(self) -> None:
        """End vLLM's own processes, if it has any."""
        with contextlib.suppress(Exception):  # at the end of a process; nothing depends on it
            if self.setup.in_ranks:  # the engine's own shutdown would end the process group, which is the run's
                self._llm.llm_engine.model_executor.shutdown()
            else:
                self._llm.llm_engine.engine_core.shutdown()

    def _on_workers(self, method: str, *args: Any) -> None:
        errors = [answer["error"] for answer in self._llm.collective_rpc(method, args=args) if "error" in answer]
        if errors:
            raise ModelError(min(errors, key=lambda error: error == ELSEWHERE))  # the worker that knows more


@dataclass
class _Sample:
    prompt: PromptRequest
    number: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class _Run:
    """One `generate`: its requests in vLLM's queue, and what came of them."""

    def __init__(
        self,
        engine: Any,
        library: Any,
        setup: Setup,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        step: int,
        on_finish: OnFinish,
    ):
        self.engine, self.on_finish = engine, on_finish
        tokenizer = _tokenizer(setup) if params.stop else None
        self.stop = StopRules(params, setup.eos_token_ids, setup.vocab_size, tokenizer)
        self.started_at = time.perf_counter()
        self.num_steps = self.max_running = self.num_generated = self.num_cached = 0
        self.num_prompt_tokens = sum(len(p.token_ids) for p in prompts)
        chosen = [(prompt, number) for prompt in prompts for number in range(params.n)]
        self.num_requested_tokens = sum(len(p.token_ids) for p, _ in chosen)
        keys = sample_keys(
            params.seed,
            step,
            torch.tensor([p.ordinal for p, _ in chosen], dtype=torch.int64),
            torch.tensor([p.first_sample + number for p, number in chosen], dtype=torch.int64),
        ).tolist()
        self.running: dict[str, _Sample] = {}
        for (prompt, number), key in zip(chosen, keys, strict=True):
            name = str(next(_REQUESTS))
            self.running[name] = _Sample(prompt, number)
            arguments = request_arguments(params, setup, draw_arguments(key, prompt.num_drawn, params))
            kinds = library.RequestOutputKind
            kind = kinds.DELTA if self.stop.has_strings else kinds.FINAL_ONLY
            wanted = library.SamplingParams(**arguments, output_kind=kind)
            engine.add_request(name, library.TokensPrompt(prompt_token_ids=list(prompt.token_ids)), wanted)

    def step(self) -> bool:
        """One step of the engine; False when there is nothing left to do."""
        if not self.running:
            return False
        self.max_running = max(self.max_running, len(self.running))
        self.num_steps += 1
        for output in self.engine.step():
            self._take(output)
        return bool(self.running)

    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # what went wrong before is raised
            self.engine.abort_request(list(self.running))

    def figures(self) -> Figures:
        cache = self.engine.vllm_config.cache_config
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_prompt_tokens_computed": self.num_requested_tokens - self.num_cached,
            "num_generated_tokens": self.num_generated,
            "num_decode_steps": self.num_steps,
            "max_running": self.max_running,
            "kv_cache_bytes": getattr(cache, "kv_cache_memory_bytes", None) or 0,
            "seconds": time.perf_counter() - self.started_at,
        }

    def _take(self, output: Any) -> None:
        name, (made,) = output.request_id, output.outputs
        sample = self.running.get(name)
        if sample is None:  # it ended by a stop string
            return
        for token, found in zip(made.token_ids, made.logprobs or (), strict=True):
            sample.token_ids.append(int(token))
            sample.log_probs.append(float(found[token].logprob))
            if self.stop.has_strings and self.stop.ends_string(np.asarray(sample.token_ids)):
                if not output.finished:
                    self.engine.abort_request([name])
                self._end(name, sample, output, "stop")
                return
        if output.finished:
            if made.finish_reason not in ("stop", "length"):
                raise ModelError(
                    f"vLLM ended sample {sample.number} of prompt {sample.prompt.ordinal}: {made.finish_reason}."
                )
            self._end(name, sample, output, made.finish_reason)

    def _end(self, name: str, sample: _Sample, output: Any, reason: FinishReason) -> None:
        del self.running[name]
        self.num_generated += len(sample.token_ids)
        self.num_cached += getattr(output, "num_cached_tokens", None) or 0
        number = sample.prompt.first_sample + sample.number
        if not sample.token_ids or not np.isfinite(sample.log_probs).all():
            raise NumericsError(
                f"Sample {number} of prompt {sample.prompt.ordinal} has a log-probability that is not finite: vLLM's logits "
                "overflow or are NaN. Go back to an earlier checkpoint."
            )
        self.on_finish(
            Completion(
                ordinal=sample.prompt.ordinal,
                sample=number,
                token_ids=sample.token_ids,
                log_probs=sample.log_probs,
                finish_reason=reason,
                weight_version=-1,
            )
        )


def request_arguments(params: SamplingParams, setup: Setup, extra: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vllm.SamplingParams for a sample. vLLM's own draw is the greedy one (see draw.py), and its own rules of
    stopping are off: end-of-sequence tokens are stop tokens like others."""
    eos = () if params.ignore_eos else setup.eos_token_ids
    stops = sorted({t for t in (*params.stop_token_ids, *eos) if 0 <= t < setup.vocab_size})
    return {
        "n": 1,
        "temperature": 0.0,
        "max_tokens": params.max_new_tokens,
        "stop_token_ids": stops,
        "ignore_eos": True,
        "logprobs": 0,  # of the drawn token alone
        "detokenize": False,
        "extra_args": extra,
    }


@contextlib.contextmanager
def undisturbed(environment: dict[str, str]) -> Iterator[None]:
    """With `environment` set; afterwards the environment, random generators and torch's thread setting are as they were,
    which vLLM's start changes for the whole process."""
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def _tokenizer(setup: Setup) -> Any:
    from transformers import AutoTokenizer

    source = setup.llm.get("tokenizer") or setup.llm["model"]
    return AutoTokenizer.from_pretrained(source, trust_remote_code=bool(setup.llm.get("trust_remote_code")))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
