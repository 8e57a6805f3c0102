"""Schemas of type hints, and arguments of calls as their schema and hints say."""

import json

import pytest

from tests.agents import hinted_tools
from tests.agents.test_tools import call
from verl.tools.function_tool import MARK
from verl.tools.hints import fitted

TOOLS = [getattr(function, MARK) for function in (hinted_tools.add, hinted_tools.paint, hinted_tools.buy)]
RED = {"type": "string", "enum": ["red", "blue"]}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "number": {"type": "integer"}},
    "required": [],
    "nullable": True,
}


def schema_of(number):
    return TOOLS[number].tool_schema.for_template()["function"]["parameters"]["properties"]


def test_a_schema_has_the_values_of_an_enum_and_the_fields_of_classes():
    assert schema_of(1)["c"] == {**RED, "description": "the colour"}
    assert schema_of(1)["other"] == {**RED, "nullable": True, "description": "a second one"}
    assert schema_of(1)["kind"]["enum"] == ["a", "b"]
    order = schema_of(2)["orders"]["items"]
    assert order["properties"] == {"color": RED, "count": {"type": "integer"}, "place": PLACE}
    assert order["required"] == ["color", "count"]
    assert schema_of(2)["fast"] == {"type": "boolean", "description": "how"}  # as transformers describes it


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("add", {"a": "1", "b": "2"}, "3"),
        ("add", {"a": 1, "b": "2.5"}, "3.5"),
        ("add", {"a": "one", "b": 2}, "the argument 'a' is 'one', not of type number"),
        ("add", {"a": [1], "b": 2}, "the argument 'a' is [1], not of type number"),
        ("add", {"a": None, "b": 2}, "the argument 'a' is None, not of type number"),
        ("add", {"a": 1}, "the argument 'b' is missing"),
        ("paint", {"c": "red"}, "<Color.RED: 'red'> a None"),
        ("paint", {"c": "red", "other": "blue"}, "<Color.RED: 'red'> a <Color.BLUE: 'blue'>"),
        ("paint", {"c": "red", "other": None}, "<Color.RED: 'red'> a None"),
        ("paint", {"c": "green"}, "the argument 'c' is 'green'; it can be ['red', 'blue']"),
        ("paint", {"c": "red", "kind": "x"}, "the argument 'kind' is 'x'; it can be ['a', 'b']"),
        ("buy", {"orders": [{"color": "red", "count": "2"}]}, "[Order(color=<Color.RED: 'red'>, count=2, place=None)] False 1"),
        ("buy", {"orders": '[{"color": "red", "count": 2.0}]', "fast": "True"}, "count=2, place=None)] True 1"),
        ("buy", {"orders": [{"color": "red", "count": 1, "place": {"city": 7}}]}, "place={'city': '7'})] False 1"),
        ("buy", {"orders": [{"color": "red"}]}, "the argument 'orders[0].count' is missing"),
        ("buy", {"orders": [{"color": "red", "count": 1.5}]}, "the argument 'orders[0].count' is 1.5, not of type integer"),
    ],
)  # fmt: skip
def test_arguments_fit_their_hints_or_the_model_reads_why(name, arguments, text):
    assert call(TOOLS, name, arguments).text.endswith(text)


SILENT = [None, {}, {"type": "unknown"}, {"type": ["integer", "null"]}, {"anyOf": [{}, {"type": "null"}]}]


@pytest.mark.parametrize("schema", SILENT)
def test_what_a_schema_does_not_say_is_left(schema):
    assert fitted(None, schema, "x") is None
    assert fitted(3, schema, "x") == 3


def test_functions_in_the_sandbox_get_the_same_values():
    from verl.agents.sandboxed import call_tool

    path, arguments = hinted_tools.__file__, {"c": "red", "other": "blue"}
    answer = call_tool("paint", "", None, {"path": path, "arguments": arguments})
    assert answer["text"] == "<Color.RED: 'red'> a <Color.BLUE: 'blue'>"
    assert json.dumps(answer)
