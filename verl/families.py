"""The built-in rows of the families that a config names. No row is imported before it is asked for, so that a config can be
checked without torch.

A row of an algorithm also names what its function reads: the settings by config key, and columns in addition to the arguments
of every function of the family. From these follow the keys that act, the models that a run needs and the rows of
docs/config.md. A new algorithm is a function, a row here and a test.

A row of a rollout engine has its facts. Rules, conditions of keys, roles and runtimes ask for a fact and never for a name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from verl.errors import ConfigError
from verl.registry import BuiltIn, Registry

_RETURNS = "verl.algorithms.advantages.returns"
_GROUP = "verl.algorithms.advantages.group"
_TURNS = "verl.algorithms.advantages.turns"
_BY_STD = "index norm_adv_by_std_in_grpo"

ADVANTAGES = Registry(
    "advantage estimator",
    {
        "gae": BuiltIn(f"{_RETURNS}:gae", "values gamma lam"),
        "grpo": BuiltIn(f"{_GROUP}:grpo", _BY_STD),
        "grpo_vectorized": BuiltIn(f"{_GROUP}:grpo", _BY_STD),
        "gdpo": BuiltIn(f"{_GROUP}:gdpo", f"{_BY_STD} reward_parts gdpo_reward_keys gdpo_reward_weights"),
        "grpo_passk": BuiltIn(f"{_GROUP}:grpo_passk", _BY_STD),
        "reinforce_plus_plus": BuiltIn(f"{_RETURNS}:reinforce_plus_plus", "gamma"),
        "reinforce_plus_plus_baseline": BuiltIn(f"{_GROUP}:reinforce_plus_plus_baseline", "index"),
        "remax": BuiltIn(f"{_RETURNS}:remax", "reward_baselines"),
        "rloo": BuiltIn(f"{_GROUP}:rloo", "index"),
        "rloo_vectorized": BuiltIn(f"{_GROUP}:rloo", "index"),
        "opo": BuiltIn(f"{_GROUP}:opo", "index"),
        "gpg": BuiltIn(f"{_GROUP}:gpg", "index f_norm"),
        "optimal_token_baseline": BuiltIn(
            f"{_RETURNS}:optimal_token_baseline",
            "index old_log_probs sum_pi_squared rollout_is_weights handle_zero_tail",
        ),
        "tir_optimal_token_baseline": BuiltIn(
            f"{_RETURNS}:tir_optimal_token_baseline",
            "index old_log_probs sum_pi_squared rollout_is_weights handle_zero_tail",
        ),
        "turn_gae": BuiltIn(f"{_TURNS}:turn_gae", "values turn_ids gamma lam"),
        "turn_grpo": BuiltIn(f"{_TURNS}:turn_grpo", f"{_BY_STD} turn_ids gamma"),
        "gigpo": BuiltIn(f"{_TURNS}:gigpo", f"{_BY_STD} turn_ids responses gamma step_advantage_w"),
    },
    shared="token_level_rewards response_mask epsilon",
    base="function",
)

_LOSSES = "verl.algorithms.policy_losses"
_CLIPS = "clip_ratio_low clip_ratio_high"

POLICY_LOSSES = Registry(
    "policy loss",
    {
        "vanilla": BuiltIn(f"{_LOSSES}.clipped:vanilla", f"{_CLIPS} clip_ratio_c"),
        "dppo_tv": BuiltIn(f"{_LOSSES}.selection:dppo_tv", f"{_CLIPS} clip_ratio_c"),
        "dppo_kl": BuiltIn(f"{_LOSSES}.selection:dppo_kl", f"{_CLIPS} clip_ratio_c"),
        "gspo": BuiltIn(f"{_LOSSES}.clipped:gspo", _CLIPS),
        "sapo": BuiltIn(f"{_LOSSES}.soft:sapo", "tau_pos tau_neg"),
        "gpg": BuiltIn(f"{_LOSSES}.soft:gpg"),
        "clip_cov": BuiltIn(f"{_LOSSES}.selection:clip_cov", f"{_CLIPS} clip_cov_ratio clip_cov_lb clip_cov_ub"),
        "kl_cov": BuiltIn(f"{_LOSSES}.selection:kl_cov", "kl_cov_ratio ppo_kl_coef"),
        "geo_mean": BuiltIn(f"{_LOSSES}.clipped:geo_mean", _CLIPS),
        "dro": BuiltIn(f"{_LOSSES}.soft:dro", "dro_beta"),
        "cispo": BuiltIn(f"{_LOSSES}.clipped:cispo", _CLIPS),
        # the loss of rollout_correction.bypass_mode
        "bypass_mode": BuiltIn(
            f"{_LOSSES}.bypass:bypass_mode",
            "loss_type rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold rollout_is_batch_normalize "
            f"{_CLIPS} clip_ratio_c",
        ),
    },
    shared="old_log_prob log_prob advantages response_mask agg rollout_is_weights generator",
    base="function",
)

_PAIRS = "verl.algorithms.preference_losses"
_RATIOS, _LABELLED = "chosen_ratio rejected_ratio", "ratio desirable desirable_weight undesirable_weight"
_CPO = "nll cpo_alpha alpha"

PREFERENCE_LOSSES = Registry(
    "preference loss",
    {
        "sigmoid": BuiltIn(f"{_PAIRS}:sigmoid", "delta label_smoothing"),
        "sigmoid_norm": BuiltIn(f"{_PAIRS}:sigmoid_norm", "mean_delta"),
        "hinge": BuiltIn(f"{_PAIRS}:hinge", "delta"),
        "ipo": BuiltIn(f"{_PAIRS}:ipo", "mean_delta"),
        "exo_pair": BuiltIn(f"{_PAIRS}:exo_pair", "delta label_smoothing"),
        "robust": BuiltIn(f"{_PAIRS}:robust", "delta label_smoothing"),
        "discopop": BuiltIn(f"{_PAIRS}:discopop", "delta discopop_tau"),
        "nca_pair": BuiltIn(f"{_PAIRS}:nca_pair", _RATIOS),
        "bco_pair": BuiltIn(f"{_PAIRS}:bco_pair", _RATIOS),
        "sppo_hard": BuiltIn(f"{_PAIRS}:sppo_hard", _RATIOS),
        "aot": BuiltIn(f"{_PAIRS}:aot", "chosen_logp rejected_logp matched_margin label_smoothing"),
        "aot_unpaired": BuiltIn(f"{_PAIRS}:aot_unpaired", f"{_RATIOS} matched_chosen matched_rejected label_smoothing"),
        "apo_zero": BuiltIn(f"{_PAIRS}:apo_zero", _RATIOS),
        "apo_down": BuiltIn(f"{_PAIRS}:apo_down", _RATIOS),
        "sft": BuiltIn(f"{_PAIRS}:sft", "nll"),
        "cpo": BuiltIn(f"{_PAIRS}:cpo", f"chosen_logp rejected_logp {_CPO} label_smoothing"),
        "cpo_hinge": BuiltIn(f"{_PAIRS}:cpo_hinge", f"chosen_logp rejected_logp {_CPO}"),
        "cpo_ipo": BuiltIn(f"{_PAIRS}:cpo_ipo", f"chosen_mean rejected_mean {_CPO}"),
        "simpo": BuiltIn(f"{_PAIRS}:simpo", "chosen_mean rejected_mean simpo_gamma label_smoothing alpha"),
        "orpo": BuiltIn(f"{_PAIRS}:orpo", "chosen_mean rejected_mean nll"),
        "kto": BuiltIn(f"{_PAIRS}:kto", f"{_LABELLED} shift"),
        "apo_zero_unpaired": BuiltIn(f"{_PAIRS}:apo_zero_unpaired", _LABELLED),
        "bco": BuiltIn(f"{_PAIRS}:bco", f"{_LABELLED} shift"),
    },
    shared="beta",
    base="function",
)
REFERENCE_COLUMNS = ("chosen_ratio", "rejected_ratio", "delta", "mean_delta", "matched_margin", "ratio")

TRAINING_ENGINES = Registry(
    "training engine",
    {
        "local": "verl.engines.local:LocalEngine",  # of one device, for any strategy of a config
        "fsdp": "verl.engines.fsdp:FSDPEngine",
        "fsdp2": "verl.engines.fsdp:FSDPEngine",
        "megatron": "verl.engines.megatron.engine:MegatronEngine",
        "deepspeed": "verl.engines.deepspeed.engine:DeepSpeedEngine",
    },
)


def _can(what: str) -> Any:
    """A fact that a row may state; `what` completes "a rollout engine that ..."."""
    return field(default=False, metadata={"what": what})


@dataclass(frozen=True)
class EngineFacts:
    """Capabilities of a rollout engine. A class outside of this package declares its facts as its attribute `facts`.

    >>> EngineFacts(starts_process=True, reads_images=True).is_in_run
    False
    """

    holds_weights: bool = _can("has a copy of the weights, to which updates are sent")
    starts_process: bool = _can("computes in processes that the run starts for it")
    asks_service: bool = _can("asks a service at service.url")
    joins_ranks: bool = _can("can run in the training processes too (mode=sync)")
    divides_model: bool = _can("divides a copy of the model over several devices")
    scales: bool = _can("can get further devices during a run")
    restarts: bool = _can("is started again if its process dies")
    reads_images: bool = _can("reads images")
    verifies_invariance: bool = _can("can verify that a sample does not depend on its batch")
    keeps_partial_kv: bool = _can("keeps keys and values of unfinished responses while weights change")
    pauses: bool = _can("pauses samples between two decode steps")
    reuses_activations: bool = _can("keeps activations that the first update reads")
    samples_adapters: bool = _can("samples with several LoRA adapters at once")
    records_experts: bool = _can("returns the experts that it chose")
    records_stopped_experts: bool = _can("returns the experts of a sample that a stop string ends")
    pages_by_key: bool = _can("has a KV cache that kv_cache_config divides into pages")
    takes_buckets: bool = _can("takes new weights in buckets of memory")
    takes_adapters: bool = _can("computes with LoRA adapters that an update sends without the weights")
    drafts: bool = _can("verifies drafts of several tokens in a step")
    drafts_history: bool = _can("drafts from earlier responses")
    drafts_mixed: bool = _can("drafts in several ways at once")
    drafts_mtp: bool = _can("drafts with the model's own heads for further tokens")
    quantizes_int8: bool = _can("computes with int8 weights")
    quantizes_fp8: bool = _can("computes with fp8 weights")
    stores_int8: bool = _can("has a KV cache of int8 numbers")
    stores_fp8: bool = _can("has a KV cache of fp8 numbers")
    limits_requests: bool = _can("takes stop strings and JSON schemas of single requests")
    prefills_by_key: bool = _can("has switches for prompts in chunks and for prefix caching")

    @property
    def needs_service(self) -> bool:
        """Whether it generates only at a service that is there already."""
        return self.asks_service and not self.starts_process

    @property
    def is_in_run(self) -> bool:
        """Whether it generates in the training processes and in no others."""
        return not (self.asks_service or self.starts_process)

    def is_service(self, url: str | None) -> bool:
        """Whether samples come from a service that the run does not start; `url` is service.url."""
        return self.asks_service and (url is not None or self.needs_service)


def _row(reference: str, facts: str) -> BuiltIn:
    return BuiltIn(reference, facts=EngineFacts(**dict.fromkeys(facts.split(), True)))


ROLLOUT_ENGINES = Registry(
    "rollout engine",
    {
        "native": _row(
            "verl.rollout.native.engine:NativeRollout",
            "divides_model scales reads_images verifies_invariance keeps_partial_kv pauses reuses_activations "
            "samples_adapters records_experts records_stopped_experts pages_by_key drafts drafts_history drafts_mixed "
            "drafts_mtp quantizes_int8 quantizes_fp8 stores_int8 limits_requests",
        ),
        "hf": _row("verl.rollout.hf:HFRollout", "scales reads_images"),
        "vllm": _row(
            "verl.rollout.vllm.engine:VLLMRollout",
            "holds_weights starts_process joins_ranks divides_model restarts reads_images records_experts takes_buckets "
            "prefills_by_key drafts drafts_mtp quantizes_fp8 stores_fp8",
        ),
        "http": _row(
            "verl.rollout.http.engine:HTTPRollout",
            "holds_weights asks_service reads_images takes_buckets samples_adapters",
        ),
        "sglang": _row(
            "verl.rollout.http.sglang:SGLangRollout",
            "holds_weights starts_process asks_service divides_model reads_images takes_buckets takes_adapters "
            "samples_adapters quantizes_fp8 stores_fp8",
        ),
    },
    base="verl.rollout.api:RolloutEngine",
)
DEFAULT_ROLLOUT, SERVICE_ROLLOUT = "native", "http"


def engine_facts(name: str | None) -> EngineFacts:
    """The facts of the rollout engine `name`; None is the default engine. No fact holds for a name that is not registered
    yet, or for a "path/to/file.py:Class" that cannot be loaded, which a run refuses when it builds the engine."""
    name = name or DEFAULT_ROLLOUT
    facts = EngineFacts()
    if ROLLOUT_ENGINES.is_built_in(name):
        facts = ROLLOUT_ENGINES.facts[name]
    elif name in ROLLOUT_ENGINES or ":" in name:
        with suppress(ConfigError):
            facts = getattr(ROLLOUT_ENGINES.get(name), "facts", facts)
    return facts


def engines_with(fact: str | Callable[[EngineFacts], bool]) -> tuple[str, ...]:
    """The built-in rollout engines of which a fact, or a function of their facts, holds."""
    holds = (lambda facts: bool(getattr(facts, fact))) if isinstance(fact, str) else fact
    return tuple(name for name, facts in ROLLOUT_ENGINES.facts.items() if holds(facts))


FACTS = {f.name: f.metadata["what"] for f in fields(EngineFacts)}


def needs_engine(what: str, fact: str) -> str:
    """The sentence for `what`, which only engines with a fact can do, without its end: "KEY needs a rollout engine that returns
    the experts that it chose: native, vllm"."""
    return f"{what} needs a rollout engine that {FACTS[fact]}: {', '.join(engines_with(fact))}"


