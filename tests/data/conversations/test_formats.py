"""Row formats: the result of each, and the errors for rows that fit none, several, or are wrong inside."""

import pytest

from tests.data.conversations.templates import chat
from verl.config.sections.data import SFTDataConfig
from verl.data.conversations.formats import example_of, format_of
from verl.data.tables import ArrowRow
from verl.errors import DataError

QA = chat("q", "a")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

CASES = {
    "messages": ({"messages": QA}, "messages", [], QA),
    "messages with unused columns": ({"messages": QA, "prompt": "q", "source": "x", "text": None}, "messages", [], QA),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, QA[1]]}, "messages", [], QA),
    "messages as ShareGPT writes them": (
        {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "messages",
        [],
        QA,
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "conversations",
        [],
        QA,
    ),
    "conversations of roles": ({"conversations": QA}, "conversations", [], QA),
    "conversations with calls": (
        {
            "system": "s",
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "a"},
            ],
        },
        "conversations",
        [],
        [
            {"role": "system", "content": "s"},
            QA[0],
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            QA[1],
        ],
    ),
    "texts": ({"prompt": "q", "completion": "a"}, "prompt_completion", "q", "a"),
    "prompt and completion of messages": (
        {"prompt": QA[:1], "completion": QA[1:]},
        "prompt_completion",
        QA[:1],
        QA[1:],
    ),
    "a text beside messages": ({"prompt": QA[:1], "completion": "a"}, "prompt_completion", QA[:1], QA[1:]),
    "messages beside a text": ({"prompt": "q", "completion": QA[1:]}, "prompt_completion", QA[:1], QA[1:]),
    "text": ({"text": "a"}, "text", "", "a"),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, "alpaca", [], QA),
    "alpaca with everything": (
        {"instruction": "i", "input": "x", "output": "a", "system": "s", "history": [["q1", "a1"]]},
        "alpaca",
        [],
        chat("q1", "a1", "i\nx", "a", system="s"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_format_becomes_a_prompt_and_a_completion(case):
    row, row_format, prompt, completion = CASES[case]
    example = example_of(row, SFTDataConfig())
    assert (example.row_format, example.prompt, example.completion) == (row_format, prompt, completion)
    assert set(example.trains) <= {None}


@pytest.mark.parametrize("case", CASES)
def test_a_system_column_and_arguments_of_the_template_reach_every_format(case):
    row = CASES[case][0] | {"system": "s", "chat_template_kwargs": '{"enable_thinking": false, "x": null}'}
    settings = SFTDataConfig(apply_chat_template_kwargs={"enable_thinking": True, "y": 1}, enable_thinking_default=True)
    if case == "texts":
        with pytest.raises(DataError, match="would not read its field 'system'"):
            example_of(row, settings)
        row["prompt"] = "s q"
    example = example_of(row, settings)
    first = (example.prompt or example.completion)[0]
    assert first == {"role": "system", "content": "s"} or case in ("texts", "text")
    assert example.template_kwargs == {"enable_thinking": False, "y": 1}


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"question": "q", "answer": "a"}, {"prompt_key": "question", "response_key": "answer"}),
        # both in one column, as in files prepared for reinforcement learning; chat messages next to it do not matter
        (
            {"extra_info": {"question": "q", "answer": {"text": "a"}}, "messages": QA},
            {
                "prompt_key": "extra_info",
                "prompt_dict_keys": ("question",),
                "response_key": "extra_info",
                "response_dict_keys": ("answer", "text"),
            },
        ),
    ],
)
def test_question_and_answer_columns_of_older_releases(row, keys):
    example = example_of(row, SFTDataConfig(**keys))
    assert (example.row_format, example.prompt, example.completion) == ("prompt_response", QA[:1], "a")


def test_defaults_of_the_tokens_that_train():
    defaults = {case: example_of(row, SFTDataConfig()).default_loss_on for case, (row, *_) in CASES.items()}
    assert {defaults[c] for c in ("messages", "conversations", "alpaca")} == {"assistant"}
    assert (defaults["texts"], defaults["prompt and completion of messages"], defaults["text"]) == (
        *["completion"] * 2,
        "all",
    )


