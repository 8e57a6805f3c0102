"""When a sample ends: end-of-sequence and stop tokens, stop strings, the token limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl.data_proto.samples import FinishReason, SamplingParams
from verl.errors import ConfigError

_MARGIN = 8  # tokens decoded beyond the longest stop string, for tokenizers that treat the start of a text differently


class StopRules:
    """The rules of one `generate`. Raises ConfigError when there are stop strings but no tokenizer to read them with."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int, tokenizer: Any):
        if params.stop and tokenizer is None:
            raise ConfigError("Stop strings need a tokenizer; give one, or use stop_token_ids.")
        self._max_new_tokens = params.max_new_tokens
        self._strings = tuple(s for s in params.stop if s)
        self._tail = max((len(s.encode()) for s in self._strings), default=0) + _MARGIN
        self._tokenizer = tokenizer
        self._stops = np.zeros(vocab_size, dtype=bool)
        ids = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
        self._stops[[i for i in ids if 0 <= i < vocab_size]] = True

    def finished(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(stopped, finished), both bool [rows]: after `tokens` [rows] (the newest of each row) made its response
        `lengths` [rows] tokens long. Stop strings are `ends_string`'s, row by row."""
        stopped = self._stops[tokens]
        return stopped, stopped | (lengths >= self._max_new_tokens)

    @property
    def has_strings(self) -> bool:
        return bool(self._strings)

    def ends_string(self, response: np.ndarray) -> bool:
        """Whether the response (int [tokens]) now holds a stop string; it did not before its last token."""
        text = self._tokenizer.decode(response[-self._tail :].tolist(), clean_up_tokenization_spaces=False)
        return any(s in text for s in self._strings)

    @staticmethod
    def reason(stopped: bool) -> FinishReason:
        return "stop" if stopped else "length"
