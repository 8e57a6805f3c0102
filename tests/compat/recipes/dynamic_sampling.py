"""A trainer with dynamic sampling as recipes write it: a subclass of RayPPOTrainer whose `fit` generates until a step has as
many prompts with differing rewards as it trains on. It uses the names of the existing trainer, and no others.

    python dynamic_sampling.py data.train_files=... algorithm.filter_groups.enable=True
"""

import os
import uuid
from collections import defaultdict
from dataclasses import asdict

import numpy as np
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.trainer.main_ppo_v0 import BaseTaskRunner, run_ppo
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    reduce_metrics,
)
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler, need_critic, need_reference_policy
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.config import validate_config
from verl.utils.fs import copy_to_local
from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking


class DynamicSamplingTrainer(RayPPOTrainer):
    """`trained` has the rows of each update: what the tests compare."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained = []
        self.gen_steps = 0

    def fit(self):
        settings = self.config.trainer
        self.logger = Tracking(
            project_name=settings.project_name,
            experiment_name=settings.experiment_name,
            default_backend=settings.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.global_steps = 0
        self._load_checkpoint()
        self.checkpoint_manager.update_weights(self.global_steps)
        if settings.get("val_before_train", True):
            metrics = self._validate()
            assert metrics
            self.logger.log(data=metrics, step=self.global_steps)
            if settings.get("val_only", False):
                return
        self.global_steps += 1
        self.timing, self.collected, self.num_prompts, self.num_batches = defaultdict(float), None, 0, 0
        while self.global_steps <= self.total_training_steps:
            for columns in self.train_dataloader:
                self.gen_steps += 1
                with marked_timer("step", self.timing):
                    batch = self.next_batch(columns)
                    if batch is None:
                        continue
                    metrics = self.train_on(batch)
                self.report(batch, metrics)
                if self.global_steps >= self.total_training_steps:
                    return
                self.global_steps += 1

    def next_batch(self, columns):
        """The rows of a whole step, or None as long as prompts are missing."""
        batch = DataProto.from_single_dict(columns)
        self.num_batches += 1
        rollout = self.config.actor_rollout_ref.rollout
        prompts = self._get_gen_batch(batch)
        prompts.meta_info["global_steps"] = self.global_steps
        repeated = prompts.repeat(repeat_times=rollout.n, interleave=True)
        self._start_profiling(False)
        with marked_timer("gen", self.timing, "red"):
            generated = self.async_rollout_manager.generate_sequences(repeated)
            self.checkpoint_manager.sleep_replicas()
            self.timing.update(generated.meta_info.pop("timing"))
        batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch.batch))], dtype=object)
        batch = batch.repeat(repeat_times=rollout.n, interleave=True).union(generated)
        if self.config.algorithm.use_kl_in_reward:
            batch = self.with_log_probs(batch)
        self.score(batch)
        if not self.config.algorithm.filter_groups.enable:
            return batch
        batch = batch[self.useful_rows(batch)]
        self.collected = batch if self.collected is None else DataProto.concat([self.collected, batch])
        self.num_prompts = len(set(self.collected.non_tensor_batch["uid"]))
        if self.num_prompts < self.config.data.train_batch_size:
            max_batches = self.config.algorithm.filter_groups.max_num_gen_batches
            if 0 < max_batches <= self.num_batches:
                raise ValueError(f"{self.num_batches=} >= {max_batches=}: too few prompts have rewards that differ.")
            return None
        return self.collected[: self.config.data.train_batch_size * rollout.n]

    def score(self, batch):
        with marked_timer("reward", self.timing, "yellow"):
            if self.use_rm and "rm_scores" not in batch.batch.keys():
                batch = batch.union(self._compute_reward_colocate(batch))
            rewards, extra = extract_reward(batch)
            batch.batch["token_level_scores"] = rewards
            batch.non_tensor_batch.update({name: np.array(values) for name, values in extra.items()})
            if self.config.algorithm.use_kl_in_reward:
                _, self.kl_metrics = apply_kl_penalty(
                    batch, kl_ctrl=self.kl_ctrl_in_reward, kl_penalty=self.config.algorithm.kl_penalty
                )
            else:
                batch.batch["token_level_rewards"], self.kl_metrics = batch.batch["token_level_scores"], {}

    def useful_rows(self, batch):
        values = batch.batch["token_level_scores"].sum(dim=-1).numpy()
        by_prompt = defaultdict(list)
        for uid, value in zip(batch.non_tensor_batch["uid"], values, strict=True):
            by_prompt[uid].append(value)
        useful = {uid for uid, rewards in by_prompt.items() if np.std(rewards) > 0 or len(rewards) == 1}
        return [row for row, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in useful]

    def with_log_probs(self, batch):
        """The columns of old and reference log-probs, and the entropy as a metric."""
        batch.batch["response_mask"] = compute_response_mask(batch)
        with marked_timer("old_log_prob", self.timing, "blue"):
            log_probs, utilization = self._compute_old_log_prob(batch)
            entropy = agg_loss(
                loss_mat=log_probs.batch["entropys"],
                loss_mask=batch.batch["response_mask"],
                loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
            )
            self.log_prob_metrics = {"actor/entropy": entropy.detach().item(), "perf/mfu/actor_infer": utilization}
            log_probs.batch.pop("entropys")
            batch = batch.union(log_probs)
        if self.use_reference_policy:
            with marked_timer("ref", self.timing, "olive"):
                batch = batch.union(self._compute_ref_log_prob(batch))
        return batch

    def train_on(self, batch):
        algorithm, settings, metrics = self.config.algorithm, self.config.trainer, dict(self.kl_metrics)
        if settings.balance_batch:
            self._balance_batch(batch, metrics=metrics)
        batch.meta_info["global_token_num"] = torch.sum(batch.batch["attention_mask"], dim=-1).tolist()
        if not algorithm.use_kl_in_reward:
            batch = self.with_log_probs(batch)
        metrics.update(self.log_prob_metrics)
        if self.use_critic:
            with marked_timer("values", self.timing, "cyan"):
                batch = batch.union(self._compute_values(batch))
        with marked_timer("adv", self.timing, "brown"):
            batch = compute_advantage(
                batch,
                adv_estimator=algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            )
        if self.use_critic:
            with marked_timer("update_critic", self.timing, "pink"):
                metrics.update(reduce_metrics(self._update_critic(batch).meta_info["metrics"]))
        if settings.critic_warmup <= self.global_steps:
            self.trained.append((self.global_steps, batch))
            with marked_timer("update_actor", self.timing, "red"):
                output = self._update_actor(batch)
            last = self.global_steps >= self.total_training_steps
            if settings.save_freq > 0 and (last or self.global_steps % settings.save_freq == 0):
                with marked_timer("save_checkpoint", self.timing, "green"):
                    self._save_checkpoint()
            with marked_timer("update_weights", self.timing, "red"):
                self.checkpoint_manager.update_weights(self.global_steps)
            metrics.update(reduce_metrics(output.meta_info["metrics"]))
        self._log_rollout_data(batch, {}, self.timing, settings.get("rollout_data_dir", None))
        self._stop_profiling(False)
        return metrics

    def report(self, batch, metrics):
        settings = self.config.trainer
        if settings.test_freq > 0 and self.global_steps % settings.test_freq == 0:
            with marked_timer("testing", self.timing, "green"):
                metrics.update(self._validate())
        metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
        metrics.update(compute_timing_metrics(batch=batch, timing_raw=self.timing))
        num_devices = self.resource_pool_manager.get_n_gpus()
        metrics.update(compute_throughout_metrics(batch=batch, timing_raw=self.timing, n_gpus=num_devices))
        metrics["train/num_gen_batches"] = self.num_batches
        self.logger.log(data=metrics, step=self.global_steps)
        self.timing, self.collected, self.num_prompts, self.num_batches = defaultdict(float), None, 0, 0


class Runner(BaseTaskRunner):
    trainers = []  # of this process, for tests

    def run(self, config):
        model = copy_to_local(config.actor_rollout_ref.model.path)
        tokenizer, processor = hf_tokenizer(model), hf_processor(model)
        actor_class, group_class = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_resource_pool(config)
        self.add_ref_policy_worker(config, actor_class)
        validate_config(config, need_reference_policy(config), need_critic(config))
        rows = create_rl_dataset(config.data.train_files, config.data, tokenizer, processor, is_train=True)
        trainer = DynamicSamplingTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=group_class,
            train_dataset=rows,
            train_sampler=create_rl_sampler(config.data, rows),
        )
        self.trainers.append(trainer)
        trainer.init_workers()
        trainer.fit()


def main(arguments):
    from verl.config import load_config

    run_ppo(OmegaConf.create(asdict(load_config(arguments).config)), task_runner_class=Runner)


assert AdvantageEstimator.GRPO == "grpo"
if __name__ == "__main__":
    import sys

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(sys.argv[1:])
