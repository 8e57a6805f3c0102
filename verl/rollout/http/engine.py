"""The rollout engine on a service: requests side by side, each sample counted once, weights by a folder that both see."""

from __future__ import annotations

import logging
import queue
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from verl.config import RolloutConfig, full_key
from verl.data_proto.media import ImageFiles
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams, TurnRequest
from verl.errors import ConfigError, ModelError, RefusedError
from verl.families import ROLLOUT_ENGINES
from verl.parallel.framing import most_connections
from verl.registry import load_object
from verl.reshard.link import Link
from verl.rollout.api import Stats, Weights
from verl.rollout.http.answers import SampleReply, SampleRequest
from verl.rollout.http.client import Client, bearer_token
from verl.rollout.http.dialects import DIALECTS, Dialect, require_tempered
from verl.rollout.http.server import require_space
from verl.rollout.other_engines import OwnWeights, with_files
from verl.rollout.requests import OpenSamples, StopRules, one_by_one, random_keys, vocab_size
from verl.rollout.vllm.settings import longest_sequence
from verl.rollout.vllm.weights import LINK_READER, Description
from verl.rollout.weight_version import checked_buckets

_URL = "http://127.0.0.1:8000"  # the address of vLLM's server by default

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HTTPRollout(OwnWeights):
    """See RolloutEngine. `module` is a meta-device model.

    Reads `config.service`, max_num_seqs (requests side by side) and max_model_len. Raises ConfigError when the service has
    another model, UnreachableError when it cannot be reached.
    """

    run_name: str = field(
        default_factory=partial(secrets.token_hex, 4), init=False
    )  # other runs have versions 1, 2, 3 too
    facts = ROLLOUT_ENGINES.facts["http"]
    api = ""  # "" for the value of service.api
    _link: Link | None = field(
        default=None, init=False
    )  # the service fetches buckets by it; None: it reads them in memory

    @classmethod
    def require_package(cls, config: RolloutConfig, key: str = "rollout.name") -> None:
        """See RolloutEngine: what the keys and the environment say of the service."""
        service = config.service
        bearer_token(service.url or _URL, service.token_env)
        cls._require_comparable(config)
        if (cls.api or service.api) == "openai":
            raise ConfigError(
                f"{full_key('rollout.service.api')}=openai takes no weights, and a run sends new ones before each generation. "
                "Set it to vllm or sglang, for a server that was started with verl's parts."
            )

    @classmethod
    def _require_comparable(cls, config: RolloutConfig) -> None:
        if (cls.api or config.service.api) == "openai" and (config.top_p < 1 or config.top_k > 0 or config.min_p > 0):
            raise ConfigError(
                "With rollout.service.api=openai log-probabilities are of the tokens that top_k, top_p and min_p leave, "
                f"and cannot be compared with the trained model's. Leave these keys of {full_key('rollout')} out, or start "
                "vLLM's server with verl's sampler (service.api=vllm)."
            )

    def __post_init__(self) -> None:
        config, service = self.config, self.config.service
        self._require_comparable(config)
        self.client = Client(
            service.url or _URL,
            token_env=service.token_env,
            timeout_s=service.timeout_s,
            num_retries=service.num_retries,
        )
        api = self.api or service.api
        self.dialect: Dialect = DIALECTS[api]()
        path, size = self.transfer.model.path, vocab_size(self.module)
        self.dialect.check(self.client, path, service.served_model_name, size)
        if api == "openai" and config.temperature not in (0.0, 1.0):
            require_tempered(self.dialect, self.client, size)
        self._require_room()
        self._buckets_problem = self._try_buckets()  # "": the service gets buckets
        if self._buckets_problem and service.weights_dir is not None:
            require_space(Path(service.weights_dir).expanduser(), self.module, self.transfer.dtype)
        self._labelled: str | None = None  # the weight version that the service must report
        self._num_updates = 0

    def weights_way(self) -> str | None:
        """See RolloutEngine."""
        root = self.config.service.weights_dir
        if self._buckets_problem and root is not None:
            return f"files in {root}"
        return None if self._link is None else f"TCP to {self.client.url}"

    def open(self, params: SamplingParams, *, step: int, keep: bool = False) -> HTTPGeneration:
        """See RolloutEngine; if the service samples by itself, samples depend on its random numbers. Raises ModelError when
        the service holds other weights than were published."""
        self.require_whole()
        self.require_current()
        return HTTPGeneration(self, params, step, keep=keep)

    def load(self, weights: Weights) -> None:
        """Let the service read all weights: in buckets of memory, in buckets that it fetches, or in a new folder. Raises
        ConfigError when no folder is set, ModelError when a weight is missing or the service did not take them; nothing is
        generated then until an update succeeds."""
        root = self.config.service.weights_dir
        if self._buckets_problem and root is None:
            raise ConfigError(
                f"The service at {self.client.url} needs new weights after each step, and cannot read memory of this run: "
                f"{self._buckets_problem} Set {full_key('rollout.service.weights_dir')} to a folder that this run can write "
                f"and the service can read{self.dialect.advice}."
            )
        if self.transfer.probe is not None:
            self.transfer.probe(lambda bucket: self.dialect.try_bucket(self.client, bucket, self.transfer.reader))
        with self.updating(), self.watched():
            buckets = checked_buckets(self.transfer.write_buckets(weights), self.module)
            if self._link is not None:
                before = self._link.num_sent_bytes
                self.dialect.update(self.client, map(self._link.offered, buckets), LINK_READER)
                self.num_fetched_bytes = self._link.num_sent_bytes - before
            elif not self._buckets_problem or root is None:
                self.dialect.update(self.client, buckets, self.transfer.reader)
            else:
                self._load_folder(Path(root).expanduser(), buckets)

    def _load_folder(self, root: Path, buckets: Iterable[Description]) -> None:
        self._num_updates += 1
        read = load_object(self.transfer.reader)
        tensors = ((name, tensor.clone()) for bucket in buckets for name, tensor in read(bucket))
        description = self.transfer.write_folder(root, self._num_updates, tensors)
        try:
            self.dialect.update(self.client, [description], self.transfer.folder_reader)
        finally:
            shutil.rmtree(description["folder"], ignore_errors=True)

    def _try_buckets(self) -> str:
        """The reason that the service cannot read a bucket in memory of this host, nor fetch it; "" if it can. Makes the link
        for a service that fetches."""
        if self.transfer.trial is None:
            return "No weights come."
        trial, link = self.transfer.trial(), None
        try:
            self.dialect.try_bucket(self.client, trial, self.transfer.reader)
            return ""
        except ModelError as error:
            problem = str(error)
        try:
            link = Link(self.client.own_address())
            self.dialect.try_bucket(self.client, link.offered(trial), LINK_READER)
        except (ModelError, OSError) as error:
            if link is not None:
                link.close()
            return problem if str(error) == problem else f"{problem} It cannot fetch it either: {error}"
        self._link = link
        if self.config.checkpoint_engine.backend == "delta":
            log.warning(
                "%s=delta has no effect: the service at %s fetches all weights in each update. Changes travel between hosts of "
                "a run.",
                full_key("rollout.checkpoint_engine.backend"),
                self.client.url,
            )
        return ""

    def close(self) -> None:
        """See RolloutEngine."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def publish(self, version: int) -> None:
        super().publish(version)
        with self.watched():
            self.dialect.label(self.client, label := f"{version}-{self.run_name}")
        self._labelled = label

    def _require_room(self) -> None:
        """Raise ConfigError when the service takes no sequence as long as a run's longest."""
        needed, (length, option) = longest_sequence(self.config, self.module), self.dialect.longest(self.client)
        if length is not None and length < needed:
            raise ConfigError(
                f"The service at {self.client.url} takes up to {length} tokens in a sequence, and this run has up to {needed}. "
                f"Start it with {option.format(needed)}, or lower {full_key('rollout.response_length')} or "
                f"{full_key('rollout.max_model_len')}."
            )

    def watched(self) -> AbstractContextManager[None]:
        """Context of each call of the service."""
        return nullcontext()

    def sample(self, request: SampleRequest) -> SampleReply:
        """The answer of the service to `request`. Raises ModelError when it is no sample, or comes from other weights."""
        reply = self.dialect.sample(self.client, request)
        self.require_version(reply.version)
        return reply

    def require_current(self) -> None:
        """Raise ModelError when the service holds other weights than the published version."""
        with self.watched():
            self.require_version(self.dialect.version(self.client))

    def require_version(self, version: str | None) -> None:
        """Raise ModelError when the service reports other weights than the published version."""
        if version is not None and self._labelled is not None and version != self._labelled:
            raise ModelError(
                f"The service at {self.client.url} generates with weights of version {version}, but version {self._labelled} "
                "was published. Another client changes them, or it was restarted: start this run again."
            )


