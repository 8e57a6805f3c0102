"""The reference engine: Hugging Face `generate`, plain, over a view of the training module with eager attention.

Slow on purpose: prompts are padded on the left and every sample computes its prompt anew. It draws with the same uniforms
and the same rule as the native engine, so that in float32 both give the same samples; the contract tests rest on it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.errors import NumericsError
from verl.rollout.api import OnFinish
from verl.rollout.requests import borrowed, check_requests, vocab_size
from verl.rollout.sampling import sample
from verl.rollout.stopping import StopRules
from verl.rollout.uniforms import sample_keys, uniforms_at


class HFRollout:
    """See RolloutEngine. Reads max_num_seqs (samples in one `generate`) and max_model_len of `config`."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        config: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int | None = None,
    ):
        self.module = module
        self.tokenizer = tokenizer
        self.config = config
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self.weight_version = 0
        self._view = eager_view(module)
        self._stats: dict[str, Any] = {}

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """See RolloutEngine. Raises NumericsError when a sampled log-prob is not finite."""
        check_requests(prompts, params, self.module, self.config.max_model_len)
        stop = StopRules(params, self.eos_token_ids, vocab_size(self.module), self.tokenizer)
        samples = [(prompt, number) for prompt in prompts for number in range(params.n)]
        started_at = time.perf_counter()
        done: list[Completion] = []
        num_steps = 0
        with borrowed(self._view):
            for first in range(0, len(samples), self.config.max_num_seqs):
                chosen = samples[first : first + self.config.max_num_seqs]
                batch = _Batch(chosen, params, step, stop, self.weight_version, on_finish)
                self._generate(batch, params)
                done.extend(c for c in batch.completions if c is not None)
                num_steps += int(batch.lengths.max())
        self._stats = {
            "num_prompt_tokens": sum(len(p.token_ids) for p in prompts),
            "num_prompt_tokens_computed": sum(len(p.token_ids) for p, _ in samples),
            "num_generated_tokens": sum(len(c.token_ids) for c in done),
            "num_decode_steps": num_steps,
            "max_running": min(len(samples), self.config.max_num_seqs),
            "kv_cache_bytes": 0,  # generate frees its cache itself
            "seconds": time.perf_counter() - started_at,
        }
        return done

    def _generate(self, batch: _Batch, params: SamplingParams) -> None:
        device = next(self._view.parameters()).device
        width = max(len(p.token_ids) for p, _ in batch.samples)
        ids = torch.full((len(batch.samples), width), self.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch.samples):
            ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, width - len(prompt.token_ids) :] = 1
        self._view.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_config=GenerationConfig(
                max_new_tokens=params.max_new_tokens, do_sample=False, pad_token_id=self.pad_token_id
            ),
            logits_processor=LogitsProcessorList([batch.drawer]),
            stopping_criteria=StoppingCriteriaList([batch.stopper]),
        )

    def publish(self, version: int) -> None:
        """See RolloutEngine."""
        self.weight_version = version

    def release(self) -> None:
        """See RolloutEngine; there is nothing to free between calls."""

    def stats(self) -> dict[str, Any]:
        """See RolloutEngine."""
        return dict(self._stats)


def eager_view(module: Any) -> Any:
    """A second module over the very same parameters and buffers, with Hugging Face's eager attention and a generation
    config that changes no logits."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    view = copy.deepcopy(module, memo=shared)
    view.set_attn_implementation("eager")
    view.generation_config = GenerationConfig()
    return view


class _Batch:
    """The samples of one `generate`: what was drawn for each, and when each ended."""

    def __init__(
        self,
        samples: Sequence[tuple[PromptRequest, int]],
        params: SamplingParams,
        step: int,
        stop: StopRules,
        weight_version: int,
        on_finish: OnFinish | None,
    ):
        self.samples, self.params, self.stop = samples, params, stop
        self.weight_version, self.on_finish = weight_version, on_finish
        self.keys = sample_keys(
            params.seed,
            step,
            torch.tensor([p.ordinal for p, _ in samples]),
            torch.tensor([p.first_sample + number for p, number in samples]),
        )
        self.first_positions = torch.tensor([p.num_drawn for p, _ in samples])
        self.tokens = np.zeros((len(samples), params.max_new_tokens), dtype=np.int64)
        self.log_probs = np.zeros((len(samples), params.max_new_tokens))
        self.lengths = np.zeros(len(samples), dtype=np.int64)
        self.completions: list[Completion | None] = [None] * len(samples)
        self.num_drawn = 0
        self.drawer = _Drawer(self)
        self.stopper = _Stopper(self)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw the next token of every row; rows that have ended draw on, unread."""
        positions = self.first_positions + self.num_drawn
        u = uniforms_at(self.keys.to(logits.device), positions.to(logits.device))
        tokens, log_probs = sample(logits, self.params, u)
        self.tokens[:, self.num_drawn] = tokens.cpu().numpy()
        self.log_probs[:, self.num_drawn] = log_probs.cpu().numpy()
        self.num_drawn += 1
        return tokens

    def end_rows(self) -> np.ndarray:
        """Complete the rows that the last draw finished; bool [rows], true on every row that has ended."""
        running = np.array([c is None for c in self.completions])
        self.lengths[running] = self.num_drawn
        stopped, finished = self.stop.finished(self.tokens[:, self.num_drawn - 1], self.lengths)
        if self.stop.has_strings:
            stopped |= np.array([self.stop.ends_string(row[: self.num_drawn]) for row in self.tokens])
        for row in np.flatnonzero(running & (stopped | finished)).tolist():
            self._complete(row, bool(stopped[row]))
        return np.array([c is not None for c in self.completions])

    def _complete(self, row: int, stopped: bool) -> None:
        (prompt, number), length = self.samples[row], self.num_drawn
        log_probs = self.log_probs[row, :length]
        if not np.isfinite(log_probs).all():
            raise NumericsError(
                f"Sample {number} of prompt {prompt.ordinal} has a log-probability that is not finite: the logits of weight "
                f"version {self.weight_version} overflow or are NaN. Go back to an earlier checkpoint."
            )
        completion = Completion(
            ordinal=prompt.ordinal,
            sample=prompt.first_sample + number,
            token_ids=self.tokens[row, :length].tolist(),
            log_probs=log_probs.tolist(),
            finish_reason=StopRules.reason(stopped),
            weight_version=self.weight_version,
        )
        self.completions[row] = completion
        if self.on_finish is not None:
            self.on_finish(completion)


class _Drawer(LogitsProcessor):
    """Leaves `generate`, whose rule is the argmax, no choice but the token that was drawn."""

    def __init__(self, batch: _Batch):
        self.batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self.batch.draw(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class _Stopper(StoppingCriteria):
    def __init__(self, batch: _Batch):
        self.batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.from_numpy(self.batch.end_rows()).to(input_ids.device)
