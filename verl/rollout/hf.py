"""The reference engine: Hugging Face `generate`, plain, over a view of the training module with eager attention.

It is slow on purpose: prompts are padded on the left, every sample computes its prompt again, and every turn its history. It
samples with the same uniforms and the same rule as the native engine, so in float32 both give the same samples. The contract
tests compare them. Models without a packed forward generate with it too, in batches of equal prompt length: some families
cannot be padded on the left. If the cache of a model differs from its forward, each new token computes all tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from verl.config import RolloutConfig, full_key
from verl.config.active_keys import WITHOUT, quantized_keys
from verl.data_proto.media import Media
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams, TurnRequest
from verl.errors import ConfigError
from verl.families import ROLLOUT_ENGINES
from verl.models.hf_module import HFModule
from verl.models.padded import forward_kind, own_logits
from verl.models.randomness import eval_mode
from verl.models.vision import padded_inputs
from verl.rollout.api import RolloutEngine, Stats
from verl.rollout.requests import OpenSamples, StopRules, one_by_one, random_keys, vocab_size
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms_at


@dataclass(eq=False)
class HFRollout(RolloutEngine):
    """See RolloutEngine. Reads max_num_seqs (samples in one `generate`) and max_model_len of `config`."""

    facts = ROLLOUT_ENGINES.facts["hf"]

    @classmethod
    def require_model(cls, module: HFModule, config: RolloutConfig, device: torch.device) -> None:
        """See RolloutEngine. The native engine may have passed a model on."""
        for key in quantized_keys(config):
            raise ConfigError(
                f"{type(module).__name__} is sampled by transformers, which does not quantize it here. Set "
                f"{key}={WITHOUT[key]}."
            )
        wishes = {
            "speculative.methods": config.speculative.methods,
            "batch_invariant": config.batch_invariant == "require",
        }
        for name, without in (("speculative.methods", "[]"), ("batch_invariant", "auto")):
            if wishes[name]:
                raise ConfigError(
                    f"{type(module).__name__} is sampled by transformers, which neither verifies drafts nor keeps the bits of "
                    f"a sample in each batch. Set {full_key(f'rollout.{name}')}={without}."
                )

    def __post_init__(self) -> None:
        self.require_model(self.module, self.config, next(self.module.parameters()).device)
        self.is_padded = forward_kind(self.module) != "packed"
        self.view = own_view(self.module) if self.is_padded else eager_view(self.module)
        self.caches = not self.is_padded or _cache_is_exact(self.view)

    def open(self, params: SamplingParams, *, step: int, keep: bool = False) -> HFGeneration:
        return HFGeneration(self, params, step, keep=keep)


class HFGeneration:
    """See Generation. A `poll` runs one batch from its beginning to the end of its last sample, with any timeout."""

    def __init__(self, engine: HFRollout, params: SamplingParams, step: int, *, keep: bool):
        self.engine, self.params, self.step = engine, params, step
        self.samples = OpenSamples(params, engine.module, engine.config.max_model_len, keep=keep)
        self.stop = StopRules(params, engine.eos_token_ids, vocab_size(engine.module), engine.tokenizer)
        self._waiting: list[PromptRequest] = []  # one for each sample
        self._num_computed = self._num_steps = self._max_running = 0

    def add(self, request: PromptRequest | TurnRequest) -> None:
        self._waiting.extend(one_by_one(self.samples.admit(request)))

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        chosen = self._next_batch()
        if not chosen:
            return []
        batch = _Batch(self, chosen)
        with eval_mode(self.engine.view), torch.no_grad():
            self._generate(batch)
        self._num_computed += sum(len(r.token_ids) for r in chosen)
        self._num_steps += batch.num_drawn
        self._max_running = max(self._max_running, len(chosen))
        return batch.finished

    def abort(self, keys: Iterable[SampleKey]) -> None:
        dropped = self.samples.drop(keys)
        self._waiting = [r for r in self._waiting if (r.ordinal, r.first_sample) not in dropped]

    def close(self) -> Stats:
        self._waiting = []
        return self.samples.stats(self._num_computed, self._num_steps, self._max_running)

    def _next_batch(self) -> list[PromptRequest]:
        """At most max_num_seqs waiting samples of equal images, and of equal prompt length if the model is not to be padded
        on the left."""
        pool = [r for r in self._waiting if _images(r) == _images(self._waiting[0])]
        if self.engine.is_padded:
            pool = [r for r in pool if len(r.token_ids) == len(pool[0].token_ids)]
        chosen = pool[: self.engine.config.max_num_seqs]
        taken = set(map(id, chosen))
        self._waiting = [r for r in self._waiting if id(r) not in taken]
        return chosen

    def _generate(self, batch: _Batch) -> None:
        view = self.engine.view
        device = next(view.parameters()).device
        width = max(len(r.token_ids) for r in batch.requests)
        ids = torch.zeros(len(batch.requests), width, dtype=torch.int64)
        mask, in_images = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for row, request in enumerate(batch.requests):
            first = width - len(request.token_ids)
            ids[row, first:] = torch.tensor(request.token_ids)
            mask[row, first:] = 1
            for span in request.placed:
                in_images[row, first + span.start : first + span.start + span.length] = True
        if not self.engine.caches:
            _generate_without_cache(view, batch, ids.to(device))
            return
        config = GenerationConfig(max_new_tokens=batch.max_new_tokens, do_sample=False, pad_token_id=0)
        images = _images(batch.requests[0])
        with padded_inputs(view, ids.to(device), in_images.to(device), images) as inputs:
            view.generate(
                **inputs,
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Sampler(batch)]),
                stopping_criteria=StoppingCriteriaList([_Stopper(batch)]),
            )


def _images(request: PromptRequest) -> list[Media]:
    return [span.media for span in request.placed]


def eager_view(module: nn.Module) -> Any:
    """A second module over the very same parameters and buffers, with Hugging Face's eager attention and a generation
    config that changes no logits."""
    view = own_view(module)
    view.set_attn_implementation("eager")
    return view


def own_view(module: Any) -> Any:
    """`eager_view` with the attention that the module has."""
    shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
    view = copy.deepcopy(module, memo=shared)
    view.generation_config = GenerationConfig()
    return view


@torch.no_grad()
def _cache_is_exact(view: Any) -> bool:
    """Whether `generate` runs, and gives in a few cached steps the logits of forwards over all tokens."""
    ids = torch.tensor([[1, 2, 3, 4]], device=next(view.parameters()).device)
    config = GenerationConfig(
        max_new_tokens=4, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    with eval_mode(view):
        try:
            output = view.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        except Exception:  # noqa: BLE001 - a module without `generate`, or of a family that it does not fit
            return False
        expected = own_logits(view, output.sequences[:, :-1])[0, ids.shape[1] - 1 :].float()
    cached = torch.cat(output.logits).float()
    return bool((cached - expected).norm() < 1e-3 * expected.norm())


def _generate_without_cache(view: object, batch: _Batch, ids: torch.Tensor) -> None:
    """Sample `batch` from its prompts `ids` [rows, tokens], by a forward over all tokens for each new one."""
    for _ in range(batch.max_new_tokens):
        tokens = batch.sample(own_logits(view, ids)[:, -1])
        if batch.end_rows().all():
            return
        ids = torch.cat([ids, tokens.unsqueeze(1)], dim=1)


class _Batch:
    """The samples of one `generate`: the tokens of each, and whether it has ended."""

    def __init__(self, generation: HFGeneration, requests: list[PromptRequest]):
        self.generation, self.requests, self.params = generation, requests, generation.params
        samples = [r.first_sample for r in requests]
        self.keys = random_keys(self.params.seed, generation.step, requests, samples)
        self.first_positions = torch.tensor([r.num_drawn for r in requests])
        self.limits = np.array([generation.samples.limit_of(r) for r in requests])
        self.max_new_tokens = int(self.limits.max())
        self.tokens = np.zeros((len(requests), self.max_new_tokens), dtype=np.int64)
        self.log_probs = np.zeros((len(requests), self.max_new_tokens))
        self.ended = np.zeros(len(requests), dtype=bool)
        self.finished: list[Completion] = []
        self.num_drawn = 0

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of every row; tokens of rows that have ended are not read."""
        positions = self.first_positions + self.num_drawn
        u = uniforms_at(self.keys.to(logits.device), positions.to(logits.device))
        tokens, log_probs = sample(logits, self.params, u)
        self.tokens[:, self.num_drawn] = tokens.cpu().numpy()
        self.log_probs[:, self.num_drawn] = log_probs.cpu().numpy()
        self.num_drawn += 1
        return tokens

    def end_rows(self) -> np.ndarray:
        """Finish the rows that end with the last token; bool [rows], true on every row that has ended."""
        stop, length = self.generation.stop, self.num_drawn
        stopped, finished = stop.finished(self.tokens[:, length - 1], np.full(len(self.tokens), length), self.limits)
        if stop.has_strings:
            stopped |= np.array([stop.ends_string(row[:length]) for row in self.tokens])
        for row in np.flatnonzero(~self.ended & (stopped | finished)).tolist():
            request, reason = self.requests[row], StopRules.reason(bool(stopped[row]))
            tokens, log_probs = self.tokens[row, :length].tolist(), self.log_probs[row, :length].tolist()
            key, version = (request.ordinal, request.first_sample), self.generation.engine.weight_version
            self.finished.append(self.generation.samples.finish(key, tokens, log_probs, reason, version))
            self.ended[row] = True
        return self.ended


class _Sampler(LogitsProcessor):
    """LogitsProcessor that masks every token except the sampled one, so greedy `generate` emits it."""

    def __init__(self, batch: _Batch):
        self.batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = self.batch.sample(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class _Stopper(StoppingCriteria):
    def __init__(self, batch: _Batch):
        self.batch = batch

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.from_numpy(self.batch.end_rows()).to(input_ids.device)
