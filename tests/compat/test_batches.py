"""verl.trainer.ppo.{core_algos, ray_trainer, rollout_corr_helper, utils, metric_utils} and verl.utils.debug.metrics: functions
over batches, with numbers worked by hand or computed by verl.algorithms."""

import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.algorithms import advantages
from verl.algorithms.correction import rollout_correction
from verl.algorithms.policy_losses import policy_loss
from verl.algorithms.reduce import agg_loss
from verl.compat.batches import CORRECTED, warn_uncorrected
from verl.config.sections.algorithm import RolloutCorrectionConfig
from verl.data_proto.metrics import metric_values
from verl.errors import ConfigError
from verl.single_controller.base import Worker
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.metric_utils import _compute_response_info
from verl.trainer.ppo.ray_trainer import AdvantageEstimator, apply_kl_penalty, compute_advantage
from verl.trainer.ppo.rollout_corr_helper import (
    apply_bypass_mode,
    compute_offpolicy_metrics,
    compute_rollout_correction_and_add_to_batch,
)
from verl.trainer.ppo.utils import Role, WorkerType, need_critic, need_reference_policy, need_reward_model
from verl.utils.debug.metrics import calculate_debug_metrics

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])


@pytest.fixture
def batch():
    """Two prompts, two responses of each; rewards 1, 0, 2, 2 on the last token."""
    rewards = torch.zeros(4, 3)
    rewards[torch.arange(4), MASK.sum(1) - 1] = torch.tensor([1.0, 0.0, 2.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    draw = lambda: -torch.rand(4, 3, generator=generator)  # noqa: E731
    return DataProto.from_dict(
        {
            "responses": torch.ones(4, 3, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.long), MASK], dim=1),
            "token_level_scores": rewards,
            "token_level_rewards": rewards.clone(),
            "old_log_probs": draw(),
            "ref_log_prob": draw(),
            "rollout_log_probs": draw(),
            "values": draw(),
        },
        {"uid": np.array(["a", "a", "b", "b"], dtype=object), "accuracy": np.array([1, 0, 1, 0], dtype=object)},
    )


@pytest.fixture
def registered():
    """Names that a test registers, forgotten after it."""
    names = []
    yield names.append
    for registry in (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY):
        for name in names:
            registry.pop(name, None)


