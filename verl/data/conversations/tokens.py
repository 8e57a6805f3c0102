"""Token ids and loss mask of a row, such that every trained token has the context that the sampler would have.

A turn of the assistant is sampled after the chat template's rendering of the messages before it, with the generation
prompt. So for each trained turn the template renders

    context = render(messages before the turn, generation prompt)      the sampler's input
    whole   = render(messages up to the turn)                          the same, with the turn

and the turn's tokens follow the tokens of `context` in `text`. Consecutive turns share one sequence as long as the
next context begins with the tokens so far. If the template rewrites history (Qwen3 drops earlier `<think>` blocks),
a new sequence begins: one row becomes as many sequences as contexts differ.

A turn ends with the token that ends sampling (`TurnEnds`). The template's text after that end is context of the next turn. It
never trains, and nothing of it follows the last turn; data.train_on_line_end takes blanks out of this rule. With
data.loss_on=assistant, `{% generation %}` markers of the template select the tokens of a turn that train; otherwise all of
them train.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from verl.data.conversations.formats import Example
from verl.data.conversations.turn_ends import TurnEnds
from verl.data.images import ConversationImages, RowImages, image_encoder
from verl.data.prompts import at_time_of_run, encode_text, render_chat
from verl.data.schema import Messages
from verl.data.template_checks import TemplateChecks
from verl.data_proto.token_ids import num_common
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DataError, UnavailableRowError

if TYPE_CHECKING:
    from verl.config.sections.data import PreferenceDataConfig, SFTDataConfig

GENERATION_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
NO_CONTENT = "\ue000"  # a private-use character, so that no answer begins with it
NUM_TOKENS_SHOWN = 8  # before the first that differs


@dataclass(frozen=True)
class TrainingSequence:
    """`input_ids` int32 [tokens]; `loss_mask` bool [tokens], true where the prediction of that token trains, never of the
    first. `num_behind` counts tokens of text behind a token that ends generation inside a turn: they do not train."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    num_behind: int = field(default=0, kw_only=True)
    images: RowImages | None = field(default=None, kw_only=True)  # all of them before the first trained token

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class _Turn:
    """Texts of one stretch that trains: its context, and the context with the stretch."""

    context: str
    text: str
    message: int | None = None  # number of the message that is the turn; None: a text, or everything (data.loss_on=all)


