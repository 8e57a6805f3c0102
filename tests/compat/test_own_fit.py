"""A recipe's trainer class with its own `fit`: three steps, resumed, on Ray, and compared with this package's group filter."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.compat.recipes.dynamic_sampling import DynamicSamplingTrainer, Runner
from tests.json_lines import read_lines, write_lines
from verl import DataProto
from verl.compat.sections import loaded_config
from verl.errors import ConfigError, InterruptedRun
from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.main_ppo_v0 import run_ppo
from verl.trainer.ppo.metric_utils import reduce_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role, compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker


@pytest.fixture(autouse=True)
def quick():
    Runner.trainers.clear()


TOKENS = ["input_ids", "attention_mask", "position_ids"]
SCORER = """
import hashlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(hashlib.sha256(solution_str.encode()).digest()[0] % 2), "acc": len(solution_str)}
"""


@pytest.fixture
def tree(tiny_llama, tmp_path):
    return tree_of(tiny_llama, tmp_path)


@pytest.fixture(scope="module")
def unbroken(tiny_llama, tmp_path_factory):
    """The folder of the unbroken run."""
    return run(tree_of(tiny_llama, tmp_path_factory.mktemp("unbroken")))


def tree_of(tiny_llama, tmp_path):
    """3 steps of GRPO on 3 prompts x 2 samples; the filter keeps about half."""
    rows = [
        {"data_source": "x", "prompt": [{"role": "user", "content": f"row {i}"}], "reward_model": {"ground_truth": "1"}}
        for i in range(40)
    ]
    write_lines(tmp_path / "train.jsonl", rows)
    (tmp_path / "score.py").write_text(SCORER)
    return {
        "algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": True, "metric": "seq_reward"}},
        "actor_rollout_ref": {
            "model": {"path": str(tiny_llama)},
            "rollout": {"n": 2},
            "actor": {"ppo_mini_batch_size": 3, "optim": {"lr": 1e-5}, "fsdp_config": {"dtype": "float32"}},
        },
        "data": {
            "train_files": f"{tmp_path}/train.jsonl", "val_files": f"{tmp_path}/train.jsonl", "val_max_samples": 2,
            "train_batch_size": 3, "max_prompt_length": 64, "max_response_length": 6,
        },
        "custom_reward_function": {"path": f"{tmp_path}/score.py"},
        "reward": {"debug": True},
        "trainer": {
            "logger": ["file"], "total_training_steps": 3, "val_before_train": False, "save_freq": 1, "test_freq": 2,
            "default_local_dir": f"{tmp_path}/run",
        },
    }  # fmt: skip


def run(tree, runner=Runner, **trainer):
    changed = {**tree, "trainer": {**tree["trainer"], **trainer}}
    composed = OmegaConf.create(asdict(loaded_config(changed).config))  # as Hydra composes it
    run_ppo(OmegaConf.merge(composed, changed), task_runner_class=runner)
    return Path(changed["trainer"]["default_local_dir"])


def weights(folder, step):
    from safetensors.torch import load_file

    return load_file(folder / f"global_step_{step}/actor/huggingface/model.safetensors")


def samples(folder, step):
    names = ("ordinal", "sample_index", "response", "score", "advantages")
    return [{name: row[name] for name in names} for row in read_lines(folder / f"samples/train/step_{step:06d}.jsonl")]


def metrics(folder):
    rows = read_lines(folder / "metrics.jsonl")
    return {row["step"]: row for row in rows if "actor/pg_loss" in row}


class TestDynamicSampling:
    def test_batches_and_gradients_equal_our_group_filter(self, tree, unbroken, tmp_path):
        theirs = unbroken
        ours = run(tree, None, default_local_dir=f"{tmp_path}/ours")
        for step in (1, 2, 3):
            assert samples(theirs, step) == samples(ours, step)
        assert sum(row["train/num_gen_batches"] for row in metrics(theirs).values()) > 3
        for name in ("critic/score/mean", "actor/grad_norm", "response_length/mean"):
            for step, row in metrics(ours).items():
                assert metrics(theirs)[step][name] == pytest.approx(row[name], rel=1e-4)
        validated = read_lines(theirs / "metrics.jsonl")[1]
        assert "val/reward" in validated

    def test_it_resumes_where_it_was_killed(self, tree, unbroken, tmp_path):
        short = run(tree, default_local_dir=f"{tmp_path}/short", total_training_steps=2)
        again = run(tree, default_local_dir=f"{tmp_path}/short")
        assert again == short
        assert [step for step, _ in Runner.trainers[-1].trained] == [3]
        assert samples(again, 3) == samples(unbroken, 3)
        for name, weight in weights(unbroken, 3).items():
            assert torch.equal(weight, weights(again, 3)[name]), name

    def test_a_stop_saves_the_last_step(self, tree):
        class Stopped(DynamicSamplingTrainer):
            def _update_actor(self, batch):
                output = super()._update_actor(batch)
                self._run.loop.stop.requested = True
                return output

        tree["trainer"]["save_freq"] = -1
        with pytest.raises(InterruptedRun, match="after step 1, and saved"):
            Stopped(OmegaConf.create(tree)).fit()
        assert (Path(tree["trainer"]["default_local_dir"]) / "global_step_1/actor").is_dir()

    @pytest.mark.slow
    def test_on_ray(self, tree, tmp_path):
        pytest.importorskip("ray")
        tree["reward"] = {"num_workers": 1}  # debug is of one process
        one = run(tree)
        two = run(tree, default_local_dir=f"{tmp_path}/two", n_gpus_per_node=2)
        for step in (1, 2, 3):
            assert [row["response"] for row in samples(one, step)] == [row["response"] for row in samples(two, step)]
            assert metrics(two)[step]["actor/grad_norm"] == pytest.approx(
                metrics(one)[step]["actor/grad_norm"], rel=1e-4
            )


class OneStep(RayPPOTrainer):
    """A step; a test changes its parts."""

    def fit(self):
        self._load_checkpoint()
        self.global_steps += 1
        for columns in self.train_dataloader:
            self.one_step(DataProto.from_single_dict(columns))
            self.global_steps += 1

    def generated(self, prompts, sampler=None):
        generate = self.async_rollout_manager.generate_sequences
        return (sampler or (lambda rows: generate(rows.repeat(2))))(self._get_gen_batch(prompts))

    def credited(self, prompts, generated):
        prompts.non_tensor_batch["uid"] = np.array([str(row) for row in range(len(prompts))], dtype=object)
        batch = prompts.repeat(2).union(generated)
        batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
        return compute_advantage(batch.union(self._compute_old_log_prob(batch)[0].select(["old_log_probs"])), "grpo")


def test_a_batch_padded_to_a_divisor_gives_the_samples_of_the_batch(tree):
    """As scripts do before they give rows to workers; the copies of the first rows are further samples of their prompts."""
    results = {}

    class Padding(OneStep):
        padded = True

        def one_step(self, prompts):
            generate = self.async_rollout_manager.generate_sequences

            def sampled(rows):
                rows, pad_size = pad_dataproto_to_divisor(rows.repeat(2), 4 if self.padded else 1)
                results["rows", self.padded] = len(rows)
                return unpad_dataproto(generate(rows), pad_size)

            batch = self.credited(prompts, self.generated(prompts, sampled))
            results[self.padded] = batch.batch["responses"]
            self._update_actor(batch)

    tree["trainer"]["total_training_steps"] = 1
    for Padding.padded in (True, False):
        tree["trainer"]["default_local_dir"] += "x"
        Padding(OmegaConf.create(tree)).fit()
    assert (results["rows", True], results["rows", False]) == (8, 6)
    assert torch.equal(results[True], results[False])


def test_a_checkpoint_has_every_update_before_its_save(tree):
    saved = []

    class Saving(OneStep):
        def one_step(self, prompts):
            self.global_steps = 0
            measured = self._get_gen_batch(prompts[:])
            measured.meta_info["do_sample"] = False
            assert len(self.async_rollout_manager.generate_sequences(measured)) == 3
            self.global_steps = 1
            self._save_checkpoint()
            batch = self.credited(prompts, self.generated(prompts))
            for _ in range(2):
                self._update_actor(batch)
                self._save_checkpoint()
                saved.append(weights(Path(self.config.trainer.default_local_dir), 1))

    tree["trainer"]["total_training_steps"] = 1
    Saving(OmegaConf.create(tree)).fit()
    assert any(not torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())
    again = Saving(OmegaConf.create(tree))
    again.fit()
    assert (len(saved), again.global_steps) == (2, 2)  # all steps are taken: the loader is empty


def test_prompts_that_a_script_leaves_out_never_train(tree, tmp_path):
    """A batch without the update, and prompts out of the middle of a batch; a run that resumes continues behind them."""
    trained = []

    class Choosing(OneStep):
        def fit(self):
            self._load_checkpoint()
            self.global_steps += 1
            for columns in self.train_dataloader:
                if columns["ordinal"][0] % 2:
                    self.one_step(DataProto.from_single_dict(columns)[[0, 2]])
                    self.global_steps = np.int64(self.global_steps + 1)

        def one_step(self, prompts):
            batch = self.credited(prompts, self.generated(prompts))
            self._update_actor(batch)
            self._save_checkpoint()
            trained.append((int(self.global_steps), batch.batch["ordinal"].tolist()))

    for last in (1, 2):
        tree["trainer"]["total_training_steps"] = last
        Choosing(OmegaConf.create(tree)).fit()
    assert trained == [(1, [3, 3, 5, 5]), (2, [9, 9, 11, 11])]


def test_steps_of_a_critic_alone_are_steps(tree, tmp_path):
    """With trainer.critic_warmup: the prompts of these steps have trained, also for a run that resumes behind one."""
    steps = {}

    class Warming(OneStep):
        def one_step(self, prompts):
            batch = self.generated(prompts)
            batch = prompts.repeat(2).union(batch)
            batch = batch.union(self._compute_old_log_prob(batch)[0].select(["old_log_probs"]))
            batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
            batch = compute_advantage(batch.union(self._compute_values(batch)), "gae")
            norms = [reduce_metrics(self._update_critic(batch).meta_info["metrics"])["critic/grad_norm"]]
            if self.config.trainer.critic_warmup <= self.global_steps:
                norms.append(reduce_metrics(self._update_actor(batch).meta_info["metrics"])["actor/grad_norm"])
            self._save_checkpoint()
            steps[self.config.trainer.default_local_dir, self.global_steps] = (batch.batch["ordinal"].tolist(), norms)

    tree["algorithm"] = {"adv_estimator": "gae"}
    tree["trainer"] |= {"critic_warmup": 3, "total_training_steps": 4}
    Warming(OmegaConf.create(tree)).fit()
    for last in (2, 4):
        parts = {**tree["trainer"], "default_local_dir": f"{tmp_path}/parts", "total_training_steps": last}
        Warming(OmegaConf.create({**tree, "trainer": parts})).fit()
    for step in (1, 2, 3, 4):
        assert steps[f"{tmp_path}/parts", step] == steps[f"{tmp_path}/run", step]
    assert steps[f"{tmp_path}/run", 3][0][0] == 6  # the first prompt of the third batch of three


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda self, prompts: self.generated(prompts[[]]), "The batch has no rows"),
        (lambda self, prompts: self._update_actor(self.credited(prompts, self.generated(prompts))[[]]), "no rows"),
        (lambda self, prompts: [self.generated(prompts[:]) for _ in range(2)], "has samples of step 1 already"),
        (lambda self, prompts: self.at_step(0, prompts), "global_steps is 0: a fit counts its steps from 1"),
        (lambda self, prompts: self.at_step(2, prompts), "has samples of an earlier step, which are dropped"),
        (lambda self, prompts: self.edited(prompts, "responses"), "have different tokens. Change them together"),
        (lambda self, prompts: self.edited(prompts, "input_ids"), "have different tokens. Change them together"),
    ],
    ids=["no prompts", "no rows", "the same samples twice", "step 0", "an earlier step", "responses", "input_ids"],
)
def test_batches_of_a_script_that_would_train_on_something_else(tree, changed, message):
    class Changed(OneStep):
        one_step = changed

        def at_step(self, number, prompts):
            batch = self.credited(prompts, self.generated(prompts))
            self.global_steps = np.int64(number)
            self._update_actor(batch)

        def edited(self, prompts, column):
            batch = self.credited(prompts, self.generated(prompts))
            batch.batch[column] = batch.batch[column] + 1
            self._update_actor(batch)

    with pytest.raises(ConfigError, match=message):
        Changed(OmegaConf.create(tree)).fit()


@pytest.mark.parametrize("pops_tokens", [False, True])
def test_a_validation_of_a_script_has_the_samples_of_the_run(tree, pops_tokens):
    class Validating(OneStep):
        def fit(self):
            self.expected, self.rewards = self._validate(), []
            for columns in self.val_dataloader:
                batch = DataProto.from_single_dict(columns).repeat(3, interleave=True)
                prompts = batch.pop(TOKENS, ["raw_prompt_ids"]) if pops_tokens else self._get_gen_batch(batch)
                prompts.meta_info = {"validate": True, "do_sample": True, "global_steps": self.global_steps}
                samples = self.async_rollout_manager.generate_sequences(prompts)
                self.rewards += samples.batch["rm_scores"].sum(-1).tolist()

    tree["actor_rollout_ref"]["rollout"]["val_kwargs"] = {"n": 3, "temperature": 1.0, "do_sample": True}
    tree["data"] |= {"val_max_samples": 5, "val_batch_size": 2}
    trainer = Validating(OmegaConf.create(tree))
    trainer.fit()
    assert len(trainer.rewards) == 15
    assert np.mean(trainer.rewards) == pytest.approx(trainer.expected["val/reward"])


def test_a_fit_of_earlier_releases(tree, caplog):
    """It takes tokens out of the prompts for generation, and calls worker groups and a reward function."""
    trained = []

    class Earlier(RayPPOTrainer):
        def fit(self):
            for columns in self.train_dataloader:
                self.global_steps += 1
                batch = DataProto.from_single_dict(columns)
                batch.non_tensor_batch["uid"] = np.arange(len(batch)).astype(object)
                prompts = batch.pop(batch_keys=TOKENS, non_tensor_batch_keys=["raw_prompt_ids"])
                assert [len(ids) for ids in prompts.non_tensor_batch["raw_prompt_ids"]] == prompts.batch[
                    "attention_mask"
                ].sum(-1).tolist()
                samples = self.actor_rollout_wg.generate_sequences(prompts.repeat(2, interleave=True))
                batch = batch.repeat(2, interleave=True).union(samples)
                batch.batch["token_level_rewards"] = self.reward_fn(batch, return_dict=True)["reward_tensor"]
                batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
                batch = compute_advantage(batch, adv_estimator="grpo", num_repeat=2)
                trained.append(self.actor_rollout_wg.update_actor(batch).meta_info["metrics"])
                if self.global_steps == 2:
                    return

    config = OmegaConf.create(
        {**tree, "algorithm": {"adv_estimator": "grpo"}, "data": {**tree["data"], "val_files": None}}
    )
    manager = load_reward_manager(config, hf_tokenizer(tree["actor_rollout_ref"]["model"]["path"]))
    trainer = Earlier(config, reward_fn=manager)
    trainer.fit()
    assert len(trained) == 2
    assert all(row["actor/grad_norm"] > 0 for row in trained)


class TestRoles:
    def test_a_critic_and_kl_terms(self, tree):
        tree["algorithm"] |= {"adv_estimator": "gae", "use_kl_in_reward": True, "filter_groups": {"enable": False}}
        tree["critic"] = {"ppo_mini_batch_size": 2, "model": {"path": tree["actor_rollout_ref"]["model"]["path"]}}
        folder = run(tree, total_training_steps=2)
        row = metrics(folder)[2]
        assert {"critic/vf_loss", "actor/reward_kl_penalty", "actor/entropy", "timing_s/values"} <= set(row)
        assert (folder / "global_step_2" / "critic").is_dir()

    def test_guards_leave_out_a_batch_that_is_not_finite(self, tree):
        class Broken(DynamicSamplingTrainer):
            def train_on(self, batch):
                batch.batch["token_level_rewards"] = batch.batch["token_level_rewards"] * float("nan")
                return super().train_on(batch)

        folder = Path(tree["trainer"]["default_local_dir"])
        tree["trainer"] |= {"guards": {"nonfinite": {"action": "skip"}}, "total_training_steps": 1, "test_freq": -1}
        Broken(OmegaConf.create(tree)).fit()
        row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        assert row["training/skipped_batches"] == 1
        assert "actor/pg_loss" not in row
        assert (folder / "guards.jsonl").is_file()

    def test_what_no_fit_calls_is_refused(self, tree):
        config = OmegaConf.create(tree)

        class Saves(RayPPOTrainer):
            def _save_checkpoint(self): ...

        class Worker(ActorRolloutRefWorker): ...

        RayPPOTrainer(config, role_worker_mapping={Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker})
        with pytest.raises(ConfigError, match="CriticWorker stands for a role of a run"):
            CriticWorker(config)

        with pytest.raises(ConfigError, match="Saves._save_checkpoint would not be called"):
            Saves(config)
        with pytest.raises(ConfigError, match="The worker class Worker would not be used. Engines compute here"):
            RayPPOTrainer(config, role_worker_mapping={Role.ActorRollout: Worker})
        ahead = DynamicSamplingTrainer(OmegaConf.merge(config, {"actor_rollout_ref": {"rollout": {"prefetch_num": 1}}}))
        with pytest.raises(ConfigError, match="prefetch_num=0"):
            ahead.fit()
