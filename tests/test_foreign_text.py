"""Foreign text, cleaned: valid UTF-8, one line, no control characters, a limit; in sentences, logs and on the console."""

import io
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.foreign_text import prints, texts
from verl.errors import DataError, VerlError, os_error_of
from verl.foreign_text import clean, printable, valid_utf8
from verl.tracking.logs import CleanRecords

RECORD = re.compile(r"(INFO|WARNING|ERROR) verl: ")


@given(texts, st.integers(4, 400))
def test_clean_is_one_short_line_that_prints(text, limit):
    shown = clean(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit
    assert shown.encode().decode() == shown
    assert clean(shown, limit) == shown


@given(texts)
def test_printable_keeps_lines_and_nothing_else(text):
    shown = printable(text)
    assert prints(shown)
    assert shown.count("\n") == text.count("\n")
    assert not prints(text) or shown == text


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


@given(texts)
def test_a_log_has_one_record_for_each_call(text):
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for _ in range(2):  # as where a record has two handlers
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


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(28, "full"), 28),
        (Exception("No space left on device (os error 28)"), 28),
        (ValueError("No space left on device (os error 28)"), None),
        (Exception("another"), None),
    ],
)
def test_errors_of_the_system_in_texts_of_libraries(error, number):
    found = os_error_of(error)
    assert (found and found.errno) == number