class HTTPGeneration:
    """See Generation. A request is one sample, and has a thread; the service finds the history of a sample that continues
    in its prefix cache."""

    def __init__(self, engine: HTTPRollout, params: SamplingParams, step: int, *, keep: bool):
        self.engine, self.params, self.step = engine, params, step
        self.samples = OpenSamples(params, engine.module, engine.config.max_model_len, keep=keep)
        self.rules = StopRules(params, engine.eos_token_ids, vocab_size(engine.module), engine.tokenizer)
        self._most = min(engine.config.max_num_seqs, most_connections())
        self._pool = ThreadPoolExecutor(self._most)
        self._waiting: list[PromptRequest] = []  # one for each sample
        self._asked: dict[SampleKey, PromptRequest] = {}
        self._answers: queue.SimpleQueue[tuple[PromptRequest, Future[SampleReply]]] = queue.SimpleQueue()
        self._num_requests = self._num_short = 0

    def add(self, request: PromptRequest | TurnRequest) -> None:
        self._waiting.extend(one_by_one(self.samples.admit(request)))

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        self._submit()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        ended: list[Completion] = []
        with self.engine.watched():
            while self._asked and not (ended and self._answers.empty()):
                left_s = None if until is None else max(0.0, until - time.monotonic())
                try:
                    request, answer = self._answers.get(timeout=left_s)
                except queue.Empty:
                    break
                key = (request.ordinal, request.first_sample)
                if self._asked.get(key) is request:  # else it was dropped
                    del self._asked[key]
                    reply, version = answer.result(), self.engine.weight_version
                    is_short = len(reply.token_ids) < self.samples.limit_of(request)
                    self._num_short += is_short and reply.finish_reason == "length"
                    ended.append(
                        self.samples.finish(key, reply.token_ids, reply.log_probs, reply.finish_reason, version)
                    )
        if ended and not self._asked:  # a restart since `open` has other weights, and vLLM's answers do not say so
            self.engine.require_current()
        return ended

    def abort(self, keys: Iterable[SampleKey]) -> None:
        """See Generation. A request that was sent is answered, and its answer is dropped."""
        for key in self.samples.drop(keys):
            self._asked.pop(key, None)
        self._waiting = [r for r in self._waiting if (r.ordinal, r.first_sample) in self.samples.running]

    def close(self) -> Stats:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.engine.client.cancel()
        if self._num_short:
            log.warning(
                "The service at %s refused further tokens of %d samples, which end before their limit of tokens. Start it for "
                "longer sequences.",
                self.engine.client.url, self._num_short,
            )  # fmt: skip
        num_computed = self.samples.num_prompt_tokens  # as far as is known here
        max_running = min(self._most, self._num_requests)
        return self.samples.stats(num_computed, self.samples.longest_response, max_running)

    def _submit(self) -> None:
        requests, self._waiting = self._waiting, []
        samples = [r.first_sample for r in requests]
        keys = random_keys(self.params.seed, self.step, requests, samples).tolist()
        for request, key in zip(requests, keys, strict=True):
            name = f"sample {request.first_sample} of prompt {request.ordinal}"
            size = vocab_size(self.engine.module)
            params = replace(self.params, max_new_tokens=self.samples.limit_of(request))
            read = with_files(request, self.engine.tokenizer)
            files = ImageFiles() if read.media is None or read.media.files is None else read.media.files
            call = SampleRequest(
                read.token_ids, params, self.rules.token_ids, key, request.num_drawn, size, name, files, request.adapter
            )
            self._asked[request.ordinal, request.first_sample] = request
            self._num_requests += 1
            future = self._pool.submit(sample_by_rules, self.engine.sample, call, self.rules)
            future.add_done_callback(partial(self._answered, request))

    def _answered(self, request: PromptRequest, answer: Future[SampleReply]) -> None:
        self._answers.put((request, answer))


