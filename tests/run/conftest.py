"""A tiny training run in this process: `tiny_run("key=value", ...)`."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.letters_task import write_task

# numbers that hold when the machine is slower or faster: everything else in a metrics row must repeat exactly
CLOCKED = ("timing_s/", "timing_per_token_ms/", "perf/", "rollout/seconds", "time", "rollout/kv_cache_bytes")


@dataclass
class Run:
    folder: Path

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def repeatable(self) -> list[dict]:
        return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in self.rows]

    def training_rows(self) -> list[dict]:
        return [row for row in self.rows if row["step"] > 0]


@pytest.fixture(scope="module", autouse=True)
def quick(no_pictures):
    """Of many runs none is looked at."""


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory):
    """Folder with train.jsonl (24 rows), val.jsonl (4 rows) and reward.py."""
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def tiny_overrides(tiny_llama, tiny_task):
    """Overrides of a GRPO run of 4 prompts x 4 samples a step in float32."""
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={tiny_llama}",
        f"data.train_files={tiny_task}/train.jsonl",
        f"data.val_files={tiny_task}/val.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=0.002",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={tiny_task}/reward.py",
        "reward.num_workers=1",
        "trainer.logger=[file]",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
    ]


def merge(base: list[str], changes: tuple[str, ...]) -> list[str]:
    """`base` with the overrides of `changes` put in place of those for the same key."""
    taken = {c.split("=", 1)[0].lstrip("+") for c in changes}
    return [b for b in base if b.split("=", 1)[0] not in taken] + list(changes)


@pytest.fixture
def tiny_run(tiny_overrides, tmp_path):
    from verl.config import load_config
    from verl.run.host import train

    def run(*changes: str, folder: str = "run") -> Run:
        where = tmp_path / folder
        overrides = merge([*tiny_overrides, f"trainer.default_local_dir={where}"], changes)
        assert train(load_config(overrides)) == 0
        return Run(where)

    return run
