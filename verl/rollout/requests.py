"""The parts that all engines share: checks of requests, rules of stopping, the samples of an open generation."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from verl.data_proto.samples import Completion, FinishReason, PromptRequest, SampleKey, SamplingParams, TurnRequest
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, ModelError, NumericsError
from verl.models.hf_module import HFModule
from verl.models.rope import row_limits
from verl.rollout.uniforms import sample_keys

_MARGIN = 8  # tokens decoded beyond the longest stop string, for tokenizers that treat the start of a text differently


def vocab_size(module: HFModule) -> int:
    """Number of tokens that the module can read, over all ranks if its embedding is divided."""
    try:
        return int(module.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # a user's module that has only a forward
        return int(module.config.get_text_config().vocab_size)


class OpenSamples:
    """The samples of one open generation: the running samples and, with `keep`, the tokens of finished samples.

    Raises ConfigError for invalid sampling parameters. `module` gives vocabulary and positions; `max_model_len` is the
    config's.
    """

    def __init__(self, params: SamplingParams, module: HFModule, max_model_len: int | None, *, keep: bool):
        _check_params(params)
        self.params, self.keep = params, keep
        self._limits = row_limits(module.config.get_text_config())
        if max_model_len is not None:
            self._limits.insert(0, (max_model_len, "rollout.max_model_len"))
        self.longest_sequence = min((limit for limit, _ in self._limits), default=1 << 20)  # tokens
        self._vocab_size = vocab_size(module)
        self._started_at = time.perf_counter()
        self.running: dict[SampleKey, PromptRequest] = {}
        self.num_prompt_tokens = self.num_generated = self.longest_response = 0
        self._kept: dict[SampleKey, PromptRequest] = {}  # each with its response so far

    def admit(self, request: PromptRequest | TurnRequest) -> PromptRequest:
        """The request with its complete history. Raises ModelError, before any computation, for a prompt that is empty, has
        a token outside the vocabulary, or is too long with `max_new_tokens`, and for a sample that runs or is not kept."""
        prompt = self._next_turn(request) if isinstance(request, TurnRequest) else request
        num_samples = prompt.num_samples or self.params.n
        self._check(prompt)
        keys = [(prompt.ordinal, prompt.first_sample + i) for i in range(num_samples)]
        taken = self.running if isinstance(request, TurnRequest) else {**self.running, **self._kept}
        if not taken.keys().isdisjoint(keys):
            raise ModelError(
                f"A sample of prompt {prompt.ordinal} is running or kept already; abort it before it starts again."
            )
        self.running.update(dict.fromkeys(keys, prompt))
        if isinstance(request, TurnRequest):
            del self._kept[request.ordinal, request.sample]
        self.num_prompt_tokens += len(request.token_ids)
        return replace(prompt, num_samples=num_samples)

    def finish(
        self,
        key: SampleKey,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        reason: FinishReason,
        version: int,
        experts: np.ndarray | None = None,
    ) -> Completion:
        """A sample has ended. Raises NumericsError when one of its log-probs is not finite."""
        if not len(token_ids) or not np.isfinite(log_probs).all():
            raise NumericsError(
                f"Sample {key[1]} of prompt {key[0]} has a log-probability that is not finite: the logits of weight version "
                f"{version} overflow or are NaN. Go back to an earlier checkpoint."
            )
        request = self.running.pop(key)
        if self.keep:
            tokens = (*request.token_ids, *token_ids)
            num_drawn = request.num_drawn + len(token_ids)
            self._kept[key] = replace(
                request, token_ids=tokens, num_drawn=num_drawn, first_sample=key[1], num_samples=1
            )
        self.num_generated += len(token_ids)
        self.longest_response = max(self.longest_response, len(token_ids))
        return Completion(*key, list(token_ids), list(log_probs), reason, version, experts)

    def stats(self, num_computed: int, num_steps: int, max_running: int, **more: object) -> dict[str, object]:
        """The statistics of RolloutEngine.stats: prompt tokens computed, decode steps, samples side by side."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_prompt_tokens_computed": num_computed,
            "num_generated_tokens": self.num_generated,
            "num_decode_steps": num_steps,
            "max_running": max_running,
            "kv_cache_bytes": 0,
            **more,
            "seconds": time.perf_counter() - self._started_at,
        }

    def drop(self, keys: Iterable[SampleKey]) -> list[SampleKey]:
        """Forget samples, running or kept; returns the running ones. Unknown keys are ignored."""
        dropped = []
        for key in keys:
            self._kept.pop(key, None)
            if self.running.pop(key, None) is not None:
                dropped.append(key)
        return dropped

    def _next_turn(self, turn: TurnRequest) -> PromptRequest:
        history = self._kept.get((turn.ordinal, turn.sample))
        if history is None:
            raise ModelError(
                f"Sample {turn.sample} of prompt {turn.ordinal} cannot continue: it has not finished in this "
                "generation, or was dropped. Use open(keep=True), and add the turn after the sample has finished."
            )
        tokens = (*history.token_ids, *turn.token_ids)
        return replace(
            history,
            token_ids=tokens,
            num_drawn=history.num_drawn + len(turn.token_ids),
            max_new_tokens=turn.max_new_tokens,
            stop=turn.stop,
            grammar=turn.grammar,
            spans=(*history.spans, *(span.moved(len(history.token_ids)) for span in turn.spans)),
        )

    def limit_of(self, request: PromptRequest) -> int:
        """The most tokens that the request may sample."""
        limit = self.params.max_new_tokens
        return limit if request.max_new_tokens is None else max(1, min(request.max_new_tokens, limit))

    def _check(self, request: PromptRequest) -> None:
        length, ordinal = len(request.token_ids), request.ordinal
        if length == 0:
            raise ModelError(f"Prompt {ordinal} is empty: there is nothing to continue.")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocab_size:
            bad = next(t for t in request.token_ids if not 0 <= t < self._vocab_size)
            raise ModelError(
                f"Prompt {ordinal} has token id {bad}, but the model knows {self._vocab_size} tokens. "
                "Tokenizer and model do not belong together."
            )
        num_new = self.limit_of(request)
        for limit, name in self._limits:
            if length + num_new > limit:
                raise ModelError(
                    f"Prompt {ordinal} of {length} tokens plus {num_new} new tokens exceeds {name} "
                    f"({limit}). Shorten prompts (data.max_prompt_length) or responses (data.max_response_length)."
                )


