"""verl.trainer.ppo.core_algos: the older names, called as recipes call them."""

from types import SimpleNamespace

import pytest
import torch

from tests.algorithms.batches import advantage_columns, close, policy_inputs
from verl.algorithms.advantages import ADVANTAGES, compute_advantage
from verl.algorithms.policy_losses import policy_loss
from verl.algorithms.reduce import agg_loss
from verl.trainer.ppo import core_algos


def test_every_name_is_there():
    for name in core_algos.__all__:
        assert getattr(core_algos, name) is not None
    assert {str(m) for m in core_algos.AdvantageEstimator} == {n for n in ADVANTAGES if not n.startswith("test_")}
    assert core_algos.AdvantageEstimator.GRPO == "grpo"


@pytest.mark.parametrize("name", [str(m) for m in core_algos.AdvantageEstimator])
def test_estimators(name):
    columns = advantage_columns(0, singles=name != "grpo_passk")
    config = SimpleNamespace(gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=False)
    keywords = {("index" if k == "uid" else k): v for k, v in columns.items()}
    estimated = core_algos.get_adv_estimator_fn(core_algos.AdvantageEstimator(name))(**keywords, config=config)
    expected = compute_advantage(name, columns, gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=False)
    for a, b in zip(estimated, expected):
        close(a, b)


def test_positional_arguments_keep_their_order():
    c = advantage_columns(1)
    rewards, mask = c["token_level_rewards"], c["response_mask"]
    estimated = core_algos.compute_gae_advantage_return(rewards, c["values"], mask, 0.9, 0.8)
    close(estimated[0], compute_advantage("gae", c, gamma=0.9, lam=0.8)[0])
    estimated = core_algos.compute_grpo_outcome_advantage(rewards, mask, c["uid"], 1e-6, False)
    close(estimated[0], compute_advantage("grpo", c, norm_adv_by_std_in_grpo=False)[0])
    estimated = core_algos.compute_remax_outcome_advantage(rewards, c["reward_baselines"], mask)
    close(estimated[0], compute_advantage("remax", c)[0])


@pytest.mark.parametrize("name", ["vanilla", "gspo", "dro", "geo_mean"])
def test_losses(name):
    old, new, advantages, mask, _ = policy_inputs(0)
    info = {"dp_size": 2, "batch_num_tokens": 50, "global_batch_size": 9}
    config = SimpleNamespace(
        clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=0.3, policy_loss={"dro_beta": 0.5}, global_batch_info=info
    )
    loss_fn = core_algos.get_policy_loss_fn(name)
    loss, metrics = loss_fn(old, new, advantages, mask, "seq-mean-token-mean", config, None)
    expected, own_metrics = policy_loss(
        name,
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        agg=lambda m, k, mode=None, /: agg_loss(m, k, mode or "seq-mean-token-mean", **info),
        params={"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "dro_beta": 0.5},
    )
    close(loss, expected)
    assert metrics == {f"actor/{k}": v.value for k, v in own_metrics.items()}


def test_the_rest():
    old, new, values, mask, _ = policy_inputs(1)
    loss, clipped = core_algos.compute_value_loss(new, old, values, mask, 0.5)
    assert loss.shape == clipped.shape == torch.Size([])
    controller = core_algos.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.2, horizon=10, target_kl=0.1))
    assert controller.value == 0.2
    assert core_algos.get_kl_controller({"type": "fixed", "kl_coef": 0.1}).value == 0.1
    close(core_algos.agg_loss(old, mask, "token-mean"), agg_loss(old, mask, "token-mean"))
