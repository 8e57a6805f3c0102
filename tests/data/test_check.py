import pytest

from tests.data.rows import config, row, write
from verl.data.check import check_data, check_rows
from verl.data.dataset import load_dataset
from verl.errors import DataError
from verl.models.tiny import make_tokenizer

tokenizer = make_tokenizer()


def test_every_bad_row_is_described_and_the_rest_counted(tmp_path):
    rows = [
        row(0),
        row(1, data_source="task/b"),
        row(2, prompt="x" * 200),
        row(3, reward_model=...),
        row(4, prompt=[]),
        row(5, prompt="question 0"),
    ]
    report = check_rows(write(tmp_path / "a.jsonl", rows), tokenizer, config())
    assert report.num_rows == 6
    assert report.num_problems == 3
    assert report.num_overlong == 1
    assert report.num_repeated == 1
    assert report.data_sources == {"task/a": 3, "task/b": 1}
    assert report.max_length > 200
    assert 40 < report.mean_length < 120
    for sentence, words in zip(report.problems, ("row 2", "row 3", "row 4"), strict=True):
        assert words in sentence


def test_overlong_rows_are_no_problem_when_they_are_filtered_or_cut(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0), row(1, prompt="x" * 200)])
    for settings in ({"filter_overlong_prompts": True}, {"truncation": "middle"}):
        report = check_rows(path, tokenizer, config(**settings))
        assert (report.num_problems, report.num_overlong) == (0, 1)
    report = check_rows(path, tokenizer, config(filter_overlong_prompts=True, max_prompt_length=3))
    assert report.num_problems == 1
    assert "All prompts are longer" in report.problems[0]


def test_failing_templates_are_refused(tmp_path):
    broken = make_tokenizer()
    broken.chat_template = "{{ raise_exception('roles') }}"
    report = check_rows(write(tmp_path / "a.jsonl", [row(i) for i in range(30)]), broken, config())
    assert report.num_problems == 30
    assert len(report.problems) == 5
    assert "roles" in report.problems[0]


def test_prompts_in_training_and_validation_are_counted(tmp_path):
    train = write(tmp_path / "train.jsonl", [row(i) for i in range(5)])
    val = write(tmp_path / "val.jsonl", [row(i) for i in (3, 4, 9)])
    report = check_data(config(train_files=train, val_files=[val]), tokenizer)
    assert report.ok
    assert (report.train.num_rows, report.validation.num_rows, report.num_shared) == (5, 3, 2)
    alone = check_data(config(train_files=train, val_files=[]), tokenizer)
    assert alone.validation is None
    assert alone.num_shared == 0


AGENTS = {
    "agent_name": {"agent_name": "tool_agent"},
    "extra_info.tools_kwargs": {"extra_info": {"tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "3"}}}}},
    "extra_info.interaction_kwargs": {"extra_info": {"interaction_kwargs": {"name": "gsm8k"}}},
    "images": {"images": [{"path": "a.png"}]},
}


@pytest.mark.parametrize("field", AGENTS)
def test_rows_that_ask_for_what_is_not_available_are_said_once_with_their_number(field, tmp_path):
    rows = [row(0), *(row(i, **AGENTS[field]) for i in (1, 2, 3))]
    path = write(tmp_path / "a.jsonl", rows)
    report = check_rows(path, tokenizer, config())
    assert report.num_problems == 3
    (sentence,) = report.problems
    assert sentence.startswith("3 of 4 rows, the first ")
    assert "row 1 (counted from 0, line 2): " in sentence
    assert f"field '{field}'" in sentence
    assert "the model has no image processor" in sentence or "but the run has no agents" in sentence
    with pytest.raises(DataError) as error:
        load_dataset(path, tokenizer, config())
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("agent", "key"),
    [("mine", "agent.agent_loop_config_path"), ("endpoint_agent", "agent.runner"), ("tool_agent", "multi_turn.enable")],
)  # fmt: skip
def test_a_row_that_names_an_agent_loop_is_told_its_key(agent, key, tmp_path):
    (sentence,) = check_rows(write(tmp_path / "a.jsonl", [row(0, agent_name=agent)]), tokenizer, config()).problems
    assert f"Set actor_rollout_ref.rollout.{key}" in sentence


def test_columns_of_agents_that_ask_for_nothing_are_fine(tmp_path):
    asks_nothing = {"agent_name": "single_turn_agent", "tools_kwargs": {}, "images": []}
    extra = {"tools_kwargs": {"calc": {"create_kwargs": None}}, "interaction_kwargs": {}, "need_tools_kwargs": False}
    path = write(tmp_path / "a.jsonl", [row(0, **asks_nothing), row(1, extra_info=extra), row(2, agent_name=None)])
    assert check_rows(path, tokenizer, config()).num_problems == 0
