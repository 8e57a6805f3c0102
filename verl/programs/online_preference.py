"""Online preference optimization (OnlineDPO, iterative DPO, SPIN by scores): pairs of a policy's own samples.

    prompts ──► rollout, n samples each ──► reward ──► best and worst of each prompt ──► reference log-probs
                                                                                              │
                                                               weights.sync ◄── actor.update ◄┘

A step is a step of OnlineDPO (2402.04792, algorithm 1): the samples come from the weights that it trains, and the reward
takes the place of the annotator. With `online.sync_steps` the reference follows the policy, as SPIN's opponent does
(2401.01335). The phases are PPO's, with pairs in place of advantages.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from verl.algorithms.filters import best_and_worst
from verl.config import PPOConfig
from verl.data_proto.batch_metrics import RowSets
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.programs.ppo import PPO
from verl.programs.ppo_program import curves_of
from verl.programs.ppo_roles import mini_batches
from verl.programs.preference import completion_log_probs
from verl.roles.api import RoleSpecs
from verl.roles.guards import SkipBatch, StepBatch
from verl.roles.objectives.preference import PreferenceObjective

log = logging.getLogger(__name__)


class OnlinePreference(PPO):
    """Metrics in addition to PPO's: objective/{scores,scores_margin} of the scored samples and of the pairs, online/pair_ratio
    (the share of prompts that give a pair), val/contain_eos_token, actor/* of PreferenceObjective."""

    console_metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "objective/scores": ("reward", "{:.3f}"),
        "objective/scores_margin": ("gap", "{:.3f}"),
        "response_length/mean": ("length", "{:.1f}"),
        "actor/loss": ("loss", "{:.4f}"),
        "actor/rewards/accuracies": ("accuracy", "{:.3f}"),
        "actor/grad_norm": ("grad", "{:.2f}"),
    }
    curves = curves_of({"objective/scores": "training"})

    @classmethod
    def roles(cls, config: PPOConfig, *, train: bool = True) -> RoleSpecs:
        """See Program: the roles of PPO without a critic; the actor learns from pairs."""
        specs, actor = super().roles(config, train=train), config.actor_rollout_ref.actor
        # likelihoods are the model's, without the sampling temperature
        changes: dict[str, dict[str, Any]] = {
            "actor": {"objective": partial(PreferenceObjective, config.preference), "schedule": mini_batches(actor, 2)},
            "reference": {"follows": "actor" if config.online.sync_steps else None},
        }
        return replace(
            specs, models=tuple(replace(spec, temperature=1.0, **changes[spec.name]) for spec in specs.models)
        )

    def annotate(self, result: StepBatch) -> None:
        """Do nothing: the reference computes log-probs only for the pairs."""

    def assign_credit(self, result: StepBatch, step: int) -> None:
        """Keep only the best and the worst sample of each prompt in the batch, with their reference log-probs. A batch is
        skipped if no prompt has samples of different scores."""
        batch, penalty = result.batch, self.config.online.missing_eos_penalty
        with self.spans("adv"):
            ended = torch.tensor([reason == "stop" for reason in batch.non_tensor_batch["finish_reason"]])
            scores = batch.batch["token_level_scores"].sum(dim=1) - (penalty or 0.0) * ~ended
            uids = list(batch.non_tensor_batch["uid"])
            rows = RowSets.of(batch)
            pairs = best_and_worst(scores.tolist(), uids, rows.scored.tolist())
            values = {
                "objective/scores": float(scores[rows.scored].mean()),
                "online/pair_ratio": len(pairs) / len(set(uids)),
                "val/contain_eos_token": float(ended[rows.sampled].float().mean()),
            }
            if pairs:
                best, worst = (scores[list(rows)] for rows in zip(*pairs, strict=True))
                values["objective/scores_margin"] = float((best - worst).mean())
            result.metrics.update({name: Metric.last(value) for name, value in values.items()})
            if not pairs:
                sentence = f"Step {step}: the samples of each prompt have equal scores, so that there is no pair"
                log.warning("%s. The batch is left out.", sentence)
                raise SkipBatch(sentence)
            result.batch = self._paired(batch, pairs)

    def _paired(self, batch: DataProto, pairs: list[tuple[int, int]]) -> DataProto:
        """The rows of the pairs with the columns of PreferenceObjective."""
        paired = batch.select_idxs([row for pair in pairs for row in pair])
        paired.batch["chosen"] = torch.tensor([True, False]).repeat(len(pairs))
        if self.reference is not None:
            with self.spans("ref"):
                log_probs = completion_log_probs(self.reference, paired, self.config.preference.ld_alpha)
                paired.batch["ref_logp"] = log_probs
        return paired

    def update(self, result: StepBatch, step: int) -> None:
        """See PPO; then the reference follows the policy, if the config asks for it."""
        super().update(result, step)
        online = self.config.online
        if self.reference is not None and online.sync_steps and step % online.sync_steps == 0:
            self.reference.follow(online.mixup_alpha)

    def header(self) -> dict[str, object]:
        """See Program."""
        n, loss = self.config.actor_rollout_ref.rollout.n, " + ".join(self.config.preference.losses)
        return {**super().header(), "algorithm": f"best and worst of {n} samples, {loss} loss"}
