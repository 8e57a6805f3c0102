"""The policy's head for further tokens, which guesses behind running samples (arXiv:2412.19437, section 2.2).

    state of token i     | state i-1 | state i   | its own state behind guess 1 | ...
    token behind it      | token i   | token i+1 | guess 1                      | ...
    forwards                  ────────────► guess 1 ─────────► guess 2 ─────────► ...

The policy's states come from its steps; the head reads the newest ones of a sample when it first follows it. Weights are those
of the policy's forward: a head that trains follows at the next generation.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import ref

import torch
from torch import nn

from verl.config import full_key
from verl.errors import ConfigError
from verl.models.decoder.projection import Projection
from verl.models.decoder.reuse import version_of
from verl.models.decoder.weights import DenseDecoder
from verl.models.further_heads import FurtherHead, read_head
from verl.models.hf_module import HFModule
from verl.models.load import num_parameters
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.store import BlockStore, Shape
from verl.rollout.native.drafts.model import MOST_CONTEXT, MOST_SAMPLES, DraftFollower, Followed
from verl.rollout.native.torch.forward import Product, compiled, plain_parts, product
from verl.rollout.requests import vocab_size

_METHODS = full_key("rollout.speculative.methods")
_SETTING = f"{_METHODS}=[ngram]"


def require_head(module: HFModule) -> None:
    """Raise ModelError or ConfigError if DraftHead does. If `module` has no values yet, its folder tells."""
    source = str(module.config._name_or_path)
    if module.get_output_embeddings().weight.is_meta and Path(source).is_dir():
        read_head(module, source, _SETTING)
    _require_dense(module)


def _require_dense(module: HFModule) -> DenseDecoder:
    read = plain_parts(module)
    if read is None or read[0].has_experts:
        raise ConfigError(
            f"{_METHODS}=[mtp] needs a dense model on the decoding kernels of a CPU, and {type(module).__name__} is none. "
            "Choose ngram and history."
        )
    return read[0]


@dataclass
class _States:
    """Newest states of a sample: of its tokens from number `start` on, in parts."""

    start: int
    parts: list[torch.Tensor] = field(default_factory=list)
    count: int = 0


class DraftHead(DraftFollower):
    """The text of a followed sample begins with a token with a state before it, so inputs and tokens have equal numbers.

    Raises ModelError for a folder without a head, and ConfigError for a head that the decoding kernels do not compute."""

    def __init__(self, module: HFModule):
        self._module, self._head = module, FurtherHead.of(module, _SETTING)
        num_head = num_parameters(self._head) + module.get_output_embeddings().weight.numel()
        super().__init__(vocab_size(module), num_head / num_parameters(module))
        self._policy: Callable[[], CpuForward | None] = lambda: None
        self._version = -1
        self._join: Product
        self._seen: OrderedDict[Hashable, _States] = OrderedDict()
        self._before: dict[int, torch.Tensor] = {}  # by slot, the states before the tokens without stored keys
        decoder = _require_dense(module)
        self._store = BlockStore(Shape(1, decoder.num_kv_heads, decoder.head_dim, decoder.embed.dtype))

    def open(self, policy: CpuForward) -> None:
        """See DraftFollower. `policy` keeps its states from now on."""
        version, policy.keeps_states = version_of(self._head), True
        if self._policy() is not policy or self._version != version:
            module, head = self._module, self._head
            output = module.get_output_embeddings()
            projection = Projection(output.weight.detach(), output.bias, (output,))
            decoder = policy.decoder.with_layer(module, head.layer, head.norm)
            kernels = compiled(module, decoder, projection, prepack=True)
            assert kernels is not None, "the policy's own layers are computed by the same kernels"
            parts = nn.ModuleList([head, module])
            self._forward = CpuForward(kernels, parts, decoder, projection, shares=policy)
            self._forward.keeps_states = True
            self._join = product(Projection(head.join.weight, None, (head.join,)), prepack=True)
            self._policy, self._version = ref(policy), version  # whose copy of the weights goes at an update
        self.clear()

    def see(self, name: Hashable, start: int, states: torch.Tensor) -> None:
        """The policy's states of a sample's tokens from number `start` on, [tokens, hidden_size], before the final norm."""
        held = self._seen.get(name)
        if held is None or held.start + held.count != start:
            held = self._seen[name] = _States(start)
        held.parts.append(states)
        held.count += len(states)
        while held.count - len(held.parts[0]) >= MOST_CONTEXT:
            held.start, held.count = held.start + len(held.parts[0]), held.count - len(held.parts[0])
            held.parts.pop(0)
        self._seen.move_to_end(name)
        if len(self._seen) > 2 * MOST_SAMPLES:
            self._seen.popitem(last=False)

    def can_follow(self, name: Hashable) -> bool:
        """See DraftFollower. Of many running samples, some have no states here."""
        return name in self._seen

    def follow(self, name: Hashable, num_tokens: int, tokens_from: Callable[[int], Sequence[int]]) -> int:
        """See DraftFollower. The policy's states take the place of the head's behind guesses."""
        held, sample = self._seen[name], self._samples.get(name)
        num_stored = 0 if sample is None else min(sample.num_stored, sample.num_sure)
        if sample is None or sample.first + num_stored <= held.start:  # a state is missing
            sample, num_stored = sample or self._placed(name, 0), 0
            sample.first, sample.num_sure, sample.text = held.start + 1, 0, []
        self._samples.move_to_end(name)
        sample.text[sample.num_sure :] = tokens_from(sample.first + sample.num_sure)
        sample.num_sure = len(sample.text)
        sample.num_stored = min(num_stored, sample.num_sure - 1)
        states = torch.cat(held.parts)[sample.first + sample.num_stored - 1 - held.start :]
        assert len(states) == sample.num_sure - sample.num_stored, "the newest token has no state"
        self._before[sample.slot] = self._read(states, self._module.get_decoder().norm)
        return sample.num_sure - sample.num_stored

    def logits(self, names: Sequence[Hashable]) -> torch.Tensor:
        """See DraftFollower."""
        samples = [self._samples[name] for name in names]
        ends = torch.tensor([len(sample.text) - sample.num_stored for sample in samples]).cumsum(0) - 1
        logits, states = super().logits(names), self._forward.states
        assert states is not None
        for sample, state in zip(samples, self._read(states[ends], self._head.norm), strict=True):
            self._before[sample.slot] = state.unsqueeze(0)
        return logits

    def clear(self) -> None:
        """See DraftFollower; states go too."""
        super().clear()
        self._seen.clear()
        self._before.clear()

    def _read(self, states: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """States as the head reads them: of some families, behind the final norm."""
        read: torch.Tensor = norm(states) if self._head.names.reads_normed else states
        return read

    def _inputs(self, samples: Sequence[Followed], embeddings: torch.Tensor) -> torch.Tensor:
        before = torch.cat([self._before[sample.slot] for sample in samples])
        return self._join(self._head.joined(embeddings, before))
