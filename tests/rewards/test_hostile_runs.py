"""Whole runs of `verl train` whose reward function attacks on some rows: each attack costs its samples and nothing else."""

import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest

from tests import letters_task
from tests.processes import is_alive, wait_until
from tests.rewards.attacks import ATTACKS, SIX
from verl.tracking.ledger.reader import Ledger

ROWS = ["", "loop", "fork_bomb", "allocate", "", "ignore_sigterm", "forge", "segfault"]  # what each row's scorer does
NUM_SAMPLES = 2
DEFAULT = -0.5
SECRETS = {
    "WANDB_API_KEY": "planted-for-wandb-0123",
    "HF_TOKEN": "hf_planted0123456789",
    "config": "planted-in-config-99",
}
CHOOSE = """


def of_row(data_source, solution_str, ground_truth, extra_info=None, api_key=None):
    print(dict(os.environ), api_key)
    return globals()[ground_truth]() if ground_truth else 0.25 + len(solution_str) / 100
"""


def overrides(folder, model):
    rows = [
        {
            "data_source": "unit/test",
            "prompt": f"row {row}",
            "reward_model": {"style": "rule", "ground_truth": attack},
            "extra_info": {"index": row},
        }
        for row, attack in enumerate(ROWS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(ATTACKS + CHOOSE)
    return letters_task.overrides(
        model,
        folder,
        "data.val_files=[]",
        f"data.train_batch_size={len(ROWS)}",
        f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={len(ROWS)}",
        "reward.custom_reward_function.name=of_row",
        f"+reward.custom_reward_function.reward_kwargs.api_key={SECRETS['config']}",
        "reward.timeout_s=1",
        "reward.memory_mb=256",
        "reward.max_processes=16",
        f"reward.default_score={DEFAULT}",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={folder}/run",
    )


def marked(folder):
    """Processes of the run in `folder`."""
    pids = []
    mark = b"RUN_OF=" + str(folder).encode() + b"\0"
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                pids += [int(name)] if mark in file.read() else []
        except OSError:
            continue
    return pids


def command_of(folder, model, *more):
    return [sys.executable, "-m", "verl", "train", *overrides(folder, model), *more]


def environment_of(folder, namespaces):
    """RUN_OF marks every process of the run."""
    environment = {**os.environ, **SECRETS, "RUN_OF": str(folder)}
    if not namespaces:
        (folder / "sitecustomize.py").write_text(
            "import verl.rewards.sandbox.launch as launch\nlaunch.namespace_command = lambda *_: ()\n"
        )
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return environment


NAMESPACES = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "none"])


@pytest.mark.slow
@NAMESPACES
def test_a_run_under_all_six_attacks_ends_and_names_every_sample(tiny_llama, tmp_path, namespaces):
    """pytest -m slow tests/rewards/test_hostile_runs.py"""
    ended = subprocess.run(
        command_of(tmp_path, tiny_llama),
        env=environment_of(tmp_path, namespaces),
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert ("grants no PID namespace" in said) != namespaces
    assert wait_until(lambda: not marked(tmp_path)), marked(tmp_path)

    count = NUM_SAMPLES * len([attack for attack in ROWS if attack])
    with Ledger.open(tmp_path / "run") as ledger:
        assert ledger.counts().defaulted == count
        samples = ledger.trained()
    assert sorted((s.row, s.sample) for s in samples) == [(r, s) for r in range(len(ROWS)) for s in range(NUM_SAMPLES)]
    for sample in samples:
        attack = ROWS[sample.row]
        if not attack:
            assert sample.error is None
            assert sample.reward >= 0.25
            continue
        assert sample.reward == DEFAULT
        assert re.search(
            SIX[attack].replace("0.4 s", "1 s") + ("|took longer" if "fork" in attack else ""), sample.error
        )
        assert f"for sample train/{sample.ordinal}/{sample.sample} of data_source" in sample.error
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["reward/num_defaulted"] == count
    logs = "".join(file.read_text() for file in (tmp_path / "run" / "logs").glob("*.log"))
    named = len(re.findall("for sample train/.* it gets the default score -0.5", logs))
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    for secret in SECRETS.values():
        assert secret not in said
        assert [file for file in files if secret.encode() in file.read_bytes()] == []
    assert f"So did {count - named} more samples of this batch." in logs  # the ledger and the samples have them all


@pytest.mark.slow
@NAMESPACES
def test_nothing_is_left_of_a_run_whose_first_process_is_killed(tiny_llama, tmp_path, namespaces):
    """pytest -m slow tests/rewards/test_hostile_runs.py"""
    command = command_of(tmp_path, tiny_llama, "reward.timeout_s=100")
    attack = f"def of_row(**sample):\n    open({str(tmp_path / 'begun')!r}, 'w').close()\n    return ignore_sigterm()\n"
    (tmp_path / "reward.py").write_text(ATTACKS + attack)
    with open(tmp_path / "said", "wb") as said:
        run = subprocess.Popen(command, env=environment_of(tmp_path, namespaces), stdout=said, stderr=said)
    try:
        assert wait_until((tmp_path / "begun").exists, 60), (tmp_path / "said").read_text()
        time.sleep(0.2)  # until a child of it has left its session
        family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
        assert len(family) >= 5  # supervisor, training, reaper or unshare, scorer, child
    finally:
        run.kill()
        run.wait()
    # only root can read the environment of a reaper, by which it is marked
    assert wait_until(lambda: not marked(tmp_path) and not any(map(is_alive, family)), 20), marked(tmp_path)