class TestRegistries:
    def test_they_are_mappings_of_functions(self):
        registry = core_algos.ADV_ESTIMATOR_REGISTRY
        assert registry["grpo"] is core_algos.compute_grpo_outcome_advantage
        assert registry[core_algos.AdvantageEstimator.GAE] is core_algos.compute_gae_advantage_return
        assert core_algos.AdvantageEstimator.RLOO in registry
        assert "nothing" not in registry
        assert registry.get("nothing") is None
        assert {str(name) for name in core_algos.AdvantageEstimator} <= set(registry)
        assert len(registry) == len(list(registry)) == len(advantages.ADVANTAGES)
        assert core_algos.POLICY_LOSS_REGISTRY["gspo"] is core_algos.compute_policy_loss_gspo
        with pytest.raises(KeyError):
            registry["nothing"]

    def test_assignment_acts_on_runs(self, batch, registered):
        registered("compat_alias")
        core_algos.ADV_ESTIMATOR_REGISTRY["compat_alias"] = core_algos.ADV_ESTIMATOR_REGISTRY["gae"]
        assert advantages.requires("compat_alias") == advantages.requires("gae")
        assert "values" in advantages.requires("compat_alias")
        columns = {**dict(batch.batch.items()), "response_mask": MASK}
        settings = {"gamma": 0.9, "lam": 0.8}
        ours = advantages.compute_advantage("gae", columns, **settings)
        alias = advantages.compute_advantage("compat_alias", columns, **settings)
        assert all(torch.equal(one, other) for one, other in zip(ours, alias, strict=True))

    def test_a_replaced_built_in_is_what_everybody_gets(self, batch):
        original = advantages.ADVANTAGES.get("opo")

        def mine(token_level_rewards, response_mask, **kwargs):
            return token_level_rewards * 0 + 5, token_level_rewards

        columns = {
            "token_level_rewards": batch.batch["token_level_rewards"],
            "response_mask": MASK,
            "uid": [0, 0, 1, 1],
        }
        try:
            core_algos.ADV_ESTIMATOR_REGISTRY["opo"] = mine
            assert core_algos.get_adv_estimator_fn("opo") is mine
            assert (advantages.compute_advantage("opo", columns)[0] == 5).all()
        finally:
            advantages.ADVANTAGES.set("opo", original)
        assert core_algos.get_adv_estimator_fn("opo") is core_algos.compute_opo_outcome_advantage

    def test_a_loss_by_assignment(self, batch, registered):
        registered("compat_loss")
        core_algos.POLICY_LOSS_REGISTRY["compat_loss"] = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
        columns = batch.batch
        inputs = {
            "old_log_prob": columns["old_log_probs"], "log_prob": columns["ref_log_prob"],
            "advantages": columns["token_level_rewards"], "response_mask": MASK,
        }  # fmt: skip
        agg = lambda matrix, mask, mode="token-mean", /: agg_loss(matrix, mask, mode or "token-mean")  # noqa: E731
        losses = [
            policy_loss(name, **inputs, agg=agg, params=settings, config=settings)[0]
            for name in ("vanilla", "compat_loss")
            for settings in ({"clip_ratio": 0.01}, {"clip_ratio": 0.5})
        ]
        torch.testing.assert_close(losses[:2], losses[2:])
        assert losses[0] != losses[1]  # the settings of a run reach it under either name

    def test_another_function_under_a_taken_name(self, registered):
        registered("compat_taken")

        def make(add):
            def estimator(token_level_rewards, response_mask):
                return token_level_rewards + add, token_level_rewards

            return estimator

        def estimator(token_level_rewards, response_mask):
            return token_level_rewards, token_level_rewards

        core_algos.register_adv_est("compat_taken")(estimator)
        assert core_algos.register_adv_est("compat_taken")(estimator) is estimator
        with pytest.raises(ConfigError, match="'compat_taken' is registered already"):
            core_algos.register_adv_est("compat_taken")(make(1))
        with pytest.raises(ConfigError, match="'grpo' is registered already"):
            core_algos.register_adv_est(core_algos.AdvantageEstimator.GRPO)(estimator)


