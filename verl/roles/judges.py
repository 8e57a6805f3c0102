"""Judges: generative reward models, run by an engine of this run (native, vLLM) or by a chat service.

    build_judge(config, device).replies(questions) -> replies, texts in the same order

The judge keeps the weights of its files; no weights are ever sent to it.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import torch

from verl.config import ModelConfig, RewardModelConfig, RolloutConfig
from verl.config.sections.rollout import EngineKwargsConfig
from verl.data.prompts import render_chat
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.data_proto.tokenizer import Tokenizer
from verl.distributions import load_part, require_part
from verl.errors import ModelError
from verl.families import DEFAULT_ROLLOUT, engine_facts
from verl.foreign_text import valid_utf8
from verl.models.frozen import load_frozen
from verl.models.hf_module import HFModule
from verl.models.load import load_tokenizer, meta_model
from verl.models.tokenizer import eos_token_ids
from verl.parallel.device import compute_dtype
from verl.rollout.api import ENGINES, RolloutEngine, WeightTransfer

_KEYS = "reward.reward_model.rollout"
_MOST_REQUESTS = 256  # concurrent; each has a thread

log = logging.getLogger(__name__)


@cache
def warn_of_cut_replies(limit: int) -> None:
    """Once in a process: the last number of a reply that was cut may not be its grade."""
    log.warning("A judge's replies are cut at %s.response_length=%d, some perhaps before the grade.", _KEYS, limit)


class Judge(Protocol):
    def replies(self, questions: Sequence[str]) -> list[str]:
        """A greedy reply to each question. Raises ModelError when one does not fit, WorkerLostError, UnreachableError
        or DeadlineError when the engine or service is gone or silent."""

    def release(self) -> None:
        """Free memory that is kept from one batch to the next."""

    def close(self) -> None:
        """End the processes of the judge."""


def build_judge(
    config: RewardModelConfig, device: torch.device, *, start_timeout_s: float, call_timeout_s: float
) -> Judge:
    """The judge that `config.rollout.name` names. A judge process has `start_timeout_s` to start and `call_timeout_s` between
    two signs of life. Raises ModelError, MissingExtraError without vLLM, and ConfigError for a service of another model."""
    rollout = config.rollout
    facts = engine_facts(rollout.name)
    if facts.asks_service:
        return ServiceJudge(config)
    assert config.model_path is not None  # a rule between keys
    model = ModelConfig(path=config.model_path, trust_remote_code=config.trust_remote_code)
    tokenizer, dtype = load_tokenizer(model), compute_dtype(rollout.dtype, device)
    engine_class: type[RolloutEngine] = ENGINES.get(rollout.name or DEFAULT_ROLLOUT)
    transfer = {}
    if facts.holds_weights:
        engine_class.require_package(RolloutConfig(), f"{_KEYS}.name")
        module = meta_model(model, dtype)
        transfer = {"transfer": _as_in_its_files(model, device, dtype, start_timeout_s, call_timeout_s)}
    else:
        module = load_frozen(config.model_path, device=device, dtype=dtype, trust_remote_code=config.trust_remote_code)
    engine = engine_class.for_module(module)(
        module, tokenizer, _settings(config, module), eos_token_ids=eos_token_ids(module, tokenizer), **transfer
    )
    return EngineJudge(engine, tokenizer, config)


class EngineJudge:
    """Asks an engine, in tokens: a question is the user's turn of a conversation if the tokenizer has a chat template."""

    def __init__(self, engine: RolloutEngine, tokenizer: Tokenizer, config: RewardModelConfig):
        self.engine, self.tokenizer = engine, tokenizer
        self.params = SamplingParams(temperature=0.0, max_new_tokens=config.rollout.response_length)
        self._frees = config.rollout.free_cache_engine

    def replies(self, questions: Sequence[str]) -> list[str]:
        """See Judge."""
        requests = [PromptRequest(number, ids) for number, ids in enumerate(self._tokens(questions))]
        completions = self.engine.generate(requests, self.params, step=0)
        if any(done.finish_reason == "length" for done in completions):
            warn_of_cut_replies(self.params.max_new_tokens)
        return [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]

    def release(self) -> None:
        """See Judge; nothing if free_cache_engine is False."""
        if self._frees:
            self.engine.release()

    def close(self) -> None:
        """End the engine's process, if it has one."""
        self.engine.close()

    def _tokens(self, questions: Sequence[str]) -> list[tuple[int, ...]]:
        if not self.tokenizer.chat_template:
            return [tuple(self.tokenizer(question)["input_ids"]) for question in questions]
        texts = [
            render_chat(
                self.tokenizer,
                [{"role": "user", "content": question}],
                "a judge's question",
                add_generation_prompt=True,
            )
            for question in questions
        ]
        return [tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


class ServiceJudge:
    """Asks `/v1/chat/completions` of an OpenAI-compatible service, in text; the model, its tokenizer and its chat template are
    the service's. Each question is a request, `max_num_seqs` of them side by side."""

    def __init__(self, config: RewardModelConfig):
        service = config.rollout.service
        require_part("verl.rollout.http", "A judge that is a service")
        self.client = load_part("verl.rollout.http.client").Client(
            service.url.rstrip("/").removesuffix("/v1"),  # as other programs have it in their settings
            token_env=service.token_env,
            timeout_s=service.timeout_s,
            num_retries=service.num_retries,
            keys=f"{_KEYS}.service",
        )
        self._max_tokens = config.rollout.response_length
        self._num_requests = min(config.rollout.max_num_seqs, _MOST_REQUESTS)
        served_model = load_part("verl.rollout.http.dialects").served_model
        self._model, *_ = served_model(self.client, service.served_model_name, config.model_path)

    def replies(self, questions: Sequence[str]) -> list[str]:
        """See Judge."""
        if not questions:
            return []
        with ThreadPoolExecutor(min(self._num_requests, len(questions))) as pool:
            futures = [pool.submit(self._reply, question) for question in questions]
            try:
                return [future.result() for future in futures]  # each request has its deadline
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def release(self) -> None:
        """The service keeps its memory."""

    def close(self) -> None:
        """Leave the service running."""

    def _reply(self, question: str) -> str:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }
        answer = self.client.post("/v1/chat/completions", body, num_tokens=self._max_tokens)
        message = ("choices", 0, "message")
        if "content" not in answer.at(dict, *message):
            raise answer.unusable("has no choices[0].message.content")
        if answer.get(str, "choices", 0, "finish_reason") == "length":
            warn_of_cut_replies(self._max_tokens)
        return valid_utf8(answer.get(str, *message, "content") or "")


