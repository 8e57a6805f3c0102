"""Tokens and masks of conversations, worked by hand: what stands in [[ ]] trains."""

import pytest

from tests.data.conversations.templates import MARKED_CHATML, PLAIN, chat, encode, shown, tokenizer_of, with_template
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
    whole = tokenizer.apply_chat_template(AB, return_dict=False)
    assert sequence.input_ids.tolist() == whole[: len(sequence.input_ids)]


def test_templates_that_strip_blanks_train_what_is_left():
    tokenizer = tokenizer_of("llama3")
    (sequence,) = encode(tokenizer, {"messages": chat(" q ", "  a \n")})
    assert shown(tokenizer, sequence).endswith(
        "\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[[a<|eot_id|>]]"
    )


def test_a_turn_that_only_text_ends_trains_to_its_end():
    tokenizer = with_template(PLAIN)
    (sequence,) = encode(tokenizer, {"messages": chat("q", "a", "r", "b")})
    assert shown(tokenizer, sequence) == (
        "### user:\nq\n\n### assistant:\n[[a\n\n]]### user:\nr\n\n### assistant:\n[[b\n\n]]"
    )


class TestHistoryThatIsRewritten:
    """Each turn trains in the context that the sampler would have had."""

    def test_earlier_thoughts_are_dropped(self):
        tokenizer = tokenizer_of("qwen3")
        row = {"messages": chat("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")}
        assert [shown(tokenizer, s) for s in encode(tokenizer, row)] == [
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n[[<think>\nt1\n</think>\n\na1<|im_end|>]]",
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\nt2\n</think>\n\na2<|im_end|>]]",
        ]

    def test_thoughts_since_the_last_question_stay_so_that_the_turns_share_a_sequence(self):
        tokenizer = tokenizer_of("qwen3")
        messages = [*chat("q", "<think>\nt1\n</think>\n\ncall"), {"role": "tool", "content": "r"}]
        messages.append({"role": "assistant", "content": "<think>\nt2\n</think>\n\na"})
        (sequence,) = encode(tokenizer, {"messages": messages})
        assert shown(tokenizer, sequence) == (
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[<think>\nt1\n</think>\n\ncall<|im_end|>]]\n"
            "<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n[[<think>\nt2\n</think>\n\na<|im_end|>]]"
        )

    @pytest.mark.parametrize("source", ["row", "default", "kwargs"])
    def test_an_empty_thought_of_the_generation_prompt_does_not_train(self, source):
        tokenizer = tokenizer_of("qwen3")
        row, settings = {"messages": chat("q", "a")}, {}
        if source == "row":
            row["enable_thinking"] = False
        elif source == "default":
            settings["enable_thinking_default"] = False
        else:
            settings["apply_chat_template_kwargs"] = {"enable_thinking": False}
        (sequence,) = encode(tokenizer, row, **settings)
        assert shown(tokenizer, sequence) == (
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[a<|im_end|>]]"
        )

    def test_a_turn_that_does_not_train_needs_no_sequence(self):
        tokenizer = tokenizer_of("qwen3")
        messages = chat("q1", "a1", "q2", "a2")
        messages[1]["loss_mask"] = 0
        (sequence,) = encode(tokenizer, {"messages": messages})
        assert shown(tokenizer, sequence).startswith(
            "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>"
        )
        assert shown(tokenizer, sequence).endswith("[[<think>\n\n</think>\n\na2<|im_end|>]]")


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

    def test_generation_markers_around_the_generation_prompt_do_not_train_it(self):
        header = "<|im_start|>assistant\n"
        tokenizer = with_template(
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + m.content "
            "+ '<|im_end|>\n' }}{% endgeneration %}{% else %}<|im_start|>user\n{{ m.content }}<|im_end|>{{ '\n' }}"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        (sequence,) = encode(tokenizer, {"messages": chat("q", "a")})
        assert shown(tokenizer, sequence) == f"<|im_start|>user\nq<|im_end|>\n{header}[[a<|im_end|>]]"

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
    """The border between prompt and answer, where releases of the original were off by one twice."""

    def test_prompt_masked_and_eos_trained(self):
        tokenizer = make_tokenizer()
        (sequence,) = encode(
            tokenizer, {"question": "1+1", "answer": "2"}, prompt_key="question", response_key="answer"
        )
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

    def test_turns_of_the_assistant_in_a_completion_train(self):
        tokenizer = tokenizer_of("chatml")
        row = {
            "prompt": chat("q1"),
            "completion": [*chat("", "a1")[1:], {"role": "tool", "content": "t"}, *chat("", "a2")[1:]],
        }
        (sequence,) = encode(tokenizer, row)
        assert shown(tokenizer, sequence).endswith(
            "[[a1<|im_end|>]]\n<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\n[[a2<|im_end|>]]"
        )

    def test_the_completion_of_messages_is_the_last_answer(self):
        tokenizer = tokenizer_of("chatml")
        (sequence,) = encode(tokenizer, {"messages": AB}, loss_on="completion")
        assert shown(tokenizer, sequence) == ONE_SEQUENCE["chatml"].replace("[[a1<|im_end|>]]", "a1<|im_end|>")
        with pytest.raises(DataError, match="here: no message is of the assistant"):
            encode(tokenizer, {"messages": chat("q")}, loss_on="completion")

    def test_all_trains_the_prompt_of_a_text_too(self):
        (sequence,) = encode(make_tokenizer(), {"prompt": "ab", "completion": "c"}, loss_on="all")
        assert sequence.loss_mask.tolist() == [False, True, True, True]


class TestMarksOfMessages:
    @pytest.mark.parametrize("mark", [{"loss_mask": 0}, {"train": False}, {"weight": 0, "train": False}])
    def test_a_turn_can_be_left_out(self, mark):
        tokenizer = tokenizer_of("chatml")
        messages = chat("q1", "a1", "q2", "a2")
        messages[1] |= mark
        messages[3] |= {"loss_mask": 1}
        (sequence,) = encode(tokenizer, {"messages": messages})
        assert shown(tokenizer, sequence) == ONE_SEQUENCE["chatml"].replace("[[a1<|im_end|>]]", "a1<|im_end|>")

    def test_a_turn_of_the_prompt_can_be_taken_in(self):
        tokenizer = tokenizer_of("chatml")
        prompt = chat("q1", "a1", "q2")
        prompt[1]["train"] = True
        row = {"prompt": prompt, "completion": "a2"}
        (sequence,) = encode(tokenizer, row, loss_on="assistant")
        assert shown(tokenizer, sequence) == ONE_SEQUENCE["chatml"]

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


def test_tools_and_calls_reach_the_template():
    tokenizer = tokenizer_of("qwen2.5")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "a"},
    ]
    (sequence,) = encode(tokenizer, {"messages": messages, "tools": '[{"name": "add"}]'})
    assert shown(tokenizer, sequence) == (
        '<|im_start|>system\nBe good.\n{"name": "add"}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n'
        '[[<tool_call>add{"a": 1}</tool_call><|im_end|>]]\n<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n[[a<|im_end|>]]"
    )


def test_messages_without_a_template_are_refused():
    tokenizer = with_template(None)
    with pytest.raises(DataError, match="here: the row has chat messages, but the tokenizer has no chat template"):
        encode(tokenizer, {"messages": AB})
