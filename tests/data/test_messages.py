"""One reader of messages: every program renders the same row to the same prompt, from every kind of file."""

import inspect
import json
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from tests.data.conversations.templates import with_template
from tests.json_lines import write_lines
from verl.agents.continuity import ChatContinuity
from verl.config import DataConfig, PPOConfig
from verl.config.roots.reward_model import RMDataConfig
from verl.config.sections.data import PreferenceDataConfig, SFTDataConfig
from verl.data.check import check_rows
from verl.data.conversations.formats import Example, example_of
from verl.data.conversations.tokens import ConversationEncoder
from verl.data.dataset import load_dataset
from verl.data.files import read_rows
from verl.data.loader import PromptLoader
from verl.data.messages import checked_kwargs
from verl.data.order import PromptOrder
from verl.data.preferences.formats import preference_of
from verl.data.preferences.scored import StepDataset
from verl.data.prompts import PromptEncoder
from verl.data.python_rows import listed_rows, prompt_row
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.programs import label, ppo_data, rejection
from verl.rewards.scorers.route import check_truth
from verl.session import Session

TEMPLATE = (
    "{{ style or '' }}{% if enable_thinking is defined %}{{ 'thoughts' if enable_thinking else 'no thoughts' }}{% endif %}"
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENTS = {"city": "Paris", "unit": None}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"unit": {"type": "string", "default": None}}}}


def called(arguments, **more):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}, **more}
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "here"},
    ]


SAID = [
    ("human", "Where?"),
    ("function_call", json.dumps({"name": "look", "arguments": ARGUMENTS})),
    ("observation", "here"),
]
ROWS = {
    "messages": {"prompt": [{"role": "user", "content": "Hi"}]},
    "a text": {"prompt": "Hi"},
    "arguments as an object": {"prompt": called({"city": "Paris"})},
    "arguments as text, with a null": {"prompt": called(json.dumps(ARGUMENTS))},
    "ShareGPT": {"prompt": [{"from": speaker, "value": value} for speaker, value in SAID]},
    "system and tools": {"prompt": [{"role": "user", "content": "Hi"}], "system": "Be brief.", "tools": json.dumps([TOOL])},
    "arguments of the template": {"prompt": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"style": "!"}},
    "enable_thinking": {"prompt": [{"role": "user", "content": "Hi"}], "enable_thinking": False},
}  # fmt: skip
FILLED = {"city": "Oslo", "street": "A"}  # of another row of the same file


@pytest.fixture(scope="module")
def tokenizer():
    return with_template(TEMPLATE)


def written(folder, kind, *rows):
    if kind == "parquet":
        columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
    else:
        write_lines(folder / "rows.jsonl", rows)
    return folder / f"rows.{kind}"


def of_rl(tokenizer, file, **keys):
    config = DataConfig(max_prompt_length=2000, **keys)
    rows = load_dataset(str(file), tokenizer, config, scored=False)
    loader = PromptLoader(rows, PromptEncoder(tokenizer, config), PromptOrder(len(rows), 0, False), 1)
    return loader.take(0, len(rows))


def ids_of(tokenizer, file, **keys):
    return of_rl(tokenizer, file, **keys).non_tensor_batch["prompt_token_ids"][0]


def context(tokenizer, example):
    (sequence,) = ConversationEncoder(tokenizer, SFTDataConfig(), checks=False).encode(example, "here")
    return sequence.input_ids[: int(np.flatnonzero(sequence.loss_mask)[0])].tolist()


def of_pairs(tokenizer, row):
    pair = preference_of(row, PreferenceDataConfig())
    marks = (None,) * (len(pair.prompt) + 1)
    example = Example("prompt_completion", pair.prompt, pair.completions[0], marks, pair.tools, pair.template_kwargs)
    return context(tokenizer, example)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_every_program_renders_the_same_prompt(tokenizer, tmp_path, name, kind):
    row = ROWS[name]
    file = written(tmp_path, kind, row)
    expected = ids_of(tokenizer, file)
    (raw,) = read_rows(str(file))
    prompt = raw["prompt"] if not isinstance(raw["prompt"], str) else [{"role": "user", "content": "Hi"}]
    answer = [{"role": "assistant", "content": "Yes"}]
    messages = {**row, "prompt": prompt}
    # fine-tuning, pairs, labelled steps
    assert context(tokenizer, example_of({**messages, "completion": answer}, SFTDataConfig())) == expected
    assert (
        of_pairs(tokenizer, {**messages, "chosen": answer, "rejected": [{"role": "assistant", "content": "No"}]})
        == expected
    )
    encoder = ConversationEncoder(tokenizer, RMDataConfig(), checks=False)
    _, (steps,), _ = StepDataset("\n").sequences_of(
        {**messages, "completions": ["a"], "labels": [True]}, encoder, "here"
    )
    assert steps.input_ids[: len(expected)].tolist() == expected
    # agents, the rows that rejection sampling and labelling write, the Python API, a session
    batch = of_rl(tokenizer, file)
    raw_prompt, kwargs = (
        batch.non_tensor_batch[n][0] if n in batch.non_tensor_batch else {} for n in ("raw_prompt", "template_kwargs")
    )
    assert ChatContinuity(tokenizer).of_row(kwargs).prompt(raw_prompt) == expected
    line = {"prompt": list(raw_prompt), "completion": answer, **rejection._columns(kwargs)}
    assert context(tokenizer, example_of(json.loads(json.dumps(line)), SFTDataConfig())) == expected
    candidates = written(tmp_path, "jsonl", {**messages, "responses": ["Yes", "No"]})
    (candidate,) = label.read_candidates(str(candidates), "prompt", "responses")
    assert of_pairs(tokenizer, candidate.row(0, 1, 1.0)) == expected
    assert ids_of(tokenizer, written(tmp_path, "jsonl", prompt_row(row, 0))) == expected
    if not kwargs and "system" not in row:
        session = SimpleNamespace(
            tokenizer=tokenizer, _encoder=PromptEncoder(tokenizer, DataConfig(max_prompt_length=2000))
        )
        assert Session._prompt_ids(session, row["prompt"], "prompt 0") == expected


