"""GVPO (2504.19599): group variance policy optimization. Inside a group, implicit rewards approach the given ones.

verl train algorithm.program=examples/recipes/gvpo.py:GVPO algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 ...
"""

from dataclasses import replace

from verl.data_proto.metrics import Metric
from verl.programs.ppo import PPO
from verl.roles.api import Objective

BETA = 0.1


class GVPOObjective(Objective):
    """1/2 mean_i ((r_i - mean r) - (R_i - mean R))^2 with r = beta (log pi(y) - log pi_old(y)), equation 10.

    Means are over the group of a prompt. Groups are never parted, whatever the micro-batches and ranks."""

    outputs = ("log_probs",)
    unit = "ordinal"

    def __init__(self, guard):
        self.guard = guard

    def __call__(self, outputs, batch, totals):
        """See Objective; reads ordinal, token_level_rewards and response_mask, and old_log_probs where the batch has them."""
        log_probs, columns = outputs["log_probs"], batch.batch
        mask = columns["response_mask"].to(log_probs.device)
        self.guard.observe(columns, mask, {"log_probs": log_probs}, {})
        old = columns["old_log_probs"].to(log_probs) if "old_log_probs" in columns.keys() else log_probs.detach()
        implicit = BETA * ((log_probs - old) * mask).sum(dim=1)
        gaps = implicit - columns["token_level_rewards"].sum(dim=1).to(log_probs)
        same = columns["ordinal"][:, None] == columns["ordinal"]
        means = (same.to(gaps) @ gaps) / same.sum(dim=1)
        loss = 0.5 * (gaps - means).square().sum() / totals.num_sequences
        return loss, {"implicit_reward": Metric.sum(implicit.detach().sum() / totals.num_sequences)}


class GVPO(PPO):
    """PPO with another objective of the actor."""

    @classmethod
    def roles(cls, config, *, train=True):
        """See Program."""
        base = super().roles(config, train=train)
        models = [
            replace(spec, objective=GVPOObjective, schedule=replace(spec.schedule, needed=None))
            if spec.name == "actor"
            else spec
            for spec in base.models
        ]
        return replace(base, models=tuple(models))
