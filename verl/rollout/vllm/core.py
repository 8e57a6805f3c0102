"""vLLM itself, in the process that runs this: requests in, finished samples out, weights in buckets."""

import contextlib
import importlib.util
import io
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.config import full_key
from verl.data_proto.media import Clip
from verl.data_proto.samples import Completion, FinishReason, PromptRequest, SampleKey, SamplingParams
from verl.errors import MissingExtraError, ModelError, first_line
from verl.models.randomness import RandomState
from verl.rollout.api import Stats
from verl.rollout.engine_names import IN_PROCESS, require_names
from verl.rollout.requests import StopRules, random_keys
from verl.rollout.vllm.sample import draw_arguments
from verl.rollout.vllm.weights import ELSEWHERE, Description

log = logging.getLogger(__name__)

TESTED_RELEASES = ("0.32",)
WORKING = f"versions known to work: {', '.join(TESTED_RELEASES)}"

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"
_REQUESTS = itertools.count()  # names of requests, each used once
_MOST_IN_FLIGHT = 3  # steps: two scheduled ahead, and one that tells workers of the end


@dataclass(frozen=True)
class Setup:
    """Arguments of vLLM; plain values, to be sent to another process."""

    llm: dict[str, object]  # arguments of vllm.LLM
    environment: dict[str, str]  # of the process while vLLM starts
    eos_token_ids: list[int]
    vocab_size: int
    reader: str  # "module:function" that gives the tensors of a described bucket
    sleeps: bool  # whether `sleep` frees memory on this device
    in_ranks: bool = False  # several processes with a process group make vLLM side by side, see library.Ranks


