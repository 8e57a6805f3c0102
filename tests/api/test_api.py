"""The Python API: exported names, and runs from Python objects."""

import json
import os
import re
import runpy
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import verl
import verl.api
from tests.api.functions import compute_score, length, starts
from tests.json_lines import read_lines, write_lines
from verl.api import _reward_keys
from verl.data_proto.samples import ScoreRequest
from verl.errors import ConfigError, DataError, InterruptedRun, ModelError, RewardError
from verl.models.folder import locate
from verl.registry import is_in_process, load_object, reference_to
from verl.rewards.functions import RewardFunctionSpec, score_lists
from verl.rewards.managers.build import build_pool

ROWS = [{"prompt": f"Say {n % 10}.", "answer": str(n % 10)} for n in range(16)]
DATA = {"data.train_batch_size": 8, "data.max_prompt_length": 64, "data.max_response_length": 4}
STEPS = {"total_training_steps": 2, "logger": ["file"]}


def centred(token_level_rewards, response_mask, *, index):
    advantages = (token_level_rewards.sum(dim=1, keepdim=True) - 1.0) * response_mask
    return advantages, advantages


def test_exported_names_are_importable_and_sorted_by_kind():
    assert [name for name in verl.__all__ if not hasattr(verl, name)] == []
    assert {"Trainer", "train", "sft", "dpo", "reward_model", "evaluate", "generate", "load_config", "Run"} <= set(
        verl.__all__
    )
    assert set(verl.__all__) <= set(dir(verl))


def test_grpo_on_rows_with_a_function_of_a_file(tiny_llama, tmp_path):
    run = verl.train(
        tiny_llama, ROWS, starts, eval_data=ROWS[:4], output_dir=tmp_path / "run", config=DATA, trainer=STEPS,
        actor_rollout_ref={"rollout": {"n": 2}},
    )  # fmt: skip
    assert run.summary()["step"] == 2
    assert (run.model_path / "config.json").is_file()
    rows = read_lines(tmp_path / "run/samples/train/step_000002.jsonl")
    assert len(rows) == 16
    assert all(row["score"] == float(row["response"].startswith(row["ground_truth"])) for row in rows)
    assert "debug: false" in (tmp_path / "run/config.yaml").read_text()  # the sandbox scored


@pytest.mark.parametrize(
    ("keys", "header"),
    [
        (
            {},
            [
                "batch: 12 prompts x 8 samples",
                "learning rate: 5e-06",
                "samples: at most 2 tokens, at temperature 1 in training\n",
                "steps: 2; few for a model to learn: trainer.total_epochs takes the rows again\n",
            ],
        ),
        (
            {"data.train_batch_size": 16, "actor_rollout_ref.rollout.n": 2},
            [
                "batch: 16 prompts x 2 samples",
                "steps: 1; an epoch leaves out 8 of the 24 rows, other ones each time; few for",
            ],
        ),
    ],
    ids=["by default", "with a batch of the user's"],
)
def test_a_run_says_which_rows_an_epoch_trains(tiny_llama, tmp_path, capsys, keys, header):
    rows = [{"prompt": f"{n}?"} for n in range(24)]
    lengths = {"data.max_prompt_length": 64, "data.max_response_length": 2}
    run = verl.train(tiny_llama, rows, length, output_dir=tmp_path / "run", config={**lengths, **keys})
    said = capsys.readouterr().out
    assert [line for line in header if line not in said] == []
    prompts = {row["prompt"] for file in (tmp_path / "run/samples/train").iterdir() for row in read_lines(file)}
    assert len(prompts) == (16 if keys else 24)
    assert run.summary()["step"] == (1 if keys else 2)


def test_two_functions_are_parts_and_add_up():
    scores = score_lists(
        ["a"] * 2, ["7", "88"], ["7", "7"], [{"prompt": "p", "answer": "7"}] * 2,
        functions=[reference_to(starts), reference_to(length)], weights=[1.0, 2.0],
    )  # fmt: skip
    assert scores == [{"score": 1.2, "starts": 1.0, "length": 0.1}, {"score": 0.4, "starts": 0.0, "length": 0.2}]


def score(completions):
    return [10.0] * len(completions)


