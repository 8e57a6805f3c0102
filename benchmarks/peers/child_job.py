"""The measured process of a whole run of ours; also evaluates and scores for the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from as_verb import as_verb
from child import serve

if TYPE_CHECKING:
    from job_side import JobSide, Scorer


class JobChild:
    """Commands of the parent, by name. torch is imported by the first of them, inside the verb."""

    def __init__(self) -> None:
        self.side: JobSide | None = None
        self.scorer: Scorer | None = None

    @property
    def run(self) -> JobSide:
        assert self.side is not None, "build comes first"
        return self.side

    def build(self, config: str, overrides: list[str]) -> dict[str, Any]:
        from job_side import JobSide

        self.side = JobSide(config, overrides)
        return self.side.facts()

    def step(self) -> dict[str, Any]:
        return self.run.step()

    def evaluate(self) -> dict[str, Any]:
        return self.run.evaluate()

    def evaluate_folder(self, config: str, overrides: list[str], folder: str, dtype: str) -> dict[str, Any]:
        from job_side import evaluate_folder

        return evaluate_folder(config, overrides, folder, dtype)

    def job(self, config: str, overrides: list[str], num_steps: int) -> dict[str, Any]:
        from job_side import job_of

        return job_of(config, overrides, num_steps)

    def open_scorer(self, config: str, overrides: list[str]) -> dict[str, Any]:
        from job_side import Scorer

        self.scorer = Scorer(config, overrides)
        return {}

    def score(self, ordinals: list[int], texts: list[str]) -> dict[str, Any]:
        assert self.scorer is not None, "open_scorer comes first"
        return {"scores": self.scorer.scores(ordinals, texts)}


def main() -> None:
    child = JobChild()
    names = ("build", "step", "evaluate", "evaluate_folder", "job", "open_scorer", "score")
    serve({name: getattr(child, name) for name in names})


if __name__ == "__main__":
    raise SystemExit(as_verb(main))
