"""The measured process of our side: builds the run once, then takes a step or generates on command."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from as_verb import as_verb
from child import serve
from workload import Workload

if TYPE_CHECKING:
    from verl_side import VerlSide


class VerlChild:
    """Commands of the parent, by name. torch is imported by the first of them, inside the verb."""

    def __init__(self) -> None:
        self.side: VerlSide | None = None

    @property
    def run(self) -> VerlSide:
        assert self.side is not None, "build comes first"
        return self.side

    def nothing(self) -> dict[str, Any]:
        """Cost of the process before it has a model."""
        import verl_side  # noqa: F401 - the cost of the libraries is measured

        return {}

    def build(self, work: dict[str, Any], folder: str, overrides: list[str]) -> dict[str, Any]:
        from verl_side import VerlSide

        self.side = VerlSide(Workload.from_json(work), Path(folder), overrides)
        return self.side.facts()

    def step(self) -> dict[str, Any]:
        return self.run.step()

    def log_prob_gap(self) -> dict[str, Any]:
        return {"log_prob_gap": self.run.log_prob_gap()}

    def generate(self, step: int) -> dict[str, Any]:
        """The samples of a step's prompts; the clock runs as it does in the other children: token ids in and out."""
        requests, params = self.run.requests(step), self.run.params()
        started = time.perf_counter()
        completions = self.run.generate(requests, params, step)
        seconds = time.perf_counter() - started
        return {
            "generate_s": seconds,
            "lengths": sorted({len(c.token_ids) for c in completions}),
            "num_sequences": len(completions),
        }

    def greedy(self, step: int) -> dict[str, Any]:
        """One greedy sample of each prompt of a step: its token ids."""
        params = replace(self.run.params(), n=1, temperature=0.0)
        completions = self.run.generate(self.run.requests(step), params, step)
        return {"tokens": [c.token_ids for c in completions]}


def main() -> None:
    child = VerlChild()
    names = ("nothing", "build", "step", "log_prob_gap", "generate", "greedy")
    serve({name: getattr(child, name) for name in names})


if __name__ == "__main__":
    raise SystemExit(as_verb(main))
