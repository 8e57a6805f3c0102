"""Trackio, the local-first tracker of Hugging Face; TRACKIO_SPACE_ID sends the run to a Space."""

from __future__ import annotations

import os
from typing import Any

from verl.tracking.sinks.api import RunInfo, Sink, require_package


class TrackioSink(Sink):
    def __init__(self, info: RunInfo):
        require_package("trackio", "trackio", "trackio")
        self.info = info
        self._run: Any = None

    def start(self) -> None:
        import trackio

        self._run = trackio.init(
            project=self.info.project,
            name=self.info.experiment,
            config=self.info.config,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            resume="allow",
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
