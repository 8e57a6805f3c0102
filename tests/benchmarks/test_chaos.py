"""benchmarks/chaos/chaos.py: a run that is killed several times ends like an undisturbed run. Kills are sampled from the
seed and counted, and the runs compared.

    pytest -m "slow or not slow" tests/benchmarks/test_chaos.py
"""

import inspect
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import chaos
import chaos_compare
import chaos_engine
import golden
import psutil
import pytest
import torch
from chaos_compare import differences, idleness
from chaos_run import Kill, Lost, Victim
from chaos_task import PHASES, PROGRAMS, RUNTIMES, Moment, make_task, plan

from tests.json_lines import read_lines
from verl.cli.main import run_verb
from verl.config import load_config
from verl.parallel.child_processes import die_with
from verl.rollout.vllm.core import Core
from verl.run.host import train


def test_the_engine_of_the_harness_has_the_calls_of_the_vllm_core():
    calls = {name: call for name, call in vars(chaos_engine.NativeCore).items() if not name.startswith("_")}
    assert {n: inspect.signature(c) for n, c in calls.items()} == {n: inspect.signature(vars(Core)[n]) for n in calls}


@pytest.fixture
def make(tmp_path, tiny_llama):
    return lambda **settings: make_task(tmp_path, model=str(tiny_llama), **settings)


def left_alone(task):
    """The folder of the same run, in this process."""
    folder = task.folder / "alone"
    assert train(load_config([*task.keys, f"trainer.default_local_dir={folder}"])) == 0
    return folder


def attacked(task, moments, victim):
    """The kills; the run has ended well then, and has left nothing."""
    rng = random.Random(0)
    try:
        kills = [kill for moment in moments for kill in victim.strike(moment, rng)]
        victim.to_the_end()
        assert victim.left_in_the_end() == []
    finally:
        victim.end()
    return kills


class Forked:
    """`verl train` as a fork of this process with torch in its memory; otherwise like a Popen of it."""

    def __init__(self, keys, log):
        parent = os.getpid()
        self.pid, self._code = os.fork(), None
        if self.pid == 0:
            self._train(keys, log, parent)

    def _train(self, keys, log, parent):
        code = 70
        try:
            die_with(parent)
            with log.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = (open(fd, "w", 1, closefd=False) for fd in (1, 2))
            code = run_verb("train", keys, whole_process=True)
        finally:
            os._exit(code)  # nothing of the tests runs here

    def poll(self):
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class ForkedVictim(Victim):
    def launch(self, log):
        return Forked(self.keys(), log)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used CUDA cannot be forked")
def test_a_run_whose_processes_are_killed_equals_the_unbroken_one(make):
    """A reward worker, the process that trains, and the supervisor: all processes end with it, and the command is run again."""
    task = make(steps=8)
    victim = ForkedVictim(task, "local", "killed")
    moments = [
        Moment(1, "any", "reward worker", 0.0),
        Moment(3, "any", "driver", 0.5),
        Moment(5, "any", "supervisor", 0.1),
    ]
    kills = attacked(task, moments, victim)
    assert [(kill.target, kill.back_by) for kill in kills] == [
        ("reward worker", "itself"),
        ("driver", "supervisor"),
        ("supervisor", "hand"),
    ]
    assert all(kill.steps_again <= 6 for kill in kills)
    alone = left_alone(task)
    assert idleness(task, alone) == []
    assert differences(task, victim.folder, alone) == []
    (event,) = read_lines(victim.folder / "events.jsonl")
    assert event["cause"] == "SIGKILL"


@pytest.mark.slow
def test_a_run_whose_supervisor_is_killed(make):
    """It takes all with it, and the command is run again; before, the run is killed twice while it comes back."""
    task = make(steps=12)
    victim = Victim(task, "local", "killed", {"start": 2.0, "save_checkpoint": 0.1})
    kills = attacked(
        task,
        [
            Moment(2, "save_checkpoint", "driver", 0.0, again=0.1, target_again="driver"),
            Moment(6, "any", "supervisor", 0.0),
        ],
        victim,
    )
    assert [kill.back_by for kill in kills] == ["killed again", "supervisor", "hand"]
    assert differences(task, victim.folder, left_alone(task)) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", [name for name, program in PROGRAMS.items() if not program.has_ledger])
def test_kills_of_a_program_on_rows_of_a_file(program):
    """pytest -m slow tests/benchmarks -k rows_of_a_file"""
    assert chaos.main(["--kills", "4", "--kills-per-run", "4", "--program", program, "--runtimes", "local"]) == 0


def test_a_program_without_samples_has_no_runtime_that_generates(capsys):
    with pytest.raises(SystemExit):
        chaos.main(["--program", "preference", "--runtimes", "async"])
    assert "has no runtime async" in capsys.readouterr().err


