"""The scan of a data set: every row examined once, in batches, before the run or during its first steps.

    up to NUM_AT_ONCE rows     by this process, before the run
    more, with `wait`          by forked processes, one for each core, before the run
    more, without              the first NUM_AT_ONCE by this process. The others by a few forked processes of low priority,
                               while the run starts and trains; `poll` raises the error of a bad row

Of n processes each examines every n-th batch, and writes what it has computed to a file. A scan that met no bad row stays in
the user's cache. Batches that a process has left undone are examined by this process.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import numpy as np

from verl.data.row_cache import claim, load_arrays, mapped, read_arrays, save_arrays, write_arrays
from verl.errors import DataError, UnavailableRowError
from verl.parallel.child_processes import die_with

log = logging.getLogger(__name__)

BATCH = 2048  # rows
NUM_AT_ONCE = 8192  # rows
_MAX_WORKERS = 32
_LOW_PRIORITY = 10
_POLL_S = 0.02
_REPORT_S = 5.0  # between two lines about the progress
_STILL_S = 900.0  # without a finished batch

_First = tuple[int, str]  # row, sentence


@dataclass
class BadRows:
    """Bad rows of a scan: the first with a wrong field, the first with an unusable prompt, and for each feature that is not
    available the number of rows that need it, the first of them and its place."""

    bad_fields: _First | None = None
    bad_prompts: _First | None = None
    unavailable: dict[str, tuple[int, int, str]] = field(default_factory=dict)

    def add_error(self, row: int, error: DataError, place: str, *, in_prompt: bool = False) -> None:
        if isinstance(error, UnavailableRowError):
            self.add(BadRows(unavailable={error.feature: (1, row, place)}))
        else:
            first = (row, str(error))
            self.add(BadRows(bad_prompts=first) if in_prompt else BadRows(bad_fields=first))

    def add(self, other: BadRows) -> None:
        """Count the bad rows of another part of the scan."""
        self.bad_fields = min(filter(None, (self.bad_fields, other.bad_fields)), default=None)
        self.bad_prompts = min(filter(None, (self.bad_prompts, other.bad_prompts)), default=None)
        for feature, (count, row, place) in other.unavailable.items():
            before, first, place_of_first = self.unavailable.get(feature, (0, row, place))
            self.unavailable[feature] = (before + count, *min((row, place), (first, place_of_first)))

    def sentences(self, num_rows: int) -> list[str]:
        """One sentence for each unavailable feature, in the order of the rows."""
        return [
            f"{count} of {num_rows} rows, the first {place}: {feature}"
            for feature, (count, _, place) in sorted(self.unavailable.items(), key=lambda entry: entry[1][1])
        ]

    def error(self, num_rows: int) -> DataError | None:
        if self.bad_fields is not None:
            return DataError(self.bad_fields[1])
        if self.unavailable:
            return DataError(" ".join(self.sentences(num_rows)))
        return DataError(self.bad_prompts[1]) if self.bad_prompts is not None else None

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> BadRows:
        """The bad rows that a process has reported."""
        first = {name: tuple(report[name]) if report[name] else None for name in ("bad_fields", "bad_prompts")}
        return cls(**first, unavailable={name: tuple(rows) for name, rows in report["unavailable"].items()})


@dataclass
class ScanPart:
    """Results of a batch of rows: 1-d arrays, a value that JSON can hold, and the bad rows."""

    arrays: dict[str, np.ndarray]
    facts: Any = None
    bad: BadRows = field(default_factory=BadRows)


Examine = Callable[[range], ScanPart]


def scan_rows(
    name: str, num_rows: int, examine: Examine, *, key: Callable[[], str | None], wait: bool = True, forks: bool = True
) -> Scan:
    """Examine `num_rows` rows of the data set `name`. `key` is asked for a large data set. With `wait` the scan has ended when
    this function returns. Without `forks` this process examines all rows. Raises DataError for bad rows."""
    scan = Scan(name, num_rows, examine)
    if num_rows <= NUM_AT_ONCE or not forks or sys.platform != "linux":
        scan.examine_here(num_rows)
        return scan
    scan.key = key()
    if scan.read_cache():
        return scan
    if not wait:
        scan.examine_first()
    descriptor = claim(scan.key, wait=wait)
    if descriptor is None and not wait:
        return scan  # another process of this machine examines the same rows
    try:
        if not scan.read_cache():  # another process has examined them meanwhile
            cores = len(os.sched_getaffinity(0))
            scan.fork(min(cores if wait else max(1, cores // 4), len(scan.batches), _MAX_WORKERS), stops=not wait)
            if wait:
                scan.finish()
    finally:
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)  # the forked processes hold the lock
    return scan


class Scan:
    """The parts of all rows by `examine`, and the bad rows. `name` is the data set, for messages."""

    def __init__(self, name: str, num_rows: int, examine: Examine):
        self.name, self.num_rows, self.examine = name, num_rows, examine
        self.key: str | None = None
        self.batches = batches_of(num_rows)
        self._parts: dict[int, ScanPart] = {}  # by number of the batch
        self._cached: tuple[dict[str, np.ndarray], list[Any]] | None = None
        # set by the processes, for the progress
        self._is_examined = np.frombuffer(mmap.mmap(-1, max(len(self.batches), 1)), np.uint8)[: len(self.batches)]
        self._bad = BadRows()
        self._workers: dict[int, IO[bytes]] = {}  # process -> the file of its parts
        self._started = time.monotonic()
        weakref.finalize(self, _end, self._workers)

    @property
    def runs(self) -> bool:
        return bool(self._workers)

    def results(self) -> tuple[dict[str, np.ndarray], list[Any]]:
        """Of a scan that has ended without a bad row: its arrays, joined, and the facts of each batch."""
        if self._cached is None:
            arrays, facts = self._joined()
            self._cached = {name: np.concatenate(parts) for name, parts in arrays.items()}, facts
        return self._cached

    def examine_here(self, num_rows: int) -> None:
        """Examine the batches of the first rows that are not examined yet. Raises DataError for bad rows."""
        for number, batch in enumerate(self.batches):
            if batch.start < max(num_rows, 1) and number not in self._parts:
                self._add(number, self.examine(batch))
                if self._bad.bad_fields is not None:
                    break  # later rows cannot change the error
        self._raise_bad()

    def examine_first(self) -> None:
        """`examine_here(NUM_AT_ONCE)`, once for all starts: a run may end before its scan. Arrays have a value for each row."""
        key = f"{self.key}.first" if self.key else None
        arrays, facts = self._load(key, NUM_AT_ONCE // BATCH) or ({}, [])
        for number, (rows, fact) in enumerate(zip(self.batches, facts, strict=False)):
            self._add(number, ScanPart({name: array[rows.start : rows.stop] for name, array in arrays.items()}, fact))
        self.examine_here(NUM_AT_ONCE)
        if not facts:
            save_arrays(key, *self._joined())

    def read_cache(self) -> bool:
        """Whether an earlier scan is in the cache; this one has then ended."""
        self._cached = self._load(self.key, len(self.batches))
        return self._cached is not None

    def _load(self, key: str | None, num_batches: int) -> tuple[dict[str, np.ndarray], list[Any]] | None:
        dtypes = {name: array.dtype for name, array in self.examine(range(0)).arrays.items()}
        return load_arrays(key, dtypes, num_batches)

    def fork(self, num_workers: int, *, stops: bool) -> None:
        """Start processes for the remaining batches; with `stops` each ends at its first bad batch, and has a low priority."""
        configured = "TOKENIZERS_PARALLELISM" in os.environ
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else tokenizers warns on standard error
        parent = os.getpid()
        for worker in range(num_workers):
            report = tempfile.TemporaryFile()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread of this process
                pid = os.fork()
            if pid == 0:
                self._work(parent, range(worker, len(self.batches), num_workers), report, stops)
            self._workers[pid] = report
        if not configured:
            del os.environ["TOKENIZERS_PARALLELISM"]

    def poll(self) -> None:
        """Raise DataError for bad rows that are known by now. Without any the scan is cached when it has ended."""
        self._read_reports()
        self._raise_bad()
        if not self._workers:
            self._end_well()

    def finish(self) -> None:
        """Wait for the processes. Raises DataError for bad rows, and for a batch that takes 15 minutes."""
        num_examined, last, reported = -1, time.monotonic(), time.monotonic()
        while self._workers:
            now, count = time.monotonic(), int(self._is_examined.sum())
            if count > num_examined:
                num_examined, last = count, now
            if now - last > _STILL_S:
                self._give_up()
            if now - reported > _REPORT_S and 0 < count < len(self.batches):
                reported, wait = now, (now - self._started) / count * (len(self.batches) - count)
                log.info(
                    "%s: %d%% of the rows are checked, %.0f s left.", self.name, 100 * count // len(self.batches), wait
                )
            self._read_reports()
            time.sleep(_POLL_S)
        self.examine_here(self.num_rows)
        self._end_well()

    def _add(self, number: int, part: ScanPart) -> None:
        self._bad.add(part.bad)
        self._parts[number] = part

    def _joined(self) -> tuple[dict[str, list[np.ndarray]], list[object]]:
        """The parts of each array so far, and the facts, in the order of the batches."""
        parts = [self._parts[number] for number in sorted(self._parts)]
        return {name: [part.arrays[name] for part in parts] for name in parts[0].arrays}, [part.facts for part in parts]

    def _give_up(self) -> None:
        _end(self._workers)
        rows = self.batches[int(self._is_examined.argmin())]
        raise DataError(
            f"{self.name}: the check of rows {rows.start} to {rows.stop - 1} takes longer than {_STILL_S:g} s. Does the chat "
            "template end on each of them?"
        )

    def _read_reports(self) -> None:
        for pid in [pid for pid in self._workers if _has_ended(pid)]:
            with self._workers.pop(pid) as report:
                for arrays, (number, facts, bad) in read_arrays(mapped(report)):
                    self._add(number, ScanPart(arrays, facts, BadRows.of_report(bad)))

    def _end_well(self) -> None:
        if len(self._parts) < len(self.batches):
            log.warning(
                "%s: a process that checked rows has ended early. The rest is checked as it is read.", self.name
            )
            return
        save_arrays(self.key, *self._joined())
        if self.read_cache():
            self._parts.clear()  # a memory map has them
        log.info("%s: all %d rows are checked, in %.0f s.", self.name, self.num_rows, time.monotonic() - self._started)

    def _work(self, parent: int, batches: range, report: IO[bytes], stops: bool) -> None:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with(parent)
            logging.disable()
            os.nice(_LOW_PRIORITY if stops else 0)
            for number in batches:
                if number in self._parts:
                    continue
                part = self.examine(self.batches[number])
                arrays = {name: [array] for name, array in part.arrays.items()}
                write_arrays(report, arrays, [number, part.facts, asdict(part.bad)])
                self._is_examined[number] = 1
                if stops and part.bad.error(self.num_rows):
                    break
            report.flush()
        finally:
            os._exit(0)  # what is left undone says whether all went well

    def _raise_bad(self) -> None:
        if error := self._bad.error(self.num_rows):
            _end(self._workers)
            raise error


def batches_of(num_rows: int) -> list[range]:
    """The rows, cut into batches; an empty batch if there are none."""
    return [range(start, min(start + BATCH, num_rows)) for start in range(0, max(num_rows, 1), BATCH)]


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # waited for elsewhere
        return True


def _end(workers: dict[int, IO[bytes]]) -> None:
    while workers:
        pid, report = workers.popitem()
        report.close()
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):  # it has ended
            continue
