"""Our side of a comparison of whole runs: a configured run that stands still between steps, and its held-out reward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from workload import digest

from verl.config import PPOConfig, load_config
from verl.data_proto.metrics import metric_values
from verl.errors import ConfigError
from verl.programs.api import ProgramSpecs, RunContext
from verl.programs.ppo import PPO
from verl.programs.ppo_data import PPOData, load_data
from verl.programs.ppo_roles import PPORoles
from verl.programs.validation import Validator
from verl.roles.api import Roles
from verl.runtime.local import LocalRuntime
from verl.tracking.spans import Spans


def open_job(config_file: str, overrides: Sequence[str]) -> tuple[PPOConfig, PPOData]:
    """Config and data of the job in `config_file`. Raises ConfigError without training or held-out prompts."""
    config = load_config([*overrides, "trainer.device=cpu"], config_file).config
    data = load_data(config)
    if data.train is None or data.validation is None:
        raise ConfigError(
            f"{config_file} needs data.train_files and data.val_files: the reward is that of held-out prompts."
        )
    return config, data


def held_out_reward(config: PPOConfig, roles: Roles, data: PPOData, step: int) -> dict[str, Any]:
    """Mean reward of the held-out prompts, sampled as val_kwargs say (the same random numbers in every call) and
    greedily."""
    assert data.validation is not None
    started = time.perf_counter()
    metrics = Validator(config, PPORoles.of(roles), data.validation, data.tokenizer, lambda *_: None).run(step)
    return {
        "sampled": metrics["val/reward"],
        "greedy": metrics.get("val/greedy"),
        "evaluation_s": time.perf_counter() - started,
    }


def evaluate_folder(config_file: str, overrides: Sequence[str], folder: str, dtype: str) -> dict[str, Any]:
    """The held-out reward of the model in `folder`, computed in `dtype`."""
    group = "actor_rollout_ref"
    config, data = open_job(
        config_file, [*overrides, f"{group}.model.path={folder}", f"{group}.actor.fsdp_config.dtype={dtype}"]
    )
    runtime = LocalRuntime(ProgramSpecs(PPO, config))
    with closing(runtime.build_roles(total_steps=1, data_sources=data.data_sources, train=False)) as roles:
        return held_out_reward(config, roles, data, 0)


class JobSide:
    """The run of a YAML file with overrides."""

    def __init__(self, config_file: str, overrides: Sequence[str]):
        self.config, self.data = open_job(config_file, overrides)
        self.spans = Spans()
        self.runtime = LocalRuntime(ProgramSpecs(PPO, self.config))
        self.roles = self.runtime.build_roles(
            total_steps=self.config.trainer.total_training_steps or 1, data_sources=self.data.data_sources
        )
        folder = Path(self.config.trainer.default_local_dir)
        context = RunContext(folder, False, lambda value: value, lambda: None, self.spans, lambda *_: None)
        self.program = PPO(self.config, self.data, self.roles, context)
        self.num_steps = 0
        self.program.weights.sync(0)

    def step(self) -> dict[str, Any]:
        """One training step, with its seconds."""
        self.num_steps += 1
        started = time.perf_counter()
        result = self.program.train(self.num_steps)
        seconds = time.perf_counter() - started
        spans, metrics = self.spans.take(), metric_values(result.metrics)
        columns = result.batch.batch
        first = range(0, len(result.batch), self.config.actor_rollout_ref.rollout.n)
        return {
            "step_s": seconds,
            "generate_s": spans["gen"],
            "update_s": spans["update_actor"],
            "train_reward": float(columns["token_level_scores"].sum(dim=1).mean()),
            "skipped_row_ratio": metrics["actor/skipped_row_ratio"],
            "num_sequences": len(result.batch),
            "prompts": digest([columns["prompts"][i][columns["prompt_mask"][i]].tolist() for i in first]),
        }

    def evaluate(self) -> dict[str, Any]:
        """The held-out reward of the weights of now."""
        rewards = held_out_reward(self.config, self.roles, self.data, self.num_steps)
        self.spans.take()
        return rewards

    def facts(self) -> dict[str, Any]:
        """The layout of the run and the dtype of the weights that compute."""
        assert self.runtime.workers is not None
        module = self.runtime.workers.models["actor"].engine.module
        return {
            **self.roles.facts,
            "num_threads": torch.get_num_threads(),
            "parameter_dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        self.program.samples.close()
        self.roles.close()


# keys whose value TRL's GRPOTrainer is given, or has as its only way; another value would be another algorithm
_NEEDED = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.optim.optimizer": "AdamW",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.actor.optim.zero_indexed_step": True,
    "actor_rollout_ref.rollout.top_p": 1.0,
}


def job_of(config_file: str, overrides: Sequence[str], num_steps: int) -> dict[str, Any]:
    """The job as data: prompts in the order in which the steps take them, and hyperparameters. Raises ConfigError where
    TRL cannot be given the same."""
    config, data = open_job(config_file, overrides)
    for key, needed in _NEEDED.items():
        value: Any = config
        for name in key.split("."):
            value = value[name]
        if value != needed:
            raise ConfigError(f"{key}={value} has no equal in TRL here; only {needed} can be compared.")
    group, count = config.actor_rollout_ref, config.data.train_batch_size
    if group.actor.ppo_mini_batch_size != count:
        raise ConfigError("actor.ppo_mini_batch_size must equal data.train_batch_size: one optimizer step per batch.")
    assert data.train is not None
    ids = [list(map(int, row)) for row in data.train.take(0, num_steps * count).non_tensor_batch["prompt_token_ids"]]
    return {
        "model": str(group.model.path),
        "prompts": [data.tokenizer.decode(row) for row in ids],
        "digests": [digest(ids[start : start + count]) for start in range(0, len(ids), count)],
        "num_steps": num_steps,
        "num_prompts": count,
        "num_samples": group.rollout.n,
        "response_tokens": config.data.max_response_length,
        "temperature": group.rollout.temperature,
        "clip_ratio": group.actor.clip_ratio,
        "seed": group.rollout.seed,
        "optim": {
            "learning_rate": group.actor.optim.lr,
            "warmup_steps": max(group.actor.optim.lr_warmup_steps, 0),
            "weight_decay": group.actor.optim.weight_decay,
            "adam_beta1": group.actor.optim.betas[0],
            "adam_beta2": group.actor.optim.betas[1],
            "max_grad_norm": group.actor.optim.clip_grad,
        },
    }


class Scorer:
    """The job's reward function on texts, for the other side."""

    def __init__(self, config_file: str, overrides: Sequence[str]):
        from verl.rewards.functions import RewardFunctionSpec, load_reward_function

        config, self.data = open_job(config_file, overrides)
        own = config.reward.custom_reward_function
        self.function = load_reward_function(RewardFunctionSpec(own.path, own.name, dict(own.reward_kwargs or {})))
        self.kwargs = dict(own.reward_kwargs or {})

    def scores(self, ordinals: Sequence[int], texts: Sequence[str]) -> list[float]:
        """The reward of each text, an answer to the prompt with that ordinal."""
        assert self.data.train is not None
        rows = {o: self.data.train.take(o, 1).non_tensor_batch for o in dict.fromkeys(ordinals)}
        scores = []
        for ordinal, text in zip(ordinals, texts, strict=True):
            row = rows[ordinal]
            score = self.function(
                data_source=row["data_source"][0],
                solution_str=text,
                ground_truth=row["reward_model"][0]["ground_truth"],
                extra_info=row["extra_info"][0] if "extra_info" in row else None,
                **self.kwargs,
            )
            scores.append(float(score["score"] if isinstance(score, dict) else score))
        return scores