def test_kills_are_shared_out_and_drawn_from_the_seed():
    usual = [name for name, runtime in RUNTIMES.items() if not runtime.needs]
    assert sum(chaos.shares(usual, 100).values()) == 100
    assert sum(chaos.shares(["torchrun", "ray", "local"], 7).values()) == 7
    assert min(chaos.shares(usual, 100).values()) >= 3
    first, second = (plan(random.Random("1/ray/0"), "ray", 40) for _ in range(2))
    assert first == second
    assert [moment.step for moment in first] == list(range(1, len(first) + 1))
    assert len(first) + sum(moment.again is not None for moment in first) == 40
    assert {m.phase for m in first} == set(PHASES)
    assert {m.target for m in plan(random.Random(0), "ray", 50, ["rank"])} == {"rank"}
    early = [plan(random.Random(seed), "ray", 3, early=0.34) for seed in range(30)]
    assert {moment.step for moments in early for moment in moments} == {1, 2, 4, 5, 6}
    assert [moment.step for moment in plan(random.Random(0), "ray", 9, early=1.0)][:3] == [1, 2, 4]
    assert Moment(1, "gen", "driver", 0.5).delay_s({"gen": 0.2}) == 0.1


def test_a_kill_that_hits_no_living_process_does_not_count(make):
    victim = Victim.__new__(Victim)
    victim.folder = make(steps=1).folder
    ended = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(ended.pid)
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
    assert victim._hit("driver", process) is None
    ended.wait()
    assert victim._hit("driver", process) is None


def test_a_command_that_fails_by_itself_is_not_run_again(make):
    task = make(steps=1)
    task = replace(task, keys=(*task.keys, "trainer.no_such_key=1"))
    victim = Victim(task, "local", "wrong")
    with pytest.raises(Lost, match=r"the command ended by itself with 2: .*no_such_key"):
        victim.to_the_end()


def test_the_report_has_every_target_and_phase():
    kills = [
        Kill("local", "r", "driver", 7, 3, "gen", "killed again", None, None),
        Kill("ray", "r", "rank", 8, 1, "after gen", "hand", 9.0, 0),
    ]
    text = chaos.report(kills)
    for word in ("local: driver", "ray: rank", "by phase", "after gen", "hand", "all"):
        assert word in text
    assert chaos.report([])


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two run folders of two steps that are equal, and what their ledgers say."""
    said = {}
    for name in ("ours", "theirs"):
        saved = tmp_path / name / "global_step_2" / "actor"
        saved.mkdir(parents=True)
        (saved / "model.safetensors").write_bytes(b"weights")
        (saved / "optimizer.safetensors").write_bytes(b"moments")
        state = {"step": 2, "weight_version": 2, "seconds": random.random(), "samples": {"run": name, "cursor": 8}}
        (saved.parent / "trainer_state.json").write_text(json.dumps(state))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        said[name] = SimpleNamespace(trained=Counter({(0, 0, "a"): 2}), pending=[])

    class Told:
        def __init__(self, folder):
            self.said = said[Path(folder).name]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def multiset_of_trained(self):
            return self.said.trained

        def pending(self):
            return self.said.pending

    monkeypatch.setattr(chaos_compare, "Ledger", SimpleNamespace(open=Told))
    return SimpleNamespace(ours=tmp_path / "ours", theirs=tmp_path / "theirs", said=said["ours"])


def write(name, text):
    return lambda pair: (pair.ours / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda pair: None, ""),
        (write("global_step_2/actor/optimizer.safetensors", "x"), "differs in actor/optimizer.safetensors"),
        (write("global_step_2/actor/more.safetensors", "x"), "differs in actor/more.safetensors"),
        (write("metrics.jsonl", '{"step": 1}\n{"step": 1}\n{"step": 2}\n'), r"the steps \[1, 1, 2\]"),
        (write(".global_step_4.tmp", ""), "global_step_4.tmp is left"),
        (
            write("global_step_2/trainer_state.json", '{"step": 2, "weight_version": 3, "seconds": 1, "samples": {"run": ""}}'),
            "weight_version is 3, not 2",
        ),
        (lambda pair: pair.said.pending.append((8, 0)), "1 samples are open, not 0"),
        (lambda pair: pair.said.trained.update({(1, 0, "b"): 1}), "1 samples trained that should not, 0 did not"),
    ],
)  # fmt: skip
def test_what_differs_is_said(folders, change, words):
    change(folders)
    task = SimpleNamespace(steps=2, program=PROGRAMS["ppo"], changes=())
    wrong = "; ".join(differences(task, folders.ours, folders.theirs))
    assert (re.search(words, wrong) is not None) if words else wrong == ""


def test_a_recorded_run_that_changed_is_told():
    recorded = {"metrics": {"1": {"actor/loss": 0.5, "reward": 1.0}}, "checkpoint": {"actor/model": "a"}}
    current = {
        "metrics": {"1": {"actor/loss": 0.5000001, "reward": 1.0, "new": 2.0}},
        "checkpoint": {"actor/model": "b"},
    }
    assert golden.differences(recorded, recorded) == []
    assert golden.differences(recorded, current) == [
        "step 1: actor/loss is 0.5000001, was 0.5",
        "the checkpoint's actor/model differs",
    ]
    metrics = golden.of_the_work({"actor/loss": 1, "timing_s/gen": 2, "perf/throughput": 3})
    assert metrics == {"actor/loss": 1}
