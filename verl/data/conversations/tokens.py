"""Token ids and loss mask of a row, such that every trained token stands in the context that the sampler would see.

A turn of the assistant is sampled after the chat template's rendering of the messages before it, with the generation
prompt. So for each trained turn the template renders

    context = render(messages before the turn, generation prompt)      what the sampler is given
    whole   = render(messages up to the turn)                          the same, with the turn

and the turn's tokens are those of `whole` after those of `context`. Consecutive turns share one sequence as long as the
next context begins with the tokens so far. Where the template rewrites history (Qwen3 drops earlier `<think>` blocks),
it does not, and a new sequence begins: one row becomes as many sequences as contexts differ.

Inside a turn, `{% generation %}` markers of the template say what trains. Without markers it is everything up to the
special token that ends the turn; blanks after it are never sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.data.conversations.formats import Example
from verl.data.conversations.settings import ConversationSettings
from verl.data.prompts import encode_text, render_chat
from verl.data.schema import Messages
from verl.errors import DataError

GENERATION_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
NO_CONTENT = "\ue000"  # for private use, so that no answer begins with it
NUM_TOKENS_SHOWN = 8  # before the first that differs


@dataclass(frozen=True)
class TrainingSequence:
    """`input_ids` int32 [tokens]; `loss_mask` bool [tokens], true where the prediction of that token trains.

    The first token is predicted from nothing, so its mask is always false.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class _Turn:
    """Texts of one stretch that trains: what stands before it, and the same with it."""

    context: str
    whole: str
    message: int | None = None  # number of the message that is the turn; None: all after the context trains