class ConversationEncoder:
    """Turns examples into training sequences with one tokenizer and its chat template. `stop_token_ids` end generation (None:
    the tokenizer's eos). `checks`: refuse rows with parts that the model would not read (TemplateChecks)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: SFTDataConfig | PreferenceDataConfig,
        stop_token_ids: Collection[int] | None = None,
        *,
        checks: bool = True,
    ):
        self.tokenizer = tokenizer
        self.settings = settings
        self.ends = TurnEnds(tokenizer, stop_token_ids)
        self.checks = TemplateChecks(tokenizer) if checks else None
        self.images = image_encoder(tokenizer, settings)
        self.reuses_prefixes = True  # until this tokenizer is found to tokenize a prefix otherwise

    def encode(self, example: Example, place: str) -> list[TrainingSequence]:
        """The uncut sequences of a row. Most rows are one; a template that rewrites history makes several. Raises DataError
        naming `place` when the template or the tokenizer fails, when no token trains, and without
        `data.ignore_input_ids_mismatch` when a turn is rendered otherwise than the sampler would have seen it."""
        row, sequences = _Row(self, example, place), []
        try:
            sequences = row.sequences()
        except DataError:
            if row.texts.verified():
                raise
        if not row.texts.verified():
            self.reuses_prefixes = False
            sequences = _Row(self, example, place).sequences()
        if not sequences:
            raise DataError(
                f"{place}: none of the row's tokens train (data.loss_on={row.loss_on}); give it a message of the "
                "assistant without loss_mask 0, or leave the row out."
            )
        return sequences


class _PrefixEncoder:
    """Token ids of texts that extend each other, in time linear in the longest: tokenizers split a text at its special tokens,
    so only the text behind the last one is tokenized again. `verified` tokenizes the last text of each chain at once, because a
    tokenizer may not work this way."""

    def __init__(self, encoder: ConversationEncoder, place: str, *, plain: bool, reuse: bool):
        self._encoder, self._place, self._plain, self._reuse = encoder, place, plain, reuse
        self._prefix, self._anchor = "", ""  # text up to and including its last special token, and that token
        self._ids: list[int] = []  # of the prefix
        self._chains: list[tuple[str, list[int]]] = []  # the last text of each chain, with its tokens

    def ids(self, text: str) -> list[int]:
        if not self._anchor or not text.startswith(self._prefix):
            ids = self._whole(text)
        else:
            ids = self._ids + self._whole(self._anchor + text[len(self._prefix) :])[1:]
            if self._chains and text.startswith(self._chains[-1][0]):
                self._chains.pop()
            self._chains.append((text, ids))
        if self._reuse:
            self._remember(text, ids)
        return ids

    def verified(self) -> bool:
        return all(self._whole(text) == ids for text, ids in self._chains)

    def _remember(self, text: str, ids: list[int]) -> None:
        special = self._encoder.ends.special
        last = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in special), None)
        if last is not None and (start := text.rfind(special[ids[last]])) >= 0:
            self._anchor = special[ids[last]]
            self._prefix, self._ids = text[: start + len(self._anchor)], ids[: last + 1]

    def _whole(self, text: str) -> list[int]:
        # a chat template writes the special tokens itself, as in verl/data/prompts.py
        return encode_text(self._encoder.tokenizer, text, self._place, add_special_tokens=self._plain) if text else []


class _Row:
    """One example on its way to sequences."""

    def __init__(self, encoder: ConversationEncoder, example: Example, place: str):
        self.tokenizer, self.settings = encoder.tokenizer, encoder.settings
        self.checks, self.ends = encoder.checks, encoder.ends
        self._num_checked = 0  # messages
        self.example, self.place = example, place
        self.loss_on = self.settings.loss_on or example.default_loss_on
        self.template_kwargs = {**example.template_kwargs, **({"tools": example.tools} if example.tools else {})}
        plain = isinstance(example.prompt, str)
        self.images = ConversationImages(example.images, encoder.images, place)
        self.messages: Messages = []
        if isinstance(example.prompt, list) and isinstance(example.completion, list):
            self.messages = example.prompt + example.completion
        self.turns = list(self._turns())
        # a single turn has two texts, and tokenizing each from its start costs no more
        reuse = encoder.reuses_prefixes and not plain and len(self.turns) > 1
        self.texts = _PrefixEncoder(encoder, place, plain=plain, reuse=reuse)
        self._marks: tuple[list[int], list[bool]] | None = None  # of the last turn's rendering

    def sequences(self) -> list[TrainingSequence]:
        joined = _Joined()
        for turn in self.turns:
            context, answer = self._tokens(turn)
            if self.checks is not None and isinstance(self.example.prompt, str):
                self.checks.check_text(turn.text, self.place, add_special_tokens=True)
            trained = self._trained(turn, context, answer)
            if all(trained) and (end := self._end_behind(turn, answer)) is not None:
                answer, trained = [*answer, end], [*trained, True]
            num_behind = 0 if self.loss_on == "all" else self.ends.num_behind(answer)
            joined.add(context, answer, trained, num_behind)
        return self.images.attached(joined.sequences())

    def _turns(self) -> Iterator[_Turn]:
        example, loss_on = self.example, self.loss_on
        if isinstance(example.completion, str):
            context = example.prompt if isinstance(example.prompt, str) else self._rendered(example.prompt)
            yield _Turn("" if loss_on == "all" else context, context + self._ended(example.completion))
            return
        if loss_on != "assistant":
            answers = self._answers(0)
            if not (loss_on == "all" or example.prompt or answers):
                raise DataError(
                    f"{self.place}: no message is of the assistant, so nothing is the completion (data.loss_on)."
                )
            start = 0 if loss_on == "all" else len(example.prompt) or answers[-1]
            if any(mark is False for mark in example.trains[start:]):
                raise DataError(
                    f"{self.place}: a message has loss_mask 0, which needs data.loss_on=assistant, not {loss_on}."
                )
        if loss_on == "all":
            yield _Turn("", self._rendered(self.messages, answered=True))
            return
        for number in self._trained_messages() if loss_on == "assistant" else self._answers(start):
            yield _Turn(self._context(number), self._rendered(self.messages[: number + 1], answered=True), number)

    def _trained_messages(self) -> list[int]:
        """Numbers of the messages that train: of the assistant, in the completion, unless the message says otherwise."""
        trained = []
        for number, (message, mark) in enumerate(zip(self.messages, self.example.trains, strict=True)):
            if mark and message["role"] != "assistant":
                raise DataError(
                    f"{self.place}: message {number} of role {message['role']!r} has loss_mask 1, but the model samples "
                    "only messages of the assistant; set data.loss_on=all to train on everything."
                )
            if mark or (mark is None and message["role"] == "assistant" and number >= len(self.example.prompt)):
                trained.append(number)
        return trained

    def _answers(self, start: int) -> list[int]:
        """Numbers of the assistant's messages from `start` on."""
        return [n for n, message in enumerate(self.messages) if n >= start and message["role"] == "assistant"]

    def _context(self, number: int) -> str:
        """The sampler's input for message `number`."""
        if not number:
            raise DataError(
                f"{self.place}: message 0 is of the assistant and has no prompt to be sampled from; put a message before "
                "it, give it loss_mask 0, or set data.loss_on=all."
            )
        return self._rendered(self.messages[:number])

    def _rendered(self, messages: Messages, *, answered: bool = False) -> str:
        """The rendering; raises DataError if the model would not read all of its messages."""
        text = self._render(messages, answered=answered)
        if self.checks is not None and len(messages) > self._num_checked:
            settings = {**self.template_kwargs, "add_generation_prompt": not answered, "first": self._num_checked}
            self.checks.check_chat(messages, self.place, **settings)
            self._num_checked = len(messages)
        return text

    def _render(self, messages: Messages, *, answered: bool = False) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UnavailableRowError(
                "the row has chat messages, but the tokenizer has no chat template to join them. Set "
                "model.custom_chat_template (docs/from-base-to-answers.md has one to copy), or give texts.",
                self.place,
            )
        text = render_chat(
            self.tokenizer, messages, self.place, add_generation_prompt=not answered, **self.template_kwargs
        )
        return self.images.expanded(text)

    def _ended(self, text: str) -> str:
        """A text completion with the token that ends it."""
        token = self.ends.token(self.place, after_chat=isinstance(self.example.prompt, list))
        end = self.tokenizer.convert_ids_to_tokens(token)
        return text if text.endswith((end, *self.ends.texts)) else text + end

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tokens(self, turn: _Turn) -> tuple[list[int], list[int]]:
        """Token ids of the context and of what follows it."""
        if split := self._split(turn):
            return split
        context, full = self.texts.ids(turn.context), self.texts.ids(turn.text)
        if not self.settings.ignore_input_ids_mismatch:
            raise DataError(f"{self.place}: {self._difference(turn, context, full)}")
        if turn.message is not None and not turn.text.startswith(turn.context):
            rendered = _Turn(self._as_rendered(turn), turn.text)
            context = self.texts.ids(rendered.context)
            if split := self._split(rendered):
                return split
        start = num_common(context, full)
        return full[:start], full[start:]

    def _split(self, turn: _Turn) -> tuple[list[int], list[int]] | None:
        """Tokens of the context as the sampler has them, and tokens after it; None if they are not the turn's text."""
        if not turn.text.startswith(turn.context):
            return None
        context, full = self.texts.ids(turn.context), self.texts.ids(turn.text)
        if full[: len(context)] == context:
            return context, full[len(context) :]
        # A token lies across the border ("\n" + "\n" is one of many vocabularies). A sampler that has been given the
        # first half cannot produce it, so the text after the border is encoded by itself.
        text = turn.text[len(turn.context) :]
        rest = encode_text(self.tokenizer, text, self.place, add_special_tokens=False)
        return (context, rest) if self._decode(context + rest) == self._decode(full) else None

    def _as_rendered(self, turn: _Turn) -> str:
        """The text before the turn's content in `turn.text`, found by rendering the turn with another content."""
        no_answer = {"role": "assistant", "content": NO_CONTENT}
        other = self._render([*self.messages[: turn.message], no_answer], answered=True)
        return turn.text[: num_common(turn.text, other)]

    def _difference(self, turn: _Turn, context: list[int], rendered: list[int]) -> str:
        at = num_common(context, rendered)
        in_prompt = repr(self._decode(context[at : at + 1])) if at < len(context) else "the beginning of the answer"
        written = repr(self._decode(rendered[at : at + 1])) if at < len(rendered) else "nothing"
        which = "the completion" if turn.message is None else f"message {turn.message}"
        fix = (
            "End the prompt where a token ends"
            if turn.text.startswith(turn.context)
            else "Use a chat template that renders the prompt the same way once it is answered (custom_chat_template)"
        )
        return (
            f"the tokens of {which} do not follow the prompt that the sampler would be given for it: token {at}, after "
            f"{self._decode(rendered[max(0, at - NUM_TOKENS_SHOWN) : at])!r}, is {written}, but {in_prompt} in the prompt. "
            f"{fix}, or set data.ignore_input_ids_mismatch=True to train on the rendering as it is."
        )

    def _trained(self, turn: _Turn, context: list[int], answer: list[int]) -> list[bool]:
        """For each token of the answer, whether it trains."""
        end = self.ends.of_text(answer) if self.loss_on == "all" else self.ends.of_turn(answer)
        if self.settings.train_on_line_end:
            end = self.ends.with_blanks(answer, end)
        trained = [True] * len(answer)
        if self.loss_on == "assistant" and turn.message is not None:
            if GENERATION_MARKER.search(self.tokenizer.get_chat_template(None, self.example.tools)):
                trained = self._marked(turn, context, answer)
        return [mark and number < end for number, mark in enumerate(trained)]

    def _end_behind(self, turn: _Turn, answer: list[int]) -> int | None:
        """The token that ends a turn without one, if the template writes it as the beginning of the next message (GLM)."""
        if turn.message is None or not self.ends.stops.isdisjoint(answer):
            return None
        message, *following = self.messages[turn.message :]
        return self.ends.of_next(following[0]["role"] if following else "tool" if message.get("tool_calls") else "user")

    def _marked(self, turn: _Turn, context: list[int], answer: list[int]) -> list[bool]:
        """The tokens of the answer that the template's `{% generation %}` markers enclose."""
        if self.images.row is not None:  # tokens of images are not in the rendering with markers
            raise DataError(
                f"{self.place}: the template has generation markers, which are not read in rows with images. Set "
                "data.loss_on=completion."
            )
        end = len(context) + len(answer)
        self._marks = self._marks or self._render_marks(self.turns[-1])
        if self._marks[0][:end] == context + answer:
            return self._marks[1][len(context) : end]
        ids, mask = self._render_marks(turn)
        if ids == context + answer:
            return mask[len(context) :]
        # other tokens than the markers' rendering: compared by characters, also for a token across the border
        covered = bytearray(len(turn.text))
        offsets = self.tokenizer(turn.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        for (start, stop), trains in zip(offsets, mask, strict=True):
            if trains:
                covered[start:stop] = b"\x01" * (stop - start)
        border = len(turn.context)
        rest = self.tokenizer(turn.text[border:], add_special_tokens=False, return_offsets_mapping=True)
        if list(rest["input_ids"]) != answer:
            raise DataError(
                f"{self.place}: the template's generation markers cannot be placed on the tokens of the row."
            )
        return [any(covered[border + start : border + stop]) for start, stop in rest["offset_mapping"]]

    def _render_marks(self, turn: _Turn) -> tuple[list[int], list[bool]]:
        """Tokens of the messages up to the turn, and whether markers enclose each."""
        assert turn.message is not None
        marked = self.tokenizer.apply_chat_template(
            self.messages[: turn.message + 1],
            return_dict=True,
            return_assistant_tokens_mask=True,
            **at_time_of_run(self.template_kwargs),
        )
        return list(marked["input_ids"]), [bool(mark) for mark in marked["assistant_masks"]]


class _Joined:
    """Turns with their contexts, joined to as few sequences as their tokens allow."""

    def __init__(self) -> None:
        self._done: list[TrainingSequence] = []
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._num_behind = 0

    def add(self, context: list[int], answer: list[int], trained: list[bool], num_behind: int) -> None:
        if not self._ids or context[: len(self._ids)] != self._ids:
            self._close()
        end = max((number + 1 for number, trains in enumerate(trained) if trains), default=0)
        self._mask += [False] * (len(context) - len(self._mask)) + trained[:end]
        self._ids = context + answer[:end]
        self._num_behind += num_behind

    def sequences(self) -> list[TrainingSequence]:
        self._close()
        return self._done

    def _close(self) -> None:
        if any(self._mask[1:]):
            mask = np.array(self._mask, dtype=np.bool_)
            mask[0] = False
            ids = np.array(self._ids, dtype=np.int32)
            self._done.append(TrainingSequence(ids, mask, num_behind=self._num_behind))
        self._ids, self._mask, self._num_behind = [], [], 0