def _settings(config: RewardModelConfig, module: HFModule) -> RolloutConfig:
    """`module` gives the longest sequence if the config does not."""
    rollout, plain, name = config.rollout, RolloutConfig(), config.rollout.name or DEFAULT_ROLLOUT
    longest = rollout.max_model_len or getattr(module.config.get_text_config(), "max_position_embeddings", None)
    settings = replace(
        plain,
        name=name,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        max_model_len=rollout.max_model_len,
        free_cache_engine=rollout.free_cache_engine,
    )
    if not engine_facts(name).holds_weights:
        return settings
    return replace(
        settings,
        mode="async",  # two vLLMs, the other one being the policy's, do not share a process
        max_engine_restarts=0,
        max_model_len=longest,
        response_length=rollout.response_length,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        engine_kwargs=EngineKwargsConfig(**{name: rollout.engine_kwargs.get(name) or {}}),
    )


def _as_in_its_files(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, start_timeout_s: float, call_timeout_s: float
) -> WeightTransfer:
    """An engine's copy of weights that stay as they are."""
    never: Callable[..., Any] = partial(_refuse, str(model.path))
    return WeightTransfer(
        model=model, device=device, dtype=dtype, write_buckets=never, write_folder=never, reader="", folder_reader="",
        start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s,
    )  # fmt: skip


def _refuse(path: str, *arguments: object) -> object:
    raise ModelError(f"The judge has the weights of {path}, which a run does not update.")
