"""What the actor and the critic minimise: losses of verl.algorithms bound to their config sections.

An objective is a LossFn of verl/engines/api.py. It sees one micro-batch at a time; every term is divided by the totals of the
whole mini-batch, so micro-batch losses add up to the loss of the mini-batch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from verl.algorithms.kl import kl_penalty
from verl.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from verl.algorithms.policy_losses.terms import is_zero_without_advantage
from verl.algorithms.reduce import Aggregate, agg_loss
from verl.algorithms.value_loss import compute_value_loss
from verl.config import ActorConfig, CriticConfig, RolloutCorrectionConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, Output
from verl.roles.step_guard import StepGuard


def _aggregate(mode: str, scale: float, totals: BatchTotals) -> Aggregate:
    def agg(matrix: torch.Tensor, mask: torch.Tensor, mode_override: str | None = None, /) -> torch.Tensor:
        return agg_loss(
            matrix,
            mask,
            mode_override or mode,
            batch_num_tokens=totals.num_tokens,
            global_batch_size=totals.num_sequences,
            loss_scale_factor=scale,
        )

    return agg


def _zero_of(outputs: torch.Tensor) -> torch.Tensor:
    """0, or NaN where the model's outputs are not all finite: a clipped loss may hide that, and the step must not be taken."""
    return (outputs.detach() * 0.0).sum()


def _loss_mode(config: ActorConfig, correction: RolloutCorrectionConfig) -> str:
    return "bypass_mode" if correction.bypass_mode else config.policy_loss.loss_mode


