"""Foreign text, cleaned: valid UTF-8, one line, no control characters, a limit; in sentences, logs and on the console."""

import contextlib
import copy
import functools
import io
import json
import logging
import operator
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from tests.config.inputs import outcome as config_outcome
from tests.data.mutations import base_rows, places, read
from tests.foreign_text import foreign_text, prints, texts
from verl.cli.main import run_guarded
from verl.config import PPO
from verl.data.prompts import render_chat
from verl.data.schema import MAX_SOURCE
from verl.errors import DataError, VerlError, os_error_of
from verl.foreign_text import clean, printable, quoted, valid_utf8
from verl.models.tiny import make_tokenizer
from verl.tracking.console import Console
from verl.tracking.logs import CleanRecords

TOKENIZER = make_tokenizer()
RECORD = re.compile(r"(INFO|WARNING|ERROR) verl: ")


@given(texts, st.integers(4, 400))
def test_clean_is_one_short_line_that_prints(text, limit):
    cleaned = clean(text, limit)
    assert cleaned.isprintable()
    assert len(cleaned) <= limit
    assert cleaned.encode().decode() == cleaned
    assert clean(cleaned, limit) == cleaned


@given(texts | st.lists(texts) | st.floats() | st.binary())
def test_quoted_is_one_short_line_that_prints(value):
    quoted_text = quoted(value, 80)
    assert quoted_text.isprintable()
    assert len(quoted_text) <= 80


def test_quoted_by_hand():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    assert quoted(nested) == "<list without a text: RecursionError>"
    assert quoted("a\n\x1b") == r"'a\n\x1b'"
    assert quoted(3) == "3"


@given(texts)
def test_printable_keeps_lines_and_nothing_else(text):
    printed = printable(text)
    assert prints(printed)
    assert printed.count("\n") == text.count("\n")
    assert not prints(text) or printed == text


@given(texts)
def test_valid_utf8_changes_half_characters_only(text):
    stored = valid_utf8(text)
    assert stored.encode().decode() == stored
    assert stored == "".join(f"\\u{ord(c):04x}" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def test_clean_by_hand():
    assert clean("a\r\n  b\tc\u2028d") == "a b c d"
    assert clean("\x1b[31mred\x9b\ud800\u202e") == r"\x1b[31mred\x9b\ud800\u202e"
    assert clean("x" * 400) == "x" * 297 + "..."
    assert clean(" " * 10_000 + "x") == "..."
    assert clean(10**5000) == "<int without a text: ValueError>"
    assert clean(ValueError("half \ud83d")) == r"half \ud83d"


@given(texts)
def test_sentences_print(text):
    assert prints(str(DataError(f"{text} is wrong")))


def in_a_row(text, rng, folder):
    row = rng.choice(base_rows())
    path = rng.choice([p for p in places(row) if p and not isinstance(p[-1], int)])
    place = functools.reduce(operator.getitem, path[:-1], row)
    place[path[-1]] = text
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row))
    answer = read(file, TOKENIZER)
    if isinstance(answer, str):
        assert prints(answer), ascii(answer)
        return "refused"
    valid_utf8(json.dumps(answer[0], ensure_ascii=False, default=str)).encode()
    return "accepted"


def in_a_config(text, rng, folder):
    if rng.random() < 0.5:
        return config_outcome(PPO, [f"trainer.experiment_name={text}"], None, folder)
    file = folder / "run.yaml"
    file.write_text(json.dumps({"trainer": {"experiment_name": text}}))
    return config_outcome(PPO, [], file, folder)


def in_a_template(text, rng, folder):
    """An error that a chat template raises with a text of the row."""
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = "{{ raise_exception(messages[0]['content']) }}"
    with pytest.raises(DataError) as caught:
        render_chat(tokenizer, [{"role": "user", "content": text}], "row 3")
    assert str(caught.value).isprintable()
    return "escaped"


def in_an_error(text, rng, folder):
    """A sentence on the console, and an exception of code that is not ours."""
    expected, error = rng.choice([(3, DataError(f"row 3: {text} is wrong.")), (70, ValueError(text))])

    def fail(arguments):
        raise error

    stream = io.TextIOWrapper(io.BytesIO(), encoding=rng.choice(["utf-8", "ascii", "latin-1"]))
    with contextlib.redirect_stderr(stream):
        assert run_guarded("data", fail, []) == expected
    stream.seek(0)
    printed = stream.read()
    assert prints(printed)
    assert "bug in verl" not in printed
    return "escaped"


def in_a_log(text, rng, folder):
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for _ in range(2):  # as if a record has two handlers
        handler.addFilter(CleanRecords())
    logger = logging.Logger("verl")
    logger.addHandler(handler)
    logger.info("the service answered %s", text)
    try:
        raise VerlError(text) from ValueError(text)
    except VerlError:
        logger.exception("it failed")
    written = handler.stream.getvalue()
    assert prints(written)
    records = [line for line in written.split("\n")[:-1] if not line.startswith("    ")]
    assert [bool(RECORD.match(record)) for record in records] == [True, True]
    return "escaped"


def in_a_name_of_a_metric(text, rng, folder):
    """The name of a task, where rows may have it, on the console and at its end."""
    if not text.isprintable() or len(text) > MAX_SOURCE:
        return "refused"
    for terminal in (False, True):
        console = Console(rich_console=RichConsole(file=io.StringIO(), force_terminal=terminal, width=200))
        console.validation(1, {f"val-core/{text}/reward/mean": 0.5})
        console.header({"data": text, "notices": [text]})
    return "accepted"


BOUNDARIES = (in_a_row, in_a_config, in_a_template, in_an_error, in_a_log, in_a_name_of_a_metric)

CHEAP = tuple(boundary for boundary in BOUNDARIES if boundary is not in_a_config)


def cases(rng, count, folder):
    """(boundary, outcome) of `count` texts at the boundaries where they enter or are shown."""
    for _ in range(count):
        boundary = rng.choice(BOUNDARIES if rng.random() < 0.3 else CHEAP)
        yield boundary.__name__.replace("_", " "), boundary(foreign_text(rng)[1], rng, folder)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_boundaries(boundary, tmp_path):
    rng = random.Random(0)
    for _ in range(12):
        boundary(foreign_text(rng)[1], rng, tmp_path)


class PanicException(BaseException):  # the name of those of Rust libraries
    pass


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(28, "full"), 28),
        (Exception("No space left on device (os error 28)"), 28),
        (ValueError("No space left on device (os error 28)"), None),
        (Exception("another"), None),
        (RuntimeError("can't start new thread"), 11),
        (RuntimeError("another"), None),
        (PanicException("no pool: ThreadPoolBuildError { kind: GlobalPoolAlreadyInitialized }"), 11),
        (PanicException("index out of bounds"), None),
    ],
)
def test_errors_of_the_system_in_texts_of_libraries(error, number):
    os_error = os_error_of(error)
    assert (os_error and os_error.errno) == number
