"""Scorers that attack: each costs its own sample, is named, and leaves no process, no folder and no score of others behind;
and whole runs of `verl train` under such attacks."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap

import psutil
import pytest

from tests import letters_task
from tests.json_lines import read_lines, write_lines
from tests.processes import is_alive, wait_until
from tests.rewards.attacks import ATTACKS, SIX, processes_of, reaper_of
from tests.rewards.test_pool import request
from verl.rewards.sandbox.limits import Limits
from verl.tracking.ledger.reader import Ledger


@pytest.mark.parametrize("attack", SIX)
def test_an_attack_costs_one_sample_and_leaves_nothing(attacked, attack, caplog):
    pool = attacked()
    before, bad, after = pool.score_all([request("0.25"), request(attack), request("0.5")])
    assert (before.score, before.error) == (0.25, None)
    assert (after.score, after.error) == (0.5, None)
    assert bad.score == -0.5
    for words in (SIX[attack], "compute_score", "attacks.py", f"for sample {attack}", "default score -0.5"):
        assert words in bad.error
    assert attack != "fork_bomb" or "is scored by another reward worker" not in caplog.text
    pool.close()
    assert processes_of(os.getpid()) == []


def test_attacks_in_processes_of_their_own(attacked):
    pool = attacked(process_per_sample=True)
    attacks = ("segfault", "fork_bomb", "forge")
    scores = pool.score_all([request(r) for attack in attacks for r in ("0.25", attack)])
    assert [s.score for s in scores] == [0.25, -0.5] * 3
    assert all(SIX[attack] in bad.error for attack, bad in zip(attacks, scores[1::2], strict=True))
    pool.close()
    assert processes_of(os.getpid()) == []


@pytest.mark.slow
def test_the_same_where_the_kernel_grants_no_namespaces(attacked, no_namespaces, caplog):
    """pytest -m slow tests/rewards/test_hostile.py"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = {"port": server.getsockname()[1]}
        (connected,) = attacked(timeout_s=10).score_all([request("connect_from_program", extra_info=port)])
    assert (connected.score, connected.error) == (0.0, None)
    attacks = ("ignore_sigterm", "fork_bomb", "fork_and_leave", "segfault", "forge")
    pool = attacked()
    scores = pool.score_all([request(r) for attack in attacks for r in (attack, "0.5")])
    for attack, bad, after in zip(attacks, scores[::2], scores[1::2], strict=True):
        # of a limit on the clock and one on processes, whichever is seen first
        words = (SIX.get(attack, SIX["fork_bomb"]), *(["took longer"] if "fork" in attack else []))
        assert any(w in bad.error for w in words), bad.error
        assert (after.score, after.error) == (0.5, None)
    pool.close()
    assert len(processes_of(os.getpid())) == 2, "more than the first pool's reaper and scorer"
    assert "grants no PID namespace" in caplog.text
    assert "grants no network namespace" in caplog.text


@pytest.mark.slow
def test_processes_of_their_own_without_namespaces(attacked, no_namespaces):
    """pytest -m slow tests/rewards/test_hostile.py"""
    pool = attacked(process_per_sample=True, timeout_s=2.0)
    attacks = ("poison", "fork_bomb", "fork_and_leave", "forge")
    scores = pool.score_all([request(r) for attack in attacks for r in (attack, "0.5")])
    assert scores[0].score == 0.25
    assert all(bad.score == -0.5 for bad in scores[2::2])
    assert [(after.score, after.error) for after in scores[1::2]] == [(0.5, None)] * 4
    assert len(processes_of(os.getpid())) == 2, "a process of a sample lives on beside reaper and scorer"
    pool.close()
    assert processes_of(os.getpid()) == []


