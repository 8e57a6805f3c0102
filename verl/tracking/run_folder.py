"""The folder of one run: its files, its lock, and the truncation of records on resume.

config.yaml  metrics.jsonl  samples/{train,val}/step_000012.jsonl  spans.jsonl  timeline.jsonl  logs/  summary.json
tokens.jsonl (their texts)  samples/images/ (their images, small)  notes.md (by the user)  plan.json (see verl plan)
curves.json (metrics worth a curve)  global_step_N/ (see verl.checkpoint)
ledger.sqlite (every sample, see verl/tracking/ledger/reader.py)  guards.jsonl (rejected values)  heartbeat.json
episodes/ (conversations of agents, results of their tools)
events.jsonl (crashes, written by the supervisor)  role_sizes.json (see verl scale)  start.json (see verl/run/state.py)
superseded_*/ (records of earlier runs that were started over)
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import yaml

from verl.config.keys import yaml_loader
from verl.errors import CheckpointError, ConfigError, FolderLostError
from verl.foreign_text import clean
from verl.regular_files import make_folder
from verl.tracking.files import (
    Json,
    each,
    is_metrics_row,
    is_text,
    json_text,
    read_json,
    read_lines,
    read_text,
    truncate_rows,
    write_atomically,
)
from verl.tracking.heartbeat import Heartbeat
from verl.tracking.ledger.file import NAME as LEDGER
from verl.tracking.lock import FolderLock
from verl.tracking.logs import add_log_file, remove_handler
from verl.tracking.pictures import FOLDER as IMAGES
from verl.tracking.pictures import TOKENS

log = logging.getLogger(__name__)

address_of_page = ""  # with the token, for the header of the run that this process starts

_MAX_CONFIG_BYTES = 4 << 20
_PARTS = ("config.yaml", "metrics.jsonl", "samples", "run.lock", "plan.json")  # every run folder has one of them
_KEY_LINE = re.compile(r"^( *)([^\s:#][^:]*):(?: (.*?))?(?:  # (.*))?$")  # of config.yaml
_SAMPLE_FILE = re.compile(r"step_(\d{6,15})\.jsonl")
# system errors after a change of the folder by another program; the command line explains errors of disks and permissions
_CHANGED = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)

Curves = Mapping[str, Mapping[str, str]]  # title of a panel -> metric -> label; the most important panel first


class WrittenKey(NamedTuple):
    """A key of config.yaml: its value as YAML, and the origin of the value; "" for a default."""

    key: str
    value: str
    origin: str


def unwritable(root: Path, error: OSError) -> ConfigError:
    """The sentence about a run folder that cannot be written."""
    fix = "Set trainer.default_local_dir to a folder that can."
    return ConfigError(f"The run folder {root} cannot be written ({error.strerror or error}). {fix}")


class RunFolder:
    """While entered, rank 0 of the run holds the folder, and the log of this process goes to logs/rank_{rank}.log,
    and to `log_dir` too. Ranks above 0 take every step too, and write only their log and stacks."""

    def __init__(self, root: str | Path, rank: int = 0, log_dir: str | None = None):
        self.rank = rank
        self._log_dir = None if log_dir is None else Path(log_dir).expanduser()
        self.root = Path(root).expanduser()
        self.metrics = self.root / "metrics.jsonl"
        self.samples = self.root / "samples"
        self.images = self.samples / IMAGES
        self.tokens = self.root / TOKENS
        self.spans = self.root / "spans.jsonl" if rank == 0 else None
        self.timeline = self.root / "timeline.jsonl"
        self.guards = self.root / "guards.jsonl"
        self.logs = self.root / "logs"
        self.summary = self.root / "summary.json"
        self.curves = self.root / "curves.json"
        self.heartbeat = Heartbeat(self.root, rank, writes=rank == 0)
        self._lock = FolderLock(self.root)
        self._log_handlers: list[logging.Handler] = []

    def __enter__(self) -> RunFolder:
        """Raises ConfigError when the folder cannot be written or another run holds it."""
        try:
            make_folder(self.samples)
            self.logs.mkdir(exist_ok=True)
            if self._log_dir is not None:
                self._log_dir.mkdir(parents=True, exist_ok=True)
            if self.rank == 0:
                self._lock.acquire()
            self.heartbeat.start()
        except OSError as error:
            self._lock.release()
            raise unwritable(self.root, error) from error
        self._log_handlers.append(add_log_file(self.logs, self.rank))
        if self._log_dir is not None:
            self._log_handlers.append(add_log_file(self._log_dir, self.rank))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises the error of the folder that has caused `error`: FolderLostError, CheckpointError for one of its files."""
        try:
            if isinstance(error, OSError | CheckpointError):
                self._explain(error)
        finally:
            while self._log_handlers:
                remove_handler(self._log_handlers.pop())
            self.heartbeat.end(failed=kind is not None)
            self._lock.release()

    def _explain(self, error: OSError | CheckpointError) -> None:
        if not isinstance(error, FolderLostError):
            self._lock.check()
        if (
            isinstance(error, OSError)
            and error.errno in _CHANGED
            and Path(error.filename or "").is_relative_to(self.root)
        ):
            raise CheckpointError(
                f"{error.filename} cannot be read or written ({error.strerror}). Move it away if it is not of this run, and "
                "run the same command again."
            ) from error

    def lost(self) -> str:
        """Reason why this run cannot use the folder any more: it was removed or replaced, or another run has it; "" while it
        can, and always on ranks above 0."""
        try:
            self._lock.check()
        except FolderLostError as error:
            return str(error)
        return ""

    def sample_file(self, split: str, step: int) -> Path:
        """samples/{split}/step_000012.jsonl."""
        return self.samples / split / f"step_{step:06d}.jsonl"

    def require_free_gb(self, wanted_gb: float) -> None:
        """Raises CheckpointError, on rank 0, when the disk of the folder has less than `wanted_gb` (10^9 bytes) free."""
        free_gb = shutil.disk_usage(self.root).free / 1e9
        if self.rank == 0 and free_gb < wanted_gb:
            raise CheckpointError(
                f"The disk of {self.root} has {free_gb:.1f} GB free, less than trainer.min_free_disk_gb={wanted_gb:g}. "
                "Free some space, or set trainer.default_local_dir to another disk."
            )

    def truncate_after(self, step: int, *, same_run: bool = False) -> int:
        """Remove the records after `step`, because those steps run again; returns the number of removed metrics rows. Without
        a step (0) all records are set aside; with `same_run` the results of its tools stay, since its episodes get them
        again. Ranks above 0 do nothing."""
        if self.spans is None:
            return 0
        if step <= 0:
            return self._set_aside(same_run)
        is_own = (self.root / f"global_step_{step}").exists()  # its rows were written before it
        removed = truncate_rows(self.metrics, step, is_metrics_row, complete=is_own or self.metrics.exists())
        truncate_rows(self.spans, step)
        truncate_rows(self.timeline, step)
        splits = [split for split in self.samples.glob("*") if split.is_dir()]
        names = ((split / name, _SAMPLE_FILE.fullmatch(name)) for split in splits for name in os.listdir(split))
        files = [file for file, match in names if match and int(match[1]) > step]
        for file in files:
            file.unlink()
        if removed or files:
            log.info("Removed %d metrics rows and %d sample files written after step %d.", removed, len(files), step)
        return removed

    def write_curves(self, curves: Curves) -> None:
        """Store the metrics that `verl show` and the page display."""
        write_atomically(self.curves, json_text(curves))

    def read_curves(self) -> dict[str, dict[str, str]]:
        """The stored curves; empty without a readable file."""
        try:
            curves = read_json(self.curves, each(each(is_text)))
        except (OSError, ValueError):
            return {}
        return {clean(title): {clean(name): clean(label) for name, label in p.items()} for title, p in curves.items()}

    def read_config(self) -> Json:
        """The config of the run as plain mappings; empty without a readable file."""
        try:
            config = yaml_loader()(read_text(self.root / "config.yaml", _MAX_CONFIG_BYTES)).get_single_data()
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return config if isinstance(config, Mapping) else {}

    def read_keys(self) -> list[WrittenKey]:
        """The keys of config.yaml; none without a readable file."""
        try:
            lines = read_text(self.root / "config.yaml", _MAX_CONFIG_BYTES).splitlines()
        except (OSError, ValueError):
            return []
        parents: list[tuple[int, str]] = []
        keys = []
        for match in filter(None, map(_KEY_LINE.match, lines)):
            indent, name, value, origin = match.groups()
            while parents and parents[-1][0] >= len(indent):
                parents.pop()
            if value:
                path = ".".join([*(parent for _, parent in parents), name.strip()])
                keys.append(WrittenKey(path, value, origin or ""))
            else:
                parents.append((len(indent), name.strip()))
        return keys

    def _set_aside(self, same_run: bool) -> int:
        """Move the records of an earlier run, or of an earlier start of this one, into a new folder; returns the number of
        metrics rows."""
        num_rows = sum(row is not None for _, row in read_lines(self.metrics, is_metrics_row))
        records = (
            self.metrics,
            self.root / "spans.jsonl",
            self.timeline,
            self.tokens,
            self.guards,
            self.summary,
            self.curves,
            self.root / "config.yaml",
            *(self.root / f"{LEDGER}{part}" for part in ("-wal", "-shm", "")),
        )
        old = [path for path in records if path.exists()]
        old += [self.samples] if any(self.samples.glob("*/*")) else []
        episodes = self.root / "episodes"
        if episodes.exists() and not same_run:  # else tools of another run would answer as they did in this one
            old.append(episodes)
        if num_rows or self.samples in old or episodes in old:
            aside = Path(tempfile.mkdtemp(prefix=f"superseded_{time.strftime('%Y%m%d-%H%M%S')}_", dir=self.root))
            for path in old:
                path.rename(aside / path.name)
            self.samples.mkdir(exist_ok=True)
            of = "its last start" if same_run else "an earlier one in this folder"
            log.info("This run starts from its first step: the records of %s are now in %s.", of, aside)
        return num_rows


def run_folders(folder: Path) -> list[Path]:
    """The run in `folder`, else the runs in its folders, by name. Raises ConfigError without one."""
    runs = [] if _is_run(folder) else sorted(filter(_is_run, folder.glob("*/")))
    if not runs:
        require_run_folder(folder)
    return runs or [folder]


def _is_run(folder: Path) -> bool:
    return any((folder / part).exists() for part in _PARTS)


def require_run_folder(folder: Path) -> None:
    """Raise ConfigError if `folder` has nothing of a run."""
    if not _is_run(folder):
        raise ConfigError(
            f"{folder} is not a run folder: it has neither config.yaml nor metrics.jsonl. Give the folder that "
            "trainer.default_local_dir named."
        )
