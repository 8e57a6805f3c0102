"""A project's backend in small, with worker groups that it builds itself, servers for agents, and rows without padding."""

import asyncio

import ray
import torch
from omegaconf import open_dict

from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.metric import reduce_metrics
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding


class ChosenLoss:
    """Another loss for some rows, as a project with several roles has it."""

    def __init__(self, config):
        self.config = omega_conf_to_dataclass(config)

    def __call__(self, model_output, data, dp_group=None):
        return ppo_loss(tu.get(data, "another_config", self.config), model_output, data, dp_group)


def own_loss(model_output, data, dp_group=None):
    return model_output["log_probs"].sum()


class Backend:
    """Agents of one turn; the reward is a number of the tokens."""

    def __init__(self, config, steps):
        self.config, self.width = config, config.data.max_response_length
        with open_dict(config):
            config.actor_rollout_ref.actor.optim.total_training_steps = steps
        validate_config(config=config, use_reference_policy=False, use_critic=False)
        worker = ray.remote(ActorRolloutRefWorker)
        pools = ResourcePoolManager({"global_pool": [1]}, {Role.ActorRollout: "global_pool"})
        pools.create_resource_pool()
        pool = pools.get_resource_pool(Role.ActorRollout)
        classes = {
            "actor_rollout": RayClassWithInitArgs(cls=worker, config=config.actor_rollout_ref, role="actor_rollout")
        }
        group = RayWorkerGroup(pool, create_colocated_worker_cls(class_dict=classes), device_name="cpu")
        self.workers = group.spawn(prefix_set=classes.keys())["actor_rollout"]
        self.workers.init_model()
        self.workers.set_loss_fn(ChosenLoss(config.actor_rollout_ref.actor))
        self.servers = LLMServerManager.create(config=config, worker_group=self.workers, rollout_resource_pool=pool)
        self.client = self.servers.get_client()
        AgentLoopManager.create(config=config, llm_client=self.client)
        section = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        self.weights = CheckpointEngineManager(section, self.workers, self.servers.get_replicas())
        self.gaps, self.metrics = [], []

    async def rollout(self, prompts):
        answers = [self.client.generate("task", prompt_ids=ids, sampling_params={"max_tokens": 6}) for ids in prompts]
        return await asyncio.gather(*answers)

    def rows(self, prompts, answers):
        longest, rows = max(map(len, prompts)), []
        for ids, answer in zip(prompts, answers, strict=True):
            tokens, pad = list(answer.token_ids), self.width - len(answer.token_ids)
            mask = [1] * len(tokens) + [0] * pad
            before = longest - len(ids)
            rows.append({
                "prompts": [0] * before + list(ids), "responses": tokens + [0] * pad, "response_mask": mask,
                "attention_mask": [0] * before + [1] * len(ids) + mask,
                "rollout_log_probs": [*answer.log_probs, *[0.0] * pad], "reward": float(sum(tokens) % 7),
            })  # fmt: skip
        columns = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], 1)
        columns["position_ids"] = (columns["attention_mask"].cumsum(-1) - 1).clip(min=0)
        return DataProto.from_dict(columns)

    def step(self, number, prompts):
        batch = self.rows(prompts, asyncio.run(self.rollout(prompts)))
        self.weights.sleep_replicas()
        self.workers._dispatch_info["actor"] = self.workers._query_dispatch_info("actor")
        jagged = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(jagged, calculate_entropy=True, compute_loss=False)
        output = self.workers.compute_log_prob(jagged)
        batch.batch["old_log_probs"] = no_padding_2_padding(tu.get(output, "log_probs"), jagged)
        mask, reward = batch.batch["response_mask"], batch.batch.pop("reward")
        gap = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"])[mask.bool()]
        self.gaps.append(gap.abs().max().item())
        assert (no_padding_2_padding(tu.get(output, "entropy"), jagged)[mask.bool()] > 0).all()
        batch.batch["advantages"] = (reward - reward.mean())[:, None] * mask
        batch.batch["response_mask"] = mask * (torch.arange(len(mask)) < len(mask) - 1)[:, None]  # a padding row
        update = left_right_2_no_padding(batch.to_tensordict())
        half = len(mask) // 2
        tu.assign_non_tensor(update, global_batch_size=half, mini_batch_size=half, epochs=2)
        self.metrics.append(reduce_metrics(tu.get(self.workers.update_actor(update), "metrics")))
        self.workers.save_checkpoint(
            f"{self.config.trainer.default_local_dir}/global_step_{number}/actor", None, number
        )
        self.weights.update_weights(number)