REWARD_MANAGERS = Registry(
    "reward manager",
    {
        "naive": "verl.rewards.managers.naive:NaiveRewardManager",
        "prime": "verl.rewards.managers.naive:NaiveRewardManager",  # scores in parallel, as naive does here too
        "batch": "verl.rewards.managers.naive:BatchRewardManager",
        "dapo": "verl.rewards.managers.dapo:DapoRewardManager",
        "gdpo": "verl.rewards.managers.naive:GdpoRewardManager",
    },
)

_PARSERS = "verl.agents.parsers"
TOOL_PARSERS = Registry(
    "tool parser",
    {
        "hermes": f"{_PARSERS}:HermesToolParser",
        "qwen3_coder": f"{_PARSERS}:QwenCoderToolParser",
        "gpt-oss": f"{_PARSERS}:GptOssToolParser",
        "glm": f"{_PARSERS}:GlmToolParser",
        "seed": f"{_PARSERS}:SeedToolParser",
        "minimax": f"{_PARSERS}:MinimaxToolParser",
        "kimi": f"{_PARSERS}:KimiToolParser",
        "deepseek": f"{_PARSERS}:DeepSeekToolParser",
        "deepseek_v4": f"{_PARSERS}:DeepSeekV4ToolParser",
        "gemma4": f"{_PARSERS}:GemmaToolParser",
    },
)