def test_the_text_of_a_prompt_says_what_its_columns_say(tokenizer, tmp_path):
    text = {name: tokenizer.decode(ids_of(tokenizer, written(tmp_path, "jsonl", row))) for name, row in ROWS.items()}
    assert '<call>look{"city": "Paris", "unit": null}</call>' in text["arguments as text, with a null"]
    assert text["ShareGPT"] == text["arguments as text, with a null"]
    assert text["system and tools"].startswith('<|im_start|>tools\n{"type"')
    assert '"default": null' in text["system and tools"]
    assert "system\nBe brief.<|im_end|>" in text["system and tools"]
    assert text["arguments of the template"].startswith("!")
    assert text["enable_thinking"].startswith("no thoughts")


def test_only_nulls_that_arrow_has_filled_in_are_left_out(tokenizer, tmp_path):
    rows = [{"prompt": called({"city": "Paris"})}, {"prompt": called(FILLED, id="call_1")}]
    plain = tokenizer.decode(ids_of(tokenizer, written(tmp_path, "jsonl", *rows)))
    assert '<call>look{"city": "Paris"}</call>' in plain
    assert tokenizer.decode(ids_of(tokenizer, written(tmp_path, "parquet", *rows))) == plain
    null = tokenizer.decode(ids_of(tokenizer, written(tmp_path, "jsonl", {"prompt": called(ARGUMENTS)})))
    assert '{"city": "Paris", "unit": null}' in null
    sft = example_of(
        {"messages": [*called(ARGUMENTS), {"role": "assistant", "content": "a"}], "tools": [TOOL]}, SFTDataConfig()
    )
    assert sft.completion[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert sft.tools == [TOOL]
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert tokenizer.decode(ids_of(tokenizer, tmp_path / "saved")) == plain
    (row, _) = read_rows(str(written(tmp_path, "parquet", *({"messages": r["prompt"]} for r in rows))))
    assert example_of(row, SFTDataConfig()).completion[1]["tool_calls"][0] == rows[0]["prompt"][1]["tool_calls"][0]


def test_rows_of_a_datasets_object_are_rows_of_arrow():
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": called({"city": "Paris"})}, {"prompt": called(FILLED)}]
    (first, _) = listed_rows("train", datasets.Dataset.from_list(rows))
    assert prompt_row(first, 0)["prompt"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


def test_a_column_of_another_meaning_is_refused_and_can_be_renamed(tokenizer, tmp_path):
    file = written(tmp_path, "jsonl", {"prompt": "Hi", "tools": ["search"]})
    with pytest.raises(DataError, match="field 'tools' is a text that is not JSON|data.tools_key"):
        ids_of(tokenizer, file)
    assert ids_of(tokenizer, file, tools_key="no_tools") == ids_of(
        tokenizer, written(tmp_path, "jsonl", {"prompt": "Hi"})
    )


def test_rows_without_such_columns_have_the_batch_that_they_had(tokenizer, tmp_path):
    batch = of_rl(tokenizer, written(tmp_path, "jsonl", ROWS["messages"]))
    assert isinstance(batch, DataProto)
    assert "template_kwargs" not in batch.non_tensor_batch


# -- an answer that the prompt begins

BEGUN = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "The answer is"}]


@pytest.mark.parametrize("by_row", [True, False])
def test_an_answer_that_the_prompt_begins_is_continued(tokenizer, tmp_path, by_row):
    row = {"prompt": BEGUN, **({"chat_template_kwargs": {"continue_final_message": True}} if by_row else {})}
    keys = {} if by_row else {"apply_chat_template_kwargs": {"continue_final_message": True}}
    batch = of_rl(tokenizer, written(tmp_path, "jsonl", row, {"prompt": "Hi"}), **keys)
    begun, usual = (tokenizer.decode(ids) for ids in batch.non_tensor_batch["prompt_token_ids"])
    assert begun.endswith("<|im_start|>assistant\nThe answer is")
    assert usual.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")  # no answer to continue
    assert batch.non_tensor_batch["extra_info"][0]["assistant_prefix"] == "The answer is"


