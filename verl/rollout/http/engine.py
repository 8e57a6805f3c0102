"""The rollout engine on a service: requests side by side, each sample counted once, weights by a folder that both see."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import ConfigError, ModelError, NumericsError, UnreachableError, WorkerLostError
from verl.rollout.api import OnFinish, OwnCopy, Weights
from verl.rollout.http.client import Client
from verl.rollout.http.dialects import DIALECTS, Dialect, Made, Wanted
from verl.rollout.http.server import SGLangServer
from verl.rollout.http.stops import sample_by_rules
from verl.rollout.requests import check_requests, vocab_size
from verl.rollout.stopping import StopRules
from verl.rollout.uniforms import sample_keys
from verl.rollout.weight_version import CopyState, checked

_URL = "http://127.0.0.1:8000"  # where vLLM's server listens by itself
_MOST_REQUESTS = 256  # side by side; each has a thread


class HTTPRollout:
    """See RolloutEngine. `module` is the model without numbers (meta device).

    Reads `config.service`, max_num_seqs (requests side by side) and max_model_len. Raises ConfigError when the service has
    another model, UnreachableError when it cannot be reached.
    """

    holds_weights = True
    api = ""  # "" for what service.api says

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
        del pad_token_id
        self.tokenizer = tokenizer  # for stop strings, which are looked for here
        self.skeleton, self.config, self.own, service = module, config, own, config.service
        self.eos_token_ids = tuple(eos_token_ids)
        self.state = CopyState()
        self.client = Client(
            service.url or _URL,
            token_env=service.token_env,
            timeout_s=service.timeout_s,
            num_retries=service.num_retries,
        )
        api = self.api or service.api
        if api == "openai" and (config.top_p < 1 or config.top_k > 0 or config.min_p > 0):
            raise ConfigError(
                "With rollout.service.api=openai log-probabilities are those of the tokens that top_k, top_p and min_p leave, "
                "which do not compare with the trained model's. Leave these keys of actor_rollout_ref.rollout out, or start "
                "vLLM's server with verl's draw (service.api=vllm)."
            )
        self.dialect: Dialect = DIALECTS[api]()
        self.dialect.check(self.client, own.model.path, service.served_model_name, vocab_size(module))
        self._labelled: str | None = None  # what the service must say of its weights
        self._num_updates = 0
        self._stats: dict[str, Any] = {}

    @property
    def weight_version(self) -> int:
        return self.state.version

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """See RolloutEngine; what a sample is a function of is the service's business where the draw is its own. Raises
        ModelError when the service holds other weights than were published."""
        check_requests(prompts, params, self.skeleton, self.config.max_model_len)
        self.state.require_whole()
        if not prompts:
            return []
        self._require_version(self.dialect.version(self.client))
        started_at, found = time.perf_counter(), {}
        numbered = [(prompt, number) for prompt in prompts for number in range(params.n)]
        with ThreadPoolExecutor(min(self.config.max_num_seqs, _MOST_REQUESTS, len(numbered))) as pool:
            futures = self._submit(pool, numbered, params, step)
            try:
                for future in as_completed(futures):
                    done = self._completion(*futures[future], future.result())
                    found[done.ordinal, done.sample] = done
                    if on_finish is not None:
                        on_finish(done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                wait(futures, timeout=self.client.timeout_s, return_when=FIRST_EXCEPTION)
                raise
        self._stats = {
            "num_prompt_tokens": sum(len(p.token_ids) for p in prompts),
            "num_prompt_tokens_computed": sum(len(p.token_ids) for p in prompts),  # as far as is known here
            "num_generated_tokens": sum(len(c.token_ids) for c in found.values()),
            "num_decode_steps": max(len(c.token_ids) for c in found.values()),
            "max_running": min(self.config.max_num_seqs, _MOST_REQUESTS, len(numbered)),
            "kv_cache_bytes": 0,  # the service's
            "seconds": time.perf_counter() - started_at,
        }
        return [found[prompt.ordinal, prompt.first_sample + number] for prompt, number in numbered]

    def load(self, weights: Weights) -> None:
        """Write all weights to a new folder and let the service read it. Raises ConfigError when no folder is set, ModelError
        when a weight is missing or the service did not take them; nothing is generated then until an update succeeds."""
        root = self.config.service.weights_dir
        if root is None:
            raise ConfigError(
                f"The service at {self.client.url} needs new weights after each step, and there is no way for them: set "
                "actor_rollout_ref.rollout.service.weights_dir to a folder that this run can write and the service can read."
            )
        self.state.begin()
        self._num_updates += 1
        tensors = checked(weights, self.skeleton, self.own.dtype)
        description = self.own.write(Path(root).expanduser(), self._num_updates, tensors)
        try:
            self.dialect.update(self.client, description, self.own.folder_reader)
        finally:
            shutil.rmtree(description["folder"], ignore_errors=True)
        self.state.loaded()

    def publish(self, version: int) -> None:
        """See RolloutEngine. Raises ModelError when no new weights came for a new version."""
        self.state.publish(version)
        self.dialect.label(self.client, version)
        self._labelled = str(version)

    def release(self) -> None:
        """See RolloutEngine; the service keeps its memory."""

    def stats(self) -> dict[str, Any]:
        """See RolloutEngine."""
        return dict(self._stats)

    def close(self) -> None:
        """The service goes on."""

    def _submit(
        self, pool: ThreadPoolExecutor, numbered: list[tuple[PromptRequest, int]], params: SamplingParams, step: int
    ) -> dict[Future[Made], tuple[PromptRequest, int]]:
        ordinals = torch.tensor([p.ordinal for p, _ in numbered], dtype=torch.int64)
        samples = torch.tensor([p.first_sample + number for p, number in numbered], dtype=torch.int64)
        keys = sample_keys(params.seed, step, ordinals, samples).tolist()
        stops = sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)})
        rules = StopRules(params, self.eos_token_ids, vocab_size(self.skeleton), self.tokenizer)
        futures = {}
        for (prompt, number), key in zip(numbered, keys, strict=True):
            wanted = Wanted(prompt.token_ids, params, stops, key, prompt.num_drawn)
            ask = partial(self._ask, f"sample {prompt.first_sample + number} of prompt {prompt.ordinal}")
            futures[pool.submit(sample_by_rules, ask, wanted, rules)] = (prompt, number)
        return futures

    def _ask(self, name: str, wanted: Wanted) -> Made:
        """What the service makes of `wanted`, which is (a part of) the sample `name`."""
        made = self.dialect.sample(self.client, wanted)
        self._require_version(made.version)
        if not 1 <= len(made.token_ids) == len(made.log_probs) <= wanted.params.max_new_tokens:
            raise ModelError(
                f"The service at {self.client.url} gave {len(made.token_ids)} tokens and {len(made.log_probs)} log-probs for "
                f"{name}, of {wanted.params.max_new_tokens} at most."
            )
        if not np.isfinite(made.log_probs).all():
            raise NumericsError(f"A log-probability of {name} is not finite. Go back to an earlier checkpoint.")
        return made

    def _completion(self, prompt: PromptRequest, number: int, made: Made) -> Completion:
        sample, version = prompt.first_sample + number, self.state.version
        return Completion(prompt.ordinal, sample, made.token_ids, made.log_probs, made.finish_reason, version)

    def _require_version(self, said: str | None) -> None:
        if said is not None and self._labelled is not None and said != self._labelled:
            raise ModelError(
                f"The service at {self.client.url} generates with weights of version {said}, but version {self._labelled} was "
                "published. Somebody else changes them, or it was started anew: start this run again."
            )


class SGLangRollout(HTTPRollout):
    """A service of SGLang (`rollout.name=sglang`), or without `service.url` a server that is started for this engine alone.
    Raises what SGLangServer and HTTPRollout raise, WorkerLostError when that server dies."""

    api = "sglang"

    def __init__(self, module: Any, tokenizer: Any, config: Any, *, own: OwnCopy, **tokens: Any):
        self.server: SGLangServer | None = None
        if config.service.url is None:
            self.server = SGLangServer(config, own, module)
            service = replace(config.service, url=self.server.url, weights_dir=self.server.weights_dir)
            config = replace(config, service=service)
        try:
            super().__init__(module, tokenizer, config, own=own, **tokens)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """See HTTPRollout."""
        with self._watched():
            return super().generate(prompts, params, step=step, on_finish=on_finish)

    def load(self, weights: Weights) -> None:
        """See HTTPRollout."""
        with self._watched():
            super().load(weights)

    def publish(self, version: int) -> None:
        """See HTTPRollout."""
        with self._watched():
            super().publish(version)

    def close(self) -> None:
        """End the server, if it was started here."""
        if self.server is not None:
            self.server.close()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except UnreachableError as error:
            ending = self.server.ending() if self.server is not None else ""
            if not ending or self.server is None:
                raise
            raise WorkerLostError(
                f"SGLang's server (pid {self.server.pid}) {ending}. Start the run again, which resumes from the last "
                "checkpoint."
            ) from error
