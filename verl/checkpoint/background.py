"""Saves during training: the state is copied, threads write the copies, and errors are raised at a later step.

    step N      every role copies its state (the only wait) and starts to write it into the store's new folder
    meanwhile   a role that has finished leaves `.saved-ROLE.json` there, with its records or its error;
                the process that holds the store waits for all of them, then commits like a synchronous save
    later       `check` and `finish` raise the error of the save; the next save waits for this one

Roles may run in other processes. They report through the folder, so training needs no further calls.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from verl.checkpoint.files import read_document, remove_tree, write_json
from verl.checkpoint.retention import clean_up
from verl.checkpoint.role import RoleCheckpoint
from verl.checkpoint.store import CheckpointStore
from verl.errors import CheckpointError, DeadlineError, VerlError
from verl.manifest import FileRecord

log = logging.getLogger(__name__)

_POLL_S = 0.02
_STALLED_S = 30.0  # a run that ends early abandons a save that has written nothing for this long
_NICENESS = 5  # of writing threads: training has priority if cores are few


@runtime_checkable
class BackgroundWriter(Protocol):
    """Writes one folder of a checkpoint during training."""

    def num_bytes(self) -> int:
        """Bytes of the tensors to write."""
        ...

    def begin(self, folder: Path) -> None:
        """Copy the state, start to write it to `folder` and return; see `RoleSave`."""
        ...

    def end(self, timeout_s: float) -> None:
        """Wait until this writer has finished."""
        ...


class RoleSave:
    """Writes `role` to the new folder `folder` on a thread, and reports the outcome to the store's process."""

    def __init__(self, role: RoleCheckpoint, folder: Path):
        self.folder = folder
        self._thread = threading.Thread(target=self._run, args=(role,), name=f"save {folder.name}", daemon=True)
        self._thread.start()

    def end(self, timeout_s: float) -> None:
        """Wait for the thread. Raises DeadlineError."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(f"Writing {self.folder} has not ended within {timeout_s:g} s. Check the disk.")

    def _run(self, role: RoleCheckpoint) -> None:
        _lower_priority()
        write_and_report(role, self.folder)


def write_and_report(role: RoleCheckpoint, folder: Path) -> None:
    """Write `role` to the new folder `folder`, and its records or its error to a file next to it."""
    try:
        records = role.write(folder)
        outcome: dict[str, object] = {"records": {name: asdict(record) for name, record in records.items()}}
    except OSError as error:
        outcome = {"errno": error.errno, "error": error.strerror or str(error)}
    except Exception as error:  # noqa: BLE001 - often no caller waits for this; every error must reach the store
        outcome = {"error": str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"}
    if "error" in outcome:
        log.error("The %s of %s was not saved: %s", folder.name, folder.parent, outcome["error"])
        with contextlib.suppress(OSError):
            remove_tree(folder)  # makes room for the report on a full disk
    with contextlib.suppress(OSError):  # without a report the store's deadline ends the save
        part = folder.with_name(f".saved-{folder.name}.part")
        write_json(part, outcome, "The outcome of a save")
        os.replace(part, _report_of(folder))


class BackgroundStore:
    """`store` with saves that return once the state is copied. A save may take `timeout_s` seconds, including the end of the
    save before it."""

    def __init__(self, store: CheckpointStore, timeout_s: float):
        self.store = store
        self.root = store.root
        self.timeout_s = timeout_s
        self._writers: list[BackgroundWriter] = []
        self._thread: threading.Thread | None = None
        self._error: VerlError | None = None
        self._step = 0
        self._folder = self.root

    def find(self, resume_mode: str = "auto", resume_from_path: str | None = None, **limit: float) -> Path | None:
        """See CheckpointStore; waits for the save in progress."""
        self.finish()
        return self.store.find(resume_mode, resume_from_path, **limit)

    def save(self, step: int, roles: Mapping[str, Any], trainer_state: Mapping[str, object]) -> Path:
        """Copy the state of all roles and start to write it; returns the future path of the checkpoint. A role that is no
        BackgroundWriter is written at once. Raises CheckpointError for the save before, or when the disk is full."""
        started = time.monotonic()
        self.finish()
        if (waited := time.monotonic() - started) > 1.0:
            log.warning(
                "Step %d waited %.1f s for checkpoint %d: saves take longer than the steps between them.",
                step,
                waited,
                self._step,
            )
        num_bytes = sum(role.num_bytes() for role in roles.values())
        state = json.loads(json.dumps(trainer_state, default=_reject))
        self._step = step
        with self.store.explained(step, num_bytes):
            folder = self._folder = self.store.open(step, num_bytes)
            written = {}
            for name, role in roles.items():
                if isinstance(role, BackgroundWriter):
                    self._writers.append(role)
                    role.begin(folder / name)
                else:
                    written[name] = role.write(folder / name)
        awaited = [name for name in roles if name not in written]
        self._thread = threading.Thread(
            target=self._commit,
            args=(folder, step, num_bytes, awaited, written, state),
            name=f"checkpoint {step}",
            daemon=True,
        )
        self._thread.start()
        return self.store.path(step)

    def check(self) -> None:
        """Raises CheckpointError when a save failed since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the save in progress. Raises CheckpointError when it failed, DeadlineError when it does not end."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.end(self.timeout_s)
        if self._thread is not None:
            self._thread.join(self.timeout_s)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"Checkpoint {self._step} has not been written to {self.root} within {self.timeout_s:g} s "
                    "(trainer.call_timeout_s). Check the disk."
                )
            self._thread = None
            # a role that was still writing when the save failed may have prevented the removal of its folder
            clean_up(self.root)
        self.check()

    def close(self) -> None:
        """End of the run, perhaps by an error: wait while the save makes progress. Calls no other process."""
        size, since = -1, time.monotonic()
        deadline = since + self.timeout_s
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.5)
            if (now := _bytes_in(self._folder)) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > _STALLED_S:
                log.error("Checkpoint %d is abandoned: nothing of it was written for %.0f s.", self._step, _STALLED_S)
                break
        if self._error is not None:
            log.error("%s", self._error)

    def _commit(
        self,
        folder: Path,
        step: int,
        num_bytes: int,
        awaited: list[str],
        records: dict[str, dict[str, FileRecord]],
        state: Mapping[str, object],
    ) -> None:
        _lower_priority()
        try:
            with self.store.explained(step, num_bytes):
                deadline = time.monotonic() + self.timeout_s
                for name in awaited:
                    records[name] = _records_of(folder / name, deadline, self.timeout_s)
                self.store.commit(folder, step, records, state)
        except VerlError as error:
            self._error = error
        except Exception as error:  # in a thread it would be lost; the next step of the run raises it
            self._error = CheckpointError(f"Checkpoint {step} failed with {type(error).__name__}: {error}.")
            log.exception("Checkpoint %d failed.", step)
        else:
            log.info("Checkpoint %d is complete.", step)


