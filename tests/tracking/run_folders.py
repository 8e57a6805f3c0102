"""Damage to the files of a run folder, and the results of a resumed run and of `verl show`."""

import io
import json
import logging
import math
import os
import shutil
import sqlite3
from contextlib import closing, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from tests.checkpoint.damage import append, cut, delete, flip, one_file, swap, zero_block
from tests.damage import ODD_TEXTS, parent_of, places, put_no_file
from tests.tracking.sample_lives import issue, open_tracker, segment, take_step
from verl.checkpoint.store import CheckpointStore
from verl.cli.main import run_guarded
from verl.cli.show import show
from verl.config import TrainerConfig
from verl.manifest import MANIFEST, record_of, write_manifest
from verl.programs.ppo_program import OpenSamplesWriter, PPOProgram
from verl.run.state import Resume, RunState
from verl.tracking.files import append_rows, read_metrics, write_atomically
from verl.tracking.heartbeat import EVENTS
from verl.tracking.ledger.file import NAME
from verl.tracking.ledger.reader import Ledger, snapshot
from verl.tracking.ledger.tracker import start_ledger
from verl.tracking.progress import read_progress
from verl.tracking.run_folder import RunFolder
from verl.tracking.timeline import Spans, Timeline

STEPS = 3  # of them the last is after the checkpoint


def make_run(root: Path) -> None:
    """A run of three steps that was killed; its checkpoint is of the second, with open samples."""
    with RunFolder(root) as folder:
        folder.write_curves({"reward": {"reward": "training"}})
        (root / "config.yaml").write_text("data: {train_batch_size: 2}\ntrainer: {test_freq: 1}\n")
        (folder.logs / "rank_0.log").write_text("2026-01-01 00:00:00,000 WARNING 7 verl.x: slow\n")
        tracker, _ = open_tracker(root / NAME)
        timeline = Timeline(folder.timeline, STEPS, spans={"gen": ("rollout", "rollout")})
        spans = Spans(folder.spans, timeline=timeline, heartbeat=folder.heartbeat)
        for step in range(1, STEPS + 1):
            spans.begin_step(step)
            issue(tracker, step, [step + 1], n=2)
            tracker.generate(step, [segment(step + 1, sample) for sample in range(2)])
            if step == 1:
                take_step(tracker, step, [0])
                issue(tracker, step, [1], n=2)
                tracker.generate(step, [segment(1, sample) for sample in range(2)])
            else:
                take_open(tracker, step, [step - 1])
            with spans("gen"):
                pass
            append_rows(folder.metrics, [{"step": step, "time": 1.0, "reward": step / 3, "timing_s/gen": 0.1}])
            file = folder.sample_file("train", step)
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, '{"step": 1}\n')
            if step == STEPS - 1:
                state = {
                    **RunState(step, 2.5, 100, {"val/reward": 0.5}).state_dict(),
                    "weight_version": step,
                    "kl_controller": {"value": 0.1},
                    "samples": tracker.commit(),
                }
                CheckpointStore(root).save(step, {"samples": OpenSamplesWriter(tracker)}, state)
            spans.write(step)
        tracker.close()
        event = {"time": 5.0, "event": "restarted", "step": 2, "phase": "gen", "cause": "SIGKILL", "from": None}
        append_rows(root / EVENTS, [event])


def take_open(tracker, step, ordinals):
    """Score and train samples that were generated before."""
    from tests.tracking.sample_lives import scored

    keys = [(ordinal, sample) for ordinal in ordinals for sample in range(2)]
    tracker.score(step, [scored(*key) for key in keys])
    tracker.train(step, keys)


@dataclass
class Start:
    """The outcome of a start in a run folder."""

    code: int = 70
    said: str = ""
    warned: list[str] = field(default_factory=list)
    state: tuple = ()


def start(root: Path) -> Start:
    """Resume as the host does, without models, and show the run."""
    result, stderr = Start(), io.StringIO()

    def work(_):
        result.state = _resume(root)
        show(read_progress(root), Console(file=io.StringIO(), width=100))
        return 0

    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: result.warned.append(record.getMessage())
    logger = logging.getLogger("verl")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(heard)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        with redirect_stderr(stderr):
            result.code = run_guarded("train", work, [])
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
        logger.propagate = propagates
    result.said = stderr.getvalue()
    return result


def _resume(root: Path) -> tuple:
    """All inputs of a resumed run: step, state, ledger, and the records that it keeps."""
    with RunFolder(root) as folder:
        store = CheckpointStore(root)
        resume = Resume(
            TrainerConfig(), folder=folder, broadcast=lambda value: value, state_schema=PPOProgram.state_schema,
            state=RunState(), store=store,
        )  # fmt: skip
        saved = resume._find("auto", math.inf)
        path, values = (None, None) if saved is None else (Path(saved[0]), saved[1])
        step = 0 if values is None else values["step"]
        waiting = start_ledger(root / NAME, path, (values or {}).get("samples")).waiting
        folder.truncate_after(step)
        content = [(s.ordinal, s.sample, s.attempt, s.step, s.split, s.limit, s.prompt) for s in waiting]
        parts = [
            (p.tokens.tobytes(), p.log_probs.tobytes(), p.version, p.finish_reason, p.rank, p.source)
            for s in waiting
            for p in s.segments
        ]
        with Ledger.open(root) as ledger:
            trained = ledger.multiset_of_trained()
        steps = [row["step"] for row in read_metrics(folder.metrics)]
        return values, snapshot(root / NAME).offset, content, parts, trained, steps