def test_a_function_called_score_does_not_replace_the_sum():
    references = [reference_to(score), reference_to(length)]
    assert score_lists(["a"], ["88"], [None], [{"prompt": "p"}], functions=references) == [
        {"score": 10.2, "length": 0.2}
    ]
    references[0] = reference_to(lambda completions: [{"right": 1.0}])  # the worker refuses a dict without a score
    assert score_lists(["a"], ["88"], [None], [{"prompt": "p"}], functions=references) == [{"score": {"right": 1.0}}]


def test_functions_of_verls_form_get_every_column():
    (parts,) = score_lists(["a"], ["1234"], ["7"], [{"answer": "7"}], functions=[reference_to(compute_score)])
    assert parts == {"score": 0.4, "same_answer": 1.0}


def test_a_reward_function_that_returns_too_few_is_named():
    with pytest.raises(RewardError, match="one_number returned 1 rewards for 2 completions"):
        score_lists(["a"] * 2, ["b"] * 2, [None] * 2, [{}] * 2, functions=[reference_to(one_number)])


def test_a_function_of_texts_that_gets_messages_is_told_so():
    row = {"prompt": [{"role": "user", "content": "Hi"}]}
    stripped = reference_to(lambda completions: [float(len(text.strip())) for text in completions])
    with pytest.raises(
        AttributeError, match=r"no attribute 'strip'; a prompt of messages .* completion\[0\]\['content'\]"
    ):
        score_lists(["d"], ["x"], [None], [row], functions=[stripped])


def one_number(completions):
    return [1.0]


@pytest.mark.parametrize("further", [(), (length,)], ids=["by itself", "beside a function over lists"])
def test_a_function_of_verls_form_fails_for_one_sample(tiny_llama, tmp_path, further):
    def halves(data_source, solution_str, ground_truth, extra_info):
        return float(solution_str) / 2

    rewards = [halves, *further]
    trainer = verl.Trainer(tiny_llama, [{"prompt": "a"}] * 2, rewards, output_dir=tmp_path, config=DATA)
    pool = build_pool(trainer.loaded.config.reward)
    scores = pool.score_all([ScoreRequest(key, "d", key, None) for key in ("1", "x", "3")])
    added = 0.1 * len(further)
    assert [(score.score, bool(score.error)) for score in scores] == [
        (0.5 + added, False),
        (0.0, True),
        (1.5 + added, False),
    ]
    assert "raised ValueError: could not convert string to float: 'x' (line " in str(scores[1].error)


def test_references_lead_back_to_their_objects():
    assert load_object(reference_to(json.dumps)) is json.dumps
    assert load_object(reference_to(starts)).__name__ == "starts"
    local = reference_to(lambda: 1)
    assert is_in_process(local)
    assert load_object(local)() == 1
    with pytest.raises(ConfigError, match=r"top level of a \.py file"):
        load_object("in_process:lambda_0")


def test_step_by_step_with_a_lambda_a_callback_and_an_own_estimator(tiny_llama, tmp_path):
    steps = []

    def callback(trainer, metrics):
        steps.append((trainer.global_step, metrics["critic/score/mean"]))
        if trainer.global_step == 2:
            trainer.stop()

    with verl.Trainer(
        tiny_llama, ROWS, lambda completions, **columns: [1.0] * len(completions), algorithm=centred, callbacks=[callback],
        eval_data=ROWS[:2], output_dir=tmp_path, config=DATA, trainer={**STEPS, "total_training_steps": 9},
    ) as trainer:  # fmt: skip
        assert trainer.loaded.config.actor_rollout_ref.rollout.n == 8  # an own estimator may compare samples
        trainer.train()
        assert steps == [(1, 1.0), (2, 1.0)]
        assert trainer.evaluate()["val/reward"] == 1.0
        folder = trainer.save()
    assert (folder / "actor/huggingface/config.json").is_file()


def test_the_same_call_resumes(tiny_llama, tmp_path, capsys):
    trainer = {**STEPS, "logger": ["console", "file"]}
    arguments = {"output_dir": tmp_path, "config": DATA, "eval_data": ROWS[:2], "trainer": trainer}
    with verl.Trainer(tiny_llama, ROWS, length, **arguments) as trainer:
        trainer.step()
        trainer.save()
    with verl.Trainer(tiny_llama, ROWS, length, **arguments) as trainer:
        assert trainer.global_step == 1
        assert trainer.step() is not None
        assert trainer.step() is None
    headers = re.findall("^validation: (.*)$", capsys.readouterr().out, re.M)
    assert headers == ["before training; after each epoch and at the end", "after each epoch and at the end"]


