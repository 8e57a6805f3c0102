"""A project of 2025 in small: rows that its dataset makes as tokens, its loaders and rewards, and a fit of that time."""

import uuid

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import verl.utils.torch_functional as verl_F
from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.ray_trainer import (
    RayPPOTrainer,
    Role,
    _timer,
    apply_kl_penalty,
    compute_advantage,
    compute_data_metrics,
    compute_timing_metrics,
    reduce_metrics,
)
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.model import compute_position_id_with_mask
from verl.utils.tracking import Tracking


class Puzzles(Dataset):
    def __init__(self, tokenizer, size):
        self.tokenizer, self.size = tokenizer, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        chat = [{"role": "user", "content": f"Puzzle {index}"}]
        prompt = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids, mask = verl_F.tokenize_and_postprocess_data(
            prompt=prompt, tokenizer=self.tokenizer, max_length=60, pad_token_id=self.tokenizer.pad_token_id, left_pad=True,
            truncation="error",
        )  # fmt: skip
        columns = {
            "input_ids": ids[0],
            "attention_mask": mask[0],
            "position_ids": compute_position_id_with_mask(mask)[0],
        }
        return {"index": index, **columns, "raw_prompt_ids": ids[0].tolist()}


class PuzzleTrainer(RayPPOTrainer):
    trainers = []

    def __init__(self, config, tokenizer, repeats_first=False, workers=({}, None, None)):
        self.train_dataset = self.val_dataset = Puzzles(tokenizer, 12)
        self.repeats_first, self.steps = repeats_first, []
        super().__init__(config, tokenizer, *workers, self._score, self._score)
        self.trainers.append(self)

    def _score(self, data):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        width = data.batch["prompts"].shape[-1]
        for row in range(len(data)):
            item = data[row]
            length = int(item.batch["attention_mask"][width:].sum())
            answer = self.tokenizer.decode(item.batch["responses"][:length])
            rewards[row, length - 1] = (sum(map(ord, answer)) + item.non_tensor_batch["index"]) % 3
        return rewards

    def _create_dataloader(self):
        size = self.config.data.train_batch_size
        generator = torch.Generator().manual_seed(3)
        self.train_dataloader = DataLoader(
            self.train_dataset, size, shuffle=True, generator=generator, collate_fn=collate_fn
        )
        self.val_dataloader = DataLoader(self.val_dataset, size, collate_fn=collate_fn)
        self.total_training_steps = self.config.trainer.total_training_steps or len(self.train_dataloader)

    def fit(self):
        trainer = self.config.trainer
        logger = Tracking(trainer.project_name, trainer.experiment_name, default_backend=trainer.logger)
        self.global_steps = 0
        self._load_checkpoint()
        self.global_steps += 1
        n = self.config.actor_rollout_ref.rollout.n
        for columns in self.train_dataloader:
            metrics, timing = {}, {}
            batch = DataProto.from_single_dict(columns)
            names = ["input_ids", "attention_mask", "position_ids"]
            with _timer("step", timing):
                prompts = batch.pop(batch_keys=names, non_tensor_batch_keys=["raw_prompt_ids"])
                if self.repeats_first:
                    prompts = prompts.repeat(n, interleave=True)
                samples = self.actor_rollout_wg.generate_sequences(prompts)
                batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
                batch = batch.repeat(repeat_times=n, interleave=True).union(samples)
                self.steps.append(batch)
                self._balance_batch(batch, metrics=metrics)
                batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
                batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
                batch.batch["token_level_scores"] = self.reward_fn(batch)
                if self.use_reference_policy:
                    batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
                    batch, penalties = apply_kl_penalty(batch, kl_ctrl=self.kl_ctrl, kl_penalty="kl")
                    metrics.update(penalties)
                else:
                    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
                batch = compute_advantage(batch, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=n)
                output = self.actor_rollout_wg.update_actor(batch)
                metrics.update(reduce_metrics(output.meta_info["metrics"]))
            metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
            metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing))
            logger.log(data=metrics, step=self.global_steps)
            if self.global_steps >= self.total_training_steps:
                self._save_checkpoint()
                return
            self.global_steps += 1


