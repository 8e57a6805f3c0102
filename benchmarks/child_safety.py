"""A run of `verl train` that is held before each step, with or without what keeps it safe; and what that takes of a step."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from as_verb import as_verb
from child import run_held
from workload import Workload

PARTS = ("ledger", "guards", "heartbeat", "determinism")
# limits that no healthy run reaches: the checks are measured
LIMITS = {"grad_norm": 1e9, "policy_kl": 1e9, "ratio": 1e9, "entropy": 1e-9, "mismatch": 2.0}
_WRITER = "ledger"  # name of the thread that writes the file
_SAME = ("actor/grad_norm", "critic/score/mean", "perf/total_num_tokens", "training/next_ordinal")


class Commands(Protocol):
    """See child.Channel."""

    def next(self) -> tuple[str, dict[str, Any]] | None: ...

    def reply(self, result: dict[str, Any] | None = None) -> None: ...


class Account:
    """Seconds that this thread spends inside the functions of each part, from the outermost call to its end, and processor
    seconds of the thread that writes the ledger."""

    def __init__(self, stack: ExitStack):
        self._seconds: dict[str, float] = {}
        self._inside = False
        self._thread = threading.current_thread()
        self._written_s = 0.0
        for part, owner, name in functions():
            stack.enter_context(patch.object(owner, name, self._clocked(part, getattr(owner, name))))

    def begin(self) -> None:
        self._seconds = {part: 0.0 for part, _, _ in functions()}
        self._written_s = _processor_seconds(_WRITER)

    def take(self) -> dict[str, float]:
        """Seconds of each part since `begin`; "ledger's thread" runs parallel to the step, not in it."""
        return {**self._seconds, "ledger's thread": _processor_seconds(_WRITER) - self._written_s}

    def _clocked(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.current_thread() is not self._thread:
                return function(*args, **kwargs)
            self._inside, started = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started

        return call


def functions() -> Iterator[tuple[str, Any, str]]:
    """(part, owner, name) of the functions that a step calls in the ledger, the guards and the heartbeat."""
    from verl.engines import base
    from verl.programs import collect
    from verl.programs import ppo as program
    from verl.programs.guards import Guards
    from verl.roles.step_guard import StepGuard
    from verl.tracking.heartbeat import Heartbeat
    from verl.tracking.ledger.tracker import SampleTracker

    places: dict[str, list[tuple[Any, str]]] = {
        "ledger": [
            (collect, "issued_prompts segments_of scores_of"),
            (program, "keys_of"),
            (SampleTracker, "issue generate score train"),
        ],
        "guards": [
            (Guards, "check_samples check_credit check_updates record"),
            (StepGuard, "start_mini_batch observe __call__ pop_findings"),
            (base, "whole_batch_metrics random_state"),
        ],
        "heartbeat": [(Heartbeat, "phase begin_step")],
    }
    for part, owners in places.items():
        for owner, names in owners:
            yield from ((part, owner, name) for name in names.split())


def _processor_seconds(name: str) -> float:
    """Of the thread of that name, so far; 0 when there is none."""
    found = [thread.ident for thread in threading.enumerate() if thread.name == name and thread.ident]
    return time.clock_gettime(time.pthread_getcpuclockid(found[0])) if found else 0.0


def hold(channel: Commands, work: dict[str, Any], folder: str, extra: Sequence[str], without: Sequence[str]) -> None:
    """Train `work`: a step for each command. The first answer comes when the run is built."""
    from verl_side import overrides_of, write_prompts

    from verl.config import load_config
    from verl.run.host import train
    from verl.run.loop import Loop

    load, place = Workload.from_json(work), Path(folder)
    write_prompts(load, place)
    settings = [
        f"trainer.default_local_dir={place / 'run'}",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        "trainer.save_freq=-1",
        f"trainer.deterministic={'determinism' not in without}",
        *(() if "guards" in without else (f"trainer.guards.{n}.limit={v}" for n, v in LIMITS.items())),
        *extra,
    ]
    whole_step = Loop._step
    with ExitStack() as stack:
        for part in without:
            WITHOUT[part](stack)
        account = Account(stack)
        began = []

        def step(loop: Loop, number: int) -> None:
            if not began:
                began.append(number)
                channel.reply(loop.roles.facts)
            if channel.next() is None:
                raise SystemExit(0)
            account.begin()
            started = time.perf_counter()
            whole_step(loop, number)
            seconds = time.perf_counter() - started
            channel.reply({"step_s": seconds, "parts": account.take(), **_proof(place / "run" / "metrics.jsonl")})

        stack.enter_context(patch.object(Loop, "_step", step))
        train(load_config(overrides_of(load, place, settings)))


def _proof(metrics: Path) -> dict[str, Any]:
    """By which the two sides are seen to have done the same."""
    row = json.loads(metrics.read_text().splitlines()[-1])
    return {name: row[name] for name in _SAME}


# -- parts that a side lacks


def _no_ledger(stack: ExitStack) -> None:
    """A tracker that only counts, and no file."""
    from verl.programs import collect, ppo_program
    from verl.programs import ppo as program
    from verl.tracking.ledger.records import Offset
    from verl.tracking.ledger.tracker import SampleTracker

    class Counting(SampleTracker):
        def issue(self, step: int, prompts: Any, **_: Any) -> None:
            self.num_issued = getattr(self, "num_issued", 0) + len(prompts)

        def generate(self, step: int, segments: Any) -> None: ...

        def score(self, step: int, scores: Any) -> None: ...

        def train(self, step: int, keys: Any) -> None:
            self.offset = Offset(step, self.num_issued)

    for name in ("issued_prompts", "segments_of", "scores_of"):
        stack.enter_context(patch.object(collect, name, lambda rows, *_: rows))
    stack.enter_context(patch.object(program, "keys_of", lambda rows: rows))
    stack.enter_context(patch.object(ppo_program, "SampleTracker", Counting))
    stack.enter_context(patch.object(ppo_program, "start_samples", lambda *_: []))


def _no_guards(stack: ExitStack) -> None:
    from verl.programs.guards import Guards
    from verl.roles.step_guard import StepGuard

    for method in ("check_samples", "check_credit", "check_updates"):
        stack.enter_context(patch.object(Guards, method, lambda *_, **__: None))
    stack.enter_context(patch.object(StepGuard, "observe", lambda *_: {}))
    stack.enter_context(patch.object(StepGuard, "__call__", lambda *_: True))
    stack.enter_context(patch.object(StepGuard, "names", {}))


def _no_heartbeat(stack: ExitStack) -> None:
    from verl.tracking.heartbeat import Heartbeat

    for method in ("start", "phase", "begin_step"):
        stack.enter_context(patch.object(Heartbeat, method, lambda *_: None))


def _no_determinism(stack: ExitStack) -> None:
    """The config says it all."""


WITHOUT: dict[str, Callable[[ExitStack], None]] = {
    "ledger": _no_ledger,
    "guards": _no_guards,
    "heartbeat": _no_heartbeat,
    "determinism": _no_determinism,
}


if __name__ == "__main__":
    raise SystemExit(as_verb(lambda: run_held(hold)))