class TestColumnsThatDoNotDecide:
    def test_columns_of_two_formats_are_an_error_that_names_the_key(self):
        row = {"messages": QA, "text": "q a"}
        with pytest.raises(DataError, match=r"of messages \('messages'\) and text \('text'\); set data\.row_format"):
            format_of(row, SFTDataConfig())
        assert format_of(row, SFTDataConfig(row_format="text")) == "text"

    def test_every_format_says_what_the_row_lacks(self):
        with pytest.raises(
            DataError,
            match=r"has 'id', 'prompt' and lacks, for each format: messages: 'messages'; .*prompt_completion: 'completion'; "
            r"text: 'text'; alpaca: 'instruction', 'output'\. .*data\.messages_key",
        ):
            format_of({"id": 1, "prompt": "q", "completion": None}, SFTDataConfig())

    def test_a_format_that_is_asked_for_says_what_is_missing(self):
        with pytest.raises(DataError, match="a row of the format alpaca lacks 'output'; it has 'instruction'"):
            format_of({"instruction": "q"}, SFTDataConfig(row_format="alpaca"))
        with pytest.raises(DataError, match="row_format=prompt_response needs data.prompt_key"):
            format_of({"messages": QA}, SFTDataConfig(row_format="prompt_response"))

    def test_keys_of_other_names(self):
        assert format_of({"conversations": QA}, SFTDataConfig(messages_key="conversations")) == "messages"
        assert format_of({"body": "a", "text": "b"}, SFTDataConfig(text_key="body")) == "text"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": "q"}, "'messages' must be a list, but it is a str"),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\]' has no text 'content'"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "did you mean 'assistant'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images"),
        ({"messages": QA, "images": ["x.png"]}, "images .field 'images'. cannot be read"),
        ({"messages": [{**QA[1], "loss_mask": 2}]}, "message 0 has 2 as loss_mask"),
        ({"messages": QA, "chat_template_kwargs": "[1]"}, r"'chat_template_kwargs' must be an object"),
        ({"messages": [{**QA[1], "loss_mask": 1, "train": False}]}, "message 0 .* contradict"),
        ({"messages": [{**QA[1], "tool_calls": [{"id": "1"}]}]}, "tool call without a function name"),
        (
            {"messages": [{**QA[1], "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "arguments' is a text that is not JSON",
        ),
        ({"messages": QA, "tools": "{"}, "'tools' is a text that is not JSON"),
        ({"messages": QA, "tools": [1]}, "'tools' must be a list of JSON schemas, but has 1"),
        ({"messages": QA, "enable_thinking": "yes"}, "'enable_thinking' must be true or false, but it is 'yes'"),
        (
            {"conversations": [{"from": "bot", "value": "a"}]},
            r"'conversations\[0\].from' is 'bot'; it can be system, human",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add 1"}]},
            r"'conversations\[0\].value' is a text that is not",
        ),
        ({"prompt": "", "completion": "a"}, "'prompt' must be a text of at least one character"),
        ({"text": 3}, "'text' must be a text of at least one character, but it is 3"),
        ({"instruction": "q", "output": "a", "history": ["q1"]}, r"'history\[0\]' must be a pair"),
        ({"instruction": "q", "output": "a", "history": [["q1", 2]]}, r"'history\[0\]' must be a text"),
    ],
)
def test_what_is_wrong_inside_a_row_is_named(row, words):
    with pytest.raises(DataError, match=words):
        example_of(row, SFTDataConfig())


def test_an_inner_key_that_is_missing_is_named():
    settings = SFTDataConfig(prompt_key="x", prompt_dict_keys=("a", "b"), response_key="y")
    with pytest.raises(DataError, match=r"field 'x.a' has no 'b'; correct data.prompt_dict_keys"):
        example_of({"x": {"a": {}}, "y": "a"}, settings)


def test_fields_that_parquet_fills_with_null_are_dropped():
    """A column of objects has the fields of all of them."""
    message = {
        "role": "assistant",
        "content": None,
        "name": None,
        "loss_mask": None,
        "tool_calls": [{"id": None, "function": {"name": "add", "arguments": {"a": 1, "b": None}}}],
    }
    tools = [{"name": "add", "parameters": {"a": {"type": "number"}, "b": None}}]
    example = example_of(ArrowRow({"messages": [QA[0], message], "tools": tools}), SFTDataConfig())
    assert example.completion[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert example.trains == (None, None)
    assert example.tools == [{"name": "add", "parameters": {"a": {"type": "number"}}}]


def test_marks_do_not_reach_the_template():
    messages = [QA[0], {**QA[1], "loss_mask": 1.0, "train": True, "reasoning_content": "t"}]
    example = example_of({"messages": messages}, SFTDataConfig())
    assert example.trains == (None, True)
    assert example.completion == [QA[0], {**QA[1], "reasoning_content": "t"}]