class GroupsTrainer(PuzzleTrainer):
    def init_workers(self):
        assert self.hybrid_engine
        self.resource_pool_manager.create_resource_pool()
        worker, section = self.role_worker_mapping[Role.ActorRollout], self.config.actor_rollout_ref
        pool = self.resource_pool_manager.get_resource_pool(Role.ActorRollout)
        by_pool = {pool: {"actor_rollout": RayClassWithInitArgs(cls=worker, config=section, role="actor_rollout")}}
        for pool, classes in by_pool.items():
            colocated = create_colocated_worker_cls(class_dict=classes)
            group = self.ray_worker_group_cls(resource_pool=pool, ray_cls_with_init=colocated)
            self.actor_rollout_wg = group.spawn(prefix_set=classes.keys())["actor_rollout"]
        self.actor_rollout_wg.init_model()


class EpisodesTrainer(RayPPOTrainer):
    """As RAGEN's trainer: no dataset, since episodes of two turns make the rows of each step; measured before the first."""

    def __init__(self, config, tokenizer):
        super().__init__(config, tokenizer, reward_fn=self._score, val_reward_fn=self._score)
        self.gaps, self.measured = [], []

    def _create_dataloader(self, train_dataset, val_dataset, collate_fn, train_sampler):
        assert (train_dataset, val_dataset) == (None, None)
        self.total_training_steps = self.config.trainer.total_training_steps

    def _score(self, data, return_dict=False):
        return data.batch["rm_scores"]

    def _sampled(self, prompts, validate):
        width = max(map(len, prompts))
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
        rows = {"input_ids": ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask)}
        assert isinstance(self.actor_rollout_wg, RayWorkerGroup)
        meta_info = {"do_sample": True, "validate": validate}
        samples = self.actor_rollout_wg.generate_sequences(DataProto.from_dict(rows, meta_info=meta_info)).batch
        lengths = samples["response_mask"].sum(-1).tolist()
        columns = zip(samples["responses"].tolist(), samples["rollout_log_probs"].tolist(), lengths, strict=True)
        return [(ids[:length], probs[:length]) for ids, probs, length in columns]

    def _rollout(self, validate=False):
        rows = [list(f"Game {number // 2}:".encode()) for number in range(8)]
        parts = [[] for _ in rows]
        for _ in range(2):
            for row, part, (ids, probs) in zip(rows, parts, self._sampled(rows, validate), strict=True):
                part.append((len(row), probs))
                row += [*ids, *b" again"]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        columns = {"input_ids": ids, "responses": ids[:, 1:], "attention_mask": (ids > 0).long()}
        trained, sampled = torch.zeros(2, len(rows), width - 1)
        for number, turns in enumerate(parts):
            for start, probs in turns:
                trained[number, start - 1 : start - 1 + len(probs)] = 1
                sampled[number, start - 1 : start - 1 + len(probs)] = torch.tensor(probs)
        scores = torch.zeros(len(rows), width - 1)
        scores[:, -1] = torch.tensor([float(sum(row) % 5) for row in rows])
        columns |= {"loss_mask": trained.long(), "rm_scores": scores, "rollout_log_probs": sampled}
        columns["position_ids"] = compute_position_id_with_mask(columns["attention_mask"])
        groups = np.array([str(number // 2) for number in range(len(rows))], dtype=object)
        return DataProto.from_dict(columns, {"uid": groups})

    def _save_checkpoint(self):
        folder = f"{self.config.trainer.default_local_dir}/global_step_{self.global_steps}/actor"
        self.actor_rollout_wg.save_checkpoint(folder, None, self.global_steps, max_ckpt_to_keep=1)

    def fit(self):
        trainer = self.config.trainer
        logger = Tracking(trainer.project_name, trainer.experiment_name, default_backend=trainer.logger)
        self.global_steps = 0
        self._load_checkpoint()
        self.held_out = self._rollout(validate=True)
        self.measured.append(self.val_reward_fn(self.held_out).sum(-1).mean().item())
        for step in range(1, self.total_training_steps + 1):
            self.global_steps = step
            batch = self._rollout()
            batch.batch["response_mask"] = batch.batch["loss_mask"]
            batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
            old = self.actor_rollout_wg.compute_log_prob(batch)
            mask = batch.batch["loss_mask"].bool()
            gaps = (old.batch["old_log_probs"] - batch.batch["rollout_log_probs"])[mask]
            self.gaps.append(gaps.abs().max().item())
            batch = batch.union(old)
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] = self.reward_fn(batch)
            batch = compute_advantage(batch, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=2)
            output = self.actor_rollout_wg.update_actor(batch)
            logger.log(data=reduce_metrics(output.meta_info["metrics"]), step=step)
        self._save_checkpoint()