def test_a_closed_answer_is_noted_once(tokenizer, tmp_path, caplog):
    batch = of_rl(tokenizer, written(tmp_path, "jsonl", {"prompt": BEGUN}, {"prompt": BEGUN}))
    text = tokenizer.decode(batch.non_tensor_batch["prompt_token_ids"][0])
    assert text.endswith("The answer is<|im_end|>\n<|im_start|>assistant\n")
    assert caplog.text.count("ends with a message of the assistant, which is closed") == 1


def test_an_empty_beginning_is_a_new_turn(tokenizer, tmp_path):
    row = {"prompt": [BEGUN[0], {"role": "assistant", "content": ""}]}
    keys = {"apply_chat_template_kwargs": {"continue_final_message": True}}
    assert ids_of(tokenizer, written(tmp_path, "jsonl", row), **keys) == ids_of(
        tokenizer, written(tmp_path, "jsonl", {"prompt": BEGUN[:1]})
    )


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"add_generation_prompt": True}, "sets 'add_generation_prompt'.* the program sets it"),
        ({"tokenize": False}, "sets 'tokenize'"),
        ({"messages": []}, "sets 'messages'"),
        ({"tokenizer": "x"}, "sets 'tokenizer'"),
        ({"truncation": True}, "sets 'truncation', which is an argument of the tokenizer.* no effect. Remove it"),
        ({"continue_final_message": "false"}, "continue_final_message in .* true or false, but it is 'false'"),
    ],
)
def test_arguments_of_the_template_that_a_program_sets(tokenizer, tmp_path, kwargs, match):
    row, answer = {"prompt": BEGUN[:1], "chat_template_kwargs": kwargs}, [{"role": "assistant", "content": "4"}]
    with pytest.raises(DataError, match=match):
        of_rl(tokenizer, written(tmp_path, "jsonl", row))
    with pytest.raises(DataError, match=match):
        example_of({**row, "completion": answer}, SFTDataConfig())
    with pytest.raises(ConfigError, match=match):
        PromptEncoder(tokenizer, DataConfig(apply_chat_template_kwargs=kwargs))
    with pytest.raises(ConfigError, match=match):
        example_of({"messages": [*BEGUN]}, SFTDataConfig(apply_chat_template_kwargs=kwargs))


def test_arguments_of_the_template_act_or_are_refused():
    """Whatever transformers' methods take by name either reaches a template or is refused."""
    acting = {"tools", "documents", "chat_template", "continue_final_message", "kwargs"}
    for owner in (PreTrainedTokenizerBase, ProcessorMixin):
        taken = set(inspect.signature(owner.apply_chat_template).parameters) - acting
        for name in taken:
            with pytest.raises(DataError, match=rf"x sets '{name}'"):
                checked_kwargs({name: None}, "x")


def test_rows_that_train_have_whole_answers():
    answers = [[{"role": "assistant", "content": text}] for text in (" 4", " 5")]
    row = {"prompt": BEGUN, "chat_template_kwargs": {"continue_final_message": True}}
    with pytest.raises(DataError, match="Move this message to the beginning of the completion"):
        example_of({**row, "completion": answers[0]}, SFTDataConfig())
    with pytest.raises(DataError, match="Move this message to the beginning of the completion"):
        preference_of({**row, "chosen": answers[0], "rejected": answers[1]}, PreferenceDataConfig())
    example_of({**row, "prompt": BEGUN[:1], "completion": answers[0]}, SFTDataConfig())
    example_of({"messages": BEGUN, **row["chat_template_kwargs"]}, SFTDataConfig())


def test_pairs_of_answers_that_a_prompt_begins_are_whole(tmp_path):
    row = {"prompt": BEGUN, "responses": [" 4", " 5"], "chat_template_kwargs": {"continue_final_message": True}}
    (candidate,) = label.read_candidates(str(written(tmp_path, "parquet", row)), "prompt", "responses")
    pair = preference_of(candidate.row(0, 1, 1.0), PreferenceDataConfig())
    assert pair.prompt == BEGUN[:1]
    assert [messages[0]["content"] for messages in pair.completions] == ["The answer is 4", "The answer is 5"]


def test_a_start_and_verl_check_name_a_row_that_no_program_could_be_scored_against(tokenizer, tmp_path):
    truth = json.dumps({"inputs": ["1", "2"], "outputs": ["1"]})
    row = {"prompt": "Add one.", "data_source": "apps", "reward_model": {"ground_truth": truth}}
    file, config = written(tmp_path, "jsonl", row), DataConfig(max_prompt_length=2000)
    with pytest.raises(DataError, match=r"row 0 .*has 2 inputs and 1 outputs"):
        load_dataset(str(file), tokenizer, config, scored=check_truth)
    report = check_rows(str(file), tokenizer, config, scored=check_truth)
    assert (report.num_problems, "has 2 inputs and 1 outputs" in report.problems[0]) == (1, True)
    assert ppo_data.scoring_of(PPOConfig()) is check_truth