@pytest.mark.parametrize(("prompts", "row"), [([""], 0), (["hi", ""], 1), ([[]], 0)])
def test_a_prompt_that_is_empty_is_named_by_its_row(tiny_llama, tmp_path, prompts, row):
    """And not by the file of the run that holds the rows."""
    with pytest.raises(DataError, match=f"^Row {row} of the prompts: field 'prompt' is an empty"):
        verl.generate(tiny_llama, prompts, output_dir=tmp_path / "run")
    with pytest.raises(DataError, match=r"^The prompts have no rows\."):
        verl.generate(tiny_llama, [], output_dir=tmp_path / "run")


def test_an_interruption_saves(tiny_llama, tmp_path):
    def interrupt(trainer, metrics):
        os.kill(os.getpid(), signal.SIGTERM)

    with verl.Trainer(
        tiny_llama, ROWS, length, callbacks=interrupt, output_dir=tmp_path, config=DATA, trainer=STEPS
    ) as trainer:
        assert trainer.step() is not None
        with pytest.raises(InterruptedRun, match="Stopped on request after step 1 of 2"):
            trainer.step()
    assert (tmp_path / "global_step_1/trainer_state.json").is_file()


def test_an_interrupted_call_says_how_it_resumes(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with verl.Trainer(tiny_llama, ROWS, length, config=DATA, trainer=STEPS) as trainer:
        trainer.step()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedRun, match=rf"Call it again with output_dir='{tmp_path}/runs/grpo-[\d-]+'"):
            trainer.step()


def test_columns_that_episodes_add_are_no_columns_of_the_rows(tiny_llama, tmp_path):
    def score(completions, turn_scores):
        return [0.0] * len(completions)

    agents = {"actor_rollout_ref.rollout.agent.runner": f"{__file__}:length"}
    with pytest.raises(RewardError, match="takes 'turn_scores'"):
        verl.Trainer(tiny_llama, ROWS, score, output_dir=tmp_path, config=DATA)
    verl.Trainer(tiny_llama, ROWS, score, output_dir=tmp_path, config=DATA | agents).close()


def test_fine_tuning_preferences_and_reward_models(tiny_llama, tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": str(n)}]} for n in range(8)
    ]
    pairs = [{"prompt": "a", "chosen": str(n), "rejected": "no"} for n in range(8)]
    settings = {"config": {"data.train_batch_size": 4}, "trainer": STEPS}
    tuned = verl.sft(tiny_llama, chats, output_dir=tmp_path / "sft", **settings)
    preferred = verl.dpo(tuned.model_path, pairs, output_dir=tmp_path / "dpo", **settings)
    scored = verl.reward_model(tuned.model_path, pairs, output_dir=tmp_path / "rm", **settings)
    assert all((run.model_path / "config.json").is_file() for run in (tuned, preferred, scored))


def test_evaluate_and_generate(tiny_llama, tmp_path):
    metrics = verl.evaluate(tiny_llama, ROWS[:4], length, output_dir=tmp_path / "eval", config=DATA)
    prompts = ["Say 1.", [{"role": "user", "content": "2?"}], *ROWS[:2]]
    samples = verl.generate(tiny_llama, iter(prompts), output_dir=tmp_path / "generate", config=DATA)
    assert metrics["val/reward"] >= 0
    assert [set(sample) >= {"response", "response_ids", "log_probs"} for sample in samples] == [True] * 4
    assert [sample["score"] for sample in samples] == [None] * 4


def test_rows_with_other_names_of_prompt_and_task(tiny_llama, tmp_path):
    rows = [{"question": row["prompt"], "task": "sums"} for row in ROWS[:8]]
    named = {**DATA, "data.prompt_key": "question", "data.reward_fn_key": "task"}
    run = verl.train(
        tiny_llama, rows, length, eval_data=rows[:2], output_dir=tmp_path / "run", config=named,
        trainer={"total_training_steps": 1}, actor_rollout_ref={"rollout": {"n": 2}},
    )  # fmt: skip
    assert "val-core/sums/reward/mean@1" in run.summary()["metrics"]
    for prompts in (rows[:2], ["Say 1.", "Say 2."]):  # of a run folder, by its newest checkpoint
        samples = verl.generate(
            tmp_path / "run", prompts, output_dir=tmp_path / f"of_{type(prompts[0]).__name__}", config=named
        )
        assert len(samples) == 2


