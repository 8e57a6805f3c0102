"""MLflow: MLFLOW_TRACKING_URI, or its own default store. A resumed run continues the same MLflow run."""

import json
import re
from collections.abc import Iterator, Mapping

from verl.tracking.sinks.api import Sink


class MlflowSink(Sink):
    package = extra = "mlflow"

    def start(self) -> None:
        import mlflow

        self.run = mlflow
        mlflow.set_experiment(self.info.project)
        tag, run_id = "verl.run_id", self.run_id()
        runs = mlflow.search_runs(filter_string=f"tags.`{tag}` = '{run_id}'", output_format="list")
        if runs:
            mlflow.start_run(run_id=runs[0].info.run_id)
            return  # MLflow refuses a second value of a parameter
        mlflow.start_run(run_name=self.info.experiment, tags={tag: run_id})
        # MLflow's limits: length of a value, size of a batch
        params = [(_name(k), json.dumps(v, default=str)[:500]) for k, v in _leaves(self.info.config)]
        for start in range(0, len(params), 100):
            mlflow.log_params(dict(params[start : start + 100]))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.run.log_metrics({_name(k): v for k, v in metrics.items()}, step=step)

    def table(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        self.run.log_dict({"rows": json.loads(json.dumps(rows, default=str))}, f"{_name(name)}_step_{step}.json")

    def close(self) -> None:
        if self.run is not None:
            self.run.end_run()


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """("trainer.save_freq", 20), ... of a nested config."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _name(name: str) -> str:
    """A name of characters that MLflow allows; `mean@16` becomes `mean_at_16`."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))
