"""One law of every program on given rows: what trains or is scored is the prompt with the tokens that sampling would return."""

import json

import numpy as np
import pytest

from tests.data.conversations.templates import FAMILIES, LLAMA3, chat, with_template
from tests.data.rows import write
from verl.config import DataConfig
from verl.config.roots.reward_model import RMDataConfig
from verl.config.sections.data import PreferenceDataConfig, SFTDataConfig
from verl.data.conversations.dataset import load_conversations, read_into
from verl.data.preferences.dataset import load_preferences
from verl.data.preferences.scored import RatedDataset, StepDataset
from verl.data.prompts import PromptEncoder
from verl.errors import DataError
from verl.models.load import eos_token_ids_of, load_tokenizer
from verl.models.tiny import make_tiny_model

# a template, its special tokens, and the tokens that end generation; the first one ends a turn
TEMPLATES = {
    "chatml": (*FAMILIES["chatml"], ["<|im_end|>"]),
    "llama3": (*FAMILIES["llama3"], ["<|eot_id|>"]),
    "qwen3": (*FAMILIES["qwen3"], ["<|im_end|>"]),
    "gemma": (*FAMILIES["gemma"], ["<end_of_turn>"]),
    "mistral": (*FAMILIES["mistral"], ["</s>"]),
    "several stop ids": (
        LLAMA3,
        (
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|end_of_text|>",
        ),
        ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
    ),
    "the next turn is the end": (  # GLM
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("<|system|>", "<|assistant|>", "<|user|>"),
        ["<|user|>"],
    ),
    "text behind the end": (
        FAMILIES["chatml"][0].replace("<|im_end|>\n", "<|im_end|> ~~\n"),
        ("<|im_end|>",),
        ["<|im_end|>"],
    ),
}
QUESTION = chat("q")
GOOD = [{"role": "assistant", "content": "good"}]
BAD = [{"role": "assistant", "content": "bad one"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "good"}]


def sft(**settings):
    return lambda path, tokenizer, stops: load_conversations(
        path, tokenizer, SFTDataConfig(**settings), stop_token_ids=stops
    )


def preferences(paired=True):
    return lambda path, tokenizer, stops: load_preferences(
        path, tokenizer, PreferenceDataConfig(), paired=paired, stop_token_ids=stops
    )


def rated(path, tokenizer, stops):
    return read_into(RatedDataset(), path, tokenizer, RMDataConfig(), stop_token_ids=stops)


# loader, row, the contents that train, in order
CHATS = {
    "messages": (sft(), {"messages": QUESTION + GOOD}, ["good"]),
    "messages, completion": (sft(loss_on="completion"), {"messages": QUESTION + GOOD}, ["good"]),
    "conversations": (sft(), {"conversations": SHAREGPT}, ["good"]),
    "alpaca": (sft(), {"instruction": "q", "output": "good"}, ["good"]),
    "prompt and completion": (sft(), {"prompt": QUESTION, "completion": GOOD}, ["good"]),
    "prompt and text completion": (sft(), {"prompt": QUESTION, "completion": "good"}, ["good"]),
    "prompt and response": (sft(prompt_key="p", response_key="r"), {"p": "q", "r": "good"}, ["good"]),
    "pair": (preferences(), {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}, ["good", "bad one"]),
    "pair of texts": (
        preferences(),
        {"prompt": QUESTION, "chosen": "good", "rejected": "bad one"},
        ["good", "bad one"],
    ),
    "whole conversations": (
        preferences(),
        {"chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
        ["good", "bad one"],
    ),
    "repeated prompt": (
        preferences(),
        {"prompt": QUESTION, "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
        ["good", "bad one"],
    ),
    "LLaMA-Factory": (
        preferences(),
        {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "bad one"}},
        ["good", "bad one"],
    ),
    "instruction": (preferences(), {"instruction": "q", "chosen": "good", "rejected": "bad one"}, ["good", "bad one"]),
    "kto": (preferences(paired=False), {"prompt": QUESTION, "completion": GOOD, "label": True}, ["good"]),
    "kto of messages": (preferences(paired=False), {"messages": QUESTION + GOOD, "label": False}, ["good"]),
    "rating": (rated, {"prompt": QUESTION, "completion": GOOD, "rating": 0.5}, ["good"]),
}


def setup(name):
    template, specials, stops = TEMPLATES[name]
    tokenizer = with_template(template, specials)
    tokenizer.eos_token = stops[-1]
    return tokenizer, tokenizer.convert_tokens_to_ids(stops)


def generated(tokenizer, stops, content):
    """The turn that sampling would return, from the template's own rendering: all up to the first token that ends it."""
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    turns = [*QUESTION, {"role": "assistant", "content": content}]
    rendered, longer = (tokenizer.apply_chat_template(m, return_dict=False) for m in (turns, turns + QUESTION))
    assert rendered[: len(prompt)] == prompt
    answer = (longer if set(stops).isdisjoint(rendered[len(prompt) :]) else rendered)[len(prompt) :]
    return prompt, answer[: 1 + min(answer.index(stop) for stop in stops if stop in answer)]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CHATS)
