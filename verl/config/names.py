"""Names that config values may take. The families' registries live in later layers; a test keeps both sides equal."""

from __future__ import annotations

PPO_PROGRAMS = ("ppo", "rejection_sampling", "online_dpo")  # of `verl train`

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "gdpo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "turn_gae",
    "turn_grpo",
    "gigpo",
)
CRITIC_ESTIMATORS = ("gae", "turn_gae")
TURN_ESTIMATORS = ("turn_gae", "turn_grpo", "gigpo")
GROUP_ESTIMATORS = tuple(n for n in ADV_ESTIMATORS if n not in (*CRITIC_ESTIMATORS, "reinforce_plus_plus", "remax"))
STD_NORM_ESTIMATORS = ("grpo", "grpo_vectorized", "gdpo", "grpo_passk", "turn_grpo", "gigpo")
TOKEN_BASELINE_ESTIMATORS = ("optimal_token_baseline", "tir_optimal_token_baseline")

POLICY_LOSSES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
)
CLIPPING_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "geo_mean", "cispo")
DUAL_CLIPPING_LOSSES = ("vanilla", "dppo_tv", "dppo_kl")

_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*_KL, *(name + "+" for name in _KL))

DISTILLATION_LOSSES = (*_KL, "forward_kl_topk", "jsd")

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")

LOGGERS = (
    "console",
    "file",
    "tensorboard",
    "wandb",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "clearml",
    "trackio",
    "rl_insight",
)

REWARD_MANAGERS = ("naive", "batch", "prime", "dapo", "gdpo", "remote", "rate_limited")

TOOL_PARSERS = (
    "hermes", "qwen3_coder", "gpt-oss", "glm", "seed", "minimax", "kimi", "deepseek", "deepseek_v4", "gemma4",
)  # fmt: skip
AGENT_LOOPS = ("single_turn_agent", "tool_agent", "environment_agent", "endpoint_agent")
ROLLOUT_ENGINES = ("native", "hf", "vllm", "http", "sglang")
ROLLOUT_IS = ("token", "sequence")
ROLLOUT_RS = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_sum_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_mean_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_max_{k}" for k in ("k2", "k3")),
)
SCORE_METRICS = ("reward", "score", "seq_reward", "seq_final_reward")  # filter_groups.metric for the score itself

# losses of labelled completions; the others are of pairs
LABELLED_LOSSES = ("kto", "apo_zero_unpaired", "bco")
REFERENCE_FREE_LOSSES = ("sft", "cpo", "cpo_hinge", "cpo_ipo", "simpo", "orpo")
DIVERGENCE_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
PREFERENCE_LOSSES = (
    *DIVERGENCE_LOSSES,
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    *REFERENCE_FREE_LOSSES,
    *LABELLED_LOSSES,
)
# setting -> the losses that read it
PREFERENCE_SETTINGS = {
    "label_smoothing": ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired", "cpo", "simpo"),
    "discopop_tau": ("discopop",),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo", "cpo_hinge", "cpo_ipo"),
    "alpha": ("cpo", "cpo_hinge", "cpo_ipo", "simpo"),
    "desirable_weight": LABELLED_LOSSES,
    "undesirable_weight": LABELLED_LOSSES,
}
