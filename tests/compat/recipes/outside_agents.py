"""A project's trainer class in small: rows in memory, agents that know only an address, and samples from what they saw."""

import json
import threading
import urllib.request

import numpy as np
import ray
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager
from verl.trainer.main_ppo import (
    TaskRunner,
    create_rl_sampler,
    get_ppo_ray_runtime_env,
    need_critic,
    need_reference_policy,
    validate_config,
)
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.ray_trainer import AdvantageEstimator, RayPPOTrainer, compute_advantage, compute_response_mask
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.fs import copy_to_local
from verl.utils.metric import reduce_metrics
from verl.utils.profiler.performance import marked_timer
from verl.utils.ray_utils import auto_await
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.tracking import Tracking
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager


class MemoryRows(RLHFDataset):
    """Rows without files."""

    def __init__(self, rows):
        self.dataframe = list(rows)

    def __len__(self):
        return len(self.dataframe)

    def __getitem__(self, item):
        return {**self.dataframe[item], "index": item, "fake_ids": torch.ones(1, dtype=torch.int)}


def ask(address, messages, **body):
    """An agent's request, as an OpenAI client sends it."""
    content = json.dumps({"model": "any", "messages": messages, "logprobs": True, **body}).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", content, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def left(ids, width):
    return [0] * (width - len(ids)) + ids


def right(ids, width):
    return ids + [0] * (width - len(ids))


class CountingClient(LLMServerClient):
    number = 0

    async def generate(self, *arguments, **keywords):
        self.number += 1
        return await super().generate(*arguments, **keywords)


class AgentsTrainer(RayPPOTrainer):
    """Agents of two turns; the reward is a number of the tokens of the last answer."""

    trainers = []

    @auto_await
    async def _abort(self):
        for replica in self.llm_server_manager.get_replicas():
            await replica.abort_all_requests()

    def _agent(self, address, question, results, place):
        messages = [{"role": "user", "content": question}]
        first = ask(address, messages)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "again"}]
        second = ask(address, messages, max_tokens=4)
        results[place] = first, second

    def _rollout(self, questions):
        address = list(self.async_rollout_manager.server_addresses)[0]
        results = [None] * len(questions)
        threads = [
            threading.Thread(target=self._agent, args=(address, question, results, place))
            for place, question in enumerate(questions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._abort()
        return results

    @auto_await
    async def _as_a_backend(self):
        """As rLLM's backend reaches the sampler: a manager of servers, a subclass of its client, tokens in and out."""
        servers = LLMServerManager.create(
            config=self.config, worker_group=self.actor_rollout_wg, rollout_resource_pool=None
        )
        weights = CheckpointEngineManager(config=None, trainer=self.actor_rollout_wg, replicas=servers.get_replicas())
        await weights.update_weights(self.global_steps)
        client, params = (
            servers.get_client(client_cls=CountingClient),
            {"temperature": 1.0, "logprobs": 1, "max_tokens": 3},
        )
        done = [await client.generate("task", prompt_ids=[65, 66], sampling_params=params) for _ in range(2)]
        await weights.sleep_replicas()
        assert servers.get_addresses() == list(self.async_rollout_manager.server_addresses)
        return client.number, [len(answer.token_ids) == len(answer.log_probs) for answer in done]

    def _batch(self, results, uids):
        data, rows = self.config.data, []
        for first, second in results:
            prompt = first["prompt_token_ids"]
            begun = [*prompt, *first["choices"][0]["token_ids"]]
            context, answer = second["prompt_token_ids"], second["choices"][0]["token_ids"]
            assert context[: len(begun)] == begun  # the tokens of the first turn, not its text again
            between = context[len(begun) :]
            sampled = first["choices"][0]["token_ids"]
            log_probs = [
                [entry["logprob"] for entry in part["choices"][0]["logprobs"]["content"]] for part in (first, second)
            ]
            rows.append(
                {
                    "prompts": left(prompt, data.max_prompt_length),
                    "responses": right([*sampled, *between, *answer], self.width),
                    "response_mask": right([1] * len(sampled) + [0] * len(between) + [1] * len(answer), self.width),
                    "rollout_log_probs": right(log_probs[0] + [0.0] * len(between) + log_probs[1], self.width),
                    "attention_mask": left([1] * len(prompt), data.max_prompt_length)
                    + right([1] * (len(sampled) + len(between) + len(answer)), self.width),
                    "token_level_scores": right(
                        [0.0] * (len(sampled) + len(between) + len(answer) - 1) + [float(sum(answer) % 5)], self.width
                    ),
                }
            )
        columns = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
        columns["token_level_scores"] = columns["token_level_scores"].bfloat16()
        columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], dim=1)
        columns["position_ids"] = (columns["attention_mask"].cumsum(-1) - 1).clip(min=0)
        return DataProto.from_dict(columns, {"uid": np.array(uids, dtype=object)})

    def fit(self):
        self.width = 3 * self.config.data.max_response_length + 30
        logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        self.trainers.append(self)
        self.gaps = []
        self.global_steps = 0
        self._load_checkpoint()
        self.checkpoint_manager.update_weights(self.global_steps)
        self.global_steps += 1
        self.answers = self._as_a_backend()
        for columns in self.train_dataloader:
            timing, metrics = {}, {}
            with marked_timer("step", timing):
                n = self.config.actor_rollout_ref.rollout.n
                rows = DataProto.from_single_dict(columns).repeat(n, interleave=True)
                questions = rows.non_tensor_batch["question"]
                with marked_timer("gen", timing):
                    batch = self._batch(self._rollout(questions), list(questions))
                assert compute_response_mask(batch).sum() >= batch.batch["response_mask"].sum()
                batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
                self.checkpoint_manager.sleep_replicas()
                self._balance_batch(batch, metrics=metrics)
                old, _ = self._compute_old_log_prob(batch)
                batch = batch.union(old.select(["old_log_probs"]))
                mask = batch.batch["response_mask"].bool()
                gap = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"])[mask]
                self.gaps.append(gap.abs().max().item())
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
                batch = compute_advantage(batch, AdvantageEstimator.GRPO, num_repeat=n, config=self.config.algorithm)
                metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
                metrics.update(reduce_metrics(self._update_actor(batch).meta_info["metrics"]))
                self.checkpoint_manager.update_weights(self.global_steps)
            metrics.update(compute_timing_metrics(batch=batch, timing_raw=timing))
            n_gpus = self.resource_pool_manager.get_n_gpus()
            metrics.update(compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=n_gpus))
            logger.log(data=metrics, step=self.global_steps)
            if self.global_steps >= self.total_training_steps:
                self._save_checkpoint()
                return
            self.global_steps += 1


def run(config, rows):
    """The project's entry, without its Ray actor."""
    assert ray is not None
    assert "env_vars" in get_ppo_ray_runtime_env()
    runner = TaskRunner()
    actor_cls, group_cls = runner.add_actor_rollout_worker(config)
    runner.add_critic_worker(config)
    runner.add_reward_model_resource_pool(config)
    runner.add_ref_policy_worker(config, actor_cls)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    path = copy_to_local(config.actor_rollout_ref.model.path)
    train = MemoryRows(rows)
    trainer = AgentsTrainer(
        config=config, tokenizer=hf_tokenizer(path), processor=hf_processor(path),
        role_worker_mapping=runner.role_worker_mapping, resource_pool_manager=runner.init_resource_pool_mgr(config),
        ray_worker_group_cls=group_cls, train_dataset=train, val_dataset=MemoryRows(rows), collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, train),
    )  # fmt: skip
    trainer.init_workers()
    trainer.fit()