def skips_zero_advantages(config: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether rows whose advantages are all 0 need not be computed: the policy loss is declared to be zero on them and no
    other term acts on them."""
    if not config.skip_zero_advantages or config.entropy_coeff != 0 or config.use_kl_loss:
        return False
    return is_zero_without_advantage(POLICY_LOSSES.get(_loss_mode(config, correction)))


class PolicyObjective:
    """pg_loss - entropy_coeff * H + kl_loss_coef * KL(policy || reference).

    Without an `old_log_probs` column the old policy is the one being updated (one optimizer step per batch), so its log-probs
    are the detached current ones and no pass is spent on them. Losses are divided by the totals of all rows; the metrics
    entropy, ppo_kl, pg_clipfrac and those of the sampler's gap are means over the rows that are computed.
    """

    def __init__(
        self,
        config: ActorConfig,
        correction: RolloutCorrectionConfig,
        *,
        max_response_length: int,
        guard: StepGuard | None = None,
    ):
        self.config = config
        self.guard = guard
        self.loss_mode = _loss_mode(config, correction)
        # Dr.GRPO's norm divides by a constant; the configured limit, not the padded width, keeps padding out of the loss
        self.scale = config.loss_scale_factor or max_response_length
        self.params: dict[str, Any] = {**asdict(config), **asdict(config.policy_loss), **asdict(correction)}
        self.params["loss_scale_factor"] = self.scale
        self.generator = torch.Generator()
        self._is_first = True
        self._observed: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def outputs(self) -> tuple[Output, ...]:
        guarded = self.guard is not None and "entropy" in self.guard.inputs
        wants_entropy = self.config.entropy_coeff != 0 or self.config.calculate_entropy or guarded
        return ("log_probs", "entropy") if wants_entropy else ("log_probs",)

    def begin(self, seed: int, is_first: bool = True) -> None:
        """Called before each mini-batch: random choices inside a loss depend on `seed` alone. The first one of a batch is
        still scored by the weights that sampled it."""
        self.generator.manual_seed(seed)
        self._is_first = is_first

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        columns = batch.batch
        log_prob = outputs["log_probs"]
        mask = columns["response_mask"].to(log_prob.device)
        old = columns.get("old_log_probs", None)
        if old is None:
            old = log_prob.detach()
        if self._is_first and "rollout_log_probs" in columns.keys():
            self._observed.append((log_prob.detach()[mask].cpu(), columns["rollout_log_probs"][mask.cpu()]))
        old = old.to(log_prob)
        weights = columns.get("rollout_is_weights", None)
        agg = _aggregate(self.config.loss_agg_mode, self.scale, totals)
        loss, metrics = policy_loss(
            self.loss_mode,
            old_log_prob=old,
            log_prob=log_prob,
            advantages=columns["advantages"].to(log_prob),
            response_mask=mask,
            agg=agg,
            rollout_is_weights=None if weights is None else weights.to(log_prob),
            params=self.params,
            config=self.config,
            generator=self.generator,
        )
        metrics = {**metrics, "pg_loss": Metric.sum(loss.detach())}
        over_computed = _aggregate(self.config.loss_agg_mode, self.scale, totals.computed or totals)
        loss = loss + self._entropy_term(outputs, mask, over_computed, metrics)
        loss = loss + self._kl_term(log_prob, columns, mask, agg, metrics)
        if self.guard is not None:
            metrics.update(self._show(self.guard, outputs, columns, mask, old))
        return loss + _zero_of(log_prob), metrics

    def _show(
        self, guard: StepGuard, outputs: dict[str, torch.Tensor], columns: Any, mask: torch.Tensor, old: torch.Tensor
    ) -> dict[str, Metric]:
        log_prob = outputs["log_probs"]
        inputs = {"log_prob": log_prob, "old": old, "entropy": outputs.get("entropy")}
        for name, column in (("reference", "ref_log_prob"), ("sampler", "rollout_log_probs")):
            if name in guard.inputs and column in columns.keys():
                inputs[name] = columns[column].to(log_prob)
        return guard.observe(columns, mask, {"log_probs": log_prob}, inputs)

    def _entropy_term(
        self, outputs: dict[str, torch.Tensor], mask: torch.Tensor, agg: Aggregate, metrics: dict[str, Metric]
    ) -> torch.Tensor | float:
        if "entropy" not in outputs:
            return 0.0
        entropy = agg(outputs["entropy"], mask)
        metrics["entropy"] = Metric.sum(entropy.detach())
        if self.config.entropy_coeff == 0:
            return 0.0
        metrics["entropy_loss"] = Metric.sum(entropy.detach())
        return -self.config.entropy_coeff * entropy

    def _kl_term(
        self, log_prob: torch.Tensor, columns: Any, mask: torch.Tensor, agg: Aggregate, metrics: dict[str, Metric]
    ) -> torch.Tensor | float:
        if not self.config.use_kl_loss:
            return 0.0
        kl = agg(kl_penalty(log_prob, columns["ref_log_prob"].to(log_prob), self.config.kl_loss_type), mask)
        metrics["kl_loss"] = Metric.sum(kl.detach())
        metrics["kl_coef"] = Metric.last(self.config.kl_loss_coef)
        return self.config.kl_loss_coef * kl

    def take_observed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(trainer log-probs, sampler log-probs) of the tokens seen since the last call, flat, or None."""
        if not self._observed:
            return None
        pairs, self._observed = self._observed, []
        return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


class ValueObjective:
    """Clipped value loss (PPO, eq. 9 as implemented with a trust region of `cliprange_value`)."""

    outputs: tuple[Output, ...] = ("values",)

    def __init__(self, config: CriticConfig, *, max_response_length: int, guard: StepGuard | None = None):
        self.config = config
        self.guard = guard
        self.scale = config.loss_scale_factor or max_response_length

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        vpreds = outputs["values"]
        columns = batch.batch
        mask = columns["response_mask"].to(vpreds.device)
        loss, metrics = compute_value_loss(
            vpreds,
            returns=columns["returns"].to(vpreds),
            values=columns["values"].to(vpreds),
            response_mask=mask,
            cliprange_value=self.config.cliprange_value,
            agg=_aggregate(self.config.loss_agg_mode, self.scale, totals),
        )
        if self.guard is not None:
            self.guard.observe(columns, mask, {"values": vpreds}, {})
        return loss + _zero_of(vpreds), {**metrics, "vf_loss": Metric.sum(loss.detach())}
