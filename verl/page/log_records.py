"""The log of a run on its page: the newest records of all ranks in order of time, by rank, level and text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from verl.page.reader import RunReader
from verl.tracking.progress import read_tail

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_NUM_RECORDS = 500
_READ_BYTES = 2 << 20  # of the end of each rank's log
_RECORD = re.compile(rf"(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) ({'|'.join(_LEVELS)}) \d+ (.*)")


class LogLine(NamedTuple):
    time: str
    rank: str  # the name of its file
    level: str
    text: str  # with its further lines


def read_log(file: Path) -> list[LogLine]:
    """The records at the end of a log, oldest first."""
    records: list[LogLine] = []
    for line in read_tail(file, _READ_BYTES).splitlines():
        if match := _RECORD.fullmatch(line):
            records.append(LogLine(match[1], file.stem, match[2], match[3]))
        elif records:
            records[-1] = records[-1]._replace(text=f"{records[-1].text}\n{line}")
    return records


def log_context(run: RunReader, query: Mapping[str, str]) -> dict[str, object]:
    """Events of the supervisor, newest first, and the newest records that match `rank`, `level` (this one and graver ones)
    and `q`, a text in any case."""
    files = {file.stem: file for file in sorted((run.folder / "logs").glob("*.log"))}
    rank, text = query.get("rank", ""), query.get("q", "").casefold()
    level = query["level"] if query.get("level") in _LEVELS else _LEVELS[0]
    graver = _LEVELS[_LEVELS.index(level) :]
    records = sorted(
        record
        for name, file in files.items()
        if rank in ("", name)
        for record in read_log(file)
        if record.level in graver and text in record.text.casefold()
    )
    return {
        "events": list(reversed(run.events)), "ranks": list(files), "levels": _LEVELS, "rank": rank, "level": level,
        "text": query.get("q", ""), "records": records[-_NUM_RECORDS:], "num_records": len(records),
    }  # fmt: skip