def random_keys(seed: int, step: int, requests: Sequence[PromptRequest], samples: Sequence[int]) -> torch.Tensor:
    """int64 [samples]: the keys of random numbers of `samples[i]` of `requests[i]`, in a generation of `step`."""
    ordinals = torch.tensor([r.ordinal if r.random_ordinal is None else r.random_ordinal for r in requests])
    steps = torch.tensor([step if r.random_step is None else r.random_step for r in requests])
    keys, numbers = torch.zeros_like(ordinals), torch.tensor(samples)
    for number in set(steps.tolist()):
        keys = torch.where(steps == number, sample_keys(seed, number, ordinals, numbers), keys)
    return keys


def one_by_one(request: PromptRequest) -> list[PromptRequest]:
    """A request for each sample of a request."""
    numbers = range(request.num_samples or 1)
    return [replace(request, first_sample=request.first_sample + i, num_samples=1) for i in numbers]


def _check_params(params: SamplingParams) -> None:
    for name, value, fits, rule in (
        ("n", params.n, params.n >= 1, "at least 1"),
        ("max_new_tokens", params.max_new_tokens, params.max_new_tokens >= 1, "at least 1"),
        ("temperature", params.temperature, 0 <= params.temperature < float("inf"), "0 (greedy) or more"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "between 0 and 1"),
    ):
        if not fits:
            raise ConfigError(f"Sampling parameter {name} is {value}; it must be {rule}.")


class StopRules:
    """The end of a sample: end-of-sequence and stop tokens, stop strings, the token limit. Raises ConfigError when there are
    stop strings but no tokenizer to read them with."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer | None
    ):
        if params.stop and tokenizer is None:
            raise ConfigError("Stop strings need a tokenizer; give one, or use stop_token_ids.")
        self._max_new_tokens = params.max_new_tokens
        self._strings = tuple(s for s in params.stop if s)
        self._tail = max((len(s.encode()) for s in self._strings), default=0) + _MARGIN
        self._tokenizer = tokenizer
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.token_ids = sorted(i for i in ids if 0 <= i < vocab_size)
        self._stops = np.zeros(vocab_size, dtype=bool)
        self._stops[self.token_ids] = True

    def finished(
        self, tokens: np.ndarray, lengths: np.ndarray, limits: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(stopped, finished), both bool [rows], after `tokens` [rows] (the newest of each row) made its response
        `lengths` [rows] tokens long. `limits` [rows] are the token limits of their requests. `ends_string` finds stop
        strings, row by row."""
        stopped = self._stops[tokens]
        return stopped, stopped | (lengths >= (self._max_new_tokens if limits is None else limits))

    @property
    def has_strings(self) -> bool:
        return bool(self._strings)

    def ends_string(self, response: np.ndarray, more: Sequence[str] = ()) -> bool:
        """Whether the response (int [tokens]) now holds a stop string, or one of `more`; it did not before its last token."""
        assert self._tokenizer is not None  # see __init__ and `require_tokenizer`
        tail = max([self._tail, *(len(s.encode()) + _MARGIN for s in more)])
        text = self._tokenizer.decode(response[-tail:].tolist(), clean_up_tokenization_spaces=False)
        return any(s in text for s in (*self._strings, *more))

    @staticmethod
    def reason(stopped: bool) -> FinishReason:
        return "stop" if stopped else "length"
