"""A draft model: a smaller model with the same tokens, which continues running samples.

    text of a sample   | tokens with stored keys | newer tokens | guess 1 | guess 2 | ...
    forwards                                      ────────────► guess 1 ─► guess 2 ─► ...

Its guesses are verified (drafter.py), so its own bits decide speed only: it multiplies in int8 where the processor can.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl.config import ModelConfig, RolloutConfig, full_key
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.models.decoder.forward import embedded
from verl.models.decoder.weights import DenseDecoder
from verl.models.hf_module import HFModule
from verl.models.load import empty_model, load_causal_lm, load_tokenizer, num_parameters
from verl.rollout.layout import Chunk
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.store import BlockStore
from verl.rollout.native.compiled.tokens import StepTokens
from verl.rollout.native.torch.forward import DenseForward, compiled, plain_parts
from verl.rollout.requests import vocab_size

_PATH = full_key("rollout.speculative.model_path")
MOST_SAMPLES = 32  # with stored keys; the sample that was used longest ago goes first
_MORE_SLOTS = 8
MOST_CONTEXT = 256  # newest tokens of a sample that are read when it is first followed
_NOBODY = np.zeros(0, dtype=np.int64)


@dataclass
class Followed:
    """A sample: its tokens from number `first` on, with guesses behind them."""

    slot: int
    first: int
    text: list[int] = field(default_factory=list)
    num_sure: int = 0  # of `text`, that are no guesses
    num_stored: int = 0  # with keys and values


def draft_model(policy: HFModule, tokenizer: Tokenizer | None, config: RolloutConfig) -> DraftModel | None:
    """The draft model of `rollout.speculative`; None without the method `model`. Raises ConfigError for other tokens."""
    path = config.speculative.model_path
    if "model" not in config.speculative.methods or path is None:
        return None
    if tokenizer is not None:
        require_tokens_of(tokenizer, path)
    module = load_causal_lm(path, dtype=next(policy.parameters()).dtype).requires_grad_(False)
    return DraftModel(module, vocab_size(policy), num_parameters(module) / num_parameters(policy))


def require_tokens_of(tokenizer: Tokenizer, path: str) -> None:
    """Raise ConfigError if the draft model in `path` has other tokens than the policy's `tokenizer`."""
    vocabulary, tokens = tokenizer.get_vocab(), load_tokenizer(path).get_vocab()
    if differing := [token for token, number in vocabulary.items() if tokens.get(token) != number]:
        raise ConfigError(
            f"{_PATH}={path} splits text into other tokens than the policy: {len(differing)} of the policy's "
            f"{len(vocabulary)} differ, as {min(differing)!r}. Choose a draft model with the policy's tokenizer."
        )


def require_kernels(path: str, dtype: torch.dtype) -> None:
    """Raise ConfigError if the decoding kernels do not compute the draft model in `path`; its weights are not read."""
    module = empty_model(ModelConfig(path=path), "lm", dtype, False)
    if (read := plain_parts(module)) is None or compiled(module, *read, prepack=True) is None:
        raise _not_computed(module)


def _not_computed(module: HFModule) -> ConfigError:
    return ConfigError(
        f"{_PATH} names a {type(module).__name__}, which the decoding kernels of a CPU do not compute. Choose a dense model "
        "of another family, such as llama or qwen3."
    )


