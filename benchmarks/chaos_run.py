"""One run of `verl train` under attack: its command, its processes, the moments at which they are killed, and what it left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from verl.parallel.ancestry import die_with
from verl.tracking.heartbeat import Beat, read_beat
from verl.tracking.ledger import Ledger

_MARK = "VERL_CHAOS_RUN"  # in the environment of every process of a run
_GONE_S = 10.0  # for its last processes to go, once it has ended
LIMIT_S = 180.0  # for a run to come back, and to reach the next moment
ROOT = Path(__file__).resolve().parents[1]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    share = sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
    return {"score": share + 0.1 * len(solution_str), "letters": share}
"""


@dataclass(frozen=True)
class Runtime:
    """`launcher`: arguments of Python before the module; `targets`: what can be killed (see `Victim.find`)."""

    keys: tuple[str, ...]
    targets: tuple[str, ...]
    launcher: tuple[str, ...] = ()


_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1000")
_ONE = ("supervisor", "driver", "driver", "reward worker", "any")
RUNTIMES = {
    "local": Runtime((), _ONE),
    "async": Runtime(
        ("actor_rollout_ref.rollout.prefetch_num=2", "actor_rollout_ref.rollout.partial_rollout=True"), _ONE
    ),
    "torchrun": Runtime((), ("launcher", "driver", "rank", "rank", "reward worker", "any"), _TORCHRUN),
    "ray": Runtime(
        ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2"),
        ("supervisor", "driver", "rank", "rank", "node", "reward worker", "any"),
    ),
}
# phases of a step (verl/tracking/spans.py); "start": some time after the kill before, wherever the run is by then
MOMENTS = ("gen", "reward", "update_actor", "update_weights", "save_checkpoint", "any", "start")


class Lost(Exception):
    """The run did not come back; the message ends with the end of its output."""


@dataclass(frozen=True)
class Task:
    """What all runs of a session share."""

    folder: Path
    keys: tuple[str, ...]
    steps: int
    warm: bool


@dataclass(frozen=True)
class Moment:
    step: int
    phase: str
    target: str
    delay_s: float


@dataclass(frozen=True)
class Kill:
    """`back_by`: who brought the run back (itself, supervisor, launcher, hand). `steps_again`: steps taken once more."""

    runtime: str
    run: str
    target: str
    step: int
    phase: str
    back_by: str
    recovered_s: float
    steps_again: int