def sample_by_rules(
    sample: Callable[[SampleRequest], SampleReply], request: SampleRequest, rules: StopRules
) -> SampleReply:
    """One sample, ended by `rules`. `sample` asks the service, and is asked for the remaining tokens, without stop strings, as
    often as the service ends a sample before its end.

    A service's own stop is a hint. A service that decodes token by token cuts the text at complete characters. If a
    prompt ends within a character, vLLM's server takes the prompt for generated text and finds stop strings in it. SGLang ends
    samples at more tokens than it was sent, and both have limits of tokens that the config of the run does not know.
    """
    reply, num_searched = sample(request), 0
    while True:
        tokens = reply.token_ids
        if end := _first_end(tokens, num_searched, rules):
            return replace(reply, token_ids=tokens[:end], log_probs=reply.log_probs[:end], finish_reason="stop")
        by_token = tokens[-1] in request.stop_token_ids
        if by_token or len(tokens) == request.params.max_new_tokens:
            return replace(reply, finish_reason="stop" if by_token else "length")
        num_searched = len(tokens)
        try:
            rest = sample(request.after(tokens))
        except RefusedError:  # no space for more
            return replace(reply, finish_reason="length")
        reply = replace(rest, token_ids=tokens + rest.token_ids, log_probs=reply.log_probs + rest.log_probs)


def _first_end(token_ids: list[int], searched: int, rules: StopRules) -> int | None:
    """Number of tokens of the shortest start of the response with a stop string; longer than `searched`."""
    if not rules.has_strings:
        return None
    response = np.asarray(token_ids)
    ends = (end for end in range(searched + 1, len(response) + 1) if rules.ends_string(response[:end]))
    return next(ends, None)
