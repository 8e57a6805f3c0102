"""PRIME (2502.01456): process rewards from outcomes. A language model trained to tell right from wrong answers by its
log-ratio to a frozen copy gives every token a reward; it learns online, with the policy.

verl train algorithm.program=examples/recipes/prime.py:PRIME actor_rollout_ref.rollout.n=4 ...     # scores are 0 or 1
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from verl.data_proto.metrics import Metric
from verl.programs.ppo import PPO
from verl.roles.api import Objective
from verl.roles.updates import MiniBatchSchedule

BETA = 0.05


class OutcomeObjective(Objective):
    """Cross-entropy of the outcome of a sample, whose log-odds are beta sum_t log(pi(y_t) / pi_ref(y_t)) (equation 3); mean
    over samples."""

    def __init__(self, guard):
        self.guard = guard

    def __call__(self, outputs, batch, totals):
        """See Objective; reads ref_log_prob, token_level_scores and response_mask."""
        log_probs, columns = outputs["log_probs"], batch.batch
        mask = columns["response_mask"].to(log_probs.device)
        self.guard.observe(columns, mask, {"log_probs": log_probs}, {})
        logits = BETA * ((log_probs - columns["ref_log_prob"].to(log_probs)) * mask).sum(dim=1)
        outcomes = columns["token_level_scores"].sum(dim=1).to(logits)
        losses = F.binary_cross_entropy_with_logits(logits, outcomes, reduction="none")
        right = ((logits.detach() > 0) == (outcomes > 0.5)).sum() / totals.num_sequences
        return losses.sum() / totals.num_sequences, {"accuracy": Metric.sum(right)}


class PRIME(PPO):
    """PPO whose advantages are leave-one-out returns of process and outcome rewards (equation 5)."""

    @classmethod
    def roles(cls, config, *, train=True):
        """See Program: the actor, a model of process rewards, and a frozen copy of its start."""
        base = super().roles(config, train=train)
        actor = base.model("actor")
        if actor is None:
            return base
        rewards = replace(actor, name="process_reward", objective=OutcomeObjective, schedule=MiniBatchSchedule())
        start = replace(actor, name="reference", optim=None, objective=None, checkpoint=None)

        def place(num_devices):
            placed = base.place(num_devices)
            return replace(placed, devices={**placed.devices, "process_reward": placed.devices["actor"]})

        return replace(base, models=(actor, rewards, start), place=place)

    def __init__(self, config, data, roles, run):
        super().__init__(config, data, roles, run)
        self.process_reward = roles.models.get("process_reward")

    def annotate(self, result):
        """See PPO; then the reward model learns from the outcomes, and scores each token (online, algorithm 1)."""
        super().annotate(result)
        with self.spans("ref"):
            updates = self.process_reward.update(result.batch, self.weight_version + 1).get()
            result.metrics.update(self.guards.record(updates).metrics())
            result.batch.union(self.process_reward.forward(result.batch, {"log_probs": "process_log_prob"}).get())

    def assign_credit(self, result, step):
        """See PPO."""
        with self.spans("adv"):
            columns, uids = result.batch.batch, list(result.batch.non_tensor_batch["uid"])
            mask = columns["response_mask"]
            process = BETA * (columns["process_log_prob"] - columns["ref_log_prob"]) * mask
            outcomes, means = (
                columns["token_level_scores"].sum(dim=1),
                process.sum(dim=1) / mask.sum(dim=1).clamp(min=1),
            )
            groups = torch.tensor([uids.index(uid) for uid in uids])
            peers = ((groups[:, None] == groups) & ~torch.eye(len(uids), dtype=torch.bool)).to(outcomes)
            count = peers.sum(dim=1).clamp(min=1)
            centred = (process - (peers @ means / count)[:, None]) * mask
            returns = centred.flip(1).cumsum(1).flip(1) + (outcomes - peers @ outcomes / count)[:, None]
            columns["token_level_rewards"], columns["returns"] = columns["token_level_scores"], returns * mask
            columns["advantages"] = returns * mask