def make_task(folder: Path, *, steps: int, model: str | None = None, warm: bool = False) -> Task:
    """Write the files of the task, and the keys that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    if model is None:
        from verl.models.tiny import make_tiny_model

        model = str(make_tiny_model(folder / "model"))
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"data_source": "letters", "prompt": [{"role": "user", "content": f"{'x' * (i % 5)} {i}"}],
         "reward_model": {"style": "rule", "ground_truth": str(i)}}
        for i in range(24)
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = (
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder}/train.jsonl",
        f"data.val_files={folder}/train.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=0.002",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.num_workers=2",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=2",
        "trainer.max_restarts=5",
        "trainer.restart_backoff_s=0.05",
    )
    return Task(folder, keys, steps, warm)


def plan(rng: random.Random, runtime: str, count: int, targets: Sequence[str] | None = None) -> list[Moment]:
    """One kill in each of the first `count` steps or so."""
    choices = [t for t in RUNTIMES[runtime].targets if targets is None or t in targets]
    return [
        Moment(
            step, phase := rng.choice(MOMENTS), rng.choice(choices), rng.uniform(0, 8.0 if phase == "start" else 0.1)
        )
        for step in range(1, count + 1)
    ]


class Victim:
    """`verl train` in a run folder of its own, as often as it has to be started."""

    def __init__(self, task: Task, runtime: str, name: str):
        self.task = task
        self.runtime = runtime
        self.folder = task.folder / runtime / name
        self.num_kills = 0
        self._log = self.folder.parent / f"{name}.log"
        self._struck = 0.0
        self.folder.mkdir(parents=True)
        self._start()

    def _start(self) -> None:
        how = RUNTIMES[self.runtime]
        warm = self.task.warm and not how.launcher
        module = [str(Path(__file__).with_name("chaos_warm.py"))] if warm else ["-m", "verl.trainer.main_ppo"]
        keys = [*self.task.keys, *how.keys, f"trainer.default_local_dir={self.folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        environment[_MARK] = str(self.folder)
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *how.launcher, *module, *keys],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )  # fmt: skip

    # -- looking ------------------------------------------------------------------------------------------------------

    def beat(self) -> Beat | None:
        """What the run does; None while no process of it that has begun is alive."""
        beat = read_beat(self.folder)
        return beat if beat is not None and beat.phase != "ended" and psutil.pid_exists(beat.pid) else None

    def find(self, target: str, rng: random.Random) -> psutil.Process | None:
        """A living process of that kind; None when there is none at the moment."""
        root = psutil.Process(self._process.pid)
        below = root.children(recursive=True)
        beat = self.beat()
        own = {beat.pid} if beat is not None else {p.pid for p in root.children()[:1]}
        found = {
            "supervisor": [root],
            "launcher": [root],
            "driver": [p for p in below if p.pid in own],
            "rank": [p for p in below if _says(p, "RankProcess") or (p.ppid() == root.pid and p.pid not in own)],
            "node": [p for p in below if _says(p, "raylet/raylet") or _says(p, "gcs_server")],
            "reward worker": [p for p in below if _says(p, "verl.rewards.")],
            "any": below,
        }[target]
        return rng.choice(found) if found else None

    # -- killing ------------------------------------------------------------------------------------------------------

    def strike(self, moment: Moment, rng: random.Random) -> Kill | None:
        """Wait for the moment, kill, and wait until the run is where it was; None when it has ended well before that. Raises
        Lost when it does not come back."""
        self._wait_for(moment)
        time.sleep(moment.delay_s)
        if self._process.poll() == 0:
            return None
        target, process = moment.target, None
        with contextlib.suppress(psutil.NoSuchProcess):
            process = self.find(target, rng)
            if process is None:
                target, process = "any", self.find("any", rng)
        before = self.beat() or Beat(0, "", 0, "starting", 0.0)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._struck = time.monotonic()
        self.num_kills += 1
        by, first = self._come_back(before)
        took_s = time.monotonic() - self._struck
        again = 0 if by == "itself" or first is None else max(before.step - first + 1, 0)
        return Kill(self.runtime, self.folder.name, target, before.step, before.phase, by, took_s, again)

    def _wait_for(self, moment: Moment) -> None:
        """Until the run is in the phase of the step, or two steps on: the phase may be too short to be seen."""
        until = time.monotonic() + LIMIT_S
        while moment.phase != "start" and self._process.poll() != 0:
            beat = self.beat()
            if beat is not None and beat.step >= moment.step:
                if moment.phase in (beat.phase, "any") or beat.step > moment.step + 1:
                    return
            if not self._alive_or_started():
                return
            self._check(until, f"step {moment.step} was not reached")
            time.sleep(0.001)

    def _come_back(self, before: Beat) -> tuple[str, int | None]:
        """(who brought it back, the first step that was then taken)."""
        by, first, until = "itself", None, time.monotonic() + LIMIT_S
        while True:
            if self._process.poll() == 0:
                return by, first
            if not self._alive_or_started():
                by = "hand"
            beat = self.beat()
            if beat is not None and beat.pid != before.pid:
                by = self._restarter() if by == "itself" else by
                first = beat.step if first is None and beat.step else first
                if beat.step >= max(before.step, 1):
                    return by, first
            elif beat is not None and beat.step > before.step:
                return by, first
            self._check(until, "it did not come back")
            time.sleep(0.002)

    def _restarter(self) -> str:
        return "launcher" if RUNTIMES[self.runtime].launcher else "supervisor"

    def _alive_or_started(self) -> bool:
        """False when the command had ended with an error, and was run again."""
        if self._process.poll() in (None, 0):
            return True
        self._start()
        return False

    def to_the_end(self) -> None:
        """Wait for a good end of the run."""
        until = time.monotonic() + LIMIT_S
        while self._process.poll() != 0:
            if not self._alive_or_started() and not self.num_kills:
                raise Lost(f"it failed without a kill: {self._last_words()}")
            self._check(until, "it did not end")
            time.sleep(0.02)

    def _check(self, until: float, what: str) -> None:
        if time.monotonic() > until:
            raise Lost(f"{what} within {LIMIT_S:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-8:])

    def end(self) -> None:
        """End what is still there of the run."""
        for process in self.left_over():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def left_over(self) -> list[psutil.Process]:
        """Processes that were started by a process of the run."""
        return [p for p in psutil.process_iter() if _is_of(p, str(self.folder))]

    def left_in_the_end(self) -> list[psutil.Process]:
        """Those that are still there some seconds after the end."""
        until = time.monotonic() + _GONE_S
        while (left := self.left_over()) and time.monotonic() < until:
            time.sleep(0.1)
        return left


def differences(victim: Victim, alone: Victim) -> list[str]:
    """In what the two runs differ, and what the first has left behind; nothing is what should be."""
    wrong = []
    ours, theirs = (_tensors(v.folder / f"global_step_{v.task.steps}") for v in (victim, alone))
    if ours != theirs or not ours:
        names = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
        wrong.append(f"weights differ: {', '.join(names[:5]) or 'there are none'}")
    if (trained := _trained(victim.folder)) != (wanted := _trained(alone.folder)):
        wrong.append(
            f"{(trained - wanted).total()} samples trained that should not, {(wanted - trained).total()} did not"
        )
    if left := victim.left_in_the_end():
        wrong.append(f"{len(left)} processes are left: {' '.join(left[0].cmdline())[:200]}")
    return wrong


def _tensors(checkpoint: Path) -> dict[str, str]:
    """Digest of every file of tensors in a checkpoint."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {str(f.relative_to(checkpoint)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _trained(folder: Path) -> Counter[Any]:
    with Ledger.open(folder) as ledger:
        return ledger.multiset_of_trained()


def _is_of(process: psutil.Process, folder: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == folder
    except psutil.Error:
        return False


def _says(process: psutil.Process, word: str) -> bool:
    try:
        return word in " ".join(process.cmdline())
    except psutil.Error:
        return False