class TestRayTrainerFunctions:
    def test_kl_in_the_reward(self, batch):
        controller = core_algos.AdaptiveKLController(0.5, target_kl=0.1, horizon=100)
        returned, metrics = apply_kl_penalty(batch, controller, "k1")
        assert returned is batch
        gap = (batch.batch["old_log_probs"] - batch.batch["ref_log_prob"]) * MASK
        torch.testing.assert_close(batch.batch["token_level_rewards"], batch.batch["token_level_scores"] - 0.5 * gap)
        mean = (gap.sum(1) / MASK.sum(1)).mean().item()
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-5)
        assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
        moved = 0.5 * (1 + min(max(mean / 0.1 - 1, -0.2), 0.2) * 4 / 100)
        assert controller.value == pytest.approx(moved)

    def test_grpo_by_hand(self, batch):
        """Rewards 1 and 0 of one prompt: mean 1/2, unbiased deviation sqrt(1/2); 2 and 2 of the other teach nothing."""
        returned = compute_advantage(batch, AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=True)
        assert returned is batch
        size = 0.5 / (math.sqrt(0.5) + 1e-6)
        expected = torch.tensor([size, -size, 0.0, 0.0])[:, None] * MASK
        torch.testing.assert_close(batch.batch["advantages"], expected)
        plain = compute_advantage(batch, "grpo", norm_adv_by_std_in_grpo=False)
        torch.testing.assert_close(plain.batch["advantages"], torch.tensor([0.5, -0.5, 0, 0])[:, None] * MASK)

    @pytest.mark.parametrize(
        "name", ["gae", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "reinforce_plus_plus"]
    )
    def test_every_estimator_matches_a_run(self, batch, name):
        columns = {**dict(batch.batch.items()), "response_mask": MASK, "uid": batch.non_tensor_batch["uid"]}
        expected, returns = advantages.compute_advantage(
            name, columns, gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=True
        )
        returned = compute_advantage(batch, name, gamma=0.9, lam=0.8, config=OmegaConf.create({"adv_estimator": name}))
        assert torch.equal(returned.batch["advantages"], expected)
        assert torch.equal(returned.batch["returns"], returns)

    def test_gdpo_reads_a_column_for_each_reward(self, batch):
        parts = {"accuracy": torch.tensor([1.0, 0, 1, 0])}
        columns = {**dict(batch.batch.items()), "response_mask": MASK, "uid": batch.non_tensor_batch["uid"]}
        expected, _ = advantages.compute_advantage(
            "gdpo", {**columns, "reward_parts": parts}, gdpo_reward_keys=["accuracy"], norm_adv_by_std_in_grpo=True
        )
        returned = compute_advantage(batch, "gdpo", config=OmegaConf.create({"gdpo_reward_keys": ["accuracy"]}))
        torch.testing.assert_close(returned.batch["advantages"], expected)

    def test_rows_of_pf_ppo_are_drawn_by_score(self, batch):
        config = OmegaConf.create({"use_pf_ppo": True, "pf_ppo": {"reweight_method": "pow", "weight_pow": 2.0}})
        resampled = compute_advantage(batch, "gae", config=config)
        assert len(resampled) == 4
        assert (resampled.batch["token_level_rewards"].sum(1) > 0).all()  # a score of 0 is never sampled

    def test_a_column_that_is_missing(self, batch):
        with pytest.raises(ConfigError, match="'remax' needs the column 'reward_baselines'"):
            compute_advantage(batch, "remax")


class TestRolloutCorrection:
    def test_weights_and_rejection_join_the_batch(self, batch):
        batch.batch["response_mask"] = MASK
        settings = {
            "rollout_is": "token",
            "rollout_is_threshold": 1.2,
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.8_1.5",
        }
        expected = rollout_correction(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], MASK, **settings)
        config = OmegaConf.create({**settings, "bypass_mode": False, "loss_type": "ppo_clip"})
        corrected, metrics = compute_rollout_correction_and_add_to_batch(batch, config)
        ratio = (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).exp()
        torch.testing.assert_close(corrected.batch["rollout_is_weights"], ratio.clamp(max=1.2) * MASK)
        assert torch.equal(corrected.batch["response_mask"], MASK * ((ratio >= 0.8) & (ratio <= 1.5)))
        assert 0 < corrected.batch["response_mask"].sum() < MASK.sum()
        assert metrics == metric_values(expected.metrics)
        assert "rollout_corr/kl" in metrics

    def test_only_measured_without_a_rule(self, batch):
        batch.batch["response_mask"] = MASK
        corrected, metrics = compute_rollout_correction_and_add_to_batch(batch, OmegaConf.create({"rollout_is": None}))
        assert "rollout_is_weights" not in corrected.batch.keys()
        assert torch.equal(corrected.batch["response_mask"], MASK)
        gap = (batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"])[MASK.bool()]
        assert metrics["rollout_corr/kl"] == pytest.approx(gap.mean().item(), rel=1e-5)

    def test_a_fit_that_leaves_it_out_is_warned_once(self, batch, caplog):
        CORRECTED.clear()
        chosen = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1")
        for section in (RolloutCorrectionConfig(), chosen, chosen):
            warn_uncorrected(section, batch)
        assert ["rollout_is=token, rollout_rs=token_k1 has no effect" in text for text in caplog.messages] == [True]

    def test_off_policy_metrics(self, batch):
        old, sampled = batch.batch["old_log_probs"], batch.batch["rollout_log_probs"]
        assert compute_offpolicy_metrics(old, None, MASK) == {}
        metrics = compute_offpolicy_metrics(old, sampled, MASK)
        log_ratio = (old - sampled)[MASK.bool()]
        assert metrics["k3_kl"] == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-5)

    def test_bypass(self, batch):
        loss = OmegaConf.create({"loss_mode": "vanilla"})
        OmegaConf.set_struct(loss, True)
        apply_bypass_mode(batch, OmegaConf.create({"rollout_is": "token"}), loss)
        assert torch.equal(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])
        assert (loss.loss_mode, loss.rollout_correction.rollout_is) == ("bypass_mode", "token")
        batch.batch.pop("rollout_log_probs")
        with pytest.raises(ConfigError, match="calculate_log_probs=True"):
            apply_bypass_mode(batch)