AGENT_LOOPS = Registry(
    "agent loop",
    {
        "single_turn_agent": "verl.agents.loops:SingleTurnAgentLoop",
        "tool_agent": "verl.agents.tool_agent:ToolAgentLoop",
        "environment_agent": "verl.agents.environments:EnvironmentAgentLoop",
        "endpoint_agent": "verl.agents.gateway.runner:EndpointAgentLoop",
    },
)

# rollout.agent.environment=KIND:NAME -> the runner that plays the environment NAME of a package
ENVIRONMENT_PACKAGES = Registry("package of environments", {"verifiers": "verl.agents.verifiers:Verifiers"})

_NO_SINK = "verl.tracking.sinks.api:not_supported"
SINKS = Registry(
    "tracker",
    {
        "console": "verl.tracking.sinks.console:ConsoleSink",
        "file": "verl.tracking.sinks.file:FileSink",
        "tensorboard": "verl.tracking.sinks.tensorboard:TensorBoardSink",
        "wandb": "verl.tracking.sinks.wandb:WandbSink",
        "mlflow": "verl.tracking.sinks.mlflow:MlflowSink",
        "swanlab": "verl.tracking.sinks.swanlab:SwanlabSink",
        "vemlp_wandb": _NO_SINK,
        "clearml": _NO_SINK,
        "trackio": "verl.tracking.sinks.trackio:TrackioSink",
        "rl_insight": _NO_SINK,
    },
)

PPO_PROGRAMS = ("ppo", "rejection_sampling", "online_dpo")  # of `verl train`
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_KINDS = (*_KL, *(name + "+" for name in _KL))
DISTILLATION_LOSSES = (*_KL, "forward_kl_topk", "jsd")
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
ROLLOUT_RS = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_sum_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_mean_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_max_{k}" for k in ("k1", "k2", "k3")),
)
UNSHAPED = "unshaped_score"  # the part that holds the score of a reward function before its manager shapes it
SCORE_METRICS = ("reward", "score", "seq_reward", "seq_final_reward")  # filter_groups.metric for the score itself
