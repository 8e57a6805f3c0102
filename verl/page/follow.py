"""Incremental reading of a growing file of JSON lines."""

from __future__ import annotations

import contextlib
import os
import time
from math import inf
from pathlib import Path
from typing import Any

from verl.regular_files import open_regular
from verl.tracking.files import Check, parse_line

_CHUNK_BYTES = 1 << 20


class Follower:
    """The rows of a file of `append_rows`, read as they are appended. A line without its end is read when it has one.

    `num_damaged` counts the lines that are no rows. `is_replaced`: the last `read` found the file replaced or cut, as
    on resume, and has read its rows from the start.
    """

    def __init__(self, path: Path, check: Check):
        self.path = path
        self.is_replaced = False
        self.num_damaged = 0
        self._check = check
        self._offset = self._size = 0
        self._identity: tuple[int, int] | None = None

    @property
    def share_read(self) -> float:
        """The part of the file that was read, from 0 to 1; a line without its end counts as read."""
        return 1.0 if self._size - self._offset < _CHUNK_BYTES else self._offset / self._size

    def read(self, deadline: float = inf) -> list[dict[str, Any]]:
        """The rows since the last call, read until `deadline` (time.monotonic), so perhaps not all of a large file; none when
        the file is missing or cannot be read."""
        rows: list[dict[str, Any]] = []
        self.is_replaced = False
        with contextlib.suppress(OSError), os.fdopen(open_regular(self.path), "rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self.is_replaced = self._identity is not None
                self._identity, self._offset, self.num_damaged = identity, 0, 0
            self._size = status.st_size
            file.seek(self._offset)
            while lines := file.readlines(_CHUNK_BYTES):
                for line in lines:
                    if not line.endswith(b"\n") or time.monotonic() > deadline:
                        return rows
                    self._offset += len(line)
                    row = parse_line(line, self._check)
                    if row is None:
                        self.num_damaged += 1
                    else:
                        rows.append(row)
        return rows
