"""Turns with damaged calls, in every format: no exception, no argument that vanishes, no call out of the model's thoughts."""

import asyncio
import re

from tests.agents.test_parsers import PARSERS, THOUGHTS, TOOLS, TURNS
from verl.agents.parsers import ToolParser
from verl.models.tiny import make_tokenizer

VALUES = ("418275", "two words", "Paris <b>")
BITS = (
    "{",
    "}",
    '"',
    "'",
    ",",
    ":",
    "<",
    ">",
    "/",
    "\n",
    "|",
    "</think>",
    "<think>",
    "<tool_call>",
    "</tool_call>",
    "x",
)


def turn_of(name, value):
    """A turn with one call. Its argument b is `value`."""
    turn = TURNS[name].removeprefix("So: ")
    if name in ("hermes", "gpt-oss", "kimi", "deepseek"):
        return turn.replace('"b": "2"', f'"b": "{value}"')
    return re.sub(r"2(?=\n?<)", value, turn, count=1)


def damaged(rng, text, value):
    """`text` with a few characters of its marks deleted, doubled or replaced, and the same `value`."""
    before, _, after = text.partition(value)
    parts = [before, after]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        which = rng.randrange(2)
        part = parts[which]
        start = rng.randrange(len(part) + 1)
        end = min(len(part), start + rng.choice((0, 1, 1, 2, 8, 40)))
        new = rng.choice(("", "", rng.choice(BITS), part[start:end] * 2))
        parts[which] = part[:start] + new + part[end:]
    return value.join(parts)


def outcome(rng, parser, name):
    value = rng.choice(VALUES)
    begin, end = THOUGHTS.get(name, ("<think>", "</think>"))
    thoughts = f"{begin}perhaps {turn_of(name, 'secret')}{end}" if rng.random() < 0.5 else ""
    good = turn_of(name, "good") if rng.random() < 0.5 else ""
    turn = thoughts + damaged(rng, turn_of(name, value), value) + good
    text, calls = asyncio.run(parser.extract_tool_calls(parser.tokenizer.encode(turn), TOOLS))
    run = [call for call in calls if call.fault() is None]
    assert not any("secret" in call.arguments for call in run), turn
    texts = [text, *(call.arguments for call in calls)]
    assert any(value in part for part in texts), (turn, texts)
    for call in calls:
        if fault := call.fault():
            assert fault.isprintable(), turn
            assert len(fault) < 400, turn
            assert call.name, turn
    if not calls:
        return "text"
    return "a sentence" if len(run) < len(calls) else "read"


def cases(rng, count, folder):
    """(format, outcome) of `count` turns."""
    tokenizer = make_tokenizer()
    parsers = {name: ToolParser.get_tool_parser(name, tokenizer) for name in PARSERS}
    for _ in range(count):
        name = rng.choice(PARSERS)
        yield name, outcome(rng, parsers[name], name)
