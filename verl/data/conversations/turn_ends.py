"""End of a turn of the assistant: the token at which sampling would end.

    <|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user ...
                         [sampled       ] the template writes what follows

Training and scoring of given rows, and reward models that read a conversation through their own template, all ask here.
"""

from collections.abc import Collection, Sequence
from functools import cached_property

from verl.data.prompts import encode_text, render_chat
from verl.data.schema import Messages
from verl.data_proto.token_ids import num_embeddings
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DataError

MARK = "\ue000"  # a private-use character: the content of a turn


class TurnEnds:
    """The ends of turns for one tokenizer. `stop_token_ids` end generation (None: the tokenizer's eos); `special` has the
    text of each special token by its id."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: Collection[int] | None = None):
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.stops = frozenset(([] if eos is None else [eos]) if stop_token_ids is None else stop_token_ids)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        numbers = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        self._of_next: dict[str, int | None] = {}  # by role
        self.special = dict(zip(numbers, tokenizer.convert_ids_to_tokens(list(numbers)), strict=True))

    @cached_property
    def texts(self) -> frozenset[str]:
        """Texts of the special tokens that end generation."""
        return frozenset(self.special[token] for token in self.stops if token in self.special)

    def of_turn(self, answer: Sequence[int]) -> int:
        """Number of tokens of a turn, without the tokens that a template writes after it."""
        first = next((number for number, token in enumerate(answer) if token in self.stops), None)
        return self.of_text(answer) if first is None else first + 1

    def of_text(self, ids: Sequence[int]) -> int:
        """Number of tokens without the blanks behind a special token at the end."""
        end = len(ids)
        while end and ids[end - 1] not in self.special and self._is_blank(ids[end - 1]):
            end -= 1
        # without a special token only text ends a turn, so that its blanks belong to it
        return end if end and ids[end - 1] in self.special else len(ids)

    def with_blanks(self, answer: Sequence[int], end: int) -> int:
        """Number of tokens up to `end` and of the blanks behind it."""
        while end < len(answer) and answer[end] not in self.special and self._is_blank(answer[end]):
            end += 1
        return end

    def num_behind(self, answer: Sequence[int]) -> int:
        """Tokens of text behind the end of a turn, beyond the reach of sampling; blanks do not count."""
        behind = answer[self.of_turn(answer) :]
        return sum(token not in self.special and not self._is_blank(token) for token in behind)

    def token(self, place: str, *, after_chat: bool) -> int:
        """The token that ends a text completion: after chat messages the last token of a turn in their template, else eos.
        Raises DataError naming `place` if there is none."""
        token_id = self._token_of_chat if after_chat else None
        token_id = self.tokenizer.eos_token_id if token_id is None else token_id
        if token_id is None:
            raise DataError(f"{place}: the tokenizer has no end-of-sequence token to end the text with; give it one.")
        return int(token_id)

    def of_next(self, role: str) -> int | None:
        """The token that ends generation if a template that ends no turn begins a message of `role` with it."""
        if self._token_of_chat is None and role not in self._of_next:
            turns = [("user", "x"), ("assistant", MARK), (role, "x")]
            ids = self._ids_behind([{"role": speaker, "content": text} for speaker, text in turns])
            self._of_next[role] = ids[0] if ids and ids[0] in self.stops else None
        return self._of_next.get(role)

    @property
    def padding(self) -> int | None:
        """A special token that ends no row, the tokenizer's padding if possible (None: there is no such token)."""
        ends, limit = (self.tokenizer.eos_token_id, self._token_of_chat), num_embeddings(self.tokenizer)
        tokens = (self.tokenizer.pad_token_id, *sorted(self.special))
        return next((token for token in tokens if token is not None and token not in ends and token < limit), None)

    @cached_property
    def _token_of_chat(self) -> int | None:
        ids = self._ids_behind([{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}])
        return next((token for kind in (self.stops, self.special) for token in ids if token in kind), None)

    def _ids_behind(self, messages: Messages) -> list[int]:
        """Tokens of the rendering behind MARK; none if the template refuses the messages."""
        try:
            text = render_chat(self.tokenizer, messages, "a turn")
        except DataError:
            return []
        return encode_text(self.tokenizer, text.rpartition(MARK)[2], "a turn", add_special_tokens=False)

    def _is_blank(self, token: int) -> bool:
        text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.isspace()