class DraftFollower:
    """Follows samples by name. `vocab_size` bounds its guesses, and it has a `share` of the policy's parameters."""

    _forward: CpuForward
    _store: BlockStore

    def __init__(self, vocab_size: int, share: float):
        self._vocab_size, self.share = vocab_size, share
        self._samples: OrderedDict[Hashable, Followed] = OrderedDict()

    def open(self, policy: CpuForward) -> None:
        """A generation of `policy` begins: names of samples begin again."""
        self.clear()

    def can_follow(self, name: Hashable) -> bool:
        """Whether it can guess behind a running sample."""
        return True

    def follow(self, name: Hashable, num_tokens: int, tokens_from: Callable[[int], Sequence[int]]) -> int:
        """The sample `name` has `num_tokens` tokens, with its prompt; `tokens_from(start)` gives the tokens from number `start`
        on. Guesses that were wrong are dropped. Returns the tokens to compute before the next guess."""
        raise NotImplementedError

    def push(self, name: Hashable, token: int) -> None:
        """A guess behind the text of a sample."""
        self._samples[name].text.append(token)

    def logits(self, names: Sequence[Hashable]) -> torch.Tensor:
        """Logits behind the texts of samples, [samples, at most vocab_size]; overwritten by the next call."""
        samples = [self._samples[name] for name in names]
        chunks = [Chunk(sample.slot, sample.num_stored, len(sample.text)) for sample in samples]
        # tokens that only the policy has are read as some other token
        embed = self._forward.decoder.embed
        ids = np.minimum(np.concatenate([sample.text[sample.num_stored :] for sample in samples]), len(embed) - 1)
        x = self._inputs(samples, embedded(self._forward.decoder, torch.from_numpy(ids.astype(np.int64))).detach())
        positions = torch.from_numpy(np.concatenate([np.arange(c.start, c.end) for c in chunks]))
        keep = torch.from_numpy(np.cumsum([c.end - c.start for c in chunks]) - 1)
        longest, store, forward = max(c.end for c in chunks), self._store, self._forward
        store.reserve(-(-len(self._samples) // _MORE_SLOTS) * _MORE_SLOTS, longest, 2 * longest)
        nobody = forward.tiles(_NOBODY, None, None)
        layout = StepTokens.of((store, store), nobody, _NOBODY, _NOBODY, chunks, forward.max_tile)
        logits = forward.logits_behind(x, positions, keep, layout)
        for sample in samples:
            sample.num_stored = len(sample.text)
        return logits[:, : self._vocab_size]

    def clear(self) -> None:
        """Free the memory of keys and values."""
        self._samples.clear()
        self._store.clear()

    def _inputs(self, samples: Sequence[Followed], embeddings: torch.Tensor) -> torch.Tensor:
        """The input of the first layer, of the `embeddings` of the tokens without stored keys."""
        return embeddings

    def _placed(self, name: Hashable, first: int) -> Followed:
        """A new sample, in a free slot or in the oldest sample's."""
        slot = len(self._samples)
        if slot >= MOST_SAMPLES:
            slot = self._samples.popitem(last=False)[1].slot
        self._samples[name] = Followed(slot, first)
        return self._samples[name]


class DraftModel(DraftFollower):
    """A smaller model."""

    def __init__(self, module: HFModule, vocab_size: int, share: float):
        decoder = DenseDecoder.of(module)
        quantization = None if decoder is None or decoder.has_experts else "int8"
        forward = DenseForward.of(module, prepack=True, quantization=quantization)
        if not isinstance(forward, CpuForward):
            raise _not_computed(module)
        super().__init__(vocab_size, share)
        self._forward, self._store = forward, BlockStore(forward.store_shape)

    def follow(self, name: Hashable, num_tokens: int, tokens_from: Callable[[int], Sequence[int]]) -> int:
        """See DraftFollower. A new sample is read from its newest tokens on."""
        sample = self._samples.get(name) or self._placed(name, max(0, num_tokens - MOST_CONTEXT))
        self._samples.move_to_end(name)
        newer, guessed = tokens_from(sample.first + sample.num_sure), sample.text[sample.num_sure :]
        num_right = 0
        while num_right < min(len(newer), len(guessed)) and newer[num_right] == guessed[num_right]:
            num_right += 1
        sample.text[sample.num_sure :] = newer
        sample.num_stored = min(sample.num_stored, sample.num_sure + num_right, len(sample.text) - 1)
        sample.num_sure = len(sample.text)
        return sample.num_sure - sample.num_stored
