"""Our side of every comparison: the roles, data and program of `verl train`, one step at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from weight_probe import WeightProbe, finish
from workload import PLAIN_TEMPLATE, Workload, digest

from verl.config import PPOConfig, load_config
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.programs.api import ProgramSpecs, RunContext
from verl.programs.ppo import PPO
from verl.programs.ppo_data import load_data
from verl.roles.rollout import sampling_params
from verl.runtime.local import LocalRuntime
from verl.tracking.spans import Spans

TEMPLATE_FILE, PROMPTS_FILE = "template.jinja", "prompts.jsonl"
MAX_IMAGE_TOKENS = 64  # of a picture of 64 x 64 pixels, with its marks


def overrides_of(work: Workload, folder: Path, extra: Sequence[str] = ()) -> list[str]:
    """The command line of `verl train` for this work, sized as the shipped recipe for this model is."""
    group = "actor_rollout_ref"
    settings = {
        "algorithm.adv_estimator": "grpo",
        f"{group}.model.path": work.model,
        f"{group}.model.custom_chat_template": folder / TEMPLATE_FILE,
        f"{group}.model.enable_gradient_checkpointing": False,
        f"{group}.actor.fsdp_config.dtype": work.dtype,
        f"{group}.actor.ppo_mini_batch_size": work.num_prompts,
        f"{group}.actor.use_dynamic_bsz": True,
        f"{group}.actor.ppo_max_token_len_per_gpu": 2048,
        f"{group}.actor.optim.lr": work.learning_rate,
        f"{group}.actor.optim.weight_decay": 0.0,
        f"{group}.rollout.n": work.num_samples,
        f"{group}.rollout.temperature": work.temperature,
        f"{group}.rollout.ignore_eos": True,
        "data.train_files": folder / PROMPTS_FILE,
        "data.val_files": "[]",
        "data.shuffle": False,
        "data.train_batch_size": work.num_prompts,
        "data.max_prompt_length": work.prompt_tokens + (MAX_IMAGE_TOKENS if work.images else 0),
        "data.max_response_length": work.response_tokens,
        "reward.custom_reward_function.path": Path(__file__).with_name("workload.py"),
        "reward.num_workers": 1,
        "trainer.device": work.device,
        "trainer.total_training_steps": work.num_steps,
    }
    mine = [f"{key}={value}" for key, value in settings.items() if not any(e.startswith(f"{key}=") for e in extra)]
    return [*mine, *extra]


def write_prompts(work: Workload, folder: Path) -> None:
    """The data file of the run, in the schema of `verl train`, and the chat template."""
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": "<image>" * len(images) + text}],
            "images": images,
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for text, images in zip(work.prompts, [[url] for url in work.images] or [[]] * len(work.prompts), strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TEMPLATE_FILE).write_text(PLAIN_TEMPLATE)
    (folder / PROMPTS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


class VerlSide:
    """A run that stands still between steps."""

    def __init__(self, work: Workload, folder: Path, extra: Sequence[str] = ()):
        write_prompts(work, folder)
        self.work = work
        self.config: PPOConfig = load_config(overrides_of(work, folder, extra)).config
        data = load_data(self.config)
        assert data.train is not None
        self.loader = data.train
        self.spans = Spans()
        runtime = LocalRuntime(ProgramSpecs(PPO, self.config))
        self.roles = runtime.build_roles(total_steps=work.num_steps, data_sources=data.data_sources)
        context = RunContext(folder, False, lambda value: value, lambda: None, self.spans, lambda *_: None)
        self.program = PPO(self.config, data, self.roles, context)
        self.num_steps = 0
        self.roles.weights.sync(0)
        assert runtime.workers is not None
        assert runtime.workers.rollout is not None
        self.actor, self.rollout = runtime.workers.models["actor"], runtime.workers.rollout
        self.probe = WeightProbe(self.actor.engine.module)

    def step(self) -> dict[str, Any]:
        """One step as the trainer takes it, with the seconds of its phases."""
        self.num_steps += 1
        started = time.perf_counter()
        result = self.program.train(self.num_steps)
        finish(self.work.device)
        seconds = time.perf_counter() - started
        spans = self.spans.take()
        train_s = spans["update_actor"] + spans["update_weights"]
        return {
            "step_s": seconds,
            "generate_s": spans["gen"],
            "train_s": train_s,
            "other_s": seconds - spans["gen"] - train_s,
            "weight_change": self.probe.change(),
            **self._proof(result.batch),
        }

    def log_prob_gap(self) -> float:
        """The largest difference between a sampled log-prob and the training forward's on the same token, over one
        generated batch."""
        batch = self.program.collect(self.num_steps)[0].batch
        trained = self.actor.forward(batch, {"log_probs": "trained"}).batch["trained"]
        mask = batch.batch["response_mask"]
        return float((trained - batch.batch["rollout_log_probs"])[mask].abs().max())

    def params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters of training, with `changes`."""
        config = self.config.actor_rollout_ref.rollout
        return SamplingParams(**{**vars(sampling_params(config)), **changes})

    def requests(self, step: int, num_prompts: int | None = None) -> list[PromptRequest]:
        """The prompts of a step, or the first `num_prompts` of all."""
        count = num_prompts or self.work.num_prompts
        start = (step * self.work.num_prompts) % max(1, len(self.work.prompts) - count + 1)
        ids = self.loader.take(start, count).non_tensor_batch["prompt_token_ids"]
        return [PromptRequest(start + i, tuple(row)) for i, row in enumerate(ids)]

    def generate(self, requests: list[PromptRequest], params: SamplingParams, step: int) -> list[Completion]:
        """Generate as the rollout role does, without the scoring."""
        completions = self.rollout.engine.generate(requests, params, step=step)
        self.rollout.end_generation()
        return completions

    def facts(self) -> dict[str, Any]:
        module = self.actor.engine.module
        return {
            **self.roles.facts,
            "num_threads": torch.get_num_threads(),
            "parameter_dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
            "micro_batch_tokens": self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu,
        }

    def close(self) -> None:
        self.roles.close()

    def _proof(self, batch: DataProto) -> dict[str, Any]:
        """The work that was done: the prompts' digest and the lengths of the samples."""
        columns, first = batch.batch, range(0, len(batch), self.work.num_samples)
        prompts = [columns["prompts"][i][columns["prompt_mask"][i]].tolist() for i in first]
        lengths = columns["response_mask"].sum(dim=1)
        return {
            "prompts": digest(prompts),
            "num_sequences": len(batch),
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
        }