def test_generate_takes_a_file_of_prompts_and_scores_what_a_scorer_reads(tiny_llama, tmp_path):
    gsm8k = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}}
    rows = [{"prompt": "Hi."}, {"prompt": "3 + 4?", **gsm8k}, {"prompt": "5?", **gsm8k, "data_source": "mine"}]
    file = tmp_path / "prompts.jsonl"
    write_lines(file, rows)
    samples = verl.generate(tiny_llama, file, output_dir=tmp_path / "run", config=DATA)
    assert [sample["score"] for sample in samples] == [None, 0.0, None]


def test_iterators_are_read_once(tiny_llama, tmp_path):
    file = tmp_path / "rows.jsonl"
    write_lines(file, (verl.api.prompt_row(row, 0) for row in ROWS[:2]))
    call = {"output_dir": tmp_path / "run", "config": DATA}
    for path in (file, str(file)):
        assert len(verl.generate(tiny_llama, iter([path]), **call)) == 2
    data = iter(ROWS[:4])
    with verl.Trainer(tiny_llama, data, iter([length, starts]), eval_data=data, callbacks=iter([print]), **call) as run:
        files = run.loaded.config.data.train_files, run.loaded.config.data.val_files
        assert [len(Path(file).read_text().splitlines()) for file in files] == [4, 4]
        assert len(run.loaded.config.reward.custom_reward_function.reward_kwargs["functions"]) == 2
    with pytest.raises(DataError, match="have no rows"):
        verl.generate(tiny_llama, iter([]), **call)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"data": [{"question": "?"}]}, DataError, r"Row 0 of the data has no 'prompt'"),
        ({"data": []}, DataError, "have no rows"),
        ({"data": ["train.jsonl", {"prompt": "a"}]}, DataError, "Row 0 of the data is a str"),
        ({"trainer": {"total_trainig_steps": 2}}, ConfigError, "total_training_steps"),
        ({"config": {"data.train_files": "x"}}, ConfigError, "data.train_files='x' .* and the argument data"),
        ({"config": {"data": {"train_files": "x"}}}, ConfigError, "data.train_files='x' .* and the argument data"),
        ({"algorithm": "sft"}, ConfigError, "reads no reward"),
        ({"algorithm": "grop"}, ConfigError, "grpo"),
        ({"data": ["Who are you?"]}, DataError, "names no file. Give a row for each prompt"),
        ({"tools": [length]}, ConfigError, "Set actor_rollout_ref.rollout.multi_turn.function_tool_path"),
        ({"peft_config": {"r": 8}}, ConfigError, "Set actor_rollout_ref.model.lora_rank"),
        ({"reward": [1.0]}, ConfigError, "no function"),
        ({"reward": lambda texts: [0.0]}, RewardError, "has no parameter 'completions' or 'solution_str'"),
        ({"reward": lambda completions, anser: [0.0]}, RewardError, "takes 'anser'.* did you mean 'answer'"),
    ],
)
def test_bad_arguments_are_refused_before_training(tiny_llama, tmp_path, arguments, error, sentence):
    call = {"data": ROWS, "reward": length, "output_dir": tmp_path, **arguments}
    with pytest.raises(error, match=sentence):
        verl.Trainer(tiny_llama, **call)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_script_that_starts_runs_when_imported_is_refused(tiny_llama, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import verl\nverl.Trainer({str(tiny_llama)!r}, [{{'prompt': 'a'}}])\n")
    with pytest.raises(ConfigError, match="__main__"):
        load_object(f"{script}:f")


def _loaded(tiny_llama, tmp_path, **arguments):
    config = verl.Trainer(tiny_llama, ROWS, length, output_dir=tmp_path, **arguments).loaded.config
    return config.trainer.total_training_steps, config.trainer.save_freq


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": {"trainer": {"total_training_steps": 3}}, "trainer": {"save_freq": 5}},
        {"config": {"trainer": {"total_training_steps": 3}, "trainer.save_freq": 5}},
        {"config": {"trainer.total_training_steps": 3}, "trainer": {"save_freq": 5}},
        {"config": {"trainer": {"total_training_steps": 3}}, "trainer.save_freq": 5},
        {"config": ["trainer.total_training_steps=3"], "trainer": {"save_freq": 5}},
        {"config": "trainer.total_training_steps=3", "trainer": {"save_freq": 5}},
        {"config": {"trainer": {"total_training_steps": 3}}, "trainer": {"total_training_steps": 3, "save_freq": 5}},
        {"config": None, "trainer": {"total_training_steps": 3, "save_freq": 5}},
    ],
)
def test_every_key_of_nested_and_dotted_arguments_acts(tiny_llama, tmp_path, arguments):
    assert _loaded(tiny_llama, tmp_path, **arguments) == (3, 5)


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": {"trainer": {"total_training_steps": 3}}, "trainer": {"total_training_steps": 2}},
        {"config": {"trainer.total_training_steps": 3}, "trainer": {"total_training_steps": 2}},
        {"config": {"trainer": {"total_training_steps": 3}, "trainer.total_training_steps": 2}},
        {"config": {"actor_rollout_ref.actor.grad_clip": 3.0}, "actor_rollout_ref.actor.optim.clip_grad": 2.0},
        {"config": ["data.train_files=x"]},
        {"config": ["+actor_rollout_ref.model.path=x"]},
    ],
)
def test_two_values_of_one_key_are_refused(tiny_llama, tmp_path, arguments):
    with pytest.raises(ConfigError, match="different values"):
        _loaded(tiny_llama, tmp_path, **arguments)


