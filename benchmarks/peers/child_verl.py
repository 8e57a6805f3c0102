"""The measured process of our side: builds a run once, then takes a step or generates on command."""

import time
from pathlib import Path
from typing import Any

from child import serve
from workload import Workload

from verl.cli.main import run_guarded


class VerlChild:
    """Commands of the parent, by name. torch is imported by the first of them, inside the verb."""

    side: Any = None  # made by `build`
    sent: list[int] = []  # bytes to other processes, in a step

    def build(self, work: dict[str, Any], folder: str, overrides: list[str]) -> dict[str, Any]:
        """A GRPO run on a workload, or a run of SFT or DPO on the rows of a file."""
        from verl_side import RowsSide, VerlSide

        if "trainer" in work:
            self.side = RowsSide(work, Path(folder), overrides)
        else:
            self.side = VerlSide(Workload.from_json(work), Path(folder), overrides)
        return self.side.facts()

    def build_run(self, config: str, overrides: list[str]) -> dict[str, Any]:
        """A run of a shipped config, by names that every revision of verl has."""
        import verl
        from verl.config import load_config
        from verl.trainer import RLTrainer

        self.side = RLTrainer(load_config(overrides, config_name=config)).__enter__()
        return {"package": verl.__path__[0]}

    def build_ranks(self, config: str | None, overrides: list[str], program: str) -> None:
        """A run of a shipped config (None: of defaults) as a rank of several, with a count of the bytes that it sends."""
        from verl.config import SCHEMAS, load_config
        from verl.parallel.traffic import TRAFFIC
        from verl.run.host import SteppedRun

        loaded = load_config(overrides, config_name=config, schema=SCHEMAS[program])
        self.side, add = SteppedRun(loaded, program), TRAFFIC.add
        TRAFFIC.add = lambda seconds, num_bytes: (self.sent.append(num_bytes), add(seconds, num_bytes))[1]

    def step(self) -> dict[str, Any]:
        return self.side.step()

    def step_of_run(self) -> dict[str, Any]:
        self.sent, start = [], time.perf_counter()
        metrics = self.side.step()
        seconds = time.perf_counter() - start
        return {
            "step_s": seconds,
            "generation_s": metrics.get("timing_s/gen"),
            "update_s": metrics.get("timing_s/update_actor", seconds),
            "response_tokens": metrics.get("response_length/mean", 0.0),
            "shortest": metrics.get("response_length/min"),
            "longest": metrics.get("response_length/max"),
            "num_tokens": metrics.get("perf/total_num_tokens"),
            "sent_bytes": sum(self.sent),
        }

    def log_prob_gap(self) -> dict[str, Any]:
        return {"log_prob_gap": self.side.log_prob_gap()}

    def generate(self, step: int) -> dict[str, Any]:
        """The samples of a step's prompts; the clock runs as it does in the other children: token ids in and out."""
        requests, params = self.side.requests(step), self.side.params()
        started = time.perf_counter()
        completions = self.side.generate(requests, params, step)
        seconds, lengths = time.perf_counter() - started, {len(c.token_ids) for c in completions}
        return {"generate_s": seconds, "lengths": sorted(lengths), "num_sequences": len(completions)}


def main(arguments: list[str]) -> int:
    child = VerlChild()
    names = ("build", "build_run", "build_ranks", "step", "step_of_run", "log_prob_gap", "generate")
    serve({name: getattr(child, name) for name in names})
    return 0


if __name__ == "__main__":
    raise SystemExit(run_guarded("measured", main, []))  # the process that the command line makes of itself
