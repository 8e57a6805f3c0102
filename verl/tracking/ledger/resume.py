"""Where a run's ledger begins: new, or taken back to the checkpoint that the run goes on from.

A checkpoint records the offset (step, cursor, number and digest of what has trained) and, where samples are made ahead of
training, a ledger with those that were open. Everything else is in the ledger of the run folder, which must agree with it.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError
from verl.tracking.ledger.book import Offset, Snapshot
from verl.tracking.ledger.file import FIX, NAME, copy, create, holds, run_of, take_back
from verl.tracking.ledger.pieces import snapshot

log = logging.getLogger(__name__)

IN_CHECKPOINT = Path("samples") / NAME


def begin(path: Path, checkpoint: Path | None = None, record: Mapping[str, Any] | None = None) -> Snapshot:
    """What the run begins with; the ledger `path` then ends there. `record` is what `checkpoint` recorded of its samples;
    without a checkpoint a new ledger begins.

    The history is that of the run folder, or else of the folder in which the checkpoint lies. Raises CheckpointError when a
    ledger is damaged, and when the checkpoint's run has a ledger but none that agrees with the record.
    """
    if checkpoint is None:
        _set_aside(path)
        create(path, uuid.uuid4().hex, Offset())
        return snapshot(path)
    if record is None:
        raise CheckpointError(
            f"The checkpoint {checkpoint} has no record of its samples, so it was saved by an earlier version. Go on with "
            "that version, or start afresh with trainer.resume_mode=disable."
        )
    run, offset = str(record["run"]), Offset(**{name: value for name, value in record.items() if name != "run"})
    disagreeing = []
    for place in dict.fromkeys((path.resolve(), checkpoint.parent.resolve() / NAME)):
        if place.exists() and run_of(place) == run:
            if holds(place, offset):
                return _taken(place, path, offset.step)
            disagreeing.append(place)
    if disagreeing:
        raise CheckpointError(
            f"The sample ledger {disagreeing[0]} does not agree with the checkpoint {checkpoint} about what had trained after "
            f"step {offset.step}: one of the two was changed or is of another day. {FIX}"
        )
    log.warning(
        "The sample ledger of the run that saved %s is not there. The run goes on from the checkpoint's own record; what is "
        "lost is the history of the samples up to step %d.", checkpoint, offset.step,
    )  # fmt: skip
    if (checkpoint / IN_CHECKPOINT).exists():
        return _taken(checkpoint / IN_CHECKPOINT, path, offset.step)
    _set_aside(path)
    create(path, run, offset)
    return snapshot(path)


def _taken(source: Path, path: Path, step: int) -> Snapshot:
    """The ledger `path` is now `source`, as it was at the end of `step`."""
    if source.resolve() != path.resolve():
        copied = path.with_name(f".{path.name}.tmp")
        copied.unlink(missing_ok=True)
        copy(source, copied)
        _set_aside(path)
        os.replace(copied, path)
    take_back(path, step)
    return snapshot(path)


def _set_aside(path: Path) -> None:
    """Away with a ledger of another run, under a name of its own if a step of that run had ended."""
    if not path.exists():
        return
    try:
        keep = snapshot(path).offset.step > 0
    except CheckpointError:
        keep = True  # damaged: whoever wants to know what was in it still can
    aside = f"superseded_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}_{path.name}"
    # the journal first: a new file must never be found beside the journal of an old one
    for suffix in ("-wal", "-shm", "-journal", ""):
        file = path.with_name(path.name + suffix)
        if file.exists():
            if keep:
                file.rename(path.with_name(aside + suffix))
            else:
                file.unlink()
