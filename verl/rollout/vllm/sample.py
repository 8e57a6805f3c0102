"""Our sampler inside vLLM: a logits processor that leaves only the sampled token to vLLM's greedy choice.

A request carries its key (verl.rollout.uniforms) and its sampling parameters in `SamplingParams.extra_args`. Of its logits
only the sampled token stays, with its log-probability as its value. vLLM takes the maximum and, asked for processed logits,
reports that value. So samples do not depend on vLLM's generators, batches or restarts. Log-probabilities come from
softmax(logits / temperature) before top-k, top-p and min-p, which vLLM has no mode for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.data_proto.samples import SamplingParams
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms_at

_ENTRY = "verl_draw"  # of extra_args


def draw_arguments(key: int, num_drawn: int, params: SamplingParams) -> dict[str, Any]:
    """The `extra_args` of a request that is sampled under `params`: its key, and how many of its tokens are in the prompt."""
    return {_ENTRY: [key, num_drawn, params.temperature, params.top_k, params.top_p, params.min_p]}


@dataclass(frozen=True)
class _Row:
    """A request that is sampled here. `output` is vLLM's own list of its tokens so far, which grows."""

    key: int
    num_drawn: int
    rule: tuple[float, int, float, float]
    output: Sequence[int]

    @property
    def position(self) -> int:
        return self.num_drawn + len(self.output)


class Draws:
    """The rows of vLLM's batch by index, updated by vLLM (`update_state`), and the sampling on its logits
    (`apply`). library.Sampler makes it a logits processor of vLLM's; other requests' rows are not changed."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """False: it decides which token is the maximum, and is called in greedy decoding."""
        return False

    def update_state(self, batch_update: Any | None) -> None:
        """vLLM's batch changed: indices removed, requests added as (index, params, prompt, output), indices moved as
        (from, to, one way or swapped); in this order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            entry = (params.extra_args or {}).get(_ENTRY) if params is not None else None
            if entry is None:
                self._rows.pop(index, None)
            else:
                key, num_drawn, temperature, top_k, top_p, min_p = entry
                rule = (float(temperature), int(top_k), float(top_p), float(min_p))
                self._rows[index] = _Row(int(key), int(num_drawn), rule, output)
        for first, second, direction in batch_update.moved:
            here, there = self._rows.pop(first, None), self._rows.pop(second, None)
            if here is not None:
                self._rows[second] = here
            if there is not None and direction.name == "SWAP":
                self._rows[first] = there

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[requests, vocab] -> the same, written to: minus infinity but for the log-prob of the sampled token."""
        for rule in {row.rule for row in self._rows.values()}:
            some = [(index, row) for index, row in self._rows.items() if row.rule == rule and index < len(logits)]
            if some:
                self._draw([index for index, _ in some], [row for _, row in some], rule, logits)
        return logits

    def _draw(self, indices: list[int], rows: list[_Row], rule: tuple[float, int, float, float], out: Any) -> None:
        temperature, top_k, top_p, min_p = rule
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        keys = torch.tensor([row.key for row in rows]).to(out.device)
        positions = torch.tensor([row.position for row in rows]).to(out.device)
        all_rows = len(indices) == len(out) and indices == list(range(len(out)))
        where = slice(None) if all_rows else torch.tensor(indices).to(out.device)
        tokens, log_probs = sample(out[where], params, uniforms_at(keys, positions))
        chosen = torch.full((len(rows), out.shape[1]), -torch.inf, dtype=out.dtype, device=out.device)
        out[where] = chosen.scatter_(1, tokens[:, None], log_probs[:, None].to(out.dtype))
