"""No field of a message disappears on its way to the model, and a template with its tokenizer is a function."""

import pytest

from tests.data.conversations.templates import FAMILIES, QWEN25, chat, encode, tokenizer_of, with_template
from verl.config.sections.data import PreferenceDataConfig
from verl.data.conversations.tokens import ConversationEncoder
from verl.data.preferences.dataset import PreferenceDataset
from verl.data.prompts import render_chat, set_template_time
from verl.data.template_checks import TemplateChecks
from verl.errors import DataError
from verl.models.tiny import CHAT_TEMPLATE, make_tokenizer

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLING = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "a"},
]
# a template that writes all that a message can hold
EVERYTHING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.reasoning_content }}{{ m.content }}{{ (m.tool_calls or '') | tojson }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# content that a template leaves out -> (the template, the row, the words of the error)
LOSSES = {
    "tools": (CHAT_TEMPLATE, {"messages": chat("q", "a"), "tools": TOOLS}, "the row's tools"),
    "tool calls": (CHAT_TEMPLATE, {"messages": CALLING}, r"tool_calls of message 1 \(role assistant\)"),
    "arguments": (
        QWEN25.replace("{{ c.function.arguments | tojson }}", ""),
        {"messages": CALLING},
        r"the arguments of tool_calls of message 1",
    ),
    "content beside a call": (
        QWEN25.replace(
            "{{ m.content }}{% for c in m", "{% if not m.tool_calls %}{{ m.content }}{% endif %}{% for c in m"
        ).replace("assistant\n{{ m.content }}", "assistant\n{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
        {"messages": [CALLING[0], {**CALLING[1], "content": "Let me add."}, *CALLING[2:]]},
        r"the content of message 1 \(role assistant\)",
    ),
    "result": (
        QWEN25.replace("<tool_response>{{ m.content }}</tool_response>", "<tool_response></tool_response>"),
        {"messages": CALLING},
        r"the content of message 2 \(role tool\)",
    ),
    "system message": (
        CHAT_TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
        {"messages": chat("q", "a", system="s")},
        r"the content of message 0 \(role system\)",
    ),
    "reasoning": (
        CHAT_TEMPLATE,
        {"messages": [*chat("q"), {"role": "assistant", "content": "a", "reasoning_content": "t"}]},
        r"reasoning_content of message 1",
    ),
    "question": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        {"messages": chat("q", "a")},
        r"the content of message 0 \(role user\)",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_field_that_the_template_leaves_out_is_refused(case):
    template, row, words = LOSSES[case]
    with pytest.raises(DataError, match=f"here: the chat template leaves out {words}"):
        encode(with_template(template), row)
    encode(with_template(EVERYTHING), row)  # and taken if it is written


@pytest.mark.parametrize("case", LOSSES)
def test_so_it_is_in_preferences(case):
    template, row, words = LOSSES[case]
    if case == "reasoning":
        return  # the last turn of a prompt is the user's
    messages = row["messages"]
    pair = {**row, "prompt": messages[:-1], "chosen": messages[-1:], "rejected": chat("", "b")[1:]}
    del pair["messages"]
    for tokenizer, is_refused in ((with_template(template), True), (with_template(EVERYTHING), False)):
        encoder = ConversationEncoder(tokenizer, PreferenceDataConfig())
        if is_refused:
            with pytest.raises(DataError, match=f"here: the chat template leaves out {words}"):
                PreferenceDataset().sequences_of(pair, encoder, "here")
        else:
            PreferenceDataset().sequences_of(pair, encoder, "here")


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_of_families_write_what_they_know(family):
    """History that a template rewrites on purpose is no loss."""
    tokenizer = tokenizer_of(family)
    messages = chat("q1", "<think>\nt\n</think>\n\na1", "q2", "a2")
    encode(tokenizer, {"messages": messages}, ignore_input_ids_mismatch=True)
    TemplateChecks(tokenizer).check_prompt(messages[:3], "here", {})


def test_rl_refuses_a_prompt_of_which_the_model_reads_nothing():
    template, row, words = LOSSES["question"]
    with pytest.raises(DataError, match=f"here: the chat template leaves out {words}"):
        TemplateChecks(with_template(template)).check_prompt(row["messages"][:1], "here", {})


def without_text():
    """A tokenizer with a normalizer that deletes all text."""
    from tokenizers import Regex, normalizers

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[^<>|_]"), "")
    return tokenizer


def test_a_tokenizer_that_deletes_text_is_refused():
    for prompt in (chat("qqqq"), "qqqq"):
        tokenizer = without_text()
        if isinstance(prompt, str):
            tokenizer.chat_template = None
            tokenizer.backend_tokenizer.normalizer = None
            from tokenizers import Regex, normalizers

            tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("."), "")
        with pytest.raises(DataError, match="here: the (tokenizer|prompt) .*(tokens for|no tokens)"):
            TemplateChecks(tokenizer).check_prompt(prompt, "here", {})
    with pytest.raises(DataError, match="here: the tokenizer has no tokens for the content of message 0"):
        encode(without_text(), {"messages": chat("q", "a")})


def with_dropout():
    from tokenizers import models

    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    pairs = [("t", "h"), ("i", "n"), ("a", "t"), ("o", "n"), ("e", "r")]
    vocabulary |= {first + second: len(vocabulary) + number for number, (first, second) in enumerate(pairs)}
    special = {"<|pad|>", "<|im_start|>", "<|im_end|>"}
    merged = models.BPE(vocab={k: v for k, v in vocabulary.items() if k not in special}, merges=pairs, dropout=0.5)
    tokenizer.backend_tokenizer.model = merged
    return tokenizer


NOT_FUNCTIONS = {
    "random choice": (
        lambda: with_template(CHAT_TEMPLATE + "{{ ['a', 'b'] | random }}"),
        "renders the same messages otherwise",
    ),
    "random number": (
        lambda: with_template("{{ range(100) | random }}" + CHAT_TEMPLATE),
        "renders the same messages otherwise",
    ),
    "dropout": (with_dropout, "gives other tokens for the same text each time"),
}


@pytest.mark.parametrize("case", NOT_FUNCTIONS)
def test_what_is_no_function_is_refused(case):
    make, words = NOT_FUNCTIONS[case]
    with pytest.raises(DataError, match=f"here: the .*{words}"):
        TemplateChecks(make()).check_prompt(chat("q"), "here", {})
    with pytest.raises(DataError, match=f"here: the .*{words}"):
        encode(make(), {"messages": chat("q", "a")})


def test_the_clock_of_a_template_stands_still():
    tokenizer = with_template("{{ strftime_now('%d %b %Y %H:%M:%S') }}" + CHAT_TEMPLATE)
    try:
        set_template_time("2024-07-26T12:30:15")
        encode(tokenizer, {"messages": chat("q", "a")})
        assert render_chat(tokenizer, chat("q"), "here").startswith("26 Jul 2024 12:30:15<|im_start|>")
    finally:
        set_template_time(None)
