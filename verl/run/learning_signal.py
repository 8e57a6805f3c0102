"""Warns when a run learns nothing: all samples of a prompt got the same reward, or rounding hides what was learned."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

_PATIENCE = 3  # steps; one or two without a signal happen to small batches
_MOSTLY = 0.9
_LEAST_VISIBLE = 0.5  # share of the masters' movement that the compute weights show
_ENGINES = {"actor": "actor_rollout_ref.actor.fsdp_config", "critic": "critic.fsdp"}


class SignalWatch:
    """`note` each step's metrics. The warning of equal rewards comes once, until there has been a signal again; that of hidden
    updates once for each role."""

    def __init__(self, max_response_length: int, samples_per_prompt: int):
        self.max_response_length = max_response_length
        self.samples_per_prompt = samples_per_prompt
        self._silent = 0
        self._hidden: set[str] = set()  # roles

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """`metrics` of a finished step under the names of compat, advantages among them."""
        highest, lowest = metrics.get("critic/advantages/max"), metrics.get("critic/advantages/min")
        self._silent = self._silent + 1 if highest == lowest == 0.0 else 0
        if self._silent == _PATIENCE:
            log.warning(
                "Steps %d to %d learnt nothing from rewards: every advantage is 0 (mean reward %.3g). %s",
                step - _PATIENCE + 1,
                step,
                metrics.get("critic/score/mean", float("nan")),
                self._why(metrics),
            )
        for role, section in _ENGINES.items():
            shown = metrics.get(f"{role}/visible_update_ratio", 1.0)
            if shown < _LEAST_VISIBLE and role not in self._hidden:
                self._hidden.add(role)
                log.warning(
                    "The weights that compute show %.0f%% of what the %s has learned (%s/visible_update_ratio): the rest is "
                    "lost in rounding to bfloat16. Set %s.master_rounding=dithered or %s.dtype=float32.",
                    100 * shown, role, role, section, section,
                )  # fmt: skip

    def _why(self, metrics: Mapping[str, float]) -> str:
        if failed := metrics.get("reward/num_defaulted", 0.0):
            return (
                f"The reward function has failed for {failed:.0f} samples, which got reward.default_score: see the log."
            )
        if self.samples_per_prompt == 1:
            return "A sample that is compared with itself has none: set actor_rollout_ref.rollout.n to 4 or more."
        cut = metrics.get("response_length/clip_ratio", 0.0)
        if cut > _MOSTLY:
            return (
                f"{cut:.0%} of the responses are cut at data.max_response_length={self.max_response_length}, before an answer "
                "perhaps: raise it, and read some in samples/ of the run folder."
            )
        return (
            "All samples of a prompt score the same: read some in samples/ of the run folder, and see whether the prompt asks "
            "for the form that the reward function looks for, and whether the model can solve the task at times."
        )
