"""Laws that hold for any conversation under any template: trained tokens follow the tokens that the sampler would be given."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.data.conversations.templates import FAMILIES, chat, encode, tokenizer_of
from verl.config import DataConfig
from verl.config.sections.data import SFTDataConfig
from verl.data.conversations import tokens
from verl.data.conversations.formats import example_of
from verl.data.conversations.tokens import ConversationEncoder
from verl.data.prompts import PromptEncoder, encode_text

SMOLLM2 = Path(__file__).resolve().parents[3] / "work" / "models" / "SmolLM2-135M-Instruct"
PREFIX_PRESERVING = ("chatml", "marked_chatml", "llama3", "qwen2.5", "mistral", "gemma")

contents = st.text(st.sampled_from("ab \n<>/thinké日\u200d😀"), max_size=12)
thoughts = st.builds("<think>\n{}\n</think>\n\n{}".format, contents, contents)


@st.composite
def conversations(draw, answers=contents | thoughts):
    """Questions and answers in turn, ending with an answer: every template knows them."""
    turns = draw(st.integers(1, 4))
    messages = []
    for _ in range(turns):
        messages.append({"role": "user", "content": draw(contents)})
        messages.append({"role": "assistant", "content": draw(answers)})
        messages[-1]["loss_mask"] = draw(st.integers(0, 1))
    assume(any(m.get("loss_mask") for m in messages))
    return messages


def bare(messages):
    return [{key: value for key, value in m.items() if key != "loss_mask"} for m in messages]


def spans(sequence):
    """(start, end) of each run of tokens that train."""
    runs, mask = [], [*sequence.loss_mask.tolist(), False]
    for number, trains in enumerate(mask):
        if trains and not mask[number - 1]:
            runs.append([number, number])
        elif not trains and number and mask[number - 1]:
            runs[-1][1] = number
    return [tuple(span) for span in runs]


def check_sampled(tokenizer, messages, ends_with):
    """Each trained run of the row begins at the end of the prompt of its turn, token for token as in rollout."""
    prompts = PromptEncoder(tokenizer, replace(DataConfig(), max_prompt_length=10**6))
    trained = [number for number, m in enumerate(messages) if m.get("loss_mask")]
    sequences = encode(tokenizer, {"messages": messages})
    marked = [(sequence, *span) for sequence in sequences for span in spans(sequence)]
    assert len(marked) == len(trained)
    for number, (sequence, start, end) in zip(trained, marked, strict=True):
        context = prompts.encode(bare(messages[:number]), "here")
        assert sequence.input_ids[:start].tolist() == context
        assert tokenizer.decode(sequence.input_ids[end - 1 : end]) == ends_with
        # context and answer are the text of the conversation up to the turn
        text = tokenizer.apply_chat_template(bare(messages[: number + 1]), tokenize=False)
        assert text.startswith(tokenizer.decode(sequence.input_ids[:end], clean_up_tokenization_spaces=False))
    return sequences


@pytest.mark.parametrize("family", [*PREFIX_PRESERVING, "qwen3"])
@given(messages=conversations())
@settings(max_examples=25, deadline=None)
def test_trained_tokens_stand_in_the_context_of_the_sampler(family, messages):
    tokenizer = tokenizer_of(family)
    check_sampled(tokenizer, messages, tokenizer.eos_token)


@pytest.mark.parametrize("family", PREFIX_PRESERVING)
@given(messages=conversations())
@settings(max_examples=25, deadline=None)
def test_one_sequence_is_one_rendering_up_to_its_last_trained_turn(family, messages):
    tokenizer = tokenizer_of(family)
    (sequence,) = encode(tokenizer, {"messages": messages})
    last = max(number for number, m in enumerate(messages) if m.get("loss_mask"))
    rendered = tokenizer.apply_chat_template(bare(messages[: last + 1]), return_dict=False)
    assert sequence.input_ids.tolist() == rendered[: len(sequence.input_ids)]
    assert tokenizer.decode(rendered[len(sequence.input_ids) :]).strip() == ""


@given(messages=conversations(answers=st.text("ab <>é日", min_size=1, max_size=9)))
@settings(max_examples=25, deadline=None)
def test_only_tokens_of_trained_answers_train(messages):
    """Decoding only the masked tokens returns the answers."""
    tokenizer = tokenizer_of("chatml")
    (sequence,) = encode(tokenizer, {"messages": messages})
    texts = [tokenizer.decode(sequence.input_ids[start:end]) for start, end in spans(sequence)]
    assert texts == [m["content"] + "<|im_end|>" for m in messages if m.get("loss_mask")]
    assert not sequence.loss_mask[0]


@pytest.mark.skipif(not (SMOLLM2 / "tokenizer.json").exists(), reason="work/models/SmolLM2-135M-Instruct is not there")
@given(messages=conversations())
@settings(max_examples=60, deadline=None)
def test_a_real_tokenizer_with_merges_across_borders(messages):
    """Answers that begin with line breaks would merge with the header; then later turns stand in separate sequences."""
    tokenizer = smollm2()
    sequences = check_sampled(tokenizer, messages, "<|im_end|>")
    if not any(m["content"][:1].isspace() for m in messages):
        (sequence,) = sequences
        last = max(number for number, m in enumerate(messages) if m.get("loss_mask"))
        rendered = tokenizer.apply_chat_template(bare(messages[: last + 1]), return_dict=False)
        assert sequence.input_ids.tolist() == rendered[: len(sequence.input_ids)]


@pytest.mark.skipif(not (SMOLLM2 / "tokenizer.json").exists(), reason="work/models/SmolLM2-135M-Instruct is not there")
def test_line_breaks_of_a_prompt_stay_one_token():
    """SmolLM2 has one token for two line breaks that end a text, and two tokens once text follows them. Under a template
    whose generation prompt ends so, the rendered whole conversation differs from the sampler's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    template, specials = FAMILIES["llama3"]
    tokenizer.add_tokens(list(specials), special_tokens=True)
    tokenizer.chat_template = template
    messages = chat("q1", "a1", "q2", "a2")
    for number in (1, 3):
        messages[number]["loss_mask"] = 1
    first, second = check_sampled(tokenizer, messages, "<|eot_id|>")
    both, one = tokenizer.encode("\n\n"), tokenizer.encode("\n")
    assert len(both) == len(one) == 1
    assert both[0] in first.input_ids
    rendered = tokenizer.apply_chat_template(bare(messages), return_dict=False)
    assert both[0] not in rendered
    assert one[0] in rendered
    assert second.input_ids.tolist().count(both[0]) == 1  # history is written as the sampler's prompt has it


