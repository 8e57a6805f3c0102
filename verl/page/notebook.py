"""A run for notebooks: `verl.Run("runs/first")`."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from markupsafe import Markup

from verl.errors import CheckpointError, MissingExtraError
from verl.page.index import SampleIndex, parsed_row
from verl.page.reader import RunReader
from verl.page.tables import polyline
from verl.regular_files import open_regular
from verl.tracking.files import Row
from verl.tracking.ledger.file import NAME as LEDGER
from verl.tracking.ledger.file import connect_read_only, explained
from verl.tracking.progress import says_nothing
from verl.tracking.trained import TrainedRun

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = (
    "ordinal, sample, attempt, epoch, data_row, issued_step, scored_step, ended_step, reward, fate, uses, error, split"
)


class Run(TrainedRun):
    """A run folder, running or ended; read each time that it is asked. Raises ConfigError when it is none.

    Data frames need pandas (the extra `pandas`).
    """

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        self._reader = RunReader(self.folder, self.folder.resolve().name)

    def metrics(self) -> pd.DataFrame:
        """One row per step (the index) and one column per metric; NaN if a step lacks one."""
        self._reader.refresh(0)
        rows = self._reader.metric_rows()
        return _pandas().DataFrame(rows).set_index("step") if rows else _pandas().DataFrame()

    def samples(self, step: int | None = None, split: str = "train") -> pd.DataFrame:
        """The samples of a step, or of all steps, with every column of their files."""
        files = SampleIndex.files_of(self.folder)
        rows: list[Row] = []
        for name, number in sorted(files):
            if name == split and step in (None, number):
                with open(open_regular(files[name, number]), encoding="utf-8", errors="replace") as stream:
                    rows += [row for line in stream if (row := parsed_row(line)) is not None]
        return _pandas().DataFrame(rows)

    def timeline(self) -> pd.DataFrame:
        """One row per step (the index): `seconds`, and the seconds of each phase."""
        self._reader.refresh(0)
        rows = [{"step": r["step"], "seconds": r["seconds"], **r["phases"]} for r in self._reader.timeline]
        return _pandas().DataFrame(rows).set_index("step") if rows else _pandas().DataFrame()

    def ledger(self) -> pd.DataFrame:
        """One row per attempt at a sample. Raises CheckpointError without a readable ledger."""
        path = self.folder / LEDGER
        if not path.is_file():
            raise CheckpointError(f"There is no sample ledger {path}: only PPO and its family keep one.")
        with explained(path), closing(connect_read_only(path)) as db:
            db.row_factory = sqlite3.Row
            rows = [
                dict(row) for row in db.execute(f"SELECT {_COLUMNS} FROM samples ORDER BY ordinal, sample, attempt")
            ]
        return _pandas().DataFrame(rows)

    def summary(self) -> Row:
        """status, step, total_steps, newest value of each metric, and the phase that bounds the run with its advice."""
        run = self._reader
        run.refresh(0)
        bound = run.bottleneck()
        return {
            "status": run.status, "step": run.step, "total_steps": run.total_steps, "problems": run.problems,
            "metrics": {name: series.last for name, series in run.metrics.items()},
            "bottleneck": bound.name if bound else None, "advice": bound.advice if bound else [],
        }  # fmt: skip

    def __repr__(self) -> str:
        self._reader.refresh(0)
        return f"Run({str(self.folder)!r}): {self._reader.status} at step {self._reader.step}"

    def _repr_html_(self) -> str:
        """For Jupyter: state, and the curves that the program names."""
        run = self._reader
        run.refresh(0)
        head = Markup("<b>{}</b> {} at step {}{}").format(
            run.key, run.status, run.step, f" of {run.total_steps}" if run.total_steps else ""
        )
        names = {
            n: f"{title}, {label}".rstrip(", ") for title, panel in run.curves.items() for n, label in panel.items()
        }
        cells = [
            Markup('<td style="padding:4px 12px"><small>{}</small><br>{}<br><b>{:.4g}</b></td>').format(
                label, _sparkline(run.metrics[name].values), run.metrics[name].last
            )
            for name, label in names.items() if name in run.metrics and not says_nothing(name, run.metrics[name].values)
        ]  # fmt: skip
        return f"{head}<table><tr>{''.join(cells[:8])}</tr></table>"


def _sparkline(values: Sequence[float]) -> Markup:
    return Markup(
        '<svg width="122" height="28" viewBox="0 0 100 20"><polyline points="{}" fill="none" stroke="#0b57b7"/></svg>'
    ).format(polyline(values))


def _pandas() -> ModuleType:
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("A data frame of a run", "pandas", "pandas") from None
    return cast("ModuleType", pandas)
