"""A tiny training run in this process: `tiny_run("key=value", ...)`."""

import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.json_lines import read_lines
from tests.letters_task import merge, overrides, write_task

# numbers that hold when the machine is slower or faster: everything else in a metrics row must repeat exactly
CLOCKED = ("timing_s/", "timing_per_token_ms/", "perf/", "rollout/seconds", "rollout/last_group/", "time", "rollout/kv")


@dataclass
class Run:
    folder: Path

    @property
    def rows(self) -> list[dict]:
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def repeatable(self) -> list[dict]:
        return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in self.rows]

    def training_rows(self) -> list[dict]:
        return [row for row in self.rows if row["step"] > 0]

    def samples_of(self, step: int = 1, split: str = "train") -> list[dict]:
        file = self.folder / f"samples/{split}/step_{step:06d}.jsonl"
        return read_lines(file)


def row_overrides(model, train, val):
    """Overrides of fine-tuning, preferences and reward models on the files `train` and `val`: 4 rows a step in float32."""
    return [
        f"model.path={model}",
        f"data.train_files={train}",
        f"data.val_files={val}",
        "data.train_batch_size=4",
        "engine.dtype=float32",
        "optim.lr=0.002",
        "trainer.logger=[file]",
    ]


def train_run(folder, base, changes=(), program="ppo"):
    """The Run of a program with the overrides `base` and `changes`, in the new `folder`."""
    from verl.config import PPO, SCHEMAS, load_config
    from verl.run.host import train

    settings = merge([*base, f"trainer.default_local_dir={folder}"], changes)
    assert train(load_config(settings, schema=SCHEMAS.get(program, PPO)), program) == 0
    return Run(folder)


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory):
    """Folder with train.jsonl (24 rows), val.jsonl (4 rows) and reward.py."""
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def tiny_overrides(tiny_llama, tiny_task):
    """Overrides of a GRPO run of 4 prompts x 4 samples a step in float32."""
    return overrides(tiny_llama, tiny_task)


@pytest.fixture
def tiny_run(tiny_overrides, tmp_path):
    return lambda *changes, folder="run": train_run(tmp_path / folder, tiny_overrides, changes)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """`shared_run(base, *changes)`: the Run of a program that tests of a module only read; equal ones are trained once."""

    @functools.cache
    def trained(base, changes, program):
        return train_run(tmp_path_factory.mktemp("shared") / "run", base, changes, program)

    return lambda base, *changes, program="ppo": trained(tuple(base), changes, program)


def broken_off(run, *settings, stop, **more):
    """(a run of `settings` that ends after step `stop` and is gone on with, the same run unbroken); `run` trains."""
    unbroken = run(*settings, folder="unbroken", **more)
    run(*settings, f"trainer.total_training_steps={stop}", folder="broken", **more)
    return run(*settings, folder="broken", **more), unbroken


@pytest.fixture
def batches(around):
    """The batch of every step of PPO, with the columns that were made for it."""
    from verl.programs.ppo import PPO

    trained = []
    around(PPO, "_step_result", lambda result_of, self, step: trained.append(step.batch) or result_of(self, step))
    return trained


@pytest.fixture(scope="module")
def theirs(cases, tmp_path_factory):
    """TRL's log of every one of the module's `cases`: one process, because its imports take longer than the steps."""
    from tests.run.trl_oracle import trl_logs

    return trl_logs(cases, tmp_path_factory.mktemp("trl"))