class TestLongConversations:
    """Tokens of earlier turns are not tokenized again."""

    ROW = {"messages": chat(*(f"{'question' if i % 2 == 0 else 'answer'} {i}\n" * (i % 3 + 1) for i in range(40)))}

    @pytest.mark.parametrize("family", [*PREFIX_PRESERVING, "qwen3"])
    def test_tokens_match_whole_texts(self, family):
        tokenizer = tokenizer_of(family)
        encoder = ConversationEncoder(tokenizer, SFTDataConfig())
        example = example_of(self.ROW, encoder.settings)
        sequences = encoder.encode(example, "here")
        assert encoder.reuses_prefixes
        encoder.reuses_prefixes = False
        for one, other in zip(sequences, encoder.encode(example, "here"), strict=True):
            assert one.input_ids.tolist() == other.input_ids.tolist()
            assert one.loss_mask.tolist() == other.loss_mask.tolist()

    def test_time_is_linear_in_the_turns(self, monkeypatch):
        tokenizer = tokenizer_of("chatml")
        tokenized = []
        monkeypatch.setattr(
            tokens, "encode_text", lambda *args, **kw: (tokenized.append(args[1]), encode_text(*args, **kw))[1]
        )
        encode(tokenizer, self.ROW)
        text = tokenizer.apply_chat_template(self.ROW["messages"], tokenize=False)
        assert sum(map(len, tokenized)) < 4 * len(text)

    def test_a_tokenizer_whose_prefixes_change_is_noticed(self, monkeypatch):
        """A tokenizer that looks across special tokens: the row is tokenized whole, and so are all rows after it."""
        tokenizer = tokenizer_of("chatml")
        looks_back = lambda _, text, *args, **kw: [5] * text.count("q3") + encode_text(tokenizer, text, *args, **kw)  # noqa: E731
        monkeypatch.setattr(tokens, "encode_text", looks_back)
        encoder = ConversationEncoder(tokenizer, SFTDataConfig())
        example = example_of({"messages": chat("q1", "a1", "q2", "a2", "q3", "a3")}, encoder.settings)
        first, second = encoder.encode(example, "here")
        assert not encoder.reuses_prefixes
        assert second.input_ids[0] == 5 != first.input_ids[0]


@cache
def smollm2():
    return AutoTokenizer.from_pretrained(SMOLLM2)
