"""The update phase with and without samples whose advantages are all zero, on the same sampled batches of one run.

    python benchmarks/skip_rows.py                        # the main job: 1 step to warm up, then 4
    python benchmarks/skip_rows.py --steps 8 --ours actor_rollout_ref.actor.fsdp_config.dtype=float32

Every batch is sampled once and trains twice from the same weights and optimizer state: all samples, and those with an
advantage. Which comes first changes from step to step; the run continues from the second. Gradients of both are compared
outside the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from as_verb import as_verb
from peer_env import ROOT
from report import Report, number, series_of

from verl.data_proto.future import Finished
from verl.roles.objectives.policy import all_rows, rows_with_advantage

MODES = {"all samples": False, "without zero advantages": True}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        default=ROOT / "verl/config/yaml/grpo_smollm2.yaml",
        help="the job, a file of `verl train`",
    )
    add("--ours", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the job")
    add("--steps", type=int, default=4, help="measured steps (after one to warm up)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)


class Gradients:
    """A step check that keeps the gradients of the whole mini-batch and refuses the step."""

    names: dict[str, str] = {}

    def __init__(self, engine: Any):
        self.engine = engine
        self.found: dict[str, Any] = {}

    def __call__(self, figures: Any) -> bool:
        masters = self.engine.optimizer.masters
        self.found = {name: p.grad.clone() for name, p in masters.items() if p.grad is not None}
        return False


def gradients_of(actor: Any, batch: Any, rows: Any) -> dict[str, Any]:
    """Gradients of the first mini-batch, without a step."""
    mini = batch.select_idxs(actor.schedule.rows(len(batch), 0)[0])
    check = Gradients(actor.engine)
    actor.objective.start_mini_batch(0, 0)
    actor.engine.train_batch(
        mini, actor.objective, actor.objective.outputs, actor.spec.micro, actor.spec.temperature, check, rows=rows(mini)
    )
    actor.objective.pop_observed()
    return check.found


def largest_gap(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of an element, relative to the largest element of `b`."""
    scale = max(float(tensor.abs().max()) for tensor in b.values())
    return max(float((a[name] - b[name]).abs().max()) for name in b) / scale if scale else 0.0


def copied(engine: Any) -> Any:
    """The engine's state, which later steps do not change."""
    state = engine.state()
    return replace(
        state,
        model={name: tensor.clone() for name, tensor in state.model.items()},
        optimizer={name: tensor.clone() for name, tensor in state.optimizer.items()},
    )


class BothWays:
    """In place of the program's actor: the same batch trains both ways, and the run continues from the second."""

    def __init__(self, handle: Any, actor: Any):
        self.forward, self.actor, self.schedule = handle.forward, actor, actor.schedule
        if self.schedule.needed is not rows_with_advantage:
            raise SystemExit("This job computes all samples: its loss has a term on those without an advantage.")
        self.found: list[dict[str, Any]] = []

    def update(self, batch: Any, step: int) -> Any:
        """See ModelHandle."""
        everything = gradients_of(self.actor, batch, lambda mini: None)
        found = {"gap": largest_gap(gradients_of(self.actor, batch, self.schedule.computed), everything)}
        del everything
        before = copied(self.actor.engine)
        for mode in list(MODES)[:: 1 if step % 2 else -1]:
            self.actor.engine.load_state(before)
            self.actor.schedule = replace(self.schedule, needed=rows_with_advantage if MODES[mode] else all_rows)
            started = time.perf_counter()
            updates = self.actor.update(batch, step)
            found[mode] = time.perf_counter() - started
            if MODES[mode]:
                found["skipped"] = updates.metrics()["actor/skipped_row_ratio"].value
        print(f"step {step}: {found}", file=sys.stderr, flush=True)
        self.found.append(found)
        return Finished(updates)


def run(options: argparse.Namespace) -> Report:
    from job_side import JobSide

    job = JobSide(str(options.config.resolve()), options.ours)
    try:
        assert job.runtime.workers is not None
        job.program.actor = both = BothWays(job.program.actor, job.runtime.workers.models["actor"])
        for _ in range(options.steps + 1):
            job.step()
        facts = {"job": options.config.name, **job.facts()}
    finally:
        job.close()
    report = Report("Update phase with and without samples whose advantages are all zero", facts)
    measured = both.found[1:]
    series = {mode: series_of(measured, mode) for mode in MODES}
    whole, part = series.values()
    ratio, gap = sum(part.values) / sum(whole.values), max(found["gap"] for found in measured)
    skipped = series_of(measured, "skipped")
    report.add_table(["update phase", "seconds"], [[mode, s.text("s")] for mode, s in series.items()])
    report.results = {"steps": measured, "ratio": ratio, "largest_gradient_gap": gap, "skipped": skipped.to_json()}
    report.notes += [
        f"Time of the update phase: {number(ratio)} of that with all samples, over {len(measured)} steps.",
        f"Samples left out: {100 * sum(skipped.values) / len(measured):.0f}%.",
        f"Largest difference of a gradient's element, relative to the largest element: {gap:.1e}.",
    ]
    report.finish(options.json)
    return report


if __name__ == "__main__":
    raise SystemExit(as_verb(lambda: run(parse())))
