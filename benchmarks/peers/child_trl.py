"""The measured process of TRL: a GRPO, SFT or DPO trainer that is built once and stands still between its steps.

Runs in TRL's own environment, where verl is not installed. The trainer's loop is TRL's; a callback holds it before each
step until the parent asks for one and answers when the step has ended. Clocks of GRPO: `_generate` (prompts to token ids) is
generation; the step without `_generate_and_score_completions` (generation, decoding, rewards, advantages) is training:
forward, backward and optimizer of every micro-batch.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from accelerate.utils import gather_object
from child import Channel, run_held
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
from workload import PLAIN_TEMPLATE, WeightProbe, Workload, compute_score, digest, finish, picture_in

FACTS = (
    *("bf16", "gradient_checkpointing", "gradient_accumulation_steps", "loss_type", "scale_rewards", "beta"),
    *("packing", "max_length", "precompute_ref_log_probs"),
)

# ours does not train on what a template writes behind the token that ends a turn
WITHOUT_LINE_END = "{{% set chat %}}{}{{% endset %}}{{{{ chat if add_generation_prompt else chat.rstrip() }}}}"


def common_settings(work: dict[str, Any], rows_per_step: int, micro_batch: int, folder: str) -> dict[str, Any]:
    """Settings of every trainer: one optimizer update for the rows of a step. Everything else is TRL's default."""
    return {
        "output_dir": folder, "use_cpu": work.get("device", "cpu") == "cpu",
        "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": max(1, rows_per_step // micro_batch),
        "learning_rate": work["learning_rate"], "lr_scheduler_type": "constant", "max_steps": work["num_steps"],
        "bf16": work["dtype"] == "bfloat16",  # TRL computes under bfloat16 autocast by default
        "model_init_kwargs": {"dtype": work["dtype"]}, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


class Gate(TrainerCallback):
    """Holds the trainer's loop until the parent wants a step, and answers with its seconds and the result of `take`."""

    def __init__(self, channel: Channel, side: Any, device: str):
        self.channel, self.side, self.device, self.started = channel, side, device, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if next(self.channel.commands(), None) is None:
            raise SystemExit(0)
        self.side.begin()
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        finish(self.device)
        step_s = time.perf_counter() - self.started
        self.channel.reply({"step_s": step_s, **self.side.take(step_s)})


class GRPOSide:
    """A GRPOTrainer with clocks around its phases."""

    def __init__(self, work: dict[str, Any], micro_batch: int, settings: dict[str, Any], folder: str):
        self.work = Workload.from_json(work)
        self.seconds: dict[str, float] = {}
        self.prompts: list[list[int]] = []
        self.lengths: list[int] = []
        trainer = self.trainer = self._make(
            common_settings(work, self.work.num_sequences, micro_batch, folder) | settings
        )
        if not self.work.answers:  # no token ends a completion, and none is cut off behind one
            trainer.eos_token_ids = [-1]
            trainer.generation_kwargs["eos_token_id"] = None
            trainer.generation_config.eos_token_id = trainer.model.generation_config.eos_token_id = None
        trainer._generate = self._clocked("generate_s", trainer._generate, self._note)
        trainer._generate_and_score_completions = self._clocked("collect_s", trainer._generate_and_score_completions)
        self.probe = WeightProbe(trainer.model)

    def _make(self, settings: dict[str, Any]) -> Any:
        work = self.work
        rows: list[dict[str, Any]] = [{"prompt": text} for text in work.prompts]
        processor = AutoTokenizer.from_pretrained(work.model, padding_side="left")
        if work.answers:
            questions = [[{"role": "user", "content": text}] for text in work.prompts]
            rows = [{"prompt": q, "answer": a} for q, a in zip(questions, work.answers, strict=True)]
        if work.images:  # messages, and the processor with our side's template
            rows = [
                {"prompt": [{"role": "user", "content": text}], "image": picture_in(url)}
                for text, url in zip(work.prompts, work.images, strict=True)
            ]
            processor = AutoProcessor.from_pretrained(work.model, padding_side="left")
            processor.chat_template = processor.tokenizer.chat_template = PLAIN_TEMPLATE
        defaults = {
            "num_generations": work.num_samples, "max_completion_length": work.response_tokens,
            "temperature": work.temperature, "shuffle_dataset": False, "seed": work.seed,
        }  # fmt: skip
        return trl.GRPOTrainer(
            model=work.model,
            reward_funcs=self._reward,
            args=trl.GRPOConfig(**defaults, **settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=processor,
        )

    def begin(self) -> None:
        self.seconds = {}

    def take(self, step_s: float) -> dict[str, Any]:
        """The measurements of the step that has just ended; samples are of all ranks."""
        prompts, lengths, rewards = map(gather_object, (self.prompts, self.lengths, self.rewards))
        return {
            "generate_s": self.seconds["generate_s"], "train_s": step_s - self.seconds["collect_s"],
            "weight_change": self.probe.change(), "prompts": digest(prompts[:: self.work.num_samples]),
            "num_sequences": len(prompts), "reward": sum(rewards) / len(rewards),
            "shortest": min(lengths), "longest": max(lengths), "response_tokens": sum(lengths) / len(lengths),
            "num_tokens": sum(map(len, prompts)) + sum(lengths),
        }  # fmt: skip

    def _clocked(
        self, name: str, function: Callable[..., Any], note: Callable[[Any], None] = lambda _: None
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            note(result)
            return result

        return timed

    def _reward(self, completions: list[Any], answer: list[str] | None = None, **_: Any) -> list[float]:
        texts = [reply if isinstance(reply, str) else reply[0]["content"] for reply in completions]
        self.rewards = [compute_score("", *pair) for pair in zip(texts, answer or [""] * len(texts), strict=True)]
        return self.rewards

    def _note(self, generated: Any) -> None:
        self.prompts, self.lengths = [list(ids) for ids in generated[0]], [len(ids) for ids in generated[1]]


class RowsSide:
    """An SFTTrainer or DPOTrainer that takes the rows of a file in their order."""

    def __init__(self, work: dict[str, Any], micro_batch: int, settings: dict[str, Any], folder: str):
        rows = [json.loads(line) for line in Path(work["file"]).read_text().splitlines()]
        for row in (row for row in rows if "images" in row):
            row["images"] = [picture_in(url) for url in row["images"]]
            row["prompt"][0]["content"] = row["prompt"][0]["content"].removeprefix("<image>")  # TRL writes it
        chosen = {**common_settings(work, work["rows_per_step"], micro_batch, folder), "weight_decay": 0.01, **settings}
        processor = (AutoProcessor if "images" in rows[0] else AutoTokenizer).from_pretrained(work["model"])
        if isinstance(processor.chat_template, str):
            processor.chat_template = WITHOUT_LINE_END.format(processor.chat_template)
        self.trainer = in_file_order(work["trainer"])(
            model=work["model"],
            args=getattr(trl, f"{work['trainer']}Config")(**chosen),
            train_dataset=Dataset.from_list(rows),
            processing_class=processor,
        )
        self.probe = WeightProbe(self.trainer.model)

    def begin(self) -> None:
        self.trainer.loss_of_step, self.num_tokens = 0.0, float(self.trainer._total_train_tokens)

    def take(self, step_s: float) -> dict[str, Any]:
        return {
            "num_tokens": float(self.trainer._total_train_tokens) - self.num_tokens,
            "loss": self.trainer.loss_of_step,
            "weight_change": self.probe.change(),
        }


def in_file_order(kind: str) -> type:
    """SFTTrainer or DPOTrainer that takes the rows in the order of the file and keeps the loss of each optimizer step."""

    class InFileOrder(getattr(trl, f"{kind}Trainer")):  # type: ignore[misc]
        loss_of_step = 0.0

        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.loss_of_step += float(loss)  # of a micro-batch, as its share of the whole step
            return loss

    return InFileOrder


def facts(trainer: Any) -> dict[str, Any]:
    """Versions and settings that the report names."""
    args = trainer.args
    return {
        "versions": {m.__name__: m.__version__ for m in (trl, transformers, torch)}, "optimizer": str(args.optim),
        "parameter_dtype": str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(), "micro_batch": args.per_device_train_batch_size,
        **{name: getattr(args, name) for name in FACTS if hasattr(args, name)},
    }  # fmt: skip


def train(channel: Channel, work: dict[str, Any], **settings: Any) -> None:
    side = (RowsSide if "trainer" in work else GRPOSide)(work, **settings)
    side.trainer.add_callback(Gate(channel, side, work.get("device", "cpu")))
    channel.reply(facts(side.trainer))
    side.trainer.train()


if __name__ == "__main__":
    run_held(train)
