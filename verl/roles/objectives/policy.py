"""The losses of PPO: the policy's, with its entropy and KL terms, and the critic's, bound to the config."""

from dataclasses import asdict

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algorithms.kl import kl_penalty
from verl.algorithms.losses import compute_value_loss
from verl.algorithms.masked import token_mean
from verl.algorithms.policy_losses import POLICY_LOSSES, policy_loss
from verl.algorithms.policy_losses.terms import is_zero_without_advantage
from verl.algorithms.reduce import Aggregate
from verl.algorithms.user_functions import require_loss_arguments
from verl.config import ActorConfig, CriticConfig, RolloutCorrectionConfig
from verl.data_proto.batch_metrics import any_true
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.token_values import token_keys
from verl.engines.api import BatchTotals
from verl.parallel.device import to_device, to_match
from verl.roles.api import Objective
from verl.roles.guards import StepGuard
from verl.roles.objectives.terms import aggregate, zero_or_nan


def _loss_mode(config: ActorConfig, correction: RolloutCorrectionConfig) -> str:
    return "bypass_mode" if correction.bypass_mode else config.policy_loss.loss_mode


def rows_with_advantage(batch: DataProto) -> list[int]:
    """Rows of `batch` with an advantage other than 0 where response_mask holds. At least one: the optimizer then steps on its
    zero gradient, with momentum and weight decay, as it would after computing all rows."""
    if not len(batch):
        return []
    mask = batch.batch["response_mask"].bool()
    needed = any_true((batch.batch["advantages"] != 0) & mask)
    if not needed.any():
        lengths = batch.batch["attention_mask"].sum(dim=1)
        shortest = torch.where(mask.any(dim=1), lengths, lengths.max() + 1).argmin()
        return [int(shortest)]
    return needed.nonzero().flatten().tolist()


def all_rows(batch: DataProto) -> list[int]:
    """Every row of `batch`."""
    return list(range(len(batch)))


