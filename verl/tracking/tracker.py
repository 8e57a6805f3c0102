"""Metrics, samples and summary of a run, written to its folder and to the trackers that the user chose."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.config.secrets import hide_values
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import DeadlineError
from verl.foreign_text import clean, printable
from verl.tracking.files import Json, Row, append_rows, json_text, write_atomically
from verl.tracking.pictures import TokenTexts, with_stored_images
from verl.tracking.run_folder import RunFolder
from verl.tracking.sinks.api import Guard, RunInfo, make_sink
from verl.tracking.sinks.file import FileSink
from verl.tracking.summary import Summary

_ROWS, _TOKENS = 64, 1 << 12  # rows and tokens with their text in memory at once; a longer row is alone
# If pandas is installed, pyarrow imports it for conversions of Python's and numpy's values, but not for views of buffers.
_NULL, _COMMA = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 4, 6], np.int32)), pa.py_buffer(b"null, "))


def _parts(rows: Iterable[Json]) -> Iterator[list[Json]]:
    part, num_tokens = list[Json](), 0
    for row in rows:
        part.append(row)
        num_tokens += len(() if (ids := row.get("response_ids")) is None else ids)
        if len(part) == _ROWS or num_tokens >= _TOKENS:
            yield part
            part, num_tokens = [], 0
    yield part


def sample_lines(step: int, rows: Iterable[Json]) -> Iterator[str]:
    """Text of some lines at a time. Flat arrays of a row come last in its line, with float32 numbers as Python writes them; NaN
    and infinities are null."""
    for part in _parts(rows):
        names = dict.fromkeys(name for row in part for name, value in row.items() if _is_flat(value))
        texts: list[list[str]] = [[] for _ in part]
        for name in names:
            chosen = [i for i, row in enumerate(part) if _is_flat(row.get(name))]
            for i, values in zip(chosen, _joined([part[i][name] for i in chosen]), strict=True):
                texts[i].append(f', "{name}": [{values}]')
        heads = (json_text({"step": step, **{n: v for n, v in row.items() if not _is_flat(v)}}) for row in part)
        yield "".join(f"{head[:-1]}{''.join(text)}}}\n" for head, text in zip(heads, texts, strict=True))


def _is_flat(value: object) -> bool:
    return bool(isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "bif")


def _joined(arrays: Sequence[np.ndarray]) -> list[str]:
    """The numbers of each array as JSON, separated by commas."""
    values = np.concatenate(arrays)
    is_real = values.dtype.kind == "f"
    numbers = _view(values.astype(np.float64), np.isfinite(values)) if is_real else _view(values)
    ends = _view(np.cumsum([0, *map(len, arrays)], dtype=np.int32))
    texts = pa.ListArray.from_arrays(ends, pc.fill_null(pc.cast(numbers, pa.string()), _NULL))
    return cast("list[str]", pc.binary_join(texts, _COMMA).to_pylist())


def _view(values: np.ndarray, valid: np.ndarray | None = None) -> pa.Array:
    """`values` for pyarrow, null if `valid` is false."""
    data = np.packbits(values, bitorder="little") if values.dtype == bool else values
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [bits, pa.py_buffer(data)])


log = logging.getLogger(__name__)

Rows = Iterable[dict[str, Any]]
_DEADLINE_S = 600.0  # for the samples of a step: they may be gigabytes
_TABLE_COLUMNS = ("prompt", "response", "ground_truth", "score")


class Behind:
    """Work on a thread behind the step that asked for it. Starts `work`; `name` says what it writes."""

    def __init__(self, work: Callable[[], object], name: str):
        self._name = name
        self._done: Future[object] = Future()
        # a daemon: a disk that hangs must not keep the process alive
        Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def finish(self, timeout_s: float) -> None:
        """Wait for the end. Raises the error of the work, DeadlineError after `timeout_s`."""
        if not wait([self._done], timeout_s).done:
            raise DeadlineError(f"{self._name} not written within {timeout_s:g} s. Check the disk of the run folder.")
        self._done.result()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `finish`, in the thread that waits
            self._done.set_exception(error)


class Tracker:
    """Writes metrics.jsonl, samples/ and summary.json of `folder`, and sends metrics to the trackers in `logger`.

    `console` is the run's Console, and `file` is metrics.jsonl unless VERL_FILE_LOGGER_PATH or VERL_FILE_LOGGER_ROOT names
    another file. With `rollout_data_dir` and `validation_data_dir`, samples are also written there as {step}.jsonl in the
    format of existing releases. `log_val_generations` samples of each validation go to the trackers as a table.

    Raises ConfigError or MissingExtraError at once when a tracker is unknown or not installed.
    """

    def __init__(
        self,
        folder: RunFolder,
        logger: Iterable[str],
        project: str,
        experiment: str,
        config: dict[str, object],
        *,
        rollout_data_dir: str | None = None,
        validation_data_dir: str | None = None,
        log_val_generations: int = 0,
        tokenizer: Tokenizer | None = None,
    ):
        self.folder = folder
        self._texts = None if tokenizer is None else TokenTexts(folder.tokens, tokenizer)
        self.log_val_generations = log_val_generations
        self._dumps = {"train": rollout_data_dir, "val": validation_data_dir}
        info = RunInfo(folder.root, project, experiment, hide_values(config))
        names = [n for n in dict.fromkeys(logger) if n != "console" and (n != "file" or FileSink.is_redirected())]
        sinks = [(name, make_sink(name, info)) for name in names]
        self._guards = [Guard(name, sink) for name, sink in sinks]
        self._writing: Behind | None = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Write one row of metrics to the disk, and queue it for the trackers."""
        row = {clean(name): _number(value) for name, value in metrics.items()}
        append_rows(self.folder.metrics, [{"step": step, "time": round(time.time(), 3), **row}])
        for guard in self._guards:
            guard.log(row, step)

    def samples(self, split: str, step: int, rows: Rows | Callable[[], Rows]) -> None:
        """Write the samples of a step, one dict each; a second call for the same split and step replaces the first. A function
        that makes the rows runs on a thread, and the thread writes them; `flush` and the next call wait for it."""
        self.flush()
        if callable(rows):
            self._writing = Behind(lambda: self._write(split, step, rows()), f"The samples of step {step} were")
        else:
            self._write(split, step, rows)

    def flush(self) -> None:
        """Wait until all samples are on the disk. Raises the error of writing them, DeadlineError for a disk that hangs."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish(_DEADLINE_S)

    def _write(self, split: str, step: int, rows: Rows) -> None:
        file = self.folder.sample_file(split, step)
        file.parent.mkdir(parents=True, exist_ok=True)
        dump = self._dumps.get(split)
        read_again = list(rows) if dump or split == "val" else []
        write_atomically(file, sample_lines(step, self._recorded(read_again or rows)))
        if dump:
            _dump(Path(dump).expanduser(), step, read_again)
        if split == "val" and self.log_val_generations > 0:
            self.validation_table(step, read_again)

    def _recorded(self, rows: Rows) -> Iterator[Json]:
        """The rows of a file of samples, after their tokens and images are on the disk."""
        for part in _parts(rows):
            if self._texts is not None:
                self._texts.record(part)
            yield from (with_stored_images(row, self.folder.images) for row in part)

    def validation_table(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Send some validation samples to the trackers: the same prompts at every step, chosen with a fixed seed."""
        ordered = sorted(rows, key=lambda row: str(row.get("prompt")))
        random.Random(42).shuffle(ordered)
        columns = [c for c in _TABLE_COLUMNS if rows and c in rows[0]]
        chosen = [
            {name: printable(value) if isinstance(value := row.get(name), str) else value for name in columns}
            for row in ordered[: self.log_val_generations]
        ]
        for guard in self._guards:
            guard.table("val/generations", chosen, step)

    def finish(self, summary: Summary) -> None:
        """Write summary.json, after all samples."""
        self.flush()
        write_atomically(self.folder.summary, json_text(summary.to_json(), indent=2) + "\n")

    def close(self) -> None:
        """Wait for samples, and for the trackers to send their queues; each has a deadline."""
        self.flush()
        guards, self._guards = self._guards, []
        for guard in guards:
            guard.close()


class NullOutput:
    """Tracker and Console of ranks above 0: ignores every call."""

    def __enter__(self) -> NullOutput:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _number(value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, int | float) and not isinstance(value, bool) else float(value)


def _dump(folder: Path, step: int, rows: list[Row]) -> None:
    """Write `folder`/{step}.jsonl as existing releases do: input, output, gts, score, step, reward parts."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for row in rows:
        columns = {
            "input": row.get("prompt"),
            "output": row.get("response"),
            "gts": row.get("ground_truth"),
            "score": row.get("score"),
        }
        lines.append(json_text({**columns, "step": step, **(row.get("reward_parts") or {})}) + "\n")
    write_atomically(folder / f"{step}.jsonl", "".join(lines))
