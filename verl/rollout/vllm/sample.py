"""verl's sampling inside vLLM: logits processors mask every token except the sampled one, so vLLM's greedy choice is it.

A request carries its key (verl.rollout.uniforms) and its sampling parameters in `SamplingParams.extra_args`. Of its logits
only the sampled token stays, with its log-probability as its value. vLLM takes the maximum and, asked for processed logits,
reports that value. So samples do not depend on vLLM's generators, batches, schedules or restarts. Log-probabilities come from
softmax(logits / temperature) before top-k, top-p and min-p; vLLM has no mode for that.

vLLM's two model runners call processors differently. `BatchSampler` is for the first; its batch has requests in rows that
move. `SlotSampler` is for the second: a request keeps a slot, and positions are on the device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.data_proto.samples import SamplingParams
from verl.parallel.device import to_device
from verl.rollout.sampling import sample
from verl.rollout.uniforms import uniforms_at

_ENTRY = "verl_draw"  # of extra_args
NO_RULE = -1  # of a row that is not sampled here

Rule = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def draw_arguments(key: int, num_drawn: int, params: SamplingParams) -> dict[str, object]:
    """The `extra_args` of a request: its `key`, the number of response tokens in its prompt, and the sampling rules."""
    return {_ENTRY: [key, num_drawn, params.temperature, params.top_k, params.top_p, params.min_p]}


class SamplingRules:
    """Sampling rules by number, in the order of their first request."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []
        self._numbers: dict[Rule, int] = {}

    def read(self, params: Any) -> tuple[int, int, int]:
        """(key, num_drawn, number of the rule) of a request with vLLM's `params`; no rule if it has no key."""
        entry = (params.extra_args or {}).get(_ENTRY) if params is not None else None
        if entry is None:
            return 0, 0, NO_RULE
        key, num_drawn, temperature, top_k, top_p, min_p = entry
        rule = (float(temperature), int(top_k), float(top_p), float(min_p))
        if rule not in self._numbers:
            self._numbers[rule] = len(self._params)
            self._params.append(SamplingParams(temperature=rule[0], top_k=rule[1], top_p=rule[2], min_p=rule[3]))
        return int(key), int(num_drawn), self._numbers[rule]

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, numbers: Iterable[int]) -> torch.Tensor:
        """Replace `logits` [rows, vocab] by minus infinity but for the log-prob of the sampled token. `rows`, int64 [3, rows],
        has key, position and rule of each row; `numbers` are the rules among them. Rows without a rule stay."""
        keys, positions, rules = rows
        present = sorted(set(numbers))
        if present in ([], [NO_RULE]):
            return logits
        uniforms = uniforms_at(keys, positions)
        tokens, values = torch.zeros_like(keys), torch.zeros_like(logits[:, 0])
        for number in present:
            if number != NO_RULE:
                drawn, log_probs = sample(logits, self._params[number], uniforms)
                tokens = torch.where(rules == number, drawn, tokens)
                values = torch.where(rules == number, log_probs.to(values.dtype), values)
        if present[0] == NO_RULE:
            is_sampled = rules != NO_RULE
            values = torch.where(is_sampled, values, logits.gather(1, tokens[:, None])[:, 0])
            logits.masked_fill_(is_sampled[:, None], -torch.inf)
        else:
            logits.fill_(-torch.inf)
        return logits.scatter_(1, tokens[:, None], values[:, None])


@dataclass(frozen=True)
class _Row:
    """A request in the batch. `output` is vLLM's list of its sampled tokens; vLLM appends to it."""

    key: int
    num_drawn: int
    rule: int
    output: Sequence[int]


_EMPTY_ROW = _Row(0, 0, NO_RULE, ())


class BatchSampler:
    """Requests by row of the first runner's batch. It updates rows before each step (`update_state`), and calls `apply` on
    their logits. A sample needs its number of tokens so far, so the runner must not schedule ahead of them."""

    def __init__(self) -> None:
        self._rules = SamplingRules()
        self._rows: dict[int, _Row] = {}

    def update_state(self, batch_update: Any | None) -> None:
        """The batch changed: indices removed, requests added as (index, params, prompt, output), indices moved as
        (from, to, one way or swapped); in this order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self._rows[index] = _Row(*self._rules.read(params), output)
        for first, second, direction in batch_update.moved:
            moved, replaced = self._rows.pop(first, None), self._rows.pop(second, None)
            if moved is not None:
                self._rows[second] = moved
            if replaced is not None and direction.name == "SWAP":
                self._rows[first] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample on logits [requests, vocab] and write to them; see SamplingRules.draw."""
        rows = [self._rows.get(index, _EMPTY_ROW) for index in range(len(logits))]
        numbers = [row.rule for row in rows]
        table = [[row.key for row in rows], [row.num_drawn + len(row.output) for row in rows], numbers]
        return self._rules.draw(logits, to_device(torch.tensor(table), logits.device), numbers)


class SlotSampler:
    """Requests by slot of the second runner. `states` are vLLM's (LogitsProcRequestState). A step copies nothing to the device
    but the slots of new requests, so vLLM may schedule ahead."""

    def __init__(self, states: Any):
        self._rules = SamplingRules()
        self._prompt_len = states.prompt_len.np  # by slot, on the host
        self._device = states.device
        # key, number of sampled tokens in the prompt, rule; a slot keeps its last request until the next one comes
        self._slots = np.zeros((3, states.max_num_reqs), np.int64)
        self._slots[2] = NO_RULE
        self._on_device = torch.from_numpy(self._slots)
        self._changed = True

    def add_request(self, slot: int, params: object) -> bool:
        """A request comes into `slot`; returns whether it is sampled here."""
        key, num_drawn, rule = self._rules.read(params)
        self._slots[:, slot] = key, num_drawn - int(self._prompt_len[slot]), rule
        self._changed = True
        return rule != NO_RULE

    def apply_staged_writes(self) -> None:
        """Before each step: copy slots to the device, if requests came."""
        if self._changed:
            self._on_device = to_device(torch.tensor(self._slots), self._device)
            self._changed = False

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        """Sample on logits [rows, vocab] and write to them; see SamplingRules.draw. `context` is vLLM's LogitsContext."""
        rows = self._on_device[:, context.expanded_idx_mapping]
        rows[1] += context.pos + 1  # the place of the new token in the sequence
        return self._rules.draw(logits, rows, self._slots[2, context.idx_mapping_np].tolist())
