"""Trackio, the local-first tracker of Hugging Face; TRACKIO_SPACE_ID sends the run to a Space."""

import os

from verl.tracking.sinks.api import Sink, columns_and_cells


class TrackioSink(Sink):
    package = extra = "trackio"

    def start(self) -> None:
        import trackio

        self.run = trackio.init(
            project=self.info.project,
            name=f"{self.info.experiment}-{self.run_id()}",  # Trackio resumes by it
            config=self.info.config,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow",
        )

    def table(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        import trackio

        columns, cells = columns_and_cells(rows)
        self.run.log({name: trackio.Table(columns=columns, data=cells)}, step=step)
