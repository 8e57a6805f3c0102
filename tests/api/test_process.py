"""The process around a run: settings of torch, threads, forks, the current folder and standard input; calls of a session."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import verl
from tests.api.process_states import CALLBACKS, STATES, cases, set_to, trained, trained_in
from tests.api.session_loop import KEYS, take_step
from verl.config import load_config
from verl.errors import ConfigError, DataError, RewardError
from verl.rewards.functions import finished
from verl.run.host import SteppedRun

ROWS = [{"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "advantage": 1.0}]


@pytest.fixture(scope="module")
def clean(tiny_llama, tmp_path_factory):
    return trained(tiny_llama, tmp_path_factory.mktemp("clean"))


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_the_process_changes_no_weight(state, clean, tiny_llama, tmp_path):
    assert trained_in([state], [], False, False, tiny_llama, tmp_path) == clean


@pytest.mark.parametrize("in_reward", [False, True])
def test_what_callbacks_and_rewards_leave_changes_no_weight(in_reward, clean, tiny_llama, tmp_path):
    assert trained_in([], CALLBACKS, in_reward, in_reward, tiny_llama, os.path.relpath(tmp_path)) == clean


def test_random_states_change_no_weight(tmp_path):
    assert dict(cases(random.Random(0), 2, tmp_path))


def test_two_threads_may_start_runs_at_once(clean, tiny_llama, tmp_path):
    weights = {}

    def run(name):
        model = shutil.copytree(tiny_llama, tmp_path / f"model{name}")  # no test has loaded it before
        weights[name] = trained(model, tmp_path / name)

    threads = [threading.Thread(target=run, args=[name]) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert weights == {"a": clean, "b": clean}


def test_a_session_computes_as_in_a_new_process(tiny_llama):
    with verl.Session(tiny_llama, config=KEYS) as session:
        expected = take_step(session)
    with torch.inference_mode(), set_to(torch.set_default_dtype, torch.float64, torch.float32):
        session = verl.Session(tiny_llama, config=KEYS)
        assert take_step(session) == expected
        assert torch.is_inference_mode_enabled()
        session.close()


@pytest.mark.parametrize("call", [lambda s: s.sample(["a"]), lambda s: s.save("x"), lambda s: s.log_probs(ROWS)])
def test_a_closed_session_takes_no_call(call, closed_session):
    with pytest.raises(ConfigError, match="Session is closed"):
        call(closed_session)


@pytest.fixture(scope="module")
def closed_session(tiny_llama):
    with verl.Session(tiny_llama, config=KEYS) as session:
        pass
    return session


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.sample(["a"], n=1.5), "n=1.5 .* whole number"),
        (lambda s: s.sample(["a"], n=0), "n=0 .* whole number"),
        (lambda s: s.sample(["a"], max_tokens=1.5), "max_tokens=1.5 is no whole number"),
        (lambda s: s.sample(["a"], max_tokens=True), "max_tokens=True is no whole number"),
        (lambda s: s.sample([[5] * 500]), "prompt 0: the prompt has 500 tokens"),
        (lambda s: s.log_probs([{**ROWS[0], "prompt_ids": [5] * 500}]), "prompt_ids of row 0 has 500 tokens"),
        (lambda s: s.log_probs([{**ROWS[0], "response_ids": [5] * 90}]), "response_ids of row 0 has 90 tokens"),
    ],
)
def test_numbers_and_lengths_of_a_session_are_checked(call, words, open_session):
    with pytest.raises(DataError, match=words):
        call(open_session)


@pytest.fixture(scope="module")
def open_session(tiny_llama):
    with verl.Session(tiny_llama, config=KEYS) as session:
        yield session


def nested(depth):
    value = "5"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("algorithm", ["grpo", "sft", "preference", "reward_model"])
def test_deep_rows_are_refused(algorithm, tiny_llama, tmp_path):
    with pytest.raises(DataError, match="Row 0 of the data is nested too deep"):
        verl.train(tiny_llama, [{"prompt": "a", "answer": nested(5000)}], algorithm=algorithm, output_dir=tmp_path)


@pytest.mark.parametrize("extra", ["x", [1], 5])
def test_extra_info_is_a_dict(extra, tiny_llama, tmp_path):
    with pytest.raises(DataError, match="Row 0 of the data has .* as 'extra_info'; give a dict"):
        verl.train(tiny_llama, [{"prompt": "a", "extra_info": extra}], output_dir=tmp_path)


def test_two_rewards_of_one_name_are_refused_before_models_load(tmp_path):
    with pytest.raises(RewardError, match="Two reward functions are called '<lambda>'"):
        verl.train("no-model", [{"prompt": "a"}], [lambda completions: [], lambda completions: []], output_dir=tmp_path)


def test_prompts_that_end_like_files_are_prompts(tiny_llama, tmp_path):
    keys = {"data.max_prompt_length": 64, "data.max_response_length": 2}
    prompts = ["Describe train.json", "Explain a.parquet"]
    assert len(verl.generate(tiny_llama, prompts, output_dir=tmp_path, config=keys)) == 2
    with pytest.raises(DataError, match="Give prompts as a list"):
        verl.generate(tiny_llama, "2 + 3?", output_dir=tmp_path, config=keys)


def test_an_async_function_runs_inside_of_a_running_loop():
    async def two():
        await asyncio.sleep(0)
        return finished(one())  # it runs inside of another one

    async def one():
        return asyncio.get_running_loop()

    async def notebook():
        return finished(one()), finished(one()), finished(two())

    first, second, third = asyncio.run(notebook())
    assert first is second is not third
    assert finished(5) == 5


def test_a_function_from_standard_input_is_called_in_the_process():
    script = "from verl.registry import reference_to\ndef f(completions): return []\nprint(reference_to(f))"
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120, check=True
    )  # its __file__ is no file
    assert done.stdout.startswith("in_process:f_")


def test_a_run_that_nobody_closes_is_closed_with_its_object(tmp_path):
    run, closed = SteppedRun(load_config([f"trainer.default_local_dir={tmp_path}"], check=False)), []
    run._stack.callback(closed.append, True)
    del run
    assert closed == [True]


def test_a_trainer_names_its_folder_from_the_root_at_the_call(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = verl.Trainer(tiny_llama, [{"prompt": "a"}], lambda completions: [], output_dir="run")
    assert str(trainer.folder) == trainer.loaded.config.trainer.default_local_dir == f"{tmp_path}/run"


def test_files_are_named_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "pkg"):
        (tmp_path / name).mkdir()
    for name in ("train.json", "score.py"):
        (tmp_path / name).touch()
    config = load_config(
        [
            "actor_rollout_ref.model.path=model", "critic.model.path=Qwen/Qwen3-0.6B",
            "actor_rollout_ref.model.external_lib=pkg",
            "data.train_files=[train.json,org/name:train,'json:train.json@train[:2]']", "data.val_files=~/x.parquet",
            "reward.custom_reward_function.path=score.py", "trainer.default_local_dir=runs/new",
            "algorithm.adv_estimator='score.py:gain'",
        ],
        check=False,
    ).absolute().config  # fmt: skip
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert config.critic.model.path == "Qwen/Qwen3-0.6B"
    assert config.actor_rollout_ref.model.external_lib == "pkg"
    assert config.data.train_files == [
        f"{tmp_path}/train.json", "org/name:train", f"json:{tmp_path}/train.json@train[:2]"
    ]  # fmt: skip
    assert config.data.val_files == "~/x.parquet"
    assert config.reward.custom_reward_function.path == f"{tmp_path}/score.py"
    assert config.trainer.default_local_dir == f"{tmp_path}/runs/new"
    assert config.algorithm.adv_estimator == f"{tmp_path}/score.py:gain"
