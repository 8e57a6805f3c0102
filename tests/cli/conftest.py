"""A tiny task on disk, and the command line run in this process: `verl("check", ...)` returns (exit code, output)."""

from functools import partial

import pytest

from tests.json_lines import write_lines
from verl.cli.main import main

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""


def make_row(i, **changes):
    row = {
        "data_source": "letters",
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i},
    }
    row.update(changes)
    return {name: value for name, value in row.items() if value is not None}


def write_task(folder):
    """Writes train.jsonl (8 rows), val.jsonl (3 rows) and reward.py."""
    write_lines(folder / "train.jsonl", [make_row(i) for i in range(8)])
    write_lines(folder / "val.jsonl", [make_row(i) for i in range(100, 103)])
    (folder / "reward.py").write_text(REWARD)
    return folder


def overrides_of(task, model, changes=None):
    """The overrides of a run that can start, with `changes`, a dict with dotted keys."""
    settings = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": model,
        "data.train_files": task / "train.jsonl",
        "data.val_files": task / "val.jsonl",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 6,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "reward.custom_reward_function.path": task / "reward.py",
        "reward.num_workers": 1,
        # scorers in processes take longer than the steps
        "reward.debug": not {"trainer.nnodes", "trainer.n_gpus_per_node"} & set(changes or {}),
        "trainer.logger": "[file]",
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": task / "run",
        **(changes or {}),
    }
    return [f"{key}={value}" for key, value in settings.items() if value is not None]


@pytest.fixture
def task(tmp_path):
    """Folder of `write_task`."""
    return write_task(tmp_path)


@pytest.fixture
def overrides(task, tiny_llama):
    """`overrides(changes)`: see `overrides_of`."""
    return partial(overrides_of, task, tiny_llama)


@pytest.fixture
def verl(capsys):
    """`verl(*arguments)`: (exit code, output). `verl.ends(code, *arguments, words=)`: the output; it has these words."""

    def run(*arguments):
        code = main([str(a) for a in arguments])
        said = capsys.readouterr()
        return code, said.out + said.err

    def ends(expected, *arguments, words=()):
        code, said = run(*arguments)
        assert code == expected, said
        assert not [word for word in words if word not in said], said
        return said

    run.ends = ends
    return run
