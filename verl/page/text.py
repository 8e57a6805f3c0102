"""Foreign text for the page: characters that change how text reads become visible, and colours of tokens."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from verl.foreign_text import valid_utf8
from verl.page.summaries import probability, trainer_log_probs
from verl.tracking.files import Json, is_count, is_number

MAX_TEXT = 200_000  # characters of one text on a page
MAX_TOKENS = 20_000
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>)\1{3,}")
_VISIBLE = {"\t": "\t", "\n": "\n"}


def visible(value: object) -> object:
    """A value as templates write it: control characters and marks of direction of a text become code points; HTML stays."""
    if not isinstance(value, str) or isinstance(value, Markup) or (value.isascii() and value.isprintable()):
        return value
    return "".join(c if is_visible(c) else f"U+{ord(c):04X}" for c in valid_utf8(value))


def is_visible(character: str) -> bool:
    """Whether a character is displayed as itself; control characters and marks of direction are not."""
    return character in _VISIBLE or unicodedata.category(character) not in ("Cc", "Cf", "Zl", "Zp")


def shown(text: object, limit: int = MAX_TEXT) -> Markup:
    """`text` as HTML: escaped, with control characters and marks of direction as their visible code points."""
    content = valid_utf8(text if isinstance(text, str) else "" if text is None else str(text))
    parts: list[Any] = []
    waiting: list[str] = []
    for character in content[:limit]:
        if is_visible(character):
            waiting.append(character)
        else:
            parts += [escape("".join(waiting)), Markup('<span class="ctl">U+{:04X}</span>').format(ord(character))]
            waiting.clear()
    parts.append(escape("".join(waiting)))
    if len(content) > limit:
        parts.append(Markup('<span class="cut">… {:,} more characters</span>').format(len(content) - limit))
    return Markup("").join(parts)


def breakable(key: object) -> Markup:
    """A dotted key as HTML, or its `shown` form, that a narrow column breaks between its words."""
    return Markup(re.sub(r"([._])(?=[^._])", r"\1<wbr>", str(escape(key))))


def collapsed(text: object) -> str:
    """A prompt; a mark that repeats, as of an image, stands once with its count: "<|image_pad|> × 96"."""
    content = text if isinstance(text, str) else ""
    return _REPEATED.sub(lambda match: f"{match[1]} × {len(match[0]) // len(match[1]):,} ", content)


@dataclass(frozen=True)
class Tokens:
    """The response of a sample, token by token. `texts` [tokens]; `columns`: name -> values [tokens] with None for a token that
    has none; `turns`: (first token, number of tokens, source), source policy or environment."""

    texts: list[str]
    ids: list[int]
    columns: dict[str, list[float | None]]
    turns: list[tuple[int, int, str]]
    num_all: int

    def to_json(self) -> dict[str, object]:
        """For the browser."""
        return {"texts": self.texts, "ids": self.ids, "columns": self.columns}


def tokens_of(
    row: Mapping[str, object], tokens: Mapping[int, tuple[str, bool]], which: str = "response"
) -> Tokens | None:
    """The tokens of a row; None when the row has no ids or the run has not kept the texts of its tokens."""
    ids = row.get(f"{which}_ids")
    if not isinstance(ids, list) or not ids or not tokens or not all(map(is_count, ids)):
        return None
    count = min(len(ids), MAX_TOKENS)
    shown_ids = ids[:count]
    columns = _columns(row, count) if which == "response" else {}
    mask = columns.get("mask")
    texts = [valid_utf8(tokens[i][0]) if i in tokens else f"⟨{i}⟩" for i in shown_ids]
    return Tokens(texts, shown_ids, columns, _turns(mask, count), len(ids))


def _columns(row: Json, count: int) -> dict[str, list[float | None]]:
    columns: dict[str, list[float | None]] = {}
    sampled = _numbers(row.get("log_probs"), count)
    trained = _numbers(list(trainer_log_probs(row)), count)
    pairs = [(b, a) if a is not None and b is not None else None for a, b in zip(sampled, trained, strict=False)]
    named = {
        "log_prob": sampled or trained,
        "trainer": trained,
        "gap": [None if pair is None else probability(pair[0]) - probability(pair[1]) for pair in pairs],
        "log_ratio": [None if pair is None else pair[0] - pair[1] for pair in pairs],
        "entropy": _numbers(row.get("entropy"), count),
        "advantage": _numbers(row.get("advantages"), count),
        "reference": _numbers(row.get("ref_log_probs"), count),
        "version": _numbers(row.get("token_versions"), count),
        "mask": _numbers([int(bool(v)) for v in row["response_mask"]], count)
        if isinstance(row.get("response_mask"), list) else [],
    }  # fmt: skip
    for name, values in named.items():
        if any(value is not None for value in values):
            columns[name] = values + [None] * (count - len(values))
    return columns


def whole_number(text: str) -> int | None:
    """The number that a part of an address gives in at most 15 digits; None for any other text. SQLite takes no larger ones,
    and Python reads no longer ones."""
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


def _numbers(values: object, count: int) -> list[float | None]:
    if not isinstance(values, list):
        return []
    return [float(value) if is_number(value) else None for value in values[:count]]


def _turns(mask: Sequence[float | None] | None, count: int) -> list[tuple[int, int, str]]:
    turns: list[tuple[int, int, str]] = []
    for i in range(count):
        source = "environment" if mask is not None and not mask[i] else "policy"
        if turns and turns[-1][2] == source:
            first, size, _ = turns[-1]
            turns[-1] = (first, size + 1, source)
        else:
            turns.append((i, 1, source))
    return turns


def diff_words(one: str, other: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both texts as (words, whether they differ) in their order."""
    import difflib

    words = [re.findall(r"\s+|[^\s]+", text[:20_000]) for text in (one, other)]
    matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
    first_words: list[tuple[str, bool]] = []
    right: list[tuple[str, bool]] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if b > a:
            first_words.append(("".join(words[0][a:b]), kind != "equal"))
        if d > c:
            right.append(("".join(words[1][c:d]), kind != "equal"))
    return first_words, right
