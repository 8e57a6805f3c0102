"""JSON schemas that sampled tokens must follow, by xgrammar: `response_format` of the endpoint, and `rollout.json_schema`.

A matcher reads the tokens of a sample and says which ones may come next; others get no probability. Log-probs are of the policy
without this filter, as for top-k, so that they compare with the training forward.
"""

import json
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from verl.errors import MissingExtraError, ModelError, first_line
from verl.foreign_text import clean
from verl.rollout.native.batch import BatchRows, Group
from verl.rollout.native.engine import NativeRollout
from verl.rollout.requests import vocab_size
from verl.rollout.sampling import sample

_MOST_COMPILED = 256
_MOST_PARTS, _MOST_DEPTH = 500, 64  # of a schema: about a second of compiling, which grows with their squares
_PASSED_OVER = (  # by xgrammar, without an error: values that break them would have probability
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependentRequired",
    "dependentSchemas", "dependencies",
)  # fmt: skip
_DATA, _NAMED = ("enum", "const", "default", "examples"), ("properties", "patternProperties", "$defs", "definitions")
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")  # of xgrammar's source


@dataclass
class _Matching:
    """The matcher of a sample, and how many of its tokens it has read."""

    matcher: Any
    num_read: int = 0


class Grammars:
    """The grammars of a generation of `engine`. Raises MissingExtraError without xgrammar, and ModelError on a GPU, whose steps
    sample on the device."""

    def __init__(self, engine: NativeRollout):
        try:
            import xgrammar
        except ImportError:
            raise MissingExtraError("response_format with a JSON schema", "schemas", "xgrammar") from None
        if next(engine.module.parameters()).device.type != "cpu":
            raise ModelError("A response_format with a JSON schema is available on CPUs only. Leave it out.")
        self._xgrammar, self._size = xgrammar, vocab_size(engine.module)
        info = xgrammar.TokenizerInfo.from_huggingface(
            cast("Any", engine.tokenizer), vocab_size=self._size, stop_token_ids=list(engine.eos_token_ids)
        )
        # xgrammar lets them into strings of limited length; no token of JSON without line ends needs them
        control = [token for token, text in enumerate(info.decoded_vocab) if any(byte < 32 for byte in text)]
        self._control = torch.tensor(
            [token for token in control if token not in engine.eos_token_ids], dtype=torch.long
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._compiled: dict[str, Any] = {}
        self._matchings: weakref.WeakKeyDictionary[Group, dict[int, _Matching]] = weakref.WeakKeyDictionary()

    def require(self, grammar: str) -> None:
        """Compile a JSON schema. Raises ModelError if it cannot be used."""
        if grammar in self._compiled:
            return
        if reason := _obstacle(json.loads(grammar)):
            raise ModelError(f"The JSON schema of response_format cannot be used: {reason}")
        try:
            compiled = self._compiler.compile_json_schema(grammar, any_whitespace=False)  # blanks without end
        except Exception as error:  # xgrammar's errors come from its C++
            reason = clean(_PLACE.sub("", first_line(error)), 200)
            raise ModelError(f"The JSON schema of response_format cannot be used: {reason}") from error
        while len(self._compiled) >= _MOST_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[grammar] = compiled

    def apply(
        self, rows: BatchRows, numbers: np.ndarray, logits: torch.Tensor, params: Any, u: torch.Tensor,
        tokens: torch.Tensor, log_probs: torch.Tensor,
    ) -> None:  # fmt: skip
        """Replace, in place, the sampled `tokens` [rows] and `log_probs` of the rows `numbers` that have a grammar, which come
        from `logits` [rows, vocab] and the uniforms `u` [rows]."""
        bound = [
            (place, matcher)
            for place, row in enumerate(numbers.tolist())
            if (group := rows.groups[row]) is not None
            and group.request.grammar
            and not (matcher := self._matcher(rows, row)).is_terminated()  # else the run ignores the end
        ]
        if not bound:
            return
        bitmask = self._xgrammar.allocate_token_bitmask(len(bound), self._size)
        for index, (_, matcher) in enumerate(bound):
            matcher.fill_next_token_bitmask(bitmask, index)
        chosen = [place for place, _ in bound]
        scores = logits[chosen].to(torch.promote_types(logits.dtype, torch.float32))
        allowed = scores.to(torch.float32, copy=True)
        self._xgrammar.apply_token_bitmask_inplace(allowed, bitmask)
        allowed[:, self._control] = -torch.inf
        sampled, _ = sample(allowed, params, u[chosen])
        temperature = params.temperature or 1.0
        normalized = torch.log_softmax(scores / temperature, dim=-1)
        tokens[chosen] = sampled
        log_probs[chosen] = normalized.gather(1, sampled[:, None])[:, 0].to(log_probs.dtype)

    def _matcher(self, rows: BatchRows, row: int) -> Any:
        """The matcher of a row's sample behind the tokens that it has."""
        group = rows.groups[row]
        assert group is not None
        grammar, sample_number = group.request.grammar, int(rows.sample[row])
        matchings = self._matchings.setdefault(group, {})
        if sample_number not in matchings:
            self.require(grammar)
            matchings[sample_number] = _Matching(self._xgrammar.GrammarMatcher(self._compiled[grammar]))
        matching = matchings[sample_number]
        for token in rows.tokens[row, matching.num_read : rows.length[row]].tolist():
            matching.matcher.accept_token(token)
            matching.num_read += 1
        return matching.matcher


def _obstacle(schema: object) -> str | None:
    """The reason why a schema cannot be kept, or would take long to compile."""
    waiting, num_parts = [(schema, 0)], 0
    while waiting:
        part, depth = waiting.pop()
        inner = part if isinstance(part, list) else []
        if isinstance(part, Mapping):
            num_parts += 1
            if reason := _passed_over(part):
                return f"{clean(reason, 100)} would not be kept. Leave it out, and check it in your program"
            named = [part.get(name) for name in _NAMED]
            inner = [value for one in named if isinstance(one, Mapping) for value in one.values()]
            inner += [value for name, value in part.items() if name not in (*_DATA, *_NAMED)]
        if depth > _MOST_DEPTH or num_parts > _MOST_PARTS:
            return f"it has more than {_MOST_PARTS} parts, or {_MOST_DEPTH} levels. Use a smaller one"
        level = depth + isinstance(part, Mapping)
        waiting += [(value, level) for value in inner if isinstance(value, list | Mapping)]
    return None


def _passed_over(part: Mapping[str, Any]) -> str | None:
    """A keyword of a part of a schema that xgrammar passes over."""
    keywords = [name for name, value in part.items() if value is not None and value is not False]
    both = next((name for name in ("anyOf", "oneOf", "allOf") if name in keywords), "")
    listed, required = part.get("properties"), part.get("required")
    if keyword := next((name for name in _PASSED_OVER if name in keywords), None):
        return f"`{keyword}`"
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        return "`allOf` of several schemas"
    if both and listed:
        return f"`{both}` beside `properties`"
    if "pattern" in keywords and ("minLength" in keywords or "maxLength" in keywords):
        return "`pattern` with a length"
    if part.get("type") == "number" and "multipleOf" in keywords:
        return "`multipleOf` of a number that may be no integer"
    if not str(part.get("$ref", "#")).startswith("#"):
        return "a `$ref` to another document"
    if isinstance(required, list) and any(name not in (listed or {}) for name in required if isinstance(name, str)):
        return "a name of `required` that `properties` does not have"
    return None
