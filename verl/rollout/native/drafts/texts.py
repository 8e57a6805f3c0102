"""Texts that samples of a prompt may repeat: the prompt, responses that run, and earlier responses.

    end of a running response   ... that is why | ?
    places of its last pair     ... and that is why | the        3 tokens match
                                ... this is why | we             2 tokens match
    guess                       the, with the share of its votes

A guess is never needed: lost texts cost speed and change no sample.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

MOST_MATCHED = 16  # tokens of an end that are compared
OF_MODEL = -1
_MOST_PLACES = 16  # newest places of a pair that vote
_MOST_EARLIER = 16  # newest responses to a prompt that are kept
_MOST_EARLIER_TOKENS = 8192  # that an index reads
_ENTRY_BYTES = 200  # of a text in the history, in addition to its tokens


class Guess(NamedTuple):
    """A next token. A place that matches m tokens has 2**m votes."""

    token: int
    matched: int  # tokens before the best place that equal the end of the sample; OF_MODEL for a guess of a draft model
    share: float  # of all votes, or its probability


class TextIndex:
    """The places of each pair of tokens in the texts of a prompt. `ngram` and `history` say which texts give guesses: the
    sample itself with its prompt, and all other responses."""

    def __init__(self, prompt: Sequence[int], *, ngram: bool, history: bool):
        self._ngram, self._history = ngram, history
        self._texts: dict[Hashable, list[int]] = {}
        self._places: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
        self._prompt = self.extend(None, prompt)

    def extend(self, name: Hashable, tokens: Sequence[int]) -> list[int]:
        """Add `tokens` to the end of a text; returns the text."""
        text = self._texts.setdefault(name, [])
        last = text[-1] if text else None
        for end, token in enumerate(tokens, len(text) + 1):
            if last is not None:
                self._places.setdefault((last, token), []).append((text, end))
            last = token
        text.extend(tokens)
        return text

    def length(self, name: Hashable) -> int:
        """Tokens of a text; 0 for an unknown text."""
        return len(self._texts.get(name, ()))

    def num_tokens(self, name: Hashable) -> int:
        """Tokens of a text, with its prompt."""
        return len(self._prompt) + len(self._texts[name])

    def tokens(self, name: Hashable, start: int) -> list[int]:
        """The tokens of a text, with its prompt, from number `start` on."""
        return [*self._prompt[start:], *self._texts[name][max(0, start - len(self._prompt)) :]]

    def end(self, name: Hashable) -> list[int]:
        """The last tokens of a text behind the prompt, as many as are compared."""
        text = self._texts[name][-MOST_MATCHED:]
        return [*self._prompt[max(0, len(self._prompt) - MOST_MATCHED + len(text)) :], *text]

    def guess(self, name: Hashable, end: Sequence[int]) -> Guess | None:
        """The next token of the text `name` behind `end`, its last tokens and further guesses; None without a place."""
        places = self._places.get((end[-2], end[-1])) if len(end) > 1 else None
        if places is None:
            return None
        response, num_places = self._texts[name], 0
        votes: dict[int, int] = {}
        best: dict[int, int] = {}
        for text, at in reversed(places):
            is_own = text is response or text is self._prompt
            if at >= len(text) or not (self._ngram if is_own else self._history):
                continue
            matched, limit = 2, min(MOST_MATCHED, at, len(end))
            while matched < limit and text[at - matched - 1] == end[-matched - 1]:
                matched += 1
            token = text[at]
            votes[token] = votes.get(token, 0) + (1 << matched)
            best[token] = max(best.get(token, 0), matched)
            num_places += 1
            if num_places == _MOST_PLACES:
                break
        if not votes:
            return None
        token = max(votes, key=votes.__getitem__)
        return Guess(token, best[token], votes[token] / sum(votes.values()))


class History:
    """Responses by prompt, in at most `most_bytes`; prompts that were used longest ago go first."""

    def __init__(self, most_bytes: int):
        self._most_bytes, self.num_bytes = most_bytes, 0
        self._texts: OrderedDict[bytes, dict[Hashable, np.ndarray]] = OrderedDict()

    def add(self, prompt: Sequence[int], name: Hashable, tokens: Sequence[int]) -> None:
        """Add a response, or a longer form of a response with this name."""
        key = _digest(prompt)
        texts = self._texts.setdefault(key, {})
        self._texts.move_to_end(key)
        self.num_bytes -= _bytes_of(texts.pop(name, None))
        while len(texts) >= _MOST_EARLIER:
            self.num_bytes -= _bytes_of(texts.pop(next(iter(texts))))
        texts[name] = np.array(tokens, dtype=np.int32)
        self.num_bytes += _bytes_of(texts[name])
        while self.num_bytes > self._most_bytes and self._texts:
            self.num_bytes -= sum(map(_bytes_of, self._texts.popitem(last=False)[1].values()))

    def of(self, prompt: Sequence[int]) -> list[tuple[Hashable, list[int]]]:
        """The newest responses to a prompt with their names, oldest first."""
        newest: list[tuple[Hashable, list[int]]] = []
        num_tokens = 0
        for name, text in reversed(self._texts.get(_digest(prompt), {}).items()):
            num_tokens += len(text)
            if newest and num_tokens > _MOST_EARLIER_TOKENS:
                break
            newest.append((name, text.tolist()))
        return newest[::-1]


def _digest(prompt: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=16).digest()


def _bytes_of(text: np.ndarray | None) -> int:
    return 0 if text is None else text.nbytes + _ENTRY_BYTES
