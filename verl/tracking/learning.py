"""Warnings of a run that learns nothing, with the likeliest cause."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

LEAST_VISIBLE = 0.5  # share of the masters' movement that the compute weights show
_PATIENCE = 3  # steps or validations; one or two without a signal happen to small batches
_MOSTLY = 0.9
_NEARLY_ALL = 0.75  # of the samples of a step: the same response


def _is_rejected(metrics: Mapping[str, float]) -> bool:
    """Whether the correction has rejected every token of the step."""
    return metrics.get("rollout_corr/rollout_rs_masked_fraction") == 1.0


def _is_silent(metrics: Mapping[str, float]) -> bool:
    """Whether every advantage of the step is 0, or there is none."""
    return _is_rejected(metrics) or metrics.get("critic/advantages/max") == metrics.get("critic/advantages/min") == 0.0


class SignalWatch:
    """A warning when a run learns nothing because all samples of a prompt got the same reward. `record` each step's metrics.
    The warning comes once, until there has been a signal again. A shorter run gets it with its last step."""

    def __init__(self, max_response_length: int, samples_per_prompt: int):
        self.max_response_length = max_response_length
        self.samples_per_prompt = samples_per_prompt
        self._silent = self._recorded = 0
        self._best, self._most_distinct = (
            (float("-inf"), 0),
            0.0,
        )  # mean reward and its step; share of different responses

    def record(self, step: int, metrics: Mapping[str, float], *, is_last: bool = False) -> None:
        """`metrics` of a finished step under the names of compat, advantages among them."""
        self._recorded += 1
        self._best = max(self._best, (metrics.get("critic/score/mean", float("-inf")), -step))
        self._most_distinct = max(self._most_distinct, metrics.get("response/distinct_ratio", 0.0))
        self._silent = self._silent + 1 if _is_silent(metrics) else 0
        is_short = is_last and 0 < self._silent == self._recorded < _PATIENCE
        if self._silent == _PATIENCE or is_short:
            first = step - self._silent + 1
            log.warning(
                "%s learnt nothing from rewards: %s (mean reward %.3g). %s",
                f"Step {step}" if first == step else f"Steps {first} to {step}",
                "every token is rejected" if _is_rejected(metrics) else "every advantage is 0",
                metrics.get("critic/score/mean", float("nan")),
                self._why(metrics),
            )

    def _why(self, metrics: Mapping[str, float]) -> str:
        if _is_rejected(metrics):
            return (
                "Sampler and trainer differ by more than algorithm.rollout_correction.rollout_rs_threshold in every sample: "
                "widen it. rollout_corr/rollout_rs_* of metrics.jsonl are the compared values."
            )
        if failed := metrics.get("reward/num_defaulted", 0.0):
            return f"The reward function has failed for {failed:.0f} samples: see the log."
        if failed := metrics.get("rollout/num_failed_episodes", 0.0):
            return f"{failed:.0f} episodes of the last step have failed: see the log, and episodes/ of the run folder."
        highest, lowest = metrics.get("critic/score/max", 0.0), metrics.get("critic/score/min", 0.0)
        best, at = self._best
        is_alike = metrics.get("response/distinct_ratio", 1.0) < self._most_distinct / 2
        if is_alike and best - metrics.get("critic/score/mean", best) > abs(best) / 2:
            return (
                f"The mean reward was {best:.3g} in step {-at}, and responses have become alike since: the policy has "
                "collapsed. Lower actor_rollout_ref.actor.optim.lr, and begin again."
            )
        if self.samples_per_prompt == 1 and (highest or lowest):  # else GRPO and its relatives train on the raw reward
            return "A sample that is compared with itself has none: set actor_rollout_ref.rollout.n to 4 or more."
        cut = metrics.get("response_length/clip_ratio", 0.0)
        if highest == lowest > 0 and (highest >= 1 or cut <= _MOSTLY):
            return (
                f"Every sample has the reward {highest:.3g}: the task is solved, and harder prompts would train, or the reward "
                "function gives the same to all replies. Read some in samples/ of the run folder."
            )
        if cut > _MOSTLY:
            return (
                f"{cut:.0%} of the responses are cut at data.max_response_length={self.max_response_length}, before an answer "
                "perhaps: raise it, and read some in samples/ of the run folder."
            )
        return (
            "All samples of a prompt score the same: read some in samples/ of the run folder, and see whether the prompt asks "
            "for the form that the reward function looks for, and whether the model can solve the task at times."
        )


class CollapseWatch:
    """A warning, once, when one response answers nearly all prompts while the reward rises, though it is not right for all:
    the policy collapses. `record` each step's metrics; batches of few prompts lack the share and say nothing."""

    def __init__(self) -> None:
        self._least, self._first, self._before, self._said = 1.0, float("inf"), False, False

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` of a finished step: the share of its most frequent response, and rewards."""
        names = ("response/most_frequent_ratio", *(f"critic/score/{part}" for part in ("mean", "min", "max")))
        if self._said or not set(names) <= metrics.keys():
            return
        share, mean, lowest, highest = (metrics[name] for name in names)
        if self._first == float("inf"):
            self._first = mean
        self._least = min(self._least, share)
        is_right = mean - lowest >= _MOSTLY * (highest - lowest)  # for nearly all prompts: a solved task
        is_collapsed = share >= _NEARLY_ALL and self._least <= share / 2 and mean > self._first and not is_right
        self._said = is_collapsed and self._before
        self._before = is_collapsed
        if self._said:
            log.warning(
                "Step %d: %.0f%% of the samples are one and the same response, whatever the prompt, while the mean reward "
                "rises (%.3g in the first step, now %.3g): the policy collapses to one answer. Raise "
                "actor_rollout_ref.actor.entropy_coeff, set actor_rollout_ref.actor.use_kl_loss=True, lower "
                "actor_rollout_ref.actor.optim.lr, or give that answer less reward; read some in samples/ of the run folder.",
                step,
                100 * share,
                self._first,
                mean,
            )


@dataclass(frozen=True)
class TrainedRole:
    """A role that trains, with the config path of its optimizer."""

    name: str
    optim: str
    learning_rate: float
    has_adapters: bool


class StillWatch:
    """A warning, once, when validations stay the same to the last digit though most steps had something to learn from: the
    learning rate moves no weight that matters."""

    def __init__(self, role: TrainedRole | None):
        self._role = role
        self._restart(None)

    def _restart(self, fingerprint: object) -> None:
        self._last, self._validated, self._steps, self._taught, self._rate = fingerprint, list[int](), 0, 0, 0.0

    def trained(self, metrics: Mapping[str, float]) -> None:
        """`metrics` of a finished step."""
        if self._role is None:
            return
        name = self._role.name
        rate, norm = (metrics.get(f"{name}/{n}", metrics.get(f"train/{n}", 0.0)) for n in ("lr", "grad_norm"))
        is_hidden = metrics.get(f"{name}/visible_update_ratio", 1.0) < LEAST_VISIBLE  # another warning's cause
        is_hidden |= (
            metrics.get("response/most_frequent_ratio", 0.0) >= _NEARLY_ALL
        )  # a collapse, so that rates are high
        self._steps += 1
        self._taught += norm > 0 and not is_hidden and not _is_silent(metrics)
        self._rate = max(self._rate, rate)

    def validated(self, step: int, fingerprint: object) -> None:
        """`fingerprint` of the validation after `step`: equal if the weights hardly move; None where there is none."""
        if fingerprint is None or fingerprint != self._last:
            self._restart(fingerprint)
        self._validated.append(step)
        if self._role is not None and len(self._validated) == _PATIENCE and 2 * self._taught > self._steps:
            log.warning(
                "The validations after steps %s, %s and %s are equal to the last digit: the weights have hardly changed, at a "
                "learning rate of at most %.2g. %s",
                *self._validated,
                self._rate,
                self._why(self._role),
            )

    def _why(self, role: TrainedRole) -> str:
        if self._rate < role.learning_rate / 2:
            return f"The schedule keeps it below {role.optim}.lr={role.learning_rate:g}: shorten {role.optim}.lr_warmup_steps."
        usual = " Adapters (lora_rank) usually take 1e-5 to 1e-3." if role.has_adapters else ""
        return f"Raise {role.optim}.lr (now {role.learning_rate:g}).{usual}"
