"""The measured process of a revision of verl: builds a run, then takes a step on command."""

from __future__ import annotations

import time
from typing import Any

from as_verb import as_verb
from child import serve


class StepChild:
    """Commands of the parent, by name. They use only names that every revision has."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def build(self, config: str, overrides: list[str]) -> dict[str, Any]:
        import verl
        from verl.config import load_config
        from verl.trainer import RLTrainer

        self.trainer = RLTrainer(load_config(overrides, config_name=config)).__enter__()
        return {"package": verl.__path__[0]}

    def step(self) -> dict[str, Any]:
        start = time.perf_counter()
        metrics = self.trainer.step()
        return {
            "step_s": time.perf_counter() - start,
            "generation_s": metrics["timing_s/gen"],
            "update_s": metrics["timing_s/update_actor"],
            "response_tokens": metrics["response_length/mean"],
        }


def main() -> None:
    child = StepChild()
    serve({"build": child.build, "step": child.step})


if __name__ == "__main__":
    raise SystemExit(as_verb(main))
