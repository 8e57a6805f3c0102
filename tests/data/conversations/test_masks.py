"""Tokens and masks of conversations, worked by hand: what stands in [[ ]] trains."""

import re
from pathlib import Path

import pytest

from tests.data.conversations.templates import (
    FAMILIES,
    MARKED_CHATML,
    PLAIN,
    chat,
    encode,
    shown,
    tokenizer_of,
    with_template,
)
from verl.errors import DataError
from verl.models.tiny import make_tokenizer

AB = chat("q1", "a1", "q2", "a2")

ONE_SEQUENCE = {
    "chatml": "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n[[a1<|im_end|>]]\n"
    "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n[[a2<|im_end|>]]",
    "marked_chatml": "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n[[a1<|im_end|>]]\n"
    "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n[[a2<|im_end|>]]",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq1<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[a1<|eot_id|>]]"
    "<|start_header_id|>user<|end_header_id|>\n\nq2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[[a2<|eot_id|>]]",
    "qwen2.5": "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n"
    "<|im_start|>assistant\n[[a1<|im_end|>]]\n"
    "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n[[a2<|im_end|>]]",
    "mistral": "<s>[INST] q1 [/INST][[ a1</s>]][INST] q2 [/INST][[ a2</s>]]",
    "gemma": "<bos><start_of_turn>user\nq1<end_of_turn>\n<start_of_turn>model\n[[a1<end_of_turn>]]\n"
    "<start_of_turn>user\nq2<end_of_turn>\n<start_of_turn>model\n[[a2<end_of_turn>]]",
}


@pytest.mark.parametrize("family", ONE_SEQUENCE)
def test_answers_and_the_token_that_ends_them_train(family):
    tokenizer = tokenizer_of(family)
    (sequence,) = encode(tokenizer, {"messages": AB})
    assert shown(tokenizer, sequence) == ONE_SEQUENCE[family]
    rendered = tokenizer.apply_chat_template(AB, return_dict=False)
    assert sequence.input_ids.tolist() == rendered[: len(sequence.input_ids)]


