"""Our side of every comparison: the roles, data and program of `verl train`, `verl sft` or `verl dpo`, one step at a time."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from workload import PLAIN_TEMPLATE, WeightProbe, Workload, digest, finish

from verl.config import SCHEMAS, PPOConfig, load_config
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.programs import api
from verl.programs.given_rows import ROLE
from verl.programs.ppo import PPO
from verl.programs.ppo_data import load_data
from verl.roles.rollout import sampling_params
from verl.runtime.local import LocalRuntime
from verl.tracking.timeline import Spans

TEMPLATE_FILE, PROMPTS_FILE = "template.jinja", "prompts.jsonl"
MAX_IMAGE_TOKENS = 64  # of a picture of 64 x 64 pixels, with its marks
_PROGRAMS = {"SFT": "sft", "DPO": "preference"}


def overrides_of(work: Workload, folder: Path, extra: Sequence[str] = ()) -> list[str]:
    """The command line of `verl train` for this work, sized as the shipped recipe for this model is."""
    group = "actor_rollout_ref"
    actor, rollout = f"{group}.actor", f"{group}.rollout"
    settings = {
        "algorithm.adv_estimator": "grpo", f"{group}.model.path": work.model,
        f"{group}.model.custom_chat_template": "null" if work.answers else folder / TEMPLATE_FILE,
        f"{group}.model.enable_gradient_checkpointing": False, f"{actor}.fsdp_config.dtype": work.dtype,
        f"{actor}.ppo_mini_batch_size": work.num_prompts, f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 2048, f"{actor}.optim.lr": work.learning_rate,
        f"{actor}.optim.weight_decay": 0.0, f"{rollout}.n": work.num_samples,
        f"{rollout}.temperature": work.temperature, f"{rollout}.ignore_eos": not work.answers,
        "data.train_files": folder / PROMPTS_FILE, "data.val_files": "[]", "data.shuffle": False,
        "data.train_batch_size": work.num_prompts, "data.max_response_length": work.response_tokens,
        "data.max_prompt_length": work.prompt_tokens + (MAX_IMAGE_TOKENS if work.images else 0),
        "reward.custom_reward_function.path": Path(__file__).with_name("workload.py"), "reward.num_workers": 1,
        "trainer.device": work.device, "trainer.total_training_steps": work.num_steps,
    }  # fmt: skip
    mine = [f"{key}={value}" for key, value in settings.items() if not any(e.startswith(f"{key}=") for e in extra)]
    return [*mine, *extra]


def write_prompts(work: Workload, folder: Path) -> None:
    """The data file of the run, in the schema of `verl train`, and the chat template."""
    pictures = [[url] for url in work.images] or [[]] * len(work.prompts)
    answers = work.answers or [""] * len(work.prompts)
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": "<image>" * len(images) + text}],
            "images": images,
            "reward_model": {"style": "rule", "ground_truth": answer},
        }
        for text, images, answer in zip(work.prompts, pictures, answers, strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TEMPLATE_FILE).write_text(PLAIN_TEMPLATE)
    (folder / PROMPTS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


class Side:
    """A program whose roles are in this process, and which stands still between steps."""

    def __init__(
        self, kind: Any, config: Any, data: Any, folder: Path, num_steps: int, data_sources: Sequence[str] = ()
    ):
        self.config, self.spans, self.num_steps = config, Spans(), 0
        runtime = LocalRuntime(api.ProgramSpecs(kind, config))
        self.roles = runtime.build_roles(total_steps=num_steps, data_sources=list(data_sources))
        context = api.RunContext(
            folder, False, lambda value: value, lambda: None, self.spans, lambda *_: None, num_steps
        )
        self.program = kind(config, data, self.roles, context)
        self.workers = runtime.workers

    def facts(self) -> dict[str, Any]:
        return {**self.roles.facts, "num_threads": torch.get_num_threads()}


class VerlSide(Side):
    """GRPO on a workload."""

    def __init__(self, work: Workload, folder: Path, extra: Sequence[str] = ()):
        write_prompts(work, folder)
        self.work = work
        config: PPOConfig = load_config(overrides_of(work, folder, extra)).config
        data = load_data(config)
        self.loader = data.train
        super().__init__(PPO, config, data, folder, work.num_steps, data.data_sources)
        self.roles.weights.sync(0)
        self.actor, self.rollout = self.workers.models["actor"], self.workers.rollout
        self.probe = WeightProbe(self.actor.engine.module)

    def step(self) -> dict[str, Any]:
        """One step as the trainer takes it, with the seconds of its phases and a digest of its prompts."""
        self.num_steps += 1
        started = time.perf_counter()
        batch: DataProto = self.program.train(self.num_steps).batch
        finish(self.work.device)
        seconds = time.perf_counter() - started
        spans = self.spans.take()
        columns, first = batch.batch, range(0, len(batch), self.work.num_samples)
        lengths = columns["response_mask"].sum(dim=1)
        return {
            "step_s": seconds, "generate_s": spans["gen"], "train_s": spans["update_actor"] + spans["update_weights"],
            "weight_change": self.probe.change(), "num_sequences": len(batch),
            "prompts": digest([columns["prompts"][i][columns["prompt_mask"][i]].tolist() for i in first]),
            "reward": float(columns["token_level_scores"].sum(dim=1).mean()),
            "shortest": int(lengths.min()), "longest": int(lengths.max()),
        }  # fmt: skip

    def log_prob_gap(self) -> float:
        """The largest difference between a sampled log-prob and the training forward's on the same token, over one
        generated batch."""
        batch = self.program.collect(self.num_steps)[0].batch
        trained = self.actor.forward(batch, {"log_probs": "trained"}).batch["trained"]
        mask = batch.batch["response_mask"]
        return float((trained - batch.batch["rollout_log_probs"])[mask].abs().max())

    def params(self) -> SamplingParams:
        """The sampling parameters of training."""
        return SamplingParams(**vars(sampling_params(self.config.actor_rollout_ref.rollout)))

    def requests(self, step: int) -> list[PromptRequest]:
        """The prompts of a step."""
        count = self.work.num_prompts
        start = (step * count) % max(1, len(self.work.prompts) - count + 1)
        ids = self.loader.take(start, count).non_tensor_batch["prompt_token_ids"]
        return [PromptRequest(start + i, tuple(row)) for i, row in enumerate(ids)]

    def generate(self, requests: list[PromptRequest], params: SamplingParams, step: int) -> list[Completion]:
        """Generate as the rollout role does, without the scoring."""
        completions = self.rollout.engine.generate(requests, params, step=step)
        self.rollout.end_generation()
        return completions

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "parameter_dtype": str(next(self.actor.engine.module.parameters()).dtype).removeprefix("torch."),
            "micro_batch_tokens": self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
        }


class RowsSide(Side):
    """SFT or DPO on the rows of a file."""

    def __init__(self, work: dict[str, Any], folder: Path, extra: Sequence[str] = ()):
        settings = {
            "model.path": work["model"], "model.enable_gradient_checkpointing": False, "engine.dtype": work["dtype"],
            "data.train_files": work["file"], "data.train_batch_size": work["rows_per_step"], "data.shuffle": False,
            "data.max_token_len_per_gpu": 2048, "optim.lr": work["learning_rate"], "trainer.device": "cpu",
            "trainer.total_training_steps": work["num_steps"],
        }  # fmt: skip
        name = _PROGRAMS[work["trainer"]]
        kind: Any = api.PROGRAMS.get(name)
        overrides = [*(f"{key}={value}" for key, value in settings.items()), *extra]
        config: Any = load_config(overrides, schema=SCHEMAS[name]).config
        data = kind.load_data(config)
        super().__init__(kind, config, data, folder, data.num_steps)
        started = time.perf_counter()
        self.program.load_state_dict(None, None)  # preferences: the reference's log-probabilities
        self.start_s = time.perf_counter() - started
        self.probe = WeightProbe(self.workers.models[ROLE].engine.module)
        (summary,) = data.train.dataset.summaries
        self.tokens_per_step = summary.num_tokens / summary.num_rows * work["rows_per_step"]

    def facts(self) -> dict[str, Any]:
        micro = self.config.data.max_token_len_per_gpu
        times = {"tokens_per_step": self.tokens_per_step, "start_s": self.start_s}
        return {**super().facts(), "micro_batch_tokens": micro, **times}

    def step(self) -> dict[str, Any]:
        self.num_steps += 1
        started = time.perf_counter()
        result = self.program.step(self.num_steps)
        return {
            "step_s": time.perf_counter() - started,
            "num_tokens": result.num_tokens,
            "loss": result.metrics["train/loss"],
            "weight_change": self.probe.change(),
        }
