"""The measured process of our side in sft_cpu.py and preference_cpu.py: builds the run of a program on given rows once, then
takes a step on command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from as_verb import as_verb
from child import serve

PROGRAMS = {"SFT": "sft", "DPO": "preference"}


class VerlRowsChild:
    """Commands of the parent, by name. torch is imported by the first of them, inside the verb."""

    def build(self, work: dict[str, Any], folder: str, overrides: list[str]) -> dict[str, Any]:
        import torch
        from weight_probe import WeightProbe

        from verl.config import SCHEMAS, load_config
        from verl.programs import api
        from verl.programs.given_rows import ROLE, GivenRowsProgram
        from verl.runtime.local import LocalRuntime
        from verl.tracking.spans import Spans

        name = PROGRAMS[work["trainer"]]
        kind: type[GivenRowsProgram] = api.PROGRAMS.get(name)
        config: Any = load_config([*overrides_of(work), *overrides], schema=SCHEMAS[name]).config
        data = kind.load_data(config)
        assert data.train is not None
        runtime = LocalRuntime(api.ProgramSpecs(kind, config))
        roles = runtime.build_roles(total_steps=data.num_steps, data_sources=[])
        run = api.RunContext(
            Path(folder), False, lambda value: value, lambda: None, Spans(), lambda *_: None, data.num_steps
        )
        self.program, self.steps_taken = kind(config, data, roles, run), 0
        started = time.perf_counter()
        self.program.load_state_dict(None, None)  # preferences: the reference's log-probabilities
        assert runtime.workers is not None
        self.probe = WeightProbe(runtime.workers.models[ROLE].engine.module)
        (summary,) = data.train.dataset.summaries
        return {
            **roles.facts,
            "num_threads": torch.get_num_threads(),
            "micro_batch_tokens": config.data.max_token_len_per_gpu,
            "tokens_per_step": summary.num_tokens / summary.num_rows * work["rows_per_step"],
            "start_s": time.perf_counter() - started,
        }

    def step(self) -> dict[str, Any]:
        self.steps_taken += 1
        started = time.perf_counter()
        result = self.program.step(self.steps_taken)
        return {
            "step_s": time.perf_counter() - started,
            "num_tokens": result.num_tokens,
            "loss": result.metrics["train/loss"],
            "weight_change": self.probe.change(),
        }


def overrides_of(work: dict[str, Any]) -> list[str]:
    """The command line of `verl sft` or `verl dpo` for this work."""
    settings = {
        "model.path": work["model"],
        "model.enable_gradient_checkpointing": False,
        "engine.dtype": work["dtype"],
        "data.train_files": work["file"],
        "data.train_batch_size": work["rows_per_step"],
        "data.max_token_len_per_gpu": 2048,
        "data.shuffle": False,
        "optim.lr": work["learning_rate"],
        "trainer.device": "cpu",
        "trainer.total_training_steps": work["num_steps"],
    }
    return [f"{key}={value}" for key, value in settings.items()]


def main() -> None:
    child = VerlRowsChild()
    serve({"build": child.build, "step": child.step})


if __name__ == "__main__":
    raise SystemExit(as_verb(main))