@dataclass
class _Sample:
    request: PromptRequest
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class Core:
    """See the package. Raises ModelError when vLLM does not start, naming versions that are known to work."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self._asleep: set[str] = set()  # parts of vLLM's memory, by its names for them
        require_names("vllm", IN_PROCESS, WORKING)
        with undisturbed(setup.environment):
            try:
                from verl.rollout.vllm import library

                check_version(library.version)
                in_slots = library.runs_in_slots()
                os.environ[library.RUNNER] = str(int(in_slots))
                # the first runner must not schedule ahead: the next sample depends on the number of tokens
                self._llm = library.LLM(**{"async_scheduling": None if in_slots else False, **setup.llm})
            except Exception as error:  # vLLM may raise anything from here, and other versions differ
                raise ModelError(
                    f"vLLM could not start with {setup.llm['model']}: {type(error).__name__}: {first_line(error)} ({WORKING})."
                ) from error
        self._library = library

    def open(self, params: SamplingParams, step: int) -> None:
        """Begin a generation; one at a time."""
        self.wake()
        self.params, self.step = params, step
        tokenizer = _tokenizer(self.setup) if params.stop else None
        self.stop = StopRules(params, self.setup.eos_token_ids, self.setup.vocab_size, tokenizer)
        self.running: dict[str, _Sample] = {}
        self._ended: list[Completion] = []
        self._num_steps = self._max_running = self._num_requested = self._num_cached = 0

    def add(self, requests: list[PromptRequest]) -> None:
        """Queue requests of one sample each."""
        samples = [r.first_sample for r in requests]
        keys = random_keys(self.params.seed, self.step, requests, samples).tolist()
        kinds = self._library.RequestOutputKind
        kind = kinds.DELTA if self.stop.has_strings else kinds.FINAL_ONLY
        for request, key in zip(requests, keys, strict=True):
            name = str(next(_REQUESTS))
            self.running[name] = _Sample(request)
            self._num_requested += len(request.token_ids)
            arguments = request_arguments(self.params, self.stop, draw_arguments(key, request.num_drawn, self.params))
            if request.max_new_tokens is not None:
                arguments["max_tokens"] = max(1, min(request.max_new_tokens, self.params.max_new_tokens))
            sampling = self._library.SamplingParams(**arguments, output_kind=kind)
            prompt = self._library.TokensPrompt(prompt_token_ids=list(request.token_ids), **_media(request))
            self._llm.llm_engine.add_request(name, prompt, sampling)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """See Generation.poll; weight_version is left to the caller."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._ended = []
        while self.running:
            self._max_running = max(self._max_running, len(self.running))
            self._num_steps += 1
            for output in self._llm.llm_engine.step():
                self._record(output)
            if self._ended or (until is not None and time.monotonic() >= until):
                break
        return self._ended

    def abort(self, keys: list[SampleKey]) -> None:
        """Drop running samples."""
        names = [n for n, s in self.running.items() if (s.request.ordinal, s.request.first_sample) in keys]
        for name in names:
            del self.running[name]
        self._llm.llm_engine.abort_request(names)

    def close_generation(self) -> Stats:
        """Drop running samples, and return the statistics of this process (see RolloutEngine.stats)."""
        with contextlib.suppress(Exception):  # an error that came before is raised
            self._llm.llm_engine.abort_request(list(self.running))
            for _ in range(_MOST_IN_FLIGHT):  # steps that vLLM has scheduled ahead still use its memory
                self._llm.llm_engine.step()
        self.running.clear()
        cache = self._llm.llm_engine.vllm_config.cache_config
        return {
            "num_prompt_tokens_computed": self._num_requested - self._num_cached,
            "num_decode_steps": self._num_steps,
            "max_running": self._max_running,
            "kv_cache_bytes": getattr(cache, "kv_cache_memory_bytes", None) or 0,
        }

    def _record(self, output: Any) -> None:
        name, (completion,) = output.request_id, output.outputs
        sample = self.running.get(name)
        if sample is None:  # it ended by a stop string
            return
        for token, candidates in zip(completion.token_ids, completion.logprobs or (), strict=True):
            sample.token_ids.append(int(token))
            sample.log_probs.append(float(candidates[token].logprob))
            if self.stop.has_strings and self.stop.ends_string(np.asarray(sample.token_ids)):
                if not output.finished:
                    self._llm.llm_engine.abort_request([name])
                self._end(name, output, "stop")
                return
        if output.finished:
            if completion.finish_reason not in ("stop", "length"):
                request = sample.request
                raise ModelError(
                    f"vLLM ended sample {request.first_sample} of prompt {request.ordinal}: {completion.finish_reason}."
                )
            self._end(name, output, completion.finish_reason)

    def _end(self, name: str, output: Any, reason: FinishReason) -> None:
        sample = self.running.pop(name)
        files = None if sample.request.media is None else sample.request.media.files
        if files is not None and list(output.prompt_token_ids) != list(files.token_ids):
            raise ModelError(
                f"vLLM has other tokens ({len(output.prompt_token_ids)}) for prompt {sample.request.ordinal} with its images "
                f"than this run ({len(files.token_ids)}). Set {full_key('rollout.name')}=native."
            )
        self._num_cached += getattr(output, "num_cached_tokens", None) or 0
        key = (sample.request.ordinal, sample.request.first_sample)
        experts = getattr(output.outputs[0], "routed_experts", None)
        self._ended.append(Completion(*key, sample.token_ids, sample.log_probs, reason, -1, experts))

    def try_bucket(self, bucket: Description) -> None:
        """Read a bucket without loading it. Raises ModelError when it cannot be read here."""
        self._on_workers("verl_try", json.dumps({"reader": self.setup.reader, "bucket": bucket}))

    def begin_update(self) -> None:
        """New weights will come in buckets."""
        self.wake(_WEIGHTS)  # the KV cache would lie in memory that the update may need
        self._on_workers("verl_begin")

    def update(self, bucket: Description) -> None:
        """Load a bucket. Raises ModelError when it differs from the written bucket, or does not fit the model."""
        self._on_workers("verl_load", json.dumps({"reader": self.setup.reader, "bucket": bucket}))

    def finish_update(self, manifest: str) -> None:
        """The weights are complete, see WeightReceiver.verl_finish; results of the old ones are dropped."""
        self._on_workers("verl_finish", manifest)
        if not self._llm.reset_prefix_cache():
            raise ModelError("vLLM did not drop the prefixes that it computed with the old weights; restart the run.")

    def abandon_update(self) -> None:
        """Give up a failed update; the weights are not usable until another one is complete."""
        self._on_workers("verl_abandon")

    def sleep(self, discards: bool = False) -> None:
        """Free the KV cache and the weights on the device, if vLLM can. With `discards` the weights are lost, and an update
        must follow. Else vLLM copies them to the host."""
        if self.setup.sleeps and _WEIGHTS not in self._asleep:
            self.wake()  # vLLM puts nothing to sleep twice
            self._llm.sleep(level=2 if discards else 1)
            self._asleep = {_WEIGHTS, _KV_CACHE}

    def wake(self, *parts: str) -> None:
        """Allocate memory again, for `parts` ("weights", "kv_cache") or for all parts without memory."""
        tags = sorted(self._asleep.intersection(parts) if parts else self._asleep)
        if tags:
            self._llm.wake_up(tags=tags)
            self._asleep.difference_update(tags)

    def close(self) -> None:
        """End vLLM's own processes, if it has any."""
        with contextlib.suppress(Exception):  # at the end of a process; nothing depends on it
            if self.setup.in_ranks:  # the engine's own shutdown would end the run's process group
                self._llm.llm_engine.model_executor.shutdown()
            else:
                self._llm.llm_engine.engine_core.shutdown()

    def _on_workers(self, method: str, *args: object) -> None:
        errors = [answer["error"] for answer in self._llm.collective_rpc(method, args=args) if "error" in answer]
        if errors:
            raise ModelError(min(errors, key=lambda error: error == ELSEWHERE))  # the worker that knows more


