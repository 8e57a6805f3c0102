"""The measured process of a whole run of TRL: a GRPOTrainer on the job's prompts, scored by the job's reward function.

Runs in TRL's own environment. Scores come from a process of ours (child_job.py), so both sides call the same function.
A callback holds TRL's loop between steps, where the parent may ask for the weights.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from child import Channel, run_held
from child_trl import facts
from datasets import Dataset
from peer import Peer
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import digest

SCORE_LIMIT_S = 600.0


def config_of(job: dict[str, Any], dtype: str, micro_batch: int, settings: dict[str, Any], folder: str) -> GRPOConfig:
    """One optimizer update per step on all its samples. `dtype`: float32 or bfloat16 parameters, or mixed: float32
    parameters under bfloat16 autocast."""
    optim = job["optim"]
    chosen = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": job["num_prompts"] * job["num_samples"] // micro_batch,
        "num_generations": job["num_samples"],
        "max_completion_length": job["response_tokens"],
        "temperature": job["temperature"],
        "epsilon": job["clip_ratio"],
        "lr_scheduler_type": "constant_with_warmup" if optim["warmup_steps"] else "constant",
        **optim,
        "max_steps": job["num_steps"],
        "shuffle_dataset": False,
        "bf16": dtype != "float32",
        "model_init_kwargs": {"dtype": "bfloat16" if dtype == "bfloat16" else "float32"},
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": job["seed"],
        **settings,
    }
    return GRPOConfig(**chosen)


class Gate(TrainerCallback):
    """Holds the trainer's loop until the parent wants a step, and answers with its seconds."""

    def __init__(self, channel: Channel, side: TRLSide):
        self.channel, self.side = channel, side
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.answer_until_step():
            raise SystemExit(0)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.channel.reply(self.side.take(time.perf_counter() - self.started))

    def answer_until_step(self) -> bool:
        """Save weights as often as asked; false when the parent is gone."""
        while (asked := self.channel.next()) is not None:
            name, arguments = asked
            if name == "step":
                return True
            self.side.trainer.model.save_pretrained(arguments["folder"])
            self.channel.reply()
        return False


class TRLSide:
    """A GRPOTrainer on the job."""

    def __init__(
        self,
        channel: Channel,
        job: dict[str, Any],
        dtype: str,
        micro_batch: int,
        settings: dict[str, Any],
        folder: str,
        scorer: dict[str, Any],
    ):
        self.job = job
        self.prompts: list[list[int]] = []
        self.rewards: list[float] = []
        self.scorer = Peer(
            "scorer",
            "child_job.py",
            log=Path(folder) / "scorer.log",
            python=Path(scorer["python"]),
            environment=scorer["environment"],
        )
        self.scorer.ask("open_scorer", SCORE_LIMIT_S, config=scorer["config"], overrides=scorer["overrides"])
        rows = [{"prompt": text, "ordinal": i} for i, text in enumerate(job["prompts"])]
        self.trainer = GRPOTrainer(
            model=job["model"],
            reward_funcs=self.reward,
            args=config_of(job, dtype, micro_batch, settings, folder),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        )
        self.gate = Gate(channel, self)
        self.trainer.add_callback(self.gate)
        generate = self.trainer._generate

        def noted(*args: Any, **kwargs: Any) -> Any:
            generated = generate(*args, **kwargs)
            self.prompts = [list(ids) for ids in generated[0]]
            return generated

        self.trainer._generate = noted

    def reward(self, completions: list[str], ordinal: list[int], **_: Any) -> list[float]:
        answer = self.scorer.ask("score", SCORE_LIMIT_S, ordinals=list(map(int, ordinal)), texts=completions)
        self.rewards = answer["scores"]
        return answer["scores"]

    def take(self, step_s: float) -> dict[str, Any]:
        """The measurements of the step that has just ended."""
        return {
            "step_s": step_s,
            "train_reward": sum(self.rewards) / len(self.rewards),
            "num_sequences": len(self.prompts),
            "prompts": digest(self.prompts[:: self.job["num_samples"]]),
        }


def train(channel: Channel, **settings: Any) -> None:
    side = TRLSide(channel, **settings)
    try:
        channel.reply(facts(side.trainer))
        side.trainer.train()
        side.gate.answer_until_step()  # the weights of the last step
    finally:
        side.scorer.close()


if __name__ == "__main__":
    run_held(train)
