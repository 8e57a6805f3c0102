"""Calls in every format: read where they are well formed, and text where they are not."""

import asyncio
import json

import pytest

from verl.agents.parsers import ToolParser
from verl.errors import ConfigError
from verl.families import TOOL_PARSERS
from verl.models.tiny import make_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
            },
        },
    }
]
# other test files register parsers too
PARSERS = [name for name in TOOL_PARSERS if TOOL_PARSERS.is_built_in(name)]
ARGUMENTS = {"a": 1, "b": "2", "c": True}
# format -> a turn with one call of add with ARGUMENTS, after the text "So: "
TURNS = {
    "hermes": 'So: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "2", "c": true}}\n</tool_call>',
    "qwen3_coder": "So: <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "<parameter=c>\nTrue\n</parameter>\n</function>\n</tool_call>",
    "gpt-oss": 'So: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "2", "c": true}<|call|>',
    "glm": "So: <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>"
    "\n<arg_key>c</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
    "seed": "So: <seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>2</parameter>\n"
    "<parameter=c>true</parameter>\n</function>\n</seed:tool_call>",
    "minimax": 'So: <minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">2'
    '</parameter>\n<parameter name="c">true</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi": "So: <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": "2", "c": true}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek": "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": "2", "c": true}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v4": 'So: <｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="c" string="false">true</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "gemma4": 'So: <|tool_call>call:add{a:1,b:<|"|>2<|"|>,c:true}<tool_call|>',
}
MALFORMED = {
    "hermes": ['<tool_call>{"name": "add", "arguments": </tool_call>', "<tool_call>[1]</tool_call>", "<tool_call>{}"],
    "qwen3_coder": ["<tool_call>add(1)</tool_call>", "<function=add>"],
    "glm": ["<tool_call></tool_call>"],
    "gemma4": ["<|tool_call>call:add{a:}<tool_call|>"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def extract(tokenizer, name, text):
    parser = ToolParser.get_tool_parser(name, tokenizer)
    return asyncio.run(
        parser.extract_tool_calls(tokenizer.encode(text + "<|im_end|>", add_special_tokens=False), TOOLS)
    )


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_is_read(tokenizer, name):
    text, (call,) = extract(tokenizer, name, TURNS[name])
    assert call.name == "add"
    assert json.loads(call.arguments) == ARGUMENTS
    assert text == "So:"
    assert call.id == ("functions.add:0" if name == "kimi" else None)


@pytest.mark.parametrize("name", PARSERS)
def test_two_calls_are_read_in_order(tokenizer, name):
    _, calls = extract(tokenizer, name, TURNS[name] + TURNS[name].removeprefix("So: "))
    assert [call.name for call in calls] == ["add", "add"]


@pytest.mark.parametrize("name", PARSERS)
def test_text_without_calls_is_unchanged(tokenizer, name):
    assert extract(tokenizer, name, "3 < 4 and {x}") == ("3 < 4 and {x}", [])


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in MALFORMED.items() for t in texts])
def test_a_malformed_call_stays_text(tokenizer, name, text):
    assert extract(tokenizer, name, text) == (text, [])


def test_arguments_that_are_a_text_are_left_to_the_one_who_calls(tokenizer):
    _, (call,) = extract(tokenizer, "hermes", '<tool_call>{"name": "add", "arguments": "{oops"}</tool_call>')
    with pytest.raises(ValueError):
        call.parsed()


def test_an_unknown_format_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="did you mean 'hermes'|hermes"):
        ToolParser.get_tool_parser("hermez", tokenizer)