def _reject(value: object) -> object:
    raise CheckpointError(f"The trainer's state cannot be saved as JSON: it holds a {type(value).__name__}.")


def _report_of(folder: Path) -> Path:
    return folder.with_name(f".saved-{folder.name}.json")


def _records_of(folder: Path, deadline: float, timeout_s: float) -> dict[str, FileRecord]:
    """The records of the writer of `folder`, once it has finished. Raises its error."""
    report = _report_of(folder)
    while not report.exists():
        if not report.parent.exists():
            raise CheckpointError(f"{report.parent} was removed while a checkpoint was written to it.")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"The process that writes {folder} has not finished within {timeout_s:g} s (trainer.call_timeout_s). Check "
                "that process and the disk."
            )
        time.sleep(_POLL_S)
    outcome = read_document(report)
    remove_tree(report)
    if outcome.get("errno") is not None:
        raise OSError(outcome["errno"], outcome["error"])
    if "error" in outcome:
        raise CheckpointError(f"Saving the {folder.name} failed: {outcome['error']}")
    return {name: FileRecord(**record) for name, record in outcome["records"].items()}


def _lower_priority() -> None:
    """Give the training threads priority; on Linux every thread has its own."""
    with contextlib.suppress(OSError, AttributeError):
        thread = threading.get_native_id()
        usual = os.getpriority(os.PRIO_PROCESS, thread)  # a run that was started with `nice` has another than 0
        os.setpriority(os.PRIO_PROCESS, thread, usual + _NICENESS)


def _bytes_in(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return 0
