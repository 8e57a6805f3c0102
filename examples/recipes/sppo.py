"""SPPO (2405.00675): self-play, where the policy learns by how often each of its samples beats the others of its prompt.

verl train algorithm.adv_estimator=examples/recipes/sppo.py:win_rates \\
    actor_rollout_ref.actor.policy_loss.loss_mode=examples/recipes/sppo.py:sppo \\
    actor_rollout_ref.actor.skip_zero_advantages=False ...
"""

import torch

from verl.algorithms.user_functions import agg_loss

ETA = 1.0


def win_rates(token_level_rewards, response_mask, *, index):
    """Advantages [batch, response]: the probability that a sample beats another one of its prompt, minus a half.

    The probability is by Bradley and Terry with rewards as scores, averaged over the other samples (section 4.1).
    """
    rewards = token_level_rewards.sum(dim=1)
    groups = torch.tensor([list(index).index(name) for name in index])
    same = (groups[:, None] == groups) & ~torch.eye(len(rewards), dtype=torch.bool)
    beats = torch.sigmoid(rewards[:, None] - rewards) - 0.5
    advantages = (beats * same).sum(dim=1) / same.sum(dim=1).clamp(min=1)
    return (spread := advantages[:, None] * response_mask), spread


def sppo(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    """(log pi(y) - log pi_old(y) - eta (P(y wins) - 1/2))^2, mean over samples (equation 4.4)."""
    ratios = ((log_prob - old_log_prob) * response_mask).sum(dim=1)
    wins = (advantages * response_mask).sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)
    losses = torch.zeros_like(log_prob)
    losses[torch.arange(len(losses)), response_mask.int().argmax(dim=1)] = (ratios - ETA * wins).square()
    metrics = {"actor/sppo_ratio": ratios.detach().mean()}
    return agg_loss(losses, response_mask, "seq-mean-token-sum"), metrics
