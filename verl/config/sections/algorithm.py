"""`algorithm`: advantages, KL in the reward, corrections and filters; `preference`: the loss of preference optimization."""

from dataclasses import dataclass
from typing import Any

from verl.config.keys import ALWAYS, Family, Section, section, used
from verl.families import ADVANTAGES, KL_KINDS, PPO_PROGRAMS, PREFERENCE_LOSSES

KL_IN_REWARD = "algorithm.use_kl_in_reward"


@dataclass(frozen=True)
class RolloutCorrectionConfig(Section):
    """Importance weights and rejection between the sampler and the trained policy."""

    rollout_is: str | None = used(
        None, "importance weights by token or by sequence", when="weighs", choices=(None, "token", "sequence")
    )
    rollout_is_threshold: float | str = used(2.0, "upper bound of a weight, or 'low_high'", when="rollout_is")
    rollout_is_batch_normalize: bool = used(False, "divide weights by their mean", when="rollout_is")
    rollout_rs: str | None = used(None, "rejection rules, separated by commas")
    rollout_rs_threshold: float | str | None = used(None, "bounds of those rules", when="rollout_rs")
    rollout_rs_threshold_lower: float | None = used(
        None, "lower bound of one rule's ratio; rollout_rs_threshold is its upper bound", when="rollout_rs", gt=0
    )
    rollout_token_veto_threshold: float | None = used(
        None, "a row with a token of a smaller ratio does not train: the rule seq_max_k1", gt=0
    )
    bypass_mode: bool = used(
        False,
        "take the sampler's log-probabilities as the old ones; with rollout.prefetch_num they are of older weights, and the "
        "clip bounds the movement of several steps together",
    )
    loss_type: str = used(
        "ppo_clip",
        "loss of bypass_mode",
        when="algorithm.rollout_correction.bypass_mode",
        choices=("ppo_clip", "reinforce"),
    )


@dataclass(frozen=True)
class FilterGroupsConfig(Section):
    enable: bool = used(False, "leave out prompts whose samples all score the same", when=ALWAYS)
    metric: str | None = used(
        "reward",
        "what is compared: score (as the function returned it), acc or a part; reward, seq_reward or seq_final_reward (shaped)",
    )
    max_num_gen_batches: int = used(0, "most generation batches per step; 0: 100", ge=0)


@dataclass(frozen=True)
class KLCtrlConfig(Section):
    type: str = used("fixed", "controller of the coefficient", choices=("fixed", "adaptive"))
    kl_coef: float = used(0.001, "coefficient, or its first value", neutral=(0.0,), ge=0)
    horizon: int = used(10000, "horizon of the adaptive controller", when=".type=adaptive", gt=0)
    target_kl: float = used(0.1, "target of the adaptive controller", when=".type=adaptive", gt=0)


@dataclass(frozen=True)
class PFPPOConfig(Section):
    reweight_method: str = used("pow", "weights of the resampling", choices=("pow", "max_min", "max_random"))
    weight_pow: float = used(2.0, "exponent of pow", when=".reweight_method=pow")


@dataclass(frozen=True)
class RejectionConfig(Section):
    """Rejection sampling (RAFT): the samples of a prompt, of `rollout.n`, that train."""

    keep: int = used(1, "samples kept of each prompt, the best first", ge=1)
    min_score: float | None = used(None, "lowest score of a sample that is kept; null: any")
    dedup: bool = used(True, "keep equal responses to a prompt once")
    truncated: bool = used(False, "keep samples that were cut at data.max_response_length too")
    write: str | None = used(
        "kept.jsonl", "file of the kept samples in the run folder, as rows for verl sft; null: none"
    )


@dataclass(frozen=True)
class OnlineConfig(Section):
    """Online preference optimization: pairs of the best and the worst of the `rollout.n` samples of a prompt."""

    missing_eos_penalty: float | None = used(
        None, "subtracted from the score of a sample that was cut at data.max_response_length; null: nothing", ge=0
    )
    sync_steps: int = used(
        0, "steps after which the reference moves towards the policy (SPIN's opponent: 1); 0: never", ge=0
    )
    mixup_alpha: float = used(1.0, "share of the policy in the new reference", when="syncs", gt=0, le=1)


@dataclass(frozen=True)
class GiGPOConfig(Section):
    step_advantage_w: float = used(
        1.0, "weight of a turn's advantage relative to its episode's", when="step_advantage_w", ge=0
    )


@dataclass(frozen=True)
class AlgorithmConfig(Section):
    program: str = used(
        "ppo",
        "what a step does: ppo (also GRPO and the other estimators), rejection_sampling (verl rejection), online_dpo, or "
        "path/to/file.py:class of a verl.programs.api.Program",
        family=Family("program", PPO_PROGRAMS, plugins=True),
    )
    adv_estimator: str = used(
        "gae",
        "advantage estimator, a name or path/to/file.py:function",
        family=Family("advantage estimator", ADVANTAGES, plugins=True),
    )
    gamma: float = used(
        1.0, "discount of a token; with turn_gae, turn_grpo and gigpo of a turn", when="gamma", ge=0, le=1
    )
    lam: float = used(1.0, "lambda of GAE", when="lam", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = used(
        True, "divide by the group's standard deviation", when="norm_adv_by_std_in_grpo"
    )
    gigpo: GiGPOConfig = section(GiGPOConfig, "settings of gigpo")
    gdpo_reward_keys: list[str] | None = used(None, "reward parts of gdpo", when="gdpo_reward_keys")
    gdpo_reward_weights: list[float] | None = used(None, "their weights; null: all 1", when="gdpo_reward_weights")
    use_kl_in_reward: bool = used(False, "subtract a KL penalty from the reward of each token")
    kl_penalty: str = used("kl", "KL estimator of that penalty", when=KL_IN_REWARD, choices=KL_KINDS)
    kl_ctrl: KLCtrlConfig = section(KLCtrlConfig, "coefficient of that penalty", when=KL_IN_REWARD)
    use_pf_ppo: bool = used(False, "resample rows by their score (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "settings of PF-PPO", when="algorithm.use_pf_ppo")
    filter_groups: FilterGroupsConfig = section(
        FilterGroupsConfig, "group filter of DAPO", when="algorithm.filter_groups.enable"
    )
    stages: list[Any] = used(
        [],
        "functions or classes of yours between the phases of a step, each path/to/file.py:name or {path: ..., setting: value} "
        "(docs/stages.md)",
        path=True,
    )
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig, "sampler against trainer")


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
