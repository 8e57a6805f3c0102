"""Loggers of libraries that log what strangers send: escaped text, one line each, not without end."""

import io
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.tracking import logs

ANY_TEXT = st.text(st.characters(categories=None, exclude_categories=()), max_size=300)


def records(texts, reason, hour=0):
    """Two records of each text: with a traceback, and with an argument that the text has no place for."""
    error = ValueError(reason)
    more = {"name": "stranger.client.stdio", "levelno": logging.ERROR, "levelname": "ERROR", "created": 3600.0 * hour}
    for text in texts:
        yield logging.makeLogRecord({**more, "msg": "%s", "args": (text,), "exc_info": (ValueError, error, None)})
        yield logging.makeLogRecord({**more, "msg": text, "args": ("a wrong argument",)})


@pytest.fixture(scope="module")
def console():
    """The console of a run."""
    file = io.StringIO()
    handler = logs.add_handler(logging.StreamHandler(file))
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    yield file
    logs.remove_handler(handler)


@settings(max_examples=50, deadline=None)
@given(st.lists(ANY_TEXT, min_size=1, max_size=40), ANY_TEXT)
def test_the_console_shows_escaped_lines_up_to_a_number(console, texts, reason):
    console.seek(0)
    console.truncate()
    adopting = logs._AdoptingHandler()
    for record in records(texts, reason):
        adopting.handle(record)
    lines = console.getvalue().split("\n")
    assert lines.pop() == ""
    assert len(lines) == min(2 * len(texts), logs.MAX_ADOPTED)
    assert all(line.isprintable() and line.startswith("ERROR: stranger: ") and len(line) < 800 for line in lines)
    assert lines[-1].endswith("are left out") == (2 * len(texts) >= logs.MAX_ADOPTED)


def test_another_hour_shows_others(console):
    console.seek(0)
    console.truncate()
    adopting = logs._AdoptingHandler()
    for hour in (0, 0, 1):
        for record in records(["x"] * logs.MAX_ADOPTED, "y", hour):
            adopting.handle(record)
    assert len(console.getvalue().splitlines()) == 2 * logs.MAX_ADOPTED


def test_a_library_logs_only_by_this_handler():
    logs.adopt_loggers("stranger")
    try:
        library = logging.getLogger("stranger")
        assert logs._ADOPTING in library.handlers
        assert not library.propagate
    finally:
        library.handlers, library.propagate = [], True