def skips_zero_advantages(config: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether rows with only advantages of 0 need not be computed: the policy loss is declared to be zero on them and no other
    term acts on them."""
    if not config.skip_zero_advantages or config.entropy_coeff != 0 or config.use_kl_loss:
        return False
    return is_zero_without_advantage(POLICY_LOSSES.get(_loss_mode(config, correction)))


class PolicyObjective(Objective):
    """pg_loss - entropy_coeff * H + kl_loss_coef * KL(policy || reference).

    Without an `old_log_probs` column the old policy is the policy being updated (one optimizer step per batch). Its log-probs
    are then the detached current log-probs, without a separate pass. Losses are divided by the totals of all rows. The metrics
    entropy, ppo_kl, pg_clipfrac and the sampler-gap metrics are means over the computed rows.
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
        require_loss_arguments(self.loss_mode, POLICY_LOSSES.get(self.loss_mode))
        # Dr.GRPO's norm divides by a constant; the configured limit, not the padded width, keeps padding out of the loss
        self.scale = config.loss_scale_factor or max_response_length
        self.params: dict[str, object] = {**asdict(config), **asdict(config.policy_loss), **asdict(correction)}
        self.params["loss_scale_factor"] = self.scale
        self.generator = torch.Generator()
        self._is_first = True
        # mask, values still on the device, values on the host: read after the step, since the host does not wait
        self._observed: list[tuple[Tensor, list[Tensor], list[Tensor]]] = []

        guarded = guard is not None and "entropy" in guard.inputs
        if config.entropy_coeff != 0 or config.calculate_entropy or guarded:
            self.outputs = ("log_probs", "entropy")

    def start_mini_batch(self, seed: int, index: int) -> None:
        """See Objective. The first mini-batch is still scored by the weights that sampled it."""
        self.generator.manual_seed(seed)
        self._is_first = index == 0

    def __call__(
        self, outputs: dict[str, Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, dict[str, Metric]]:
        columns = batch.batch
        log_prob = outputs["log_probs"]
        mask = to_device(columns["response_mask"], log_prob.device)
        old = columns.get("old_log_probs", None)
        if old is None:
            old = log_prob.detach()
        if self._is_first and "rollout_log_probs" in columns.keys():
            self._keep_observed(outputs, batch)
        old = to_match(old, log_prob)
        agg = aggregate(self.config.loss_agg_mode, self.scale, totals)
        loss, metrics = self._first_term(outputs, columns, mask, old, agg)
        loss = loss + self._entropy_term(outputs, mask, agg, metrics)
        loss = loss + self._kl_term(log_prob, columns, mask, agg, metrics)
        if self.guard is not None:
            metrics.update(self._observe(self.guard, outputs, columns, mask, old))
        return loss + zero_or_nan(log_prob), metrics

    def _first_term(
        self, outputs: dict[str, Tensor], columns: TensorDict, mask: Tensor, old: Tensor, agg: Aggregate
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The policy loss and its metrics."""
        weights = columns.get("rollout_is_weights", None)
        loss, metrics = policy_loss(
            self.loss_mode,
            old_log_prob=old,
            log_prob=outputs["log_probs"],
            advantages=to_match(columns["advantages"], old),
            response_mask=mask,
            agg=agg,
            rollout_is_weights=None if weights is None else to_match(weights, old),
            params=self.params,
            config=self.config,
            generator=self.generator,
        )
        return loss, {**metrics, "pg_loss": Metric.sum(loss.detach())}

    def _observe(
        self, guard: StepGuard, outputs: dict[str, Tensor], columns: TensorDict, mask: Tensor, old: Tensor
    ) -> dict[str, Metric]:
        log_prob = outputs["log_probs"]
        inputs = {"log_prob": log_prob, "old": old, "entropy": outputs.get("entropy")}
        for name, column in (("reference", "ref_log_prob"), ("sampler", "rollout_log_probs")):
            if name in guard.inputs and column in columns.keys():
                inputs[name] = to_match(columns[column], log_prob)
        return guard.observe(columns, mask, {"log_probs": log_prob}, inputs)

    def _entropy_term(
        self, outputs: dict[str, Tensor], mask: Tensor, agg: Aggregate, metrics: dict[str, Metric]
    ) -> Tensor | float:
        if "entropy" not in outputs:
            return 0.0
        metrics["entropy"] = token_mean(outputs["entropy"], mask)  # in nats, for any mean of the loss
        if self.config.entropy_coeff == 0:
            return 0.0
        entropy = agg(outputs["entropy"], mask)
        metrics["entropy_loss"] = Metric.sum(entropy.detach())
        return -self.config.entropy_coeff * entropy

    def _kl_term(
        self, log_prob: Tensor, columns: TensorDict, mask: Tensor, agg: Aggregate, metrics: dict[str, Metric]
    ) -> Tensor | float:
        if not self.config.use_kl_loss:
            return 0.0
        reference = to_match(columns["ref_log_prob"], log_prob)
        kl = kl_penalty(log_prob, reference, self.config.kl_loss_type)
        metrics["kl_loss"] = token_mean(kl, mask)
        metrics["kl_coef"] = Metric.last(self.config.kl_loss_coef)
        return self.config.kl_loss_coef * agg(kl, mask)

    def _keep_observed(self, outputs: dict[str, Tensor], batch: DataProto) -> None:
        mask = batch.batch["response_mask"].cpu()
        keys = token_keys(batch, mask)
        names = ["log_probs", *(["entropy"] if keys and "entropy" in outputs else [])]
        sampled = batch.batch["rollout_log_probs"][mask]
        self._observed.append((mask, [outputs[name].detach() for name in names], [sampled, *keys]))

    def pop_observed(self) -> list[Tensor]:
        """(trainer log-probs, sampler log-probs) of the tokens of the first mini-batch, flat, their keys (`token_keys`), and
        their entropy if the loss has it; [] without sampler log-probs."""
        observed, self._observed = self._observed, []
        parts = []
        for mask, computed, sampled_columns in observed:
            log_probs, *entropy = (values.cpu()[mask] for values in computed)
            parts.append([log_probs, *sampled_columns, *entropy])
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


class ValueObjective(Objective):
    """Clipped value loss (PPO, eq. 9 as implemented with a trust region of `cliprange_value`)."""

    outputs = ("values",)

    def __init__(self, config: CriticConfig, *, max_response_length: int, guard: StepGuard | None = None):
        self.config = config
        self.guard = guard
        self.scale = config.loss_scale_factor or max_response_length

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See Objective; reads the columns returns, values and response_mask."""
        vpreds = outputs["values"]
        columns = batch.batch
        mask = to_device(columns["response_mask"], vpreds.device)
        loss, metrics = compute_value_loss(
            vpreds,
            returns=to_match(columns["returns"], vpreds),
            values=to_match(columns["values"], vpreds),
            response_mask=mask,
            cliprange_value=self.config.cliprange_value,
            agg=aggregate(self.config.loss_agg_mode, self.scale, totals),
        )
        if self.guard is not None:
            self.guard.observe(columns, mask, {"values": vpreds}, {})
        return loss + zero_or_nan(vpreds), {**metrics, "vf_loss": Metric.sum(loss.detach())}
