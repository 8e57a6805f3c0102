"""Preference optimization: a weighted sum of losses of pairs, or of labelled completions."""

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.algorithms import preference_losses
from verl.config.sections.algorithm import PreferenceLossConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals
from verl.parallel.device import to_device
from verl.roles.api import Objective
from verl.roles.guards import StepGuard
from verl.roles.objectives.terms import FirstRows

_CHOSEN, _REJECTED = "chosen_rows", "rejected_rows"  # indices, int64: a mask of the device would make the host wait


def mask_of(columns: Any) -> Tensor:
    """The tokens of completions [batch, response]: the tokens that train, unless prompts train too."""
    return cast("Tensor", columns["completion_mask" if "completion_mask" in columns.keys() else "response_mask"])


def row_sums(log_probs: Tensor, columns: TensorDict, ld_alpha: float | None) -> Tensor:
    """log pi(y) of each row [batch], desensitized to length with `ld_alpha`; see `completion_sums`. The columns are on the
    host: their values are known without a wait."""
    mask = mask_of(columns)
    shared = (
        None
        if ld_alpha is None
        else to_device(preference_losses.shared_lengths(mask, columns["chosen"]), log_probs.device)
    )
    return preference_losses.completion_sums(log_probs, to_device(mask, log_probs.device), shared, ld_alpha)