# -- damage -----------------------------------------------------------------------------------------------------------


def replace(rng, root):
    one_file(rng, root).write_text(rng.choice(ODD_TEXTS))


def not_a_file(rng, root):
    """Replace a file, or a file that a run may make, by something else."""
    new = [
        "run.lock", "heartbeat.json", f"{NAME}-wal", f"{NAME}-journal", f"{NAME}-shm", f".{NAME}.tmp", "guards.jsonl",
        "summary.json", "samples/train/step_000009.jsonl", "logs/rank_1.log", "global_step_9", ".global_step_3.tmp-1",
        "latest_checkpointed_iteration.txt", f".metrics.jsonl.{os.getpid()}.tmp",
    ]  # fmt: skip
    file = root / rng.choice(new) if rng.random() < 0.4 else one_file(rng, root)
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    put_no_file(rng, file, ("folder", "pipe", "loop", "nowhere", "other", "device"), one_file(rng, root))


def edit_value(rng, root):
    """Another value in a JSON file; rows of one are JSON too."""
    file = rng.choice([p for p in sorted(root.rglob("*.json*")) if p.is_file()])
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = rng.randrange(len(lines))
    document = json.loads(lines[number])
    path = rng.choice([p for p in places(document) if p])
    odd = [None, -7, 1e300, 10**400, "text", "\ud800\x1b[2J", [], {}, True, [[1]], -(10**30)]
    parent_of(document, path)[path[-1]] = rng.choice(odd)
    lines[number] = json.dumps(document)
    file.write_text("\n".join(lines) + "\n")


def forge_state(rng, root):
    """A trainer_state.json with digests that are right."""
    folder = root / f"global_step_{STEPS - 1}"
    file = folder / "trainer_state.json"
    state = json.loads(file.read_text())
    place = rng.choice([state, state["samples"], state["kl_controller"]])
    key = rng.choice(sorted(place))
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = rng.choice([None, -1, -(10**30), 10**30, 0.5, "two", [], {}, True, "\ud800", float("nan")])
    file.write_text(json.dumps(state))
    names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST]
    (folder / MANIFEST).unlink()
    write_manifest(folder, STEPS - 1, {name: record_of(folder / name) for name in names})


def edit_ledger(rng, root):
    """A cell, a row or a table of the ledger."""
    with closing(sqlite3.connect(root / NAME)) as db:
        tables = ["about", "samples", "segments", "steps"]
        table = rng.choice(tables)
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        (row,) = rng.choice(db.execute(f"SELECT rowid FROM {table}").fetchall())
        value = rng.choice([None, -1, 2**62, 0.5, "text", b"\0\1", "é" * 9])
        try:
            if (kind := rng.random()) < 0.7:
                db.execute(f"UPDATE {table} SET {rng.choice(columns)} = ? WHERE rowid = ?", (value, row))
            elif kind < 0.85:
                db.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))
            else:
                db.execute(
                    rng.choice([f"DROP TABLE {table}", f"ALTER TABLE {table} ADD COLUMN more", "CREATE TABLE more (x)"])
                )
        except sqlite3.IntegrityError:
            db.execute("DELETE FROM samples")
        db.commit()


def lose(rng, root):
    """A folder, or everything of a kind."""
    kind = rng.choice(
        [f"global_step_{STEPS - 1}", "samples", "logs", "metrics.jsonl", NAME, "latest_checkpointed_iteration.txt"]
    )
    for path in root.glob(f"{kind}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


KINDS = (flip, cut, append, zero_block, replace, delete, swap, not_a_file, edit_value, forge_state, edit_ledger, lose)


def outcome(rng, template: Path, root: Path, expected: tuple) -> tuple[str, str]:
    """(kind of damage, outcome) of a copy of `template`: "whole" (it resumes as it would have), "refused" in a sentence,
    "noticed" by a warning, or "other numbers" of seconds and the KL weight that a run could have saved, with digests that are
    right. Raises AssertionError for what passes in silence, and for an error that is no sentence."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    kind = rng.choice(KINDS)
    kind(rng, root)
    result = start(root)
    name = kind.__name__
    assert "bug in verl" not in result.said, f"{name}: {result.said}"
    assert "Traceback" not in result.said, f"{name}: {result.said}"
    if result.code:
        assert result.said.strip().count("\n") == 0, f"{name}: {result.said}"
        return name, "refused"
    if result.state == expected:
        return name, "whole"
    if kind is forge_state and result.state[1:] == expected[1:]:
        free = ("seconds", "first_validation", "kl_controller")
        assert all(result.state[0][name] == value for name, value in expected[0].items() if name not in free)
        return name, "other numbers"
    assert result.warned, (
        f"{name}: the run resumes with something else, in silence: {result.state} instead of {expected}"
    )
    return name, "noticed"


def cases(rng, count, folder):
    """(kind of damage, outcome) of `count` folders of a killed run that is resumed and shown."""
    make_run(folder / "template")
    shutil.copytree(folder / "template", folder / "run")
    expected = start(folder / "run").state
    for _ in range(count):
        yield outcome(rng, folder / "template", folder / "run", expected)
