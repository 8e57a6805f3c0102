"""`preference`: the loss of preference optimization."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.keys import Family, Section, used
from verl.families import PREFERENCE_LOSSES


@dataclass(frozen=True)
class PreferenceLossConfig(Section):
    """The loss, and the settings that losses read; see verl/algorithms/preference_losses.py for formulas and papers."""

    loss: str | list[str] = used(
        "sigmoid",
        "loss of a pair (sigmoid is DPO) or of a labelled completion (kto, apo_zero_unpaired, bco); a list is a weighted sum",
        family=Family("preference loss", PREFERENCE_LOSSES.built_in),
    )
    loss_weights: list[float] | None = used(None, "weights of a list of losses; null: 1 each")
    beta: float = used(0.1, "scale of rewards; larger keeps the policy closer to the reference", gt=0)
    label_smoothing: float = used(
        0.0,
        "probability that a pair is labelled the wrong way round",
        when="label_smoothing",
        neutral=(0.0,),
        ge=0,
        lt=0.5,
    )
    f_divergence: str = used(
        "reverse_kl",
        "divergence from the reference (arXiv 2309.16240)",
        when="f_divergence",
        neutral=("reverse_kl",),
        choices=("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
    )
    f_alpha: float = used(0.5, "alpha of alpha_divergence", when="preference.f_divergence=alpha_divergence")
    ld_alpha: float | None = used(
        None,
        "weight of tokens beyond the length of the pair's shorter completion (LD-DPO, arXiv 2409.06411); null: 1",
        when="pairs",
        ge=0,
        le=1,
    )
    use_weighting: bool = used(
        False, "weigh pairs by how likely the policy is to write them (WPO, arXiv 2406.11827)", when="pairs"
    )
    discopop_tau: float = used(0.05, "temperature of discopop", when="discopop_tau", gt=0)
    simpo_gamma: float = used(0.5, "margin of rewards in simpo", when="simpo_gamma")
    cpo_alpha: float = used(
        1.0, "weight of the negative log-likelihood in cpo, cpo_hinge and cpo_ipo", when="cpo_alpha", ge=0
    )
    alpha: float = used(
        0.0,
        "shape of rewards in simpo, cpo, cpo_hinge and cpo_ipo (AlphaPO, arXiv 2501.03884); 0: log-probability",
        when="alpha",
        neutral=(0.0,),
    )
    desirable_weight: float = used(1.0, "weight of desirable completions", when="desirable_weight", ge=0)
    undesirable_weight: float = used(1.0, "weight of undesirable completions", when="undesirable_weight", ge=0)

    @property
    def losses(self) -> list[str]:
        """Names of all losses."""
        return [self.loss] if isinstance(self.loss, str) else list(self.loss)

    @property
    def weights(self) -> list[float]:
        """A weight for each of them."""
        return [1.0] * len(self.losses) if self.loss_weights is None else list(self.loss_weights)
