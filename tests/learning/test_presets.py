"""Each preset has the gradient of its paper's formula, and a policy that trains with it earns more."""

from dataclasses import asdict

import pytest
import torch

from tests.letters_task import overrides, write_task
from tests.run.conftest import train_run
from tests.slow import slow
from verl import families
from verl.algorithms.advantages import compute_advantage
from verl.config import load_config
from verl.config.presets import PRESETS, preset_settings
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.roles.objectives.policy import PolicyObjective

LENGTHS, GROUP, LIMIT = [5, 2, 3, 6, 1, 4], 3, 6  # two prompts of three samples
REWARDS = torch.tensor([[1.0, 0.0, 0.25], [0.5, 1.0, -1.0]], dtype=torch.float64)


def by_std(rewards):
    return (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)


def others(rewards):
    return rewards - (rewards.sum(1, True) - rewards) / (GROUP - 1)


def whitened(rows):
    tokens = torch.cat(rows)
    return [(row - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for row in rows]


def on_tokens(advantages):
    return [a.expand(length) for a, length in zip(advantages.flatten(), LENGTHS, strict=True)]


def gae(rewards, values):
    """With gamma = lambda = 1: the reward of the response minus the value of the token."""
    return whitened([reward - value for reward, value in zip(rewards.flatten(), values, strict=True)])


def clipped(low, high):
    return lambda ratio, advantage: torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def of_tokens(gain):
    return lambda lp, old, a: gain((lp - old).exp(), a)


def gspo(lp, old, a):
    """Equation 5: the ratio of the response, for its one advantage."""
    return clipped(3e-4, 4e-4)((lp - old).mean().exp(), a[0]).expand(len(lp))


def cispo(lp, old, a):
    return (lp - old).exp().detach().clamp(max=5) * a * lp


def sapo(lp, old, a):
    tau = torch.where(a > 0, 1.0, 1.05).double()
    return torch.sigmoid(tau * ((lp - old).exp() - 1)) * 4 / tau * a


def token_mean(rows):
    return torch.cat(rows).mean()


def sequence_mean(rows):
    return torch.stack([row.mean() for row in rows]).mean()


def per_limit(rows):
    return torch.stack([row.sum() / LIMIT for row in rows]).mean()


def summed(rows):
    """The paper's sum over a response, divided as the mean over tokens is."""
    return torch.stack([row.sum() for row in rows]).mean() * len(rows) / sum(LENGTHS)


PPO = of_tokens(clipped(0.2, 0.2))
PAPERS = {  # preset -> advantages of (rewards, values), objective of a response, and the mean over responses
    "ppo": (gae, PPO, token_mean),
    "grpo": (lambda r, _: on_tokens(by_std(r)), PPO, token_mean),
    "dapo": (lambda r, _: on_tokens(by_std(r)), of_tokens(clipped(0.2, 0.28)), token_mean),
    "dr_grpo": (lambda r, _: on_tokens(r - r.mean(1, True)), PPO, per_limit),
    "gspo": (lambda r, _: on_tokens(by_std(r)), gspo, sequence_mean),
    "cispo": (lambda r, _: on_tokens(by_std(r)), cispo, token_mean),
    "sapo": (lambda r, _: on_tokens(by_std(r)), sapo, sequence_mean),
    "rloo": (lambda r, _: on_tokens(others(r)), PPO, summed),
    "reinforce++": (lambda r, _: whitened(on_tokens(r)), PPO, token_mean),
    "reinforce++-baseline": (lambda r, _: whitened(on_tokens(r - r.mean(1, True))), PPO, token_mean),
}


EDGES = {"dapo": (0.8, 1.28), "gspo": (0.9997, 1.0004), "cispo": (0.5, 5.0)}  # of the clip; else 0.8 and 1.2


def log_ratios(name):
    """Ratios below and above each edge of the clip: of tokens, with GSPO of responses with the clipped sign."""
    low, high = EDGES.get(name, (0.8, 1.2))
    ratios = torch.tensor([low, low, high, high]).double() + (high - low) / 100 * torch.tensor([-1, 1, -1, 1])
    at_rows = [2, 0, 0, 3, 2, 1] if name == "gspo" else [0] * len(LENGTHS)
    step = 0 if name == "gspo" else 1
    return [ratios[[(at + step * t) % 4 for t in range(n)]].log() for at, n in zip(at_rows, LENGTHS, strict=True)]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_has_the_gradient_of_its_paper(name):
    generator = torch.Generator().manual_seed(7)
    old, values = ([torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS] for _ in range(2))
    lp = [(o + move).requires_grad_() for o, move in zip(old, log_ratios(name), strict=True)]
    advantages_of, gain, mean = PAPERS[name]
    paper = [gain(*row) for row in zip(lp, old, advantages_of(REWARDS, values), strict=True)]
    expected = torch.autograd.grad(-mean(paper), lp)

    config = load_config(
        ["data.train_files=t"], check=False, defaults="command", fallbacks=preset_settings(name)
    ).config
    mask = padded([torch.ones(n, dtype=torch.bool) for n in LENGTHS])
    token_rewards = padded(
        [torch.eye(n, dtype=torch.float64)[-1] * r for n, r in zip(LENGTHS, REWARDS.flatten(), strict=True)]
    )
    uid = object_array([str(row // GROUP) for row in range(len(LENGTHS))])
    columns = {"token_level_rewards": token_rewards, "response_mask": mask, "values": padded(values), "uid": uid}
    settings = {key: asdict(config.algorithm)[key] for key in ("gamma", "lam", "norm_adv_by_std_in_grpo")}
    advantages, _ = compute_advantage(config.algorithm.adv_estimator, columns, **settings)
    log_probs = padded(row.detach() for row in lp).requires_grad_()
    batch = DataProto.from_dict({"response_mask": mask, "old_log_probs": padded(old), "advantages": advantages})
    objective = PolicyObjective(
        config.actor_rollout_ref.actor, config.algorithm.rollout_correction, max_response_length=LIMIT
    )
    totals = BatchTotals(sum(LENGTHS), len(LENGTHS), len(LENGTHS))
    loss, metrics = objective({"log_probs": log_probs}, batch, totals)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, padded(expected), rtol=1e-6, atol=1e-9)
    assert name == "sapo" or metrics["pg_clipfrac"].value > 0


STEPS = 12
KEYS = [
    "data.max_response_length=12", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.val_files=[]", "actor_rollout_ref.rollout.n=8",
]  # fmt: skip


def assert_learns(model, folder, *keys, steps=STEPS):
    task = write_task(folder)
    run = train_run(folder / "run", overrides(model, task, *KEYS), [f"trainer.total_training_steps={steps}", *keys])
    rewards = [row["critic/score/mean"] for row in run.training_rows()]
    assert len(rewards) == steps
    assert all(row["actor/grad_norm"] > 0 for row in run.training_rows())
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards


@pytest.mark.parametrize("name", [slow(name, when=name not in ("dapo", "ppo")) for name in PRESETS])
def test_a_policy_learns_with_a_preset(name, tiny_llama, tmp_path):
    keys = [f"{key}={value}" for key, value in preset_settings(name).items()]
    assert_learns(tiny_llama, tmp_path, *keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families.ADVANTAGES.built_in if "turn" not in name])
def test_a_policy_learns_with_an_estimator(name, tiny_llama, tmp_path):
    keys = ["algorithm.gdpo_reward_keys=[letters]"] if name == "gdpo" else []
    steps = 24 if name == "remax" else STEPS  # the greedy response of a random model is a poor baseline
    assert_learns(tiny_llama, tmp_path, f"algorithm.adv_estimator={name}", *keys, steps=steps)


@pytest.mark.slow
def test_a_policy_learns_by_adapters(tiny_llama, tmp_path):
    assert_learns(tiny_llama, tmp_path, "actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.actor.optim.lr=0.01")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in families.POLICY_LOSSES.built_in if name != "bypass_mode"])
def test_a_policy_learns_with_a_loss(name, tiny_llama, tmp_path):
    mode = "actor_rollout_ref.actor.policy_loss"
    keys = [f"{mode}.dro_beta=0.1"] if name == "dro" else []
    assert_learns(tiny_llama, tmp_path, f"{mode}.loss_mode={name}", *keys)
