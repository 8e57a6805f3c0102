"""The measured process of TRL: a GRPOTrainer that is built once and stands still between its steps.

Runs in TRL's own environment, where verl is not installed. The trainer's loop is TRL's; a callback holds it before each
step until the parent asks for one and answers when the step has ended. Clocks: `_generate` (prompts to token ids) is
generation; the step without `_generate_and_score_completions` (generation, decoding, rewards, advantages) is training:
forward, backward and optimizer of every micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
import trl
from child import Channel, run_held
from datasets import Dataset
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from weight_probe import WeightProbe, finish
from workload import PLAIN_TEMPLATE, Workload, digest, picture_in, reward_of


def config_of(work: Workload, micro_batch: int, settings: dict[str, Any], output: str) -> GRPOConfig:
    """One optimizer update per `num_prompts * num_samples` samples; everything else is TRL's default unless `settings`
    says otherwise."""
    return GRPOConfig(
        output_dir=output,
        use_cpu=work.device == "cpu",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.num_sequences // micro_batch,
        num_generations=work.num_samples,
        max_completion_length=work.response_tokens,
        temperature=work.temperature,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        max_steps=work.num_steps,
        shuffle_dataset=False,
        bf16=work.dtype == "bfloat16",  # TRL computes under bfloat16 autocast by default
        model_init_kwargs={"dtype": work.dtype},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=work.seed,
        **settings,
    )


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [reward_of(reply if isinstance(reply, str) else reply[0]["content"]) for reply in completions]


def rows_of(work: Workload) -> list[dict[str, Any]]:
    """A row for each prompt; TRL wants messages where there are pictures."""
    if not work.images:
        return [{"prompt": text} for text in work.prompts]
    return [
        {"prompt": [{"role": "user", "content": text}], "image": picture_in(url)}
        for text, url in zip(work.prompts, work.images, strict=True)
    ]


def processor_of(work: Workload) -> Any:
    """The tokenizer, or with pictures the processor around it and the template of our side."""
    if not work.images:
        return AutoTokenizer.from_pretrained(work.model, padding_side="left")
    processor = AutoProcessor.from_pretrained(work.model, padding_side="left")
    processor.chat_template = processor.tokenizer.chat_template = PLAIN_TEMPLATE
    return processor


class Gate(TrainerCallback):
    """Holds the trainer's loop until the parent wants a step, and answers with the step's cost."""

    def __init__(self, channel: Channel, timed: TimedTrainer):
        self.channel, self.timed = channel, timed
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.channel.next() is None:
            raise SystemExit(0)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        finish(self.timed.work.device)
        self.channel.reply(self.timed.take(time.perf_counter() - self.started))


def facts(trainer: GRPOTrainer) -> dict[str, Any]:
    """Versions and settings that the report names."""
    args = trainer.args
    return {
        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch)},
        "num_threads": torch.get_num_threads(),
        "parameter_dtype": str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        "bf16": args.bf16,
        "gradient_checkpointing": args.gradient_checkpointing,
        "micro_batch": args.per_device_train_batch_size,
        "optimizer": str(args.optim),
        "loss_type": args.loss_type,
        "scale_rewards": args.scale_rewards,
        "beta": args.beta,
    }


class TimedTrainer:
    """A GRPOTrainer with clocks around its phases."""

    def __init__(self, channel: Channel, work: Workload, micro_batch: int, settings: dict[str, Any], folder: str):
        self.work = work
        self.seconds: dict[str, float] = {}
        self.prompts: list[list[int]] = []
        self.lengths: list[int] = []
        self.matmul_dtypes: set[str] = set()
        self.trainer = self._make(work, micro_batch, settings, folder)
        self.trainer.add_callback(Gate(channel, self))
        self._never_stop()
        self.trainer._generate = self._clocked("generate_s", self.trainer._generate, self._note)
        self.trainer._generate_and_score_completions = self._clocked(
            "collect_s", self.trainer._generate_and_score_completions
        )
        self.probe = WeightProbe(self.trainer.model)
        self._watch_dtype()

    def _make(self, work: Workload, micro_batch: int, settings: dict[str, Any], folder: str) -> GRPOTrainer:
        return GRPOTrainer(
            model=work.model,
            reward_funcs=reward,
            args=config_of(work, micro_batch, settings, folder),
            train_dataset=Dataset.from_list(rows_of(work)),
            processing_class=processor_of(work),
        )

    def take(self, step_s: float) -> dict[str, Any]:
        """The measurements of the step that has just ended."""
        seconds, self.seconds = self.seconds, {}
        train_s = step_s - seconds["collect_s"]
        return {
            "step_s": step_s,
            "generate_s": seconds["generate_s"],
            "train_s": train_s,
            "other_s": step_s - seconds["generate_s"] - train_s,
            "weight_change": self.probe.change(),
            "prompts": digest(self.prompts[:: self.work.num_samples]),
            "num_sequences": len(self.prompts),
            "shortest": min(self.lengths),
            "longest": max(self.lengths),
            "matmul_dtypes": sorted(self.matmul_dtypes),
        }

    def _never_stop(self) -> None:
        """No token ends a completion, and none is cut off behind one."""
        trainer = self.trainer
        trainer.eos_token_ids = [-1]
        trainer.generation_kwargs["eos_token_id"] = None
        trainer.generation_config.eos_token_id = None
        trainer.model.generation_config.eos_token_id = None

    def _clocked(
        self, name: str, function: Callable[..., Any], note: Callable[[Any], None] | None = None
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            if note is not None:
                note(result)
            return result

        return timed

    def _note(self, generated: Any) -> None:
        self.prompts = [list(ids) for ids in generated[0]]
        self.lengths = [len(ids) for ids in generated[1]]

    def _watch_dtype(self) -> None:
        """Note in which formats a layer's projection is really computed."""
        linear = next(m for m in self.trainer.model.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_hook(
            lambda module, inputs, output: self.matmul_dtypes.add(str(output.dtype).removeprefix("torch."))
        )


def train(channel: Channel, work: dict[str, Any], **settings: Any) -> None:
    timed = TimedTrainer(channel, Workload.from_json(work), **settings)
    channel.reply(facts(timed.trainer))
    timed.trainer.train()


if __name__ == "__main__":
    run_held(train)