class PreferenceObjective(Objective):
    """sum_k weight_k * mean over pairs (or labelled completions) of loss_k.

    Reads the columns response_mask and chosen; with a reference ref_logp [batch], its log pi_ref(y) (see `row_sums`); and
    the constants [batch] of the losses in use: shift, matched_margin, matched_ratio.
    Metrics have TRL's names: rewards/{chosen,rejected,accuracies,margins}, logps/{chosen,rejected}, logits/{chosen,rejected}
    (means over the vocabulary and the tokens of completions), entropy, mean_token_accuracy (of chosen completions);
    nll_loss, log_odds_chosen, log_odds_ratio and kl of the losses that have them.
    """

    def __init__(self, config: PreferenceLossConfig, guard: StepGuard | None = None):
        self.config, self.guard = config, guard
        self._first = FirstRows()
        self.losses = list(zip(config.losses, config.weights, strict=True))
        self.wants = frozenset().union(*(preference_losses.reads(name) for name, _ in self.losses))
        self.paired = all(preference_losses.is_paired(name) for name, _ in self.losses)
        self.has_reference = any(preference_losses.needs_reference(name) for name, _ in self.losses)
        self.unit = "ordinal" if self.paired else "row"
        weighting = ("sum_pi_squared",) if config.use_weighting else ()
        self.outputs = ("log_probs", "entropy", "correct", "mean_logit", *weighting)
        # ORPO, CPO-IPO and SimPO score completions per token
        self.per_token = "chosen_mean" in self.wants

    def __call__(
        self, outputs: dict[str, Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[Tensor, dict[str, Metric]]:
        log_probs = outputs["log_probs"]
        columns = {name: to_device(column, log_probs.device) for name, column in batch.batch.items()}
        chosen = batch.batch["chosen"]
        for name, rows in ((_CHOSEN, chosen), (_REJECTED, ~chosen)):
            columns[name] = to_device(rows.nonzero().flatten(), log_probs.device)
        if self.guard is not None:
            self.guard.observe(batch.batch, columns["response_mask"], {"log_probs": log_probs}, {})
            self._first.add(outputs, batch, mask_of(batch.batch))
        sums = row_sums(log_probs, batch.batch, self.config.ld_alpha)
        terms = {**self.config, **self._terms(sums, log_probs, columns, totals)}
        weight: Tensor | float = 1.0
        if self.config.use_weighting:
            row_weights = preference_losses.wpo_weights(log_probs, outputs["sum_pi_squared"], mask_of(columns))
            weight = row_weights[columns[_CHOSEN]] * row_weights[columns[_REJECTED]]
        losses = (factor * preference_losses.preference_loss(name, terms) * weight for name, factor in self.losses)
        loss = torch.stack([unit_losses.sum() for unit_losses in losses]).sum() / totals.num_units
        return loss, self._metrics(outputs, sums, terms, columns)

    def pop_observed(self) -> list[Tensor]:
        """See Objective and FirstRows."""
        return self._first.pop()

    def _terms(
        self, sums: Tensor, log_probs: Tensor, columns: dict[str, Tensor], totals: BatchTotals
    ) -> dict[str, object]:
        """Arguments of the losses; see verl/algorithms/preference_losses.py."""
        terms: dict[str, object] = {"desirable": columns["chosen"]}
        if self.has_reference:
            terms["ratio"] = sums - columns["ref_logp"].to(sums)
        if "shift" in self.wants:
            terms["shift"] = columns["shift"].to(sums)
        return terms | self._pair_terms(terms, sums, log_probs, columns, totals) if self.paired else terms

    def _pair_terms(
        self, terms: dict[str, Any], sums: Tensor, log_probs: Tensor, columns: dict[str, Tensor], totals: BatchTotals
    ) -> dict[str, object]:
        chosen, rejected = columns[_CHOSEN], columns[_REJECTED]
        means = sums / mask_of(columns).sum(1).clamp(min=1)

        def both(name: str, values: Tensor) -> dict[str, Tensor]:
            return {f"chosen_{name}": values[chosen], f"rejected_{name}": values[rejected]}

        pair_terms: dict[str, Any] = both("logp", sums) | both("mean", means)
        if "nll" in self.wants:
            nll = -(log_probs * columns["response_mask"]).sum(1)[chosen]
            pair_terms["nll"] = nll * (totals.num_units / max(totals.num_chosen_tokens, 1))  # 0: all are masked
        if self.has_reference:
            score = preference_losses.divergence_score(terms["ratio"], self.config.f_divergence, self.config.f_alpha)
            per_token = score / mask_of(columns).sum(1).clamp(min=1)
            pair_terms |= both("ratio", terms["ratio"])
            pair_terms["delta"] = score[chosen] - score[rejected]
            pair_terms["mean_delta"] = per_token[chosen] - per_token[rejected]
        if "matched_margin" in self.wants:
            pair_terms["matched_margin"] = columns["matched_margin"][chosen].to(sums)
        if "matched_chosen" in self.wants:
            matched = columns["matched_ratio"].to(sums)  # of a chosen row: the rejected ratio of its rank
            pair_terms |= {"matched_rejected": matched[chosen], "matched_chosen": matched[rejected]}
        return pair_terms

    def _metrics(
        self, outputs: dict[str, Tensor], sums: Tensor, terms: dict[str, Any], columns: dict[str, Tensor]
    ) -> dict[str, Metric]:
        chosen, rejected, mask = columns[_CHOSEN], columns[_REJECTED], mask_of(columns)
        lengths, logps = mask.sum(1), sums.detach()
        if self.has_reference:
            rewards = self.config.beta * terms["ratio"].detach()
        else:
            logps = logps / lengths.clamp(min=1) if self.per_token else logps
            rewards = self.config.beta * preference_losses.alpha_reward(logps, self.config.alpha)
        metrics: dict[str, Metric] = {}
        for name, rows in (("chosen", chosen), ("rejected", rejected)):
            if len(rewards[rows]):
                metrics[f"rewards/{name}"] = _mean(rewards[rows])
                metrics[f"logps/{name}"] = _mean(logps[rows])
                metrics[f"logits/{name}"] = _share((outputs["mean_logit"] * mask)[rows].sum(), lengths[rows].sum())
        if len(rewards[chosen]):
            metrics["mean_token_accuracy"] = _share((outputs["correct"] * mask)[chosen].sum(), lengths[chosen].sum())
        metrics["entropy"] = _share((outputs["entropy"].detach() * mask).sum(), lengths.sum())
        if self.paired:
            margins = rewards[chosen] - rewards[rejected]
            metrics["rewards/margins"] = _mean(margins)
            metrics["rewards/accuracies"] = _mean((margins > 0).to(margins))
        if "nll" in self.wants:
            metrics["nll_loss"] = _mean(terms["nll"].detach())
        if any(name == "orpo" for name, _ in self.losses):
            odds = preference_losses.log_odds(logps[chosen]) - preference_losses.log_odds(logps[rejected])
            metrics |= {"log_odds_chosen": _mean(odds), "log_odds_ratio": _mean(torch.nn.functional.logsigmoid(odds))}
        if "shift" in self.wants:
            metrics["kl" if "kto" in self.config.losses else "delta"] = _mean(terms["shift"])
            metrics["rewards/mean"] = _mean(rewards)
        return metrics


def _mean(values: Tensor) -> Metric:
    return Metric.mean(values.sum() / max(1, values.numel()), values.numel())


def _share(total: Tensor, count: Tensor) -> Metric:
    return Metric.mean(total / count.clamp(min=1), count)