def test_a_turn_ends_where_sampling_ends(tmp_path, template, case):
    load, row, contents = CHATS[case]
    tokenizer, stops = setup(template)
    dataset = load(write(tmp_path / "rows.jsonl", [row]), tokenizer, stops)
    batch = dataset.batch(range(len(dataset))).batch
    assert len(batch["responses"]) == len(contents)
    expected = [generated(tokenizer, stops, content) for content in contents]
    if case == "prompt and response":  # a text follows the generation prompt as it is
        expected = [(expected[0][0], [*tokenizer.encode("good"), stops[0]])]
    for number, (prompt, answer) in enumerate(expected):
        exists = batch["attention_mask"][number].bool()
        ids = np.concatenate([batch["prompts"][number], batch["responses"][number]])[exists]
        assert batch["responses"][number][batch["response_mask"][number]].tolist() == answer
        assert ids.tolist() == prompt + answer  # so the score of a reward model is read at the last token of the answer
    assert dataset.summaries[0].longest == max(len(prompt + answer) for prompt, answer in expected)


@pytest.mark.parametrize("template", TEMPLATES)
def test_steps_end_with_the_token_of_the_template(tmp_path, template):
    tokenizer, stops = setup(template)
    row = {"prompt": QUESTION, "completions": ["a", "b"], "labels": [True, False]}
    path = write(tmp_path / "rows.jsonl", [row])
    dataset = read_into(StepDataset("\n"), path, tokenizer, RMDataConfig(), stop_token_ids=stops)
    prompt, _ = generated(tokenizer, stops, "x")
    (sequence,) = dataset[0]
    assert sequence.input_ids.tolist() == [*prompt, *tokenizer.encode("a\nb\n"), stops[0]]


@pytest.mark.parametrize("template", ["chatml", "llama3", "several stop ids"])
def test_prompts_match_rl(tmp_path, template):
    """`verl train` scores its own prompt and response; `verl rm` trains on the same tokens."""
    tokenizer, stops = setup(template)
    path = write(tmp_path / "rows.jsonl", [CHATS["pair"][1]])
    chosen = CHATS["pair"][0](path, tokenizer, stops)[0][0]
    prompt = PromptEncoder(tokenizer, DataConfig()).encode(QUESTION, "here")
    assert chosen.input_ids.tolist() == [*prompt, *tokenizer.encode("good"), stops[0]]


def test_later_turns_keep_the_text_behind_a_turn_as_context(tmp_path):
    tokenizer, stops = setup("text behind the end")
    messages = [*QUESTION, *GOOD, *QUESTION, *BAD]
    (sequence,) = sft()(write(tmp_path / "rows.jsonl", [{"messages": messages}]), tokenizer, stops)[0]
    rendered = tokenizer.apply_chat_template(messages, return_dict=False)
    assert sequence.input_ids.tolist() == rendered[: len(rendered) - len(" ~~\n")]
    trained = tokenizer.decode(sequence.input_ids[sequence.loss_mask])
    assert trained == "good<|im_end|>bad one<|im_end|>"


def test_text_behind_a_stop_token_is_counted_and_does_not_train(tmp_path):
    tokenizer, stops = setup("chatml")
    path = write(tmp_path / "rows.jsonl", [{"prompt": "q", "completion": "a<|im_end|>\nmore"}])
    dataset = sft()(path, tokenizer, stops)
    (sequence,) = dataset[0]
    assert tokenizer.decode(sequence.input_ids) == "qa<|im_end|>"
    assert "Sequences with text behind a token that ends generation: 1." in " ".join(dataset.summaries[0].sentences())


def test_a_completion_of_several_turns_needs_a_template_that_keeps_history(tmp_path):
    tokenizer, stops = setup("qwen3")
    turns = [*chat("", "<think>\na\n</think>\n\nb", "q2", "c")[1:]]
    path = write(tmp_path / "rows.jsonl", [{"prompt": QUESTION, "chosen": turns, "rejected": BAD}])
    with pytest.raises(DataError, match="row 0 .*renders an earlier turn of the completion otherwise"):
        preferences()(path, tokenizer, stops)


def test_stop_tokens_of_a_folder_match_all_its_files(tmp_path):
    from verl.config import ModelConfig

    folder = make_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 256]}))
    model = ModelConfig(path=str(folder))
    assert eos_token_ids_of(model, load_tokenizer(model)) == (256, 257, 258)