def test_iterables_are_rows_for_training_and_validation(tiny_llama, tmp_path):
    for data in ((row for row in ROWS), tuple(ROWS)):
        loaded = verl.Trainer(tiny_llama, data, length, eval_data=data, output_dir=tmp_path).loaded.config.data
        files = [Path(loaded.train_files), Path(loaded.val_files)]
        assert [[json.loads(line)["prompt"] for line in file.open()] for file in files] == [
            [row["prompt"] for row in ROWS]
        ] * 2


def test_a_missing_value_of_a_data_frame_is_none():
    pandas = pytest.importorskip("pandas", reason="needs the extra scripts")
    frame = pandas.DataFrame([{"prompt": ["a"], "answer": 1, "at": pandas.NaT}, {"prompt": "b", "messages": [{}]}])
    assert verl.api.listed_rows("train", frame) == [
        {"prompt": ["a"], "answer": 1.0, "at": None, "messages": None},
        {"prompt": "b", "answer": None, "at": None, "messages": [{}]},
    ]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"train": ROWS}, r"one split, such as data\['train'\]"),
        (None, "NoneType"),
        ([{"prompt": "a", "seen": {1, 2}}], "Row 0 .* no form for a set"),
        ([{"prompt": "a"}, {"prompt": "a", "x": [object()]}], "Row 1 .* no form for a object"),
    ],
)
def test_data_of_another_form_are_refused(tiny_llama, tmp_path, data, sentence):
    with pytest.raises(DataError, match=sentence):
        verl.Trainer(tiny_llama, data, length, output_dir=tmp_path)


def test_arrays_at_any_depth_are_lists(tiny_llama, tmp_path):
    rows = [{"prompt": "a", "x": {"y": np.int64(3), "z": np.arange(2)}}]
    file = verl.Trainer(tiny_llama, rows, length, output_dir=tmp_path).loaded.config.data.train_files
    assert json.loads(Path(file).read_text())["extra_info"]["x"] == {"y": 3, "z": [0, 1]}


def test_another_call_in_the_folder_leaves_the_rows_of_a_run(tiny_llama, tmp_path):
    file = Path(verl.Trainer(tiny_llama, ROWS, length, output_dir=tmp_path).loaded.config.data.train_files)
    before = file.read_text()
    verl.Trainer(tiny_llama, ROWS[:2], length, eval_data=ROWS[:2], output_dir=tmp_path)
    assert file.read_text() == before
    assert verl.Trainer(tiny_llama, iter(ROWS), length, output_dir=tmp_path).loaded.config.data.train_files == str(file)


def test_a_closed_trainer_takes_no_step(tiny_llama, tmp_path):
    with verl.Trainer(tiny_llama, ROWS, length, output_dir=tmp_path) as trainer:
        pass
    for call in (trainer.step, trainer.save, trainer.evaluate):
        with pytest.raises(ConfigError, match="The Trainer is closed"):
            call()


def columns_of(completions, **columns):
    return [{"score": len(text), "columns": sorted(columns)} for text in completions]


async def waits(completions, **columns):
    return [2.0] * len(completions)


