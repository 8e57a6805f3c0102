"""Tokens and masks against TRL's SFTTrainer on the same rows, in a separate environment."""

from pathlib import Path

import pytest

from tests.data.conversations.templates import FAMILIES, MARKED_CHATML, chat, encode, with_template
from tests.data.conversations.test_properties import SMOLLM2
from tests.run.trl_oracle import answer_of

LONG = [
    {"messages": chat("What is 2+2?", "4", "And 3 + 3?", "It is 6.\n\nSix.", system="You add.")},
    {"messages": chat("日本?", "é 😀 ok")},
]
THOUGHTS = [{"messages": chat("q", "<think>\nt\n</think>\n\na", "r", "<think>\nu\n</think>\n\nb")}, *LONG]
CALLS = [
    {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
            },
            {"role": "tool", "name": "add", "content": "4"},
            {"role": "assistant", "content": "4."},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    }
]
# TRL takes the speakers for roles as they are, so these are named as roles
SHAREGPT = [{"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]}]
MESSAGE_PAIRS = [{"prompt": chat("q", "a", "r"), "completion": [{"role": "assistant", "content": "b c"}]}]
TEXT_PAIRS = [{"prompt": "The sky is", "completion": " blue."}, {"prompt": "é\n", "completion": "日本 <|im_end|>"}]
TEXTS = [{"text": "Once upon a time"}, {"text": "it ended.<|im_end|>"}]

ASSISTANT = {"assistant_only_loss": True}
# name: rows, SFTConfig, a chat template of TRL's, our settings
CASES = {
    "messages": (LONG, ASSISTANT, None, {}),
    "messages, all tokens": (LONG, {}, None, {"loss_on": "all"}),
    "conversations": (SHAREGPT, {}, None, {"loss_on": "all"}),  # TRL cannot mask these
    "prompt and completion of messages": (MESSAGE_PAIRS, {}, None, {}),
    "prompt and completion of messages, assistant only": (MESSAGE_PAIRS, ASSISTANT, None, {"loss_on": "assistant"}),
    "prompt and completion of messages, all tokens": (
        MESSAGE_PAIRS,
        {"completion_only_loss": False},
        None,
        {"loss_on": "all"},
    ),
    "texts of prompt and completion": (TEXT_PAIRS, {}, None, {}),
    "texts of prompt and completion, all tokens": (
        TEXT_PAIRS,
        {"completion_only_loss": False},
        None,
        {"loss_on": "all"},
    ),
    "texts": (TEXTS, {}, None, {}),
    "llama3": (LONG, ASSISTANT, "llama3_training.jinja", {}),
    "qwen2.5": (LONG, ASSISTANT, "qwen2_5_training.jinja", {}),
    "qwen2.5 with tools": (CALLS, ASSISTANT, "qwen2_5_training.jinja", {}),
    "qwen3": (THOUGHTS, ASSISTANT, "qwen3_training.jinja", {}),
    "qwen3 with tools": (CALLS, ASSISTANT, "qwen3_training.jinja", {}),
    "gemma": (LONG[1:], ASSISTANT, "gemma_training.jinja", {}),
    # without markers TRL cannot mask; its qwen3.jinja is Qwen's: it rewrites history
    "qwen3 of one turn, prompt and completion": (
        [{"prompt": chat("q"), "completion": [{"role": "assistant", "content": "<think>\nt\n</think>\n\na"}]}],
        {},
        "qwen3.jinja",
        {},
    ),
}


@pytest.fixture(scope="module", params=["bytes", "smollm2"])
def both(request, tmp_path_factory):
    """Our tokenizer, and what TRL made of every case with it."""
    from transformers import AutoTokenizer

    if request.param == "smollm2" and not (SMOLLM2 / "tokenizer.json").exists():
        pytest.skip("work/models/SmolLM2-135M-Instruct is not there")
    folder = tmp_path_factory.mktemp("trl")
    tokenizer = with_template(MARKED_CHATML) if request.param == "bytes" else AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.chat_template = MARKED_CHATML
    # as in the vocabularies of the families; as several tokens they would merge with the text around them
    tokenizer.add_tokens(
        [token for family in ("llama3", "gemma") for token in FAMILIES[family][1]], special_tokens=True
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    cases = {name: {"rows": rows, "args": args, "template": t} for name, (rows, args, t, _) in CASES.items()}
    task = {"tokenizer": str(folder / "tokenizer"), "cases": cases}
    answers = answer_of(Path(__file__).with_name("trl_rows.py"), task, folder)
    return AutoTokenizer.from_pretrained(folder / "tokenizer"), answers


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_masks_match_trl(both, case):
    tokenizer, answers = both
    rows, _, template, settings = CASES[case]
    if case == "llama3" and len(tokenizer) > 1000:
        pytest.skip("differs on purpose; test_properties.py has it: test_line_breaks_of_a_prompt_stay_one_token")
    tokenizer.chat_template = answers[case]["template"]
    assert len(answers[case]["rows"]) == len(rows)
    for row, (input_ids, labels) in zip(rows, answers[case]["rows"], strict=True):
        (sequence,) = encode(tokenizer, row, **settings)
        # TRL keeps the template's text after the last turn, and without markers trains it; sampling ends before it
        length = len(sequence.input_ids)
        assert sequence.input_ids.tolist() == input_ids[:length]
        assert tokenizer.decode(input_ids[length:]).strip() == ""
        ours, theirs = sequence.loss_mask.tolist(), [label != -100 for label in labels[:length]]
        theirs[0] = False  # TRL leaves the first label in and drops it in its loss
        if "qwen2_5" in str(template):
            # its markers begin inside the generation prompt, which the sampler is given and which does not train here
            starts = [n for n, trains in enumerate(ours) if trains and not ours[n - 1]]
            for start in starts:
                assert tokenizer.decode(input_ids[:start]).endswith("<|im_start|>assistant\n")
                assert theirs[start - 1]
                theirs[start - 1] = False
        # TRL trains a line end that the markers have behind the end of a turn, after the end of sampling
        for after in (n for n in range(1, length) if ours[n - 1] and not ours[n] and theirs[n]):
            assert tokenizer.decode(input_ids[after - 1 : after + 1]) == tokenizer.eos_token + "\n"
            theirs[after] = False
        assert ours == theirs