class TestMetrics:
    def test_lengths(self, batch):
        lengths = _compute_response_info(batch)
        assert lengths["prompt_length"].tolist() == [2, 2, 2, 2]
        assert lengths["response_length"].tolist() == [3, 2, 1, 3]
        assert torch.equal(lengths["response_mask"], MASK)

    def test_trainer_against_sampler(self, batch):
        p, q = (batch.batch[name].exp()[MASK.bool()].double() for name in ("old_log_probs", "rollout_log_probs"))
        metrics = calculate_debug_metrics(batch)
        assert metrics["training/rollout_probs_diff_valid"] == 1
        assert metrics["training/rollout_probs_diff_mean"] == pytest.approx((p - q).abs().mean().item(), rel=1e-5)
        assert metrics["training/rollout_probs_diff_max"] == pytest.approx((p - q).abs().max().item(), rel=1e-5)
        expected = np.corrcoef(p.numpy(), q.numpy())[0, 1]
        assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected, rel=1e-4)
        batch.batch["response_mask"] = torch.zeros_like(MASK)
        assert calculate_debug_metrics(batch) == {"training/rollout_probs_diff_valid": 0}


class TestRoles:
    def config(self, **changes):
        tree = {
            "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
            "actor_rollout_ref": {"actor": {"use_kl_loss": False}},
            "critic": {"enable": None},
            "reward_model": {"enable": False},
        }
        config = OmegaConf.create(tree)
        for path, value in changes.items():
            OmegaConf.update(config, path.replace("__", "."), value)
        return config

    def test_what_a_config_needs(self):
        assert not need_reference_policy(self.config())
        assert need_reference_policy(self.config(algorithm__use_kl_in_reward=True))
        assert need_reference_policy(self.config(actor_rollout_ref__actor__use_kl_loss=True))
        assert not need_critic(self.config())
        assert need_critic(self.config(algorithm__adv_estimator="gae"))
        assert not need_critic(self.config(algorithm__adv_estimator="gae", critic__enable=False))
        assert need_critic(self.config(critic__enable=True))
        assert not need_reward_model(self.config())
        assert need_reward_model(self.config(reward_model__enable=True))
        assert need_reward_model(OmegaConf.create({"reward": {"reward_model": {"enable": True}}}))

    def test_a_mapping_of_roles(self):
        mapping = {Role.ActorRollout: object, Role.RefPolicy: object}
        assert need_reference_policy(mapping)
        assert not need_reward_model(mapping)
        assert str(Role.ActorRolloutRef) == "actor_rollout_ref"
        assert Role.from_string("ref") is Role.RefPolicy
        with pytest.raises(ValueError, match="'nobody'"):
            Role.from_string("nobody")
        assert WorkerType == type[Worker]

    def test_pools_of_roles(self):
        pytest.importorskip("ray")
        from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

        manager = ResourcePoolManager(
            {"all": [2, 2], "rm": [1]}, {Role.Actor: "all", Role.RewardModel: "rm"}, use_gpu=False
        )
        manager.create_resource_pool()
        assert manager.get_n_gpus() == 5
        assert manager.get_resource_pool(Role.Actor).world_size == 4
        with pytest.raises(ConfigError, match="mapped to the pool None"):
            manager.get_resource_pool(Role.Critic)
