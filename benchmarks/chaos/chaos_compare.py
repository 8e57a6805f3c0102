"""Comparison of the folders of two runs of the same work: only times may differ."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from chaos_task import PROMPTS, SAMPLES, Task
from chaos_tools import CALLS
from safetensors.numpy import load_file

from verl.agents.journal import FOLDER, TOOL, read
from verl.tracking.ledger.reader import Ledger

_OF_A_RUN = ("manifest.json", "trainer_state.json", "ledger.sqlite")  # files in which a run is named, or times are


def differences(task: Task, ours: Path, theirs: Path) -> list[str]:
    """Differences between the run folders `ours` and `theirs`."""
    wrong = []
    digests, reference = (checkpoint_digests(folder / f"global_step_{task.steps}") for folder in (ours, theirs))
    if names := sorted(n for n in digests.keys() | reference.keys() if digests.get(n) != reference.get(n)):
        wrong.append(f"the last checkpoint differs in {', '.join(names[:5])}")
    if not any("optimizer" in name for name in digests):
        wrong.append("the last checkpoint has no state of an optimizer")
    state, expected = (_state(folder / f"global_step_{task.steps}", task) for folder in (ours, theirs))
    wrong += [f"the trainer's {k} is {state.get(k)}, not {v}" for k, v in expected.items() if state.get(k) != v]
    trained, meant = trained_samples(task, ours), trained_samples(task, theirs)
    if trained != meant:
        wrong.append(
            f"{(trained - meant).total()} samples trained that should not, {(meant - trained).total()} did not"
        )
    if task.program.has_ledger:
        with Ledger.open(ours) as ledger, Ledger.open(theirs) as other:
            if ledger.pending() != other.pending():
                wrong.append(f"{len(ledger.pending())} samples are open, not {len(other.pending())}")
    if (steps := [row["step"] for row in _metrics(ours)]) != list(range(1, task.steps + 1)):
        wrong.append(f"metrics.jsonl has the steps {steps}")
    wrong += [f"{path.name} is left" for path in sorted(ours.glob(".global_step_*"))]
    return wrong


def repeated_calls(ours: Path, theirs: Path, num_kills: int) -> list[str]:
    """Differences between the tool calls of `ours`, a run with `num_kills` kills, and of `theirs`. A result is recorded once.
    A call that a kill cut before its result was recorded is made again; each of the two tool processes has at most one."""
    calls, expected = (Counter((folder / CALLS).read_text().split()) for folder in (ours, theirs))
    wrong = [f"{(expected - calls).total()} calls of the tool were not made"] if expected - calls else []
    if (more := (calls - expected).total()) > 2 * num_kills:
        wrong.append(f"{more} calls of the tool were made again after {num_kills} kills")
    recorded = Counter(
        (record["split"], record["episode"], record["call"], record["digest"])
        for file in sorted((ours / FOLDER).glob("*.jsonl"))
        for record in read(file)
        if record["kind"] == TOOL
    )
    if twice := [key for key, count in recorded.items() if count > 1]:
        wrong.append(f"{len(twice)} calls of the tool have several results: {twice[0]}")
    return wrong


def idleness(task: Task, folder: Path) -> list[str]:
    """Reasons why the run folder is no reference for another: samples or weights that should have trained and have not."""
    wrong = []
    expected = task.steps * (PROMPTS * SAMPLES if task.program.has_ledger else 1)
    if (count := trained_samples(task, folder).total()) != expected:
        wrong.append(f"{count} samples trained instead of {expected}")
    before = load_file(next(task.model.glob("*.safetensors")))
    after = load_file(folder / f"global_step_{task.steps}" / task.program.role / "huggingface" / "model.safetensors")
    trains = [name for name in before.keys() & after.keys() if not name.startswith("mtp.")]  # a head that only drafts
    same = [name for name in trains if np.array_equal(before[name], after[name])]
    if same or not after:
        wrong.append(f"these weights have not changed: {', '.join(sorted(same)[:3])}")
    return wrong


def checkpoint_digests(checkpoint: Path) -> dict[str, str]:
    """Of every file that the roles have written: weights, optimizer, schedule, model config."""
    files = sorted(f for f in checkpoint.rglob("*") if f.is_file() and f.name not in _OF_A_RUN)
    return {str(f.relative_to(checkpoint)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def trained_samples(task: Task, folder: Path) -> Counter[Any]:
    """The samples of the ledger; of a program without one, the loss and the gradient norm of each step."""
    if not task.program.has_ledger:
        rows = _metrics(folder)
        return Counter((row["step"], row["train/loss"], row["train/grad_norm"]) for row in rows)
    with Ledger.open(folder) as ledger:
        return ledger.multiset_of_trained()


def tried_drafts(folder: Path) -> Counter[str]:
    """Drafts that the steps of a run tried and accepted."""
    rows = _metrics(folder)
    names = {"tried": "rollout/num_drafts", "accepted": "rollout/num_accepted_drafts"}
    return Counter({name: int(sum(row.get(metric, 0) for row in rows)) for name, metric in names.items()})


def _state(checkpoint: Path, task: Task) -> dict[str, Any]:
    """The trainer's state without the values that differ between two runs: seconds, name and time of the start, and files of
    keys that killed runs change."""
    changed = {key.partition("=")[0] for key in task.changes}
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state.pop("seconds")
    state.pop("started_at", None)
    state.get("samples", {}).pop("run", None)
    state["inputs"] = {name: digest for name, digest in state.get("inputs", {}).items() if name not in changed}
    return dict(state)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