LLAMA3_ASKED = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
CHATML_ASKED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
THOUGHTS = chat("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
CALLED = [
    *chat("q", "<think>\nt1\n</think>\n\ncall"), {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "<think>\nt2\n</think>\n\na"},
]  # fmt: skip
ADD = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WITH_TOOLS = [
    {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [ADD]},
    {"role": "tool", "content": "2"}, {"role": "assistant", "content": "a"},
]  # fmt: skip
HEADER_TRAINS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + m.content "
    "+ '<|im_end|>\n' }}{% endgeneration %}{% else %}<|im_start|>user\n{{ m.content }}<|im_end|>{{ '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMPTY_THOUGHT = [f"{CHATML_ASKED}<think>\n\n</think>\n\n[[a<|im_end|>]]"]
WITHOUT_FIRST = [ONE_SEQUENCE["chatml"].replace("[[a1<|im_end|>]]", "a1<|im_end|>")]


def marked(*marks):
    """AB with the first marks in its first answer, and so on."""
    return [message | mark for message, mark in zip(AB, marks, strict=True)]


# family or template, row, settings -> its sequences
SEQUENCES = {
    "blanks that a template strips": (
        "llama3", {"messages": chat(" q ", "  a \n")}, {},
        [f"{LLAMA3_ASKED}<|start_header_id|>assistant<|end_header_id|>\n\n[[a<|eot_id|>]]"],
    ),
    "turns that only text ends": (
        PLAIN, {"messages": chat("q", "a", "r", "b")}, {},
        ["### user:\nq\n\n### assistant:\n[[a\n\n]]### user:\nr\n\n### assistant:\n[[b\n\n]]"],
    ),
    # each turn trains in the context that the sampler would have had
    "earlier thoughts that are dropped": (
        "qwen3", {"messages": THOUGHTS}, {},
        ["<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n[[<think>\nt1\n</think>\n\na1<|im_end|>]]",
         "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
         "<|im_start|>assistant\n[[<think>\nt2\n</think>\n\na2<|im_end|>]]"],
    ),
    "thoughts since the last question, which stay": (
        "qwen3", {"messages": CALLED}, {},
        ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[<think>\nt1\n</think>\n\ncall<|im_end|>]]\n"
         "<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n[[<think>\nt2\n</think>\n\na<|im_end|>]]"],
    ),
    "an empty thought of the prompt, by the row": (
        "qwen3", {"messages": chat("q", "a"), "enable_thinking": False}, {}, EMPTY_THOUGHT,
    ),
    "an empty thought of the prompt, by default": (
        "qwen3", {"messages": chat("q", "a")}, {"enable_thinking_default": False}, EMPTY_THOUGHT,
    ),
    "an empty thought of the prompt, by an argument": (
        "qwen3", {"messages": chat("q", "a")}, {"apply_chat_template_kwargs": {"enable_thinking": False}}, EMPTY_THOUGHT,
    ),
    "a turn of a rewritten history that does not train": (
        "qwen3", {"messages": marked({}, {"loss_mask": 0}, {}, {})}, {},
        ["<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
         "<|im_start|>assistant\n[[<think>\n\n</think>\n\na2<|im_end|>]]"],
    ),
    "markers around the generation prompt, which does not train": (
        HEADER_TRAINS, {"messages": chat("q", "a")}, {}, [f"{CHATML_ASKED}[[a<|im_end|>]]"],
    ),
    "several turns in a completion": (
        "chatml",
        {"prompt": chat("q"), "completion": [*chat("", "a1")[1:], {"role": "tool", "content": "t"}, *chat("", "a2")[1:]]},
        {},
        [f"{CHATML_ASKED}[[a1<|im_end|>]]\n<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\n[[a2<|im_end|>]]"],
    ),
    "the last answer as the completion": ("chatml", {"messages": AB}, {"loss_on": "completion"}, WITHOUT_FIRST),
    **{
        f"a turn that is left out by {mark}": (
            "chatml", {"messages": marked({}, mark, {}, {"loss_mask": 1})}, {}, WITHOUT_FIRST,
        )
        for mark in ({"loss_mask": 0}, {"train": False}, {"weight": 0, "train": False})
    },
    "a turn of the prompt that is taken in": (
        "chatml", {"prompt": marked({}, {"train": True}, {}, {})[:3], "completion": "a2"}, {"loss_on": "assistant"},
        [ONE_SEQUENCE["chatml"]],
    ),
    "tools and calls": (
        "qwen2.5", {"messages": WITH_TOOLS, "tools": '[{"name": "add"}]'}, {},
        ['<|im_start|>system\nBe good.\n{"name": "add"}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n'
         '[[<tool_call>add{"a": 1}</tool_call><|im_end|>]]\n<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n'
         "<|im_start|>assistant\n[[a<|im_end|>]]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEQUENCES)
def test_what_trains_of_a_row(case):
    template, row, settings, expected = SEQUENCES[case]
    tokenizer = tokenizer_of(template) if template in FAMILIES else with_template(template)
    assert [shown(tokenizer, sequence) for sequence in encode(tokenizer, row, **settings)] == expected


class TestRenderingsThatTheSamplerNeverSees:
    def test_a_generation_prompt_that_the_answer_drops(self):
        tokenizer = tokenizer_of("r1")
        row = {"messages": chat("q", "<think>\nt</think>a")}
        with pytest.raises(
            DataError,
            match=r"here: the tokens of message 1 do not .* token 3, after '<\|User\|>q<\|Assistant\|>', is 'a', but '<' in "
            r"the prompt.*custom_chat_template.*ignore_input_ids_mismatch=True",
        ):
            encode(tokenizer, row)
        (sequence,) = encode(tokenizer, row, ignore_input_ids_mismatch=True)
        assert shown(tokenizer, sequence) == "<|User|>q<|Assistant|>[[a<|eos|>]]"

    def test_a_system_message_that_is_gone_with_the_answer(self):
        tokenizer = tokenizer_of("mistral_last_user")
        row = {"messages": chat("q", "a", system="s")}
        with pytest.raises(DataError, match=r"token 8, after '<s>\[INST\] ', is 'q', but 's' in the prompt"):
            encode(tokenizer, row)
        # only the answer trains, although the renderings part before the question
        (sequence,) = encode(tokenizer, row, ignore_input_ids_mismatch=True)
        assert shown(tokenizer, sequence) == "<s>[INST] q[/INST] [[a</s>]]"
        (sequence,) = encode(tokenizer, {"messages": chat("q", "a")})
        assert shown(tokenizer, sequence) == "<s>[INST] q[/INST][[ a</s>]]"

    @pytest.mark.parametrize("family", ["gemma", "mistral"])
    def test_templates_without_a_system_role_are_quoted(self, family):
        with pytest.raises(DataError, match="here: the chat template failed.*(System role|alternate)"):
            encode(tokenizer_of(family), {"messages": chat("q", "a", system="s")})


class TestTokensAcrossTheBorder:
    """A vocabulary with a token for two line breaks: the header ends with one, the answer begins with another."""

    @pytest.fixture
    def tokenizer(self):
        return merging([("Ċ", "Ċ")])

    def test_the_prompt_stays_as_the_sampler_has_it(self, tokenizer):
        row = {"messages": chat("q", "\na")}
        (sequence,) = encode(tokenizer, row)
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        assert sequence.input_ids[: len(prompt)].tolist() == prompt
        assert not sequence.loss_mask[: len(prompt)].any()
        assert tokenizer.decode(sequence.input_ids[sequence.loss_mask]) == "\na<|im_end|>"
        # one rendering of the conversation has the token for both
        assert tokenizer.apply_chat_template(row["messages"], return_dict=False) != sequence.input_ids.tolist()

    def test_the_next_turn_sees_what_its_own_prompt_has(self, tokenizer):
        row = {"messages": chat("q", "\na", "r", "b")}
        first, second = encode(tokenizer, row)
        prompt = tokenizer.apply_chat_template(row["messages"][:3], add_generation_prompt=True, return_dict=False)
        assert second.input_ids[: len(prompt)].tolist() == prompt
        assert [shown(tokenizer, s).count("[[") for s in (first, second)] == [1, 1]

    def test_markers_are_placed_by_characters(self, tokenizer):
        tokenizer.chat_template = MARKED_CHATML
        (sequence,) = encode(tokenizer, {"messages": chat("q", "\na")})
        assert shown(tokenizer, sequence).endswith("<|im_start|>assistant\n[[\na<|im_end|>]]")

    def test_tokens_that_cannot_be_joined_are_refused(self):
        from tokenizers import pre_tokenizers

        # as sentencepiece does: every text begins with a blank, so an answer encoded by itself is another text
        tokenizer = merging([("a", "b")], pre_tokenizers.Metaspace(prepend_scheme="always"), extra="▁")
        row = {"prompt": "x a", "completion": "b"}
        with pytest.raises(
            DataError,
            match="tokens of the completion do not .*token 3, after 'x ', is 'ab', but 'a' .*where a token ends",
        ):
            encode(tokenizer, row)
        (sequence,) = encode(tokenizer, row, ignore_input_ids_mismatch=True)
        assert tokenizer.convert_ids_to_tokens(sequence.input_ids[sequence.loss_mask]) == ["ab", "<|im_end|>"]


def merging(merges, pre_tokenizer=None, extra=""):
    """A tokenizer of bytes and some merged pairs, without a rule that keeps blanks apart."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel() if pre_tokenizer is None else decoders.Metaspace(prepend_scheme="always")
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = make_tokenizer().chat_template
    return tokenizer


class TestSingleTurn:
    """The border between prompt and answer, at which releases of the original were off by one twice."""

    def test_prompt_masked_and_eos_trained(self):
        tokenizer = make_tokenizer()
        row = {"question": "1+1", "answer": "2"}
        (sequence,) = encode(tokenizer, row, prompt_key="question", response_key="answer")
        prompt = tokenizer.encode("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n")
        assert sequence.input_ids.tolist() == [*prompt, *tokenizer.encode("2"), tokenizer.eos_token_id]
        assert sequence.loss_mask.tolist() == [False] * len(prompt) + [True, True]

    def test_text_prompt_and_completion(self):
        tokenizer = make_tokenizer()
        (sequence,) = encode(tokenizer, {"prompt": "ab", "completion": "cd"})
        assert sequence.input_ids.tolist() == [*tokenizer.encode("abcd"), 258]
        assert sequence.loss_mask.tolist() == [False, False, True, True, True]
        (again,) = encode(tokenizer, {"prompt": "ab", "completion": "cd<|im_end|>"})
        assert again.input_ids.tolist() == sequence.input_ids.tolist()  # eos is not written twice

    def test_text(self):
        tokenizer = make_tokenizer()
        (sequence,) = encode(tokenizer, {"text": "abc"})
        assert sequence.input_ids.tolist() == [*tokenizer.encode("abc"), 258]
        assert sequence.loss_mask.tolist() == [False, True, True, True]  # nothing predicts the first token

    def test_a_tokenizer_without_eos_is_named(self):
        tokenizer = make_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(DataError, match="here: the tokenizer has no end-of-sequence token"):
            encode(tokenizer, {"text": "abc"})


class TestLossOn:
    ROW = {"prompt": chat("q1", "a1", "q2"), "completion": [{"role": "assistant", "content": "a2"}]}

    @pytest.mark.parametrize(
        ("loss_on", "expected"),
        [
            (None, "user q1 end assistant a1 end user q2 end assistant [[a2 end]]"),
            ("completion", "user q1 end assistant a1 end user q2 end assistant [[a2 end]]"),
            ("assistant", "user q1 end assistant a1 end user q2 end assistant [[a2 end]]"),
            ("all", "user [[q1 end assistant a1 end user q2 end assistant a2 end]]"),
        ],
    )
    def test_prompt_and_completion_of_messages(self, loss_on, expected):
        tokenizer = with_template(
            "{% for m in messages %}{{ m.role }} {{ m.content }} end{% if not loop.last %} {% endif %}{% endfor %}"
            "{% if add_generation_prompt %} assistant {% endif %}"
        )
        (sequence,) = encode(tokenizer, self.ROW, loss_on=loss_on)
        text = shown(tokenizer, sequence)
        assert text == ("u[[ser" + expected.replace("user [[", "ser ", 1)[3:] if loss_on == "all" else expected)

    @pytest.mark.parametrize("loss_on", ["completion", "assistant", "all"])
    def test_the_line_end_behind_the_last_turn_is_not_sampled(self, loss_on):
        tokenizer = tokenizer_of("chatml")
        (sequence,) = encode(tokenizer, self.ROW, loss_on=loss_on)
        assert shown(tokenizer, sequence).endswith("a2<|im_end|>]]")

    def test_a_completion_of_messages_needs_an_answer(self):
        with pytest.raises(DataError, match="here: no message is of the assistant"):
            encode(tokenizer_of("chatml"), {"messages": chat("q")}, loss_on="completion")

    def test_all_trains_the_prompt_of_a_text_too(self):
        (sequence,) = encode(make_tokenizer(), {"prompt": "ab", "completion": "c"}, loss_on="all")
        assert sequence.loss_mask.tolist() == [False, True, True, True]


class TestMarksOfMessages:
    def test_what_no_turn_trains_is_refused(self):
        tokenizer = tokenizer_of("chatml")
        messages = chat("q", "a")
        messages[1]["loss_mask"] = 0
        with pytest.raises(DataError, match=r"here: none of the row's tokens train \(data.loss_on=assistant\)"):
            encode(tokenizer, {"messages": messages})
        with pytest.raises(DataError, match="loss_mask 0, which needs data.loss_on=assistant, not all"):
            encode(tokenizer, {"messages": messages}, loss_on="all")
        messages[0]["loss_mask"] = 1
        with pytest.raises(DataError, match="message 0 of role 'user' has loss_mask 1"):
            encode(tokenizer, {"messages": messages})

    def test_an_answer_without_a_prompt_is_refused(self):
        tokenizer = tokenizer_of("chatml")
        messages = [{"role": "assistant", "content": "hello"}, *chat("q", "a")]
        with pytest.raises(DataError, match="here: message 0 is of the assistant and has no prompt"):
            encode(tokenizer, {"messages": messages})
        messages[0]["loss_mask"] = 0
        (sequence,) = encode(tokenizer, {"messages": messages})
        assert shown(tokenizer, sequence).count("[[") == 1


def test_messages_without_a_template_are_refused():
    tokenizer = with_template(None)
    with pytest.raises(DataError, match="here: the row has chat messages, but the tokenizer has no chat template"):
        encode(tokenizer, {"messages": AB})


def test_the_template_with_tools_of_the_agents_page():
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text(encoding="utf-8")
    (template,) = re.findall(r"^```text\n(\{%- if tools %\}.*?)^```", page, re.M | re.S)
    tokenizer = with_template(template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be good."}, {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"}, {"role": "assistant", "content": "a"},
    ]  # fmt: skip
    (sequence,) = encode(tokenizer, {"messages": messages, "tools": tools})
    assert shown(tokenizer, sequence) == (
        "<|im_start|>system\nBe good.\n\nYou may call functions. Their JSON schemas:\n"
        '{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}\n'
        'Write a call as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.<|im_end|>\n<|im_start|>user\nq<|im_end|>\n'
        '<|im_start|>assistant\n[[<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>]]\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n[[a<|im_end|>]]"
    )
    (plain,) = encode(tokenizer, {"messages": AB})
    assert shown(tokenizer, plain) == ONE_SEQUENCE["chatml"]