async def waits_for_one(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5


def one_text(completions):
    return ["1.0" if text == "b" else 1.0 for text in completions]


def one_value(completions):
    return 1.0


def has_a(completions):
    return [float("a" in text) for text in completions]


def _scores(function, texts=("a", "b"), **extra):
    rows = [{"prompt": "p", **extra}] * len(texts)
    scored = score_lists(["d"] * len(texts), texts, [None] * len(texts), rows, functions=[reference_to(function)])
    return [row["score"] for row in scored]


def test_completions_are_the_samples_whatever_the_columns_are_called():
    assert _scores(columns_of, ("aaa",), completions="from the row", prompts="from the row") == [3]
    rows = [verl.api.prompt_row({"prompt": "p", "data_source": "mine", "reward_model": {"ground_truth": 1}}, 0)]
    scored = score_lists(["mine"], ["aaa"], [1], [rows[0]["extra_info"]], functions=[reference_to(columns_of)])
    assert {"data_source", "reward_model"} <= set(scored[0]["columns"])


def test_reward_functions_over_lists_may_be_async():
    assert _scores(waits) == [2.0, 2.0]
    assert _scores(waits_for_one) == [0.5, 0.5]


def test_a_result_that_is_no_number_costs_its_own_sample():
    assert _scores(one_text) == [1.0, "1.0"]
    with pytest.raises(RewardError, match="one_value returned a float for 2 completions"):
        _scores(one_value)


def test_a_text_is_not_looked_for_among_messages():
    assert _scores(has_a) == [1.0, 0.0]
    with pytest.raises(TypeError, match=r"'a' is looked for in a list of messages; .* as completion\[0\]\['content'\]"):
        _scores(has_a, prompt=[{"role": "user", "content": "p"}])


def test_rows_without_a_column_have_none_in_it(tiny_llama, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "7"}]
    trainer = verl.Trainer(tiny_llama, rows, starts, output_dir=tmp_path, config={"data.train_batch_size": 2})
    written = [json.loads(line)["extra_info"] for line in Path(trainer.loaded.config.data.train_files).open()]
    assert [row["answer"] for row in written] == [None, "7"]


def test_columns_are_those_of_all_samples_of_a_batch():
    extras = [{"prompt": "p"}, {"prompt": "p", "answer": "7"}]
    functions = [reference_to(lambda completions, answer: [float(a == "7") for a in answer])]
    assert score_lists(["d"] * 2, ["x"] * 2, [None] * 2, extras, functions=functions) == [
        {"score": 0.0},
        {"score": 1.0},
    ]


def test_a_function_below_the_main_guard_is_called_in_the_process(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text('def top(x): ...\nif __name__ == "__main__":\n    def guarded(x): ...\n')
    module = runpy.run_path(str(script), run_name="__main__")
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(**module))
    assert reference_to(module["top"]) == f"{script}:top"
    assert is_in_process(reference_to(module["guarded"]))


def test_another_lambda_of_the_same_name_is_no_changed_setting(tiny_llama, tmp_path, caplog):
    keys = {"output_dir": tmp_path, "config": DATA}
    for num_steps in (1, 2):
        reward = eval("lambda completions: [1.0] * len(completions)")
        verl.train(tiny_llama, ROWS, reward, trainer={**STEPS, "total_training_steps": num_steps}, **keys)
    (warning,) = [message for message in caplog.messages if "changed settings" in message]
    assert "total_training_steps" in warning
    assert "lambda" not in warning


def test_a_run_stands_for_its_newest_model(tiny_llama, tmp_path):
    run = verl.train(tiny_llama, ROWS, length, output_dir=tmp_path / "run", config=DATA, trainer=STEPS)
    with verl.Trainer(run, ROWS, length, output_dir=tmp_path / "next") as trainer:
        assert trainer.loaded.config.actor_rollout_ref.model.path == str(
            tmp_path / "run/global_step_2/actor/huggingface"
        )
    with pytest.raises(ModelError, match="give .*global_step_2/actor/huggingface"):
        locate(tmp_path / "run")


def test_a_model_in_memory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="model is a object. Give the name or the folder"):
        verl.Trainer(object(), ROWS, length, output_dir=tmp_path)


def half(completions):
    return [0.5] * len(completions)


def test_messages_name_the_functions_that_python_code_passed():
    keys = _reward_keys([half, lambda completions: [1.0] * len(completions)])
    spec = RewardFunctionSpec(
        keys["reward.custom_reward_function.path"], kwargs=keys["reward.custom_reward_function.reward_kwargs"]
    )
    assert spec.label == "half, lambda"