@pytest.mark.slow
def test_a_reaper_that_is_killed_leaves_nothing(attacked, no_namespaces):
    """pytest -m slow tests/rewards/test_hostile.py"""
    pool = attacked(timeout_s=20)
    futures = [pool.submit([request(r)]) for r in ("sleep_beside", "0.5")]
    assert wait_until(lambda: len(processes_of(os.getpid())) == 3)
    first = set(processes_of(os.getpid()))
    os.kill(reaper_of(first), signal.SIGKILL)
    # the cause is unknown: the sample gets a second worker, and it is killed too
    assert wait_until(lambda: len(pids := processes_of(os.getpid())) == 3 and first.isdisjoint(pids))
    os.kill(reaper_of(processes_of(os.getpid())), signal.SIGKILL)
    (killed,), (after,) = (future.result(120) for future in futures)
    assert "ended its process by SIGKILL" in killed.error
    assert after.score == 0.5
    pool.close()
    assert processes_of(os.getpid()) == []


def test_limits_name_their_key(attacked):
    limits = Limits(cpu_s=0.2, max_file_mb=4, max_open_files=64)
    attacks = [request(name) for name in ("write_file", "open_files", "burn")]
    written, opened, burned = attacked(timeout_s=5, limits=limits).score_all(attacks)
    assert "wrote a larger file than reward.max_file_mb allows" in written.error
    assert "opened more files than reward.max_open_files allows" in opened.error
    assert "used more processor time than reward.cpu_s=0.2 s allows" in burned.error


def test_what_a_sample_does_to_its_own_process_does_not_last(attacked):
    pool = attacked(timeout_s=5, process_per_sample=True)
    poisoned, healthy = pool.score_all([request("poison"), request("0.5")])
    assert (poisoned.score, healthy.score) == (0.25, 0.5)
    assert len(processes_of(os.getpid())) == 3, "a process of the first sample lives on beside unshare, sh and scorer"


def test_attackers_end_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "attacks.py").write_text(ATTACKS)
    program = textwrap.dedent(
        f"""
        import time
        from verl.data_proto.samples import ScoreRequest
        from verl.rewards.functions import RewardFunctionSpec
        from verl.rewards.pool import RewardPool
        pool = RewardPool(RewardFunctionSpec({str(tmp_path / "attacks.py")!r}), num_workers=1, timeout_s=99, memory_mb=256)
        pool.start()
        pool.submit([ScoreRequest("1", "s", "ignore_sigterm", "")])
        print("ready", flush=True)
        time.sleep(99)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        assert wait_until(lambda: len(processes_of(parent.pid)) == 4)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_until(lambda: not processes_of(parent.pid))


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
    write_lines(folder / "train.jsonl", rows)
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
        "reward.debug=False",
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
    """pytest -m slow tests/rewards/test_hostile.py"""
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
    (row,) = read_lines(tmp_path / "run" / "metrics.jsonl")
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
    """pytest -m slow tests/rewards/test_hostile.py"""
    command = command_of(tmp_path, tiny_llama, "reward.timeout_s=100")
    attack = f"def of_row(**sample):\n    open({str(tmp_path / 'begun')!r}, 'w').close()\n    return ignore_sigterm()\n"
    (tmp_path / "reward.py").write_text(ATTACKS + attack)
    with open(tmp_path / "said", "wb") as said:
        run = subprocess.Popen(command, env=environment_of(tmp_path, namespaces), stdout=said, stderr=said)
    try:
        assert wait_until((tmp_path / "begun").exists), (tmp_path / "said").read_text()

        def has_left_its_session():
            """Whether there are training, reaper or unshare, scorer, and its child, the leader of a session."""
            children = psutil.Process(run.pid).children(recursive=True)
            newest = max((child.create_time(), child.pid) for child in children)[1]
            return len(children) >= 4 and os.getsid(newest) == newest

        assert wait_until(has_left_its_session)
        family = [run.pid, *(child.pid for child in psutil.Process(run.pid).children(recursive=True))]
    finally:
        run.kill()
        run.wait()
    # only root can read the environment of a reaper with its mark
    assert wait_until(lambda: not marked(tmp_path) and not any(map(is_alive, family))), marked(tmp_path)
