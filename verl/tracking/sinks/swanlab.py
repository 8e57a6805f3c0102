"""SwanLab: SWANLAB_API_KEY, SWANLAB_MODE and SWANLAB_LOG_DIR are its own; offline without a key. A resumed run continues."""

import os

from verl.tracking.sinks.api import Sink


class SwanlabSink(Sink):
    package = extra = "swanlab"

    def start(self) -> None:
        import swanlab

        if os.environ.get("SWANLAB_API_KEY"):
            swanlab.login(os.environ["SWANLAB_API_KEY"])
        swanlab.init(
            project=self.info.project,
            experiment_name=self.info.experiment,
            id=self.run_id(),
            resume="allow",
            config=self.info.config,
            logdir=os.environ.get("SWANLAB_LOG_DIR") or str(self.info.root / "swanlab"),
            mode=os.environ.get("SWANLAB_MODE") or ("cloud" if os.environ.get("SWANLAB_API_KEY") else "offline"),
        )
        self.run = swanlab

    def table(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        texts = [
            self.run.Text("\n\n".join(f"{k}: {v}" for k, v in row.items()), caption=f"{i}")
            for i, row in enumerate(rows)
        ]
        self.run.log({name: texts}, step=step)