def _media(request: PromptRequest) -> dict[str, Any]:
    """vLLM's prompt entries for the images of a request; {} without images. vLLM replaces each image's token by its patches."""
    if request.media is None or request.media.files is None:
        return {}
    data: dict[str, list[object]] = {}
    for item in request.media.files.contents:
        data.setdefault("video" if isinstance(item, Clip) else "image", []).append(_opened(item))
    return {"multi_modal_data": data, "mm_processor_kwargs": request.media.files.arguments}


def _opened(item: bytes | Clip) -> object:
    """A PIL image, or for a clip the frames (uint8 [frames, height, width, 3]) and vLLM's metadata of a video."""
    if isinstance(item, Clip):
        entries: dict[str, object] = {"total_num_frames": item.num_frames, "frames_indices": list(item.indices)}
        entries |= {"fps": item.fps, "duration": item.num_frames / item.fps, "do_sample_frames": False}
        return np.stack([np.asarray(_opened(frame)) for frame in item.frames]), entries
    from PIL import Image

    return Image.open(io.BytesIO(item)).convert("RGB")


def request_arguments(params: SamplingParams, stop: StopRules, extra: dict[str, object]) -> dict[str, Any]:
    """Arguments of vllm.SamplingParams for a sample. vLLM samples greedily (see sample.py). Its rules of stopping are off:
    end-of-sequence tokens are plain stop tokens."""
    return {
        "n": 1,
        "temperature": 0.0,
        "max_tokens": params.max_new_tokens,
        "stop_token_ids": stop.token_ids,
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
        "extra_args": extra,
    }


def require_vllm(key: str) -> None:
    """Raise MissingExtraError if vLLM is not installed; the error says that `key` asks for it. Does not import vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            f"{full_key(key)}=vllm", "vllm", "vllm", f"set {full_key(key)}=native, the engine that comes with verl"
        )


def check_version(version: str) -> None:
    """Warn of a version that is not in TESTED_RELEASES."""
    if not any(version == release or version.startswith(f"{release}.") for release in TESTED_RELEASES):
        log.warning("vLLM %s was not tried with this version of verl; %s.", version, WORKING)


@contextlib.contextmanager
def undisturbed(environment: dict[str, str]) -> Iterator[None]:
    """Set `environment` for the start of vLLM. Afterwards restore the environment, the random generators and torch's thread
    setting: vLLM's start changes them for the process."""
    before, set_num_threads = dict(os.environ), torch.set_num_threads
    on_host = RandomState.of(torch.device("cpu"))
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads = set_num_threads
        on_host.restore(torch.device("cpu"))
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def _tokenizer(setup: Setup) -> Any:
    from transformers import AutoTokenizer

    source = setup.llm.get("tokenizer") or setup.llm["model"]
    return AutoTokenizer.from_pretrained(source, trust_remote_code=bool(setup.llm.get("trust_remote_code")))
