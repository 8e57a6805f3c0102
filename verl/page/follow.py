"""Incremental reading of a growing file of JSON lines, and the rows of one step in it."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.regular_files import open_regular
from verl.tracking.files import Check, even_segments, lines_of, parse_line

_NEAR_BYTES = 1 << 16  # so much is read in order once the bisection is that near


class Follower:
    """The rows of a file of `append_rows`, read as they are appended. A line without its end is read when it has one.

    `num_damaged` counts the lines that are no rows. `is_replaced`: the last `read` found the file replaced or cut, as
    on resume, and has read its rows from the start. `is_partial`: some rows were left out, see `read`.
    """

    def __init__(self, path: Path, check: Check):
        self.path = path
        self.is_replaced = self.is_partial = False
        self.num_damaged = 0
        self._check = check
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def read(self, limit: int = sys.maxsize) -> list[dict[str, Any]]:
        """The rows since the last call; where these have more than `limit` bytes, rows at evenly spaced places. None when the
        file is missing or cannot be read."""
        rows: list[dict[str, object]] = []
        self.is_replaced = False
        with contextlib.suppress(OSError), os.fdopen(open_regular(self.path), "rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._offset:
                self.is_replaced = self._identity is not None
                self._identity, self._offset, self.num_damaged, self.is_partial = identity, 0, 0, False
            segments = even_segments(self._offset, status.st_size, limit)
            self.is_partial |= len(segments) > 1
            for line, end in lines_of(file, segments):
                if not line.endswith(b"\n"):
                    break
                self._offset = end
                row = parse_line(line, self._check)
                if row is None:
                    self.num_damaged += 1
                else:
                    rows.append(row)
        return rows


def rows_of_step(path: Path, step: int, check: Check) -> list[dict[str, Any]]:
    """The rows of `step` in a file whose rows have growing steps; none when it is missing. The place is bisected, so a file of
    any length costs a few reads."""
    rows: list[dict[str, object]] = []
    with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as file:

        def read_from(start: int) -> Iterator[dict[str, Any]]:
            parsed = (parse_line(line, check) for line, _ in lines_of(file, [(start, sys.maxsize)]))
            return (row for row in parsed if row is not None)

        low, high = 0, os.fstat(file.fileno()).st_size
        while high - low > _NEAR_BYTES:  # the rows of `step` begin behind `low`
            middle = (low + high) // 2
            row = next(read_from(middle), None)
            low, high = (middle, high) if row is not None and row["step"] < step else (low, middle)
        upwards = itertools.takewhile(lambda row: row["step"] <= step, read_from(low))
        rows = [row for row in upwards if row["step"] == step]
    return rows
