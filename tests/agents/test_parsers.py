"""Calls in every format: read if they are well formed, else a sentence for the model."""

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
JSON = ["hermes", "gpt-oss", "kimi", "deepseek"]  # formats with arguments as JSON
# a damage of the arguments '{"a": 1, "b": "2", "c": true}'
DAMAGES = {
    "cut": ('"c": true}', '"c": tr'),
    "raw line end": ('"2"', '"2\n"'),
    "trailing comma": ("true}", "true,}"),
    "single quotes": ('"a"', "'a'"),
    "bare key": ('"a"', "a"),
}
TAGS = {  # format -> the tags of a parameter and of a call
    "qwen3_coder": ("</parameter>", "</function>", "</tool_call>"),
    "seed": ("</parameter>", "</function>", "</seed:tool_call>"),
    "minimax": ("</parameter>", "</invoke>", "</minimax:tool_call>"),
    "deepseek_v4": ("</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>"),
    "glm": ("</arg_value>", "", "</tool_call>"),
}
ENDS = {
    "hermes": "</tool_call>",
    "gemma4": "<tool_call|>",
    "kimi": "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek": "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt-oss": "<|call|>",
}
THOUGHTS = {
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", JSON)
def test_damaged_json_gets_a_sentence_and_the_good_call_beside_it_is_read(tokenizer, name, damage):
    bad = TURNS[name].replace(*DAMAGES[damage])
    _, (call,) = extract(tokenizer, name, bad)
    assert call.name == "add"
    assert "Invalid" in call.fault()
    good = TURNS[name].removeprefix("So: ")
    _, calls = extract(tokenizer, name, bad + good)
    assert [bool(call.fault()) for call in calls] == [True, False]
    assert json.loads(calls[1].arguments) == ARGUMENTS


@pytest.mark.parametrize("name", ENDS)
def test_a_complete_call_without_its_end_is_read(tokenizer, name):
    turn = TURNS[name].removesuffix(ENDS[name])
    _, (call,) = extract(tokenizer, name, turn)
    assert json.loads(call.arguments) == ARGUMENTS
    _, calls = extract(tokenizer, name, turn + TURNS[name].removeprefix("So: "))
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS, ARGUMENTS]


@pytest.mark.parametrize("name", TAGS)
def test_a_parameter_without_its_end_ends_at_the_next_tag(tokenizer, name):
    end, call_end, last = TAGS[name]
    for number in range(3):
        parts = TURNS[name].split(end)
        parts[number] += parts.pop(number + 1)
        _, (call,) = extract(tokenizer, name, end.join(parts))
        assert (call.fault(), json.loads(call.arguments)) == (None, ARGUMENTS)
    _, calls = extract(tokenizer, name, TURNS[name].replace(end, "") + TURNS[name].removeprefix("So: "))
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS, ARGUMENTS]
    # the text of the turn ends in a parameter: it may lack its second half
    _, (call,) = extract(tokenizer, name, TURNS[name].partition(end)[0])
    assert (call.name, "has no end" in call.fault()) == ("add", True)
    if call_end:
        _, (call,) = extract(tokenizer, name, TURNS[name].replace(call_end, ""))
        assert (call.fault(), json.loads(call.arguments)) == (None, ARGUMENTS)
    _, (call,) = extract(tokenizer, name, TURNS[name].replace(last, ""))
    assert call.fault() or json.loads(call.arguments) == ARGUMENTS


@pytest.mark.parametrize("name", PARSERS)
def test_an_end_without_a_beginning_gets_a_sentence(tokenizer, name):
    if name == "gpt-oss":
        return  # its end ends every message
    end = ENDS[name] if name in ENDS else TAGS[name][-1]
    _, (call,) = extract(tokenizer, name, f"add(1) {end}")
    assert "no beginning" in call.fault()


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_inside_thoughts_is_none(tokenizer, name):
    begin, end = THOUGHTS.get(name, ("<think>", "</think>"))
    call = TURNS[name].removeprefix("So: ")
    text, calls = extract(tokenizer, name, f"{begin}perhaps {call}{end}No.")
    assert (text, calls) == (f"{begin}perhaps {call}{end}No.", [])
    assert extract(tokenizer, name, f"{begin}perhaps {call.removesuffix('<|call|>')}") == (
        f"{begin}perhaps {call.removesuffix('<|call|>')}", [],
    )  # fmt: skip
    _, calls = extract(tokenizer, name, f"{begin}perhaps {call.replace('1', '3')}{end}{call}")
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS]


@pytest.mark.parametrize("name", PARSERS)
def test_thoughts_may_begin_in_the_prompt(tokenizer, name):
    begin, end = THOUGHTS.get(name, ("<think>\n", "</think>"))
    parser, call = ToolParser.get_tool_parser(name, tokenizer), TURNS[name].removeprefix("So: ")
    context = tokenizer.encode(f"<|im_start|>assistant\n{begin}")[-60:]
    for turn, count in ((f"perhaps {call}", 0), (f"perhaps {call}{end}{call}", 1), (f"no{end}{call}", 1)):
        work = parser.of_turn(context, tokenizer.encode(turn), TOOLS)
        text, calls = asyncio.run(work)
        assert (len(calls), begin.strip() in text) == (count, False), turn


def test_a_text_with_marks_stays_an_argument(tokenizer):
    arguments = {"b": "Is <tool_call> a tag, or </think>?"}
    turn = f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"
    _, (call,) = extract(tokenizer, "hermes", turn)
    assert json.loads(call.arguments) == arguments


def test_arguments_that_are_a_text_are_left_to_the_one_who_calls(tokenizer):
    _, (call,) = extract(tokenizer, "hermes", '<tool_call>{"name": "add", "arguments": "{oops"}</tool_call>')
    with pytest.raises(ValueError):
        call.parsed()


def test_an_unknown_format_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="did you mean 'hermes'|hermes"):
        ToolParser.get_tool_parser("hermez", tokenizer)