class ConversationEncoder:
    """Turns examples into training sequences with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, settings: ConversationSettings):
        self.tokenizer = tokenizer
        self.settings = settings
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}

    def encode(self, example: Example, place: str) -> list[TrainingSequence]:
        """The sequences of a row, whole. Most rows are one; a template that rewrites history makes several.

        Raises DataError naming `place` when the template or the tokenizer fails, when no token trains, and, naming the
        first token that differs, when the template renders a turn otherwise than the sampler would have seen it and
        `data.ignore_input_ids_mismatch` is not set.
        """
        joined = _Joined()
        for turn in self._turns(example, place):
            context, answer = self._tokens(turn, example, place)
            joined.add(context, answer, self._trained(turn, context, answer, example, place))
        sequences = joined.sequences()
        if not sequences:
            raise DataError(
                f"{place}: none of the row's tokens train (data.loss_on={self._loss_on(example)}); give it a message of "
                "the assistant without loss_mask 0, or leave the row out."
            )
        return sequences

    def _loss_on(self, example: Example) -> str:
        return self.settings.loss_on or example.default_loss_on

    def _turns(self, example: Example, place: str) -> Iterator[_Turn]:
        loss_on = self._loss_on(example)
        if isinstance(example.completion, str):
            context = (
                example.prompt if isinstance(example.prompt, str) else self._render(example.prompt, example, place)
            )
            whole = context + self._with_eos(example.completion, place)
            yield _Turn("" if loss_on == "all" else context, whole)
            return
        assert isinstance(example.prompt, list)  # formats.py makes messages of both or of none
        messages = example.prompt + example.completion
        if loss_on == "assistant":
            for number in _trained_turns(example, messages, place):
                context = self._context(messages, number, example, place)
                yield _Turn(context, self._render(messages[: number + 1], example, place, answered=True), number)
            return
        start = 0 if loss_on == "all" else len(example.prompt) or _last_answer(messages, place)
        if any(mark is False for mark in example.trains[start:]):
            raise DataError(f"{place}: a message has loss_mask 0, which needs data.loss_on=assistant, not {loss_on}.")
        context = self._context(messages, start, example, place) if loss_on == "completion" else ""
        yield _Turn(context, self._render(messages, example, place, answered=True))

    def _context(self, messages: Messages, number: int, example: Example, place: str) -> str:
        """What the sampler is given for message `number`."""
        if not number:
            raise DataError(
                f"{place}: message 0 is of the assistant and has no prompt to be sampled from; put a message before it, "
                "give it loss_mask 0, or set data.loss_on=all."
            )
        return self._render(messages[:number], example, place)

    def _render(self, messages: Messages, example: Example, place: str, *, answered: bool = False) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{place}: the row has chat messages, but the tokenizer has no chat template to join them. Set the "
                "model's custom_chat_template, or give texts."
            )
        return render_chat(
            self.tokenizer, messages, place, add_generation_prompt=not answered, **_template_kwargs(example)
        )

    def _with_eos(self, text: str, place: str) -> str:
        eos = self.tokenizer.eos_token
        if not eos:
            raise DataError(f"{place}: the tokenizer has no end-of-sequence token to end the text with; give it one.")
        return text if text.endswith(eos) else text + eos

    def _ids(self, text: str, example: Example, place: str) -> list[int]:
        # a chat template writes the special tokens itself, as in verl/data/prompts.py
        plain = isinstance(example.prompt, str)
        return encode_text(self.tokenizer, text, place, add_special_tokens=plain) if text else []

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tokens(self, turn: _Turn, example: Example, place: str) -> tuple[list[int], list[int]]:
        """Token ids of the context and of what follows it."""
        found = self._split(turn, example, place)
        if found:
            return found
        context = self._ids(turn.context, example, place)
        whole = self._ids(turn.whole, example, place)
        if not self.settings.ignore_input_ids_mismatch:
            raise DataError(f"{place}: {self._difference(turn, context, whole)}")
        if turn.message is not None and not turn.whole.startswith(turn.context):
            rendered = _Turn(self._as_rendered(turn, example, place), turn.whole)
            context = self._ids(rendered.context, example, place)
            if found := self._split(rendered, example, place):
                return found
        start = _first_difference(context, whole)
        return whole[:start], whole[start:]

    def _split(self, turn: _Turn, example: Example, place: str) -> tuple[list[int], list[int]] | None:
        """Tokens of the context exactly as the sampler has them, and of the rest; None when they are not the whole."""
        if not turn.whole.startswith(turn.context):
            return None
        context = self._ids(turn.context, example, place)
        whole = self._ids(turn.whole, example, place)
        if whole[: len(context)] == context:
            return context, whole[len(context) :]
        # A token lies across the border ("\n" + "\n" is one of many vocabularies). A sampler that has been given the
        # first half cannot produce it, so the rest is encoded alone.
        rest = encode_text(self.tokenizer, turn.whole[len(turn.context) :], place, add_special_tokens=False)
        return (context, rest) if self._decode(context + rest) == self._decode(whole) else None

    def _as_rendered(self, turn: _Turn, example: Example, place: str) -> str:
        """What stands before the turn's content in `turn.whole`, found by rendering the turn with another content."""
        assert isinstance(example.prompt, list)
        assert isinstance(example.completion, list)
        before = (example.prompt + example.completion)[: turn.message]
        other = self._render([*before, {"role": "assistant", "content": NO_CONTENT}], example, place, answered=True)
        return turn.whole[: _first_difference(turn.whole, other)]

    def _difference(self, turn: _Turn, context: list[int], whole: list[int]) -> str:
        at = _first_difference(context, whole)
        seen = repr(self._decode(context[at : at + 1])) if at < len(context) else "the beginning of the answer"
        written = repr(self._decode(whole[at : at + 1])) if at < len(whole) else "nothing"
        which = "the completion" if turn.message is None else f"message {turn.message}"
        fix = (
            "End the prompt where a token ends"
            if turn.whole.startswith(turn.context)
            else "Use a chat template that renders the prompt the same way once it is answered (custom_chat_template)"
        )
        return (
            f"the tokens of {which} do not follow the prompt that the sampler would be given for it: token {at}, after "
            f"{self._decode(whole[max(0, at - NUM_TOKENS_SHOWN) : at])!r}, is {written}, but {seen} in the prompt. {fix}, "
            "or set data.ignore_input_ids_mismatch=True to train on the rendering as it is."
        )

    def _trained(self, turn: _Turn, context: list[int], answer: list[int], example: Example, place: str) -> list[bool]:
        """For each token of the answer, whether it trains."""
        if turn.message is None:
            return [True] * len(answer)
        if GENERATION_MARKER.search(self.tokenizer.get_chat_template(None, example.tools)):
            return self._marked(turn, context, answer, example, place)
        end = len(answer)
        while end and answer[end - 1] not in self._special and self._decode([answer[end - 1]]).isspace():
            end -= 1
        if not end or answer[end - 1] not in self._special:
            end = len(answer)  # nothing but text ends a turn of this template
        return [number < end for number in range(len(answer))]

    def _marked(self, turn: _Turn, context: list[int], answer: list[int], example: Example, place: str) -> list[bool]:
        """What the template's `{% generation %}` markers enclose."""
        assert isinstance(example.prompt, list)
        assert isinstance(example.completion, list)
        assert turn.message is not None
        marked = self.tokenizer.apply_chat_template(
            (example.prompt + example.completion)[: turn.message + 1],
            return_dict=True,
            return_assistant_tokens_mask=True,
            **_template_kwargs(example),
        )
        whole, mask = list(marked["input_ids"]), [bool(m) for m in marked["assistant_masks"]]
        if whole == context + answer:
            return mask[len(context) :]
        # another division into tokens: by characters, those of a token across the border included
        covered = bytearray(len(turn.whole))
        offsets = self.tokenizer(turn.whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for (start, end), trains in zip(offsets, mask, strict=True):
            if trains:
                covered[start:end] = b"\x01" * (end - start)
        border = len(turn.context)
        rest = self.tokenizer(turn.whole[border:], add_special_tokens=False, return_offsets_mapping=True)
        if list(rest["input_ids"]) != answer:
            raise DataError(f"{place}: the template's generation markers cannot be placed on the tokens of the row.")
        return [any(covered[border + start : border + end]) for start, end in rest["offset_mapping"]]


class _Joined:
    """Turns with their contexts, joined to as few sequences as their tokens allow."""

    def __init__(self) -> None:
        self._done: list[TrainingSequence] = []
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._tail: list[int] = []  # after the end of the last turn: in the rendering, but never sampled

    def add(self, context: list[int], answer: list[int], trained: list[bool]) -> None:
        if not self._ids or context[: len(self._ids)] != self._ids:
            self._close()
        end = max((number + 1 for number, trains in enumerate(trained) if trains), default=0)
        self._mask += [False] * (len(context) - len(self._mask)) + trained[:end]
        self._ids = context + answer[:end]
        self._tail = answer[end:]

    def sequences(self) -> list[TrainingSequence]:
        self._close()
        return self._done

    def _close(self) -> None:
        if any(self._mask[1:]):
            mask = np.zeros(len(self._ids) + len(self._tail), dtype=np.bool_)
            mask[1 : len(self._mask)] = self._mask[1:]
            self._done.append(TrainingSequence(np.array(self._ids + self._tail, dtype=np.int32), mask))
        self._ids, self._mask, self._tail = [], [], []


def _template_kwargs(example: Example) -> dict[str, Any]:
    return {**example.template_kwargs, **({"tools": example.tools} if example.tools else {})}


def _trained_turns(example: Example, messages: Messages, place: str) -> list[int]:
    """Numbers of the messages that train: of the assistant, in the completion, unless the message says otherwise."""
    found = []
    for number, (message, mark) in enumerate(zip(messages, example.trains, strict=True)):
        if mark and message["role"] != "assistant":
            raise DataError(
                f"{place}: message {number} of role {message['role']!r} has loss_mask 1, but the model samples only "
                "messages of the assistant; set data.loss_on=all to train on everything."
            )
        if mark or (mark is None and message["role"] == "assistant" and number >= len(example.prompt)):
            found.append(number)
    return found


def _last_answer(messages: Messages, place: str) -> int:
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not numbers:
        raise DataError(f"{place}: no message is of the assistant, so nothing is the completion (data.loss_on).")
    return numbers[-1]


def _first_difference(first: Sequence[Any], second: Sequence[Any]) -> int:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))
