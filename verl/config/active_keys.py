"""Conditions of keys: a key without effect does not fulfil its condition. The declaration of a key names its condition.

A condition reads the tree and the section of the key. Its sentences name the reason why the key is not read, and the key to
set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from verl.config.schema import Condition, value_at
from verl.families import (
    ADVANTAGES,
    ENVIRONMENT_PACKAGES,
    FACTS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    REFERENCE_COLUMNS,
    engine_facts,
    engines_with,
)

if TYPE_CHECKING:
    from verl.config.roots.ppo import PPOConfig
    from verl.config.roots.preference import PreferenceConfig
    from verl.config.sections.rollout import AgentConfig, RolloutConfig

MOST_REUSED_TOKENS = 1 << 16  # listing more slots in each step takes longer than the forward of a tiny model
REUSED_SHARE = 4  # activations that the sampler keeps take at most 1 / REUSED_SHARE of free memory


WITHOUT = {"actor_rollout_ref.rollout.quantization": "null", "actor_rollout_ref.rollout.kv_cache_dtype": "auto"}


def quantized_keys(rollout: RolloutConfig) -> dict[str, str]:
    """The keys by which the sampler computes in fewer bits than the model, with their values."""
    values = dict(zip(WITHOUT, (rollout.quantization or "null", rollout.kv_cache_dtype), strict=True))
    return {key: value for key, value in values.items() if value != WITHOUT[key]}


def reuse_obstacle(rollout: RolloutConfig) -> str | None:
    """The setting that makes updates on a CPU compute their forward; None if they may read the sampler's activations."""
    if not rollout.reuse_activations_gb:
        return "actor_rollout_ref.rollout.reuse_activations_gb=0"
    if rollout.prefetch_num:
        return "samples are made ahead of their update"
    for key, value in quantized_keys(rollout).items():
        return f"{key}={value}"
    if rollout.kv_cache_config.enable_paged_attention:
        return "the KV cache is paged"
    return None


def selects_samples(root: PPOConfig) -> bool:
    """Whether the run is rejection sampling: training on its best samples, without advantages."""
    return bool(root.algorithm.program == "rejection_sampling")


def learns_from_pairs(root: PPOConfig) -> bool:
    """Whether the run is online preference optimization: training on pairs of its samples, without advantages."""
    return bool(root.algorithm.program == "online_dpo")


def uses_critic(root: PPOConfig) -> bool:
    """Whether a value model trains: an explicit critic.enable, else the estimator decides."""
    if selects_samples(root) or learns_from_pairs(root):
        return False
    if root.critic.enable is not None:
        return bool(root.critic.enable)
    return ADVANTAGES.may_read(root.algorithm.adv_estimator, "values") and uses_rewards(root)


def uses_rewards(root: PPOConfig) -> bool:
    """Whether rewards train the policy; if only a teacher trains it, rewards are only reported."""
    return not root.distillation.enabled or bool(root.distillation.distillation_loss.use_task_rewards)


def uses_reference(root: PPOConfig) -> bool:
    if learns_from_pairs(root):
        return uses_reference_policy(root)
    uses_kl = root.actor_rollout_ref.actor.use_kl_loss or root.algorithm.use_kl_in_reward
    return bool(uses_kl) and not selects_samples(root)


def trains_on_several_devices(root: PPOConfig) -> bool:
    """Whether there are several processes beside those of a sampler, by the config or because a launcher has started them."""
    trainer = root.trainer
    num_devices = trainer.nnodes * trainer.n_gpus_per_node
    return num_devices > 1 or bool(trainer.placement) or os.environ.get("WORLD_SIZE", "1") != "1"


def runs_on_several_devices(root: PPOConfig) -> bool:
    """The same, with the processes of a sampler."""
    return trains_on_several_devices(root) or (value_at(root, "actor_rollout_ref.rollout.nnodes") or 0) > 0


def runs_agents(root: PPOConfig) -> bool:
    """Whether samples are episodes of agents."""
    rollout = root.actor_rollout_ref.rollout
    agent = rollout.agent
    return bool(
        rollout.multi_turn.enable
        or agent.agent_loop_config_path
        or agent.environment
        or agent.runner
        or agent.default_agent_loop != "single_turn_agent"
    )


def trains_branches(root: PPOConfig) -> bool:
    """Whether all conversations of an episode train."""
    return runs_agents(root) and root.actor_rollout_ref.rollout.agent.branches == "all"


def runner_of(agent: AgentConfig) -> str | None:
    """The agent that talks to the run's endpoint: `runner`, or an environment of a package, "verifiers:NAME"."""
    is_package = agent.environment and agent.environment.partition(":")[0] in ENVIRONMENT_PACKAGES
    return agent.runner or (agent.environment if is_package else None)


def brings_reward(root: PPOConfig) -> bool:
    """Whether episodes may bring their rewards (of an environment, a runner, a loop of the user's), and no reward function is
    given."""
    loop = root.actor_rollout_ref.rollout.agent.default_agent_loop
    return loop not in ("single_turn_agent", "tool_agent") and not root.reward.custom_reward_function.path


def starts_engine(root: PPOConfig) -> bool:
    """Whether the generation engine may span devices in addition to the devices of the run's processes."""
    rollout = root.actor_rollout_ref.rollout
    facts = engine_facts(rollout.name)
    return facts.starts_process and not facts.is_service(rollout.service.url)


def effective_loss(root: PPOConfig) -> str:
    """The policy loss that runs; bypass_mode replaces the configured one."""
    correction = root.algorithm.rollout_correction
    if correction.bypass_mode:
        return "vanilla" if correction.loss_type == "ppo_clip" else "reinforce"
    return str(root.actor_rollout_ref.actor.policy_loss.loss_mode)


def _loss_reads(root: PPOConfig, key: str) -> bool:
    """Whether the policy loss reads `key`; reinforce, the other loss of bypass_mode, reads none."""
    name = effective_loss(root)
    return name != "reinforce" and POLICY_LOSSES.may_read(name, key)


def _is_not(key: str, names: tuple[str, ...]) -> str:
    """The reason why a key that only functions of these names read has no effect."""
    *first, last = names
    return f"{key} is not {', '.join(first)}{' or ' if first else ''}{last}"


# the keys of bypass_mode have conditions of their section
_READ_BY_LOSSES = {name: keys for name, keys in POLICY_LOSSES.reads.items() if name != "bypass_mode"}


def _read_by_loss(key: str) -> Condition:
    losses = tuple(name for name, keys in _READ_BY_LOSSES.items() if key in keys)
    return Condition(
        lambda root, node: _loss_reads(root, key),
        _is_not("actor.policy_loss.loss_mode", losses),
        f"set actor_rollout_ref.actor.policy_loss.loss_mode={losses[0]}",
    )


def _read_by_estimator(key: str) -> Condition:
    estimators = ADVANTAGES.reading(key)
    return Condition(
        lambda root, node: ADVANTAGES.may_read(root.algorithm.adv_estimator, key),
        _is_not("algorithm.adv_estimator", estimators),
        f"set algorithm.adv_estimator={estimators[0]}",
    )


def _drafts_by(method: str) -> Condition:
    return Condition(
        lambda root, node: method in node.methods, f"{{}}methods has no {method}", f"set {{}}methods=[{method}]"
    )


def _engine_can(fact: str) -> Condition:
    names = engines_with(fact)
    return Condition(
        lambda root, node: bool(getattr(engine_facts(root.actor_rollout_ref.rollout.name), fact)),
        _is_not("actor_rollout_ref.rollout.name", names),
        f"set actor_rollout_ref.rollout.name={names[0]}",
    )


_SERVERS = engines_with(lambda facts: facts.starts_process and facts.asks_service)


def _fixed_bsz(use_dynamic: str) -> Condition:
    return Condition(
        lambda root, node: not node[use_dynamic],
        f"{{}}{use_dynamic}=True cuts micro-batches by token count",
        f"set {{}}{use_dynamic}=False",
    )


def _judge(*engines: str) -> Condition:
    def holds(root: PPOConfig, node: object) -> bool:
        model = root.reward.reward_model
        user_function = root.reward.custom_reward_function.path  # it may ask the service itself
        return bool(model.judge_template or user_function) and model.rollout.name in engines

    return Condition(
        holds,
        f"no judge runs on {' or '.join(engines)}",
        f"set reward.reward_model.judge_template and reward.reward_model.rollout.name={engines[0]}",
    )


def uses_reference_policy(root: PPOConfig | PreferenceConfig) -> bool:
    """Whether a chosen loss compares with a reference."""
    return any(PREFERENCE_LOSSES.may_read(name, *REFERENCE_COLUMNS) for name in root.preference.losses)


def _read_by_preference(*arguments: str) -> Condition:
    losses = PREFERENCE_LOSSES.reading(*arguments)
    return Condition(
        lambda root, node: any(PREFERENCE_LOSSES.may_read(name, *arguments) for name in root.preference.losses),
        _is_not("preference.loss", losses),
        f"set preference.loss={losses[0]}",
    )


LABELLED_LOSSES = PREFERENCE_LOSSES.reading("desirable")  # of labelled completions; all further losses are of pairs
DIVERGENCE_LOSSES = PREFERENCE_LOSSES.reading("delta", "mean_delta")

# conditions of the section `preference`
PREFERENCE_CONDITIONS: dict[str, Condition] = {
    **{
        key: _read_by_preference(key)
        for key in (
            "label_smoothing", "discopop_tau", "simpo_gamma", "cpo_alpha", "alpha", "desirable_weight",
            "undesirable_weight",
        )
    },
    "f_divergence": _read_by_preference("delta", "mean_delta"),
    "pairs": Condition(
        lambda root, node: any(name not in LABELLED_LOSSES for name in root.preference.losses),
        "the loss is of labelled completions",
        "choose a loss of pairs",
    ),
    "syncs": Condition(lambda root, node: node.sync_steps > 0, "{}sync_steps is 0", "set {}sync_steps above 0"),
}  # fmt: skip

# conditions of sections that all programs have
SHARED_CONDITIONS: dict[str, Condition] = {
    "fixed_bsz": _fixed_bsz("use_dynamic_bsz"),
    "several_devices": Condition(
        lambda root, node: runs_on_several_devices(root),
        "the run is on one device, which holds the whole model",
        "set trainer.n_gpus_per_node above 1",
    ),
    "no_warmup_steps": Condition(
        lambda root, node: (node.lr_warmup_steps or 0) <= 0,
        "{}lr_warmup_steps gives the length of the warm-up",
        "remove {}lr_warmup_steps",
    ),
    "lora": Condition(
        lambda root, node: node.lora_rank > 0, "{}lora_rank is 0, so there are no adapters", "set {}lora_rank above 0"
    ),
    "ends_by_epochs": Condition(
        lambda root, node: root.trainer.total_training_steps is None,
        "trainer.total_training_steps ends the run, after more or fewer epochs",
        "remove trainer.total_training_steps",
    ),
    "has_limit": Condition(lambda root, node: node.limit is not None, "no limit is set with it", "set {}limit as well"),
    "has_path": Condition(lambda root, node: node.path is not None, "no path is set with it", "set {}path as well"),
}

PPO_CONDITIONS: dict[str, Condition] = {
    **SHARED_CONDITIONS,
    **PREFERENCE_CONDITIONS,
    "has_class_path": Condition(
        lambda root, node: node.class_path is not None, "no class_path is set with it", "set {}class_path as well"
    ),
    "has_drafts": Condition(
        lambda root, node: bool(node.methods), "{}methods is empty, so there are no drafts", "set {}methods=[ngram]"
    ),
    **{f"drafts_by_{method}": _drafts_by(method) for method in ("history", "model")},
    "critic": Condition(
        lambda root, node: uses_critic(root),
        "no critic is trained with this algorithm.adv_estimator",
        "set algorithm.adv_estimator=gae",
    ),
    "rejection": Condition(
        lambda root, node: root.algorithm.program != "ppo",
        "algorithm.program=ppo trains on all samples by their advantages",
        "run verl rejection, or set algorithm.program=rejection_sampling",
    ),
    "reference": Condition(
        lambda root, node: uses_reference(root),
        "no KL term uses a reference policy",
        "set actor_rollout_ref.actor.use_kl_loss=True or algorithm.use_kl_in_reward=True",
    ),
    "weighs": Condition(
        lambda root, node: not (node.bypass_mode and node.loss_type == "ppo_clip"),
        "in bypass_mode the loss ppo_clip has no importance weights",
        "set algorithm.rollout_correction.loss_type=reinforce",
    ),
    "rollout_is": Condition(
        lambda root, node: node.rollout_is is not None,
        "algorithm.rollout_correction.rollout_is is null, so there are no importance weights",
        "set algorithm.rollout_correction.rollout_is=token or sequence",
    ),
    "rollout_rs": Condition(
        lambda root, node: node.rollout_rs is not None,
        "algorithm.rollout_correction.rollout_rs is null, so nothing is rejected",
        "set algorithm.rollout_correction.rollout_rs, for example to token_k1",
    ),
    "no_bypass": Condition(
        lambda root, node: not root.algorithm.rollout_correction.bypass_mode,
        "algorithm.rollout_correction.bypass_mode=True brings its own loss",
        "choose that loss by algorithm.rollout_correction.loss_type",
    ),
    "clips_both": Condition(
        lambda root, node: (
            _loss_reads(root, "clip_ratio_low") and (node.clip_ratio_low is None or node.clip_ratio_high is None)
        ),
        "clip_ratio_low and clip_ratio_high are both set, or the chosen policy loss does not clip the ratio",
        "set only {}clip_ratio",
    ),
    **{key: _read_by_loss(key) for keys in _READ_BY_LOSSES.values() for key in keys},
    **{
        key: _read_by_estimator(key)
        for key in (
            "gamma",
            "lam",
            "norm_adv_by_std_in_grpo",
            "gdpo_reward_keys",
            "gdpo_reward_weights",
            "step_advantage_w",
        )
    },
    "log_prob_fixed_bsz": _fixed_bsz("log_prob_use_dynamic_bsz"),
    "samples": Condition(
        lambda root, node: node.do_sample and node.temperature > 0,
        "rollout decodes greedily (do_sample=False or temperature=0)",
        "set actor_rollout_ref.rollout.do_sample=True and a temperature above 0",
    ),
    "val_samples": Condition(
        lambda root, node: node.do_sample,
        "validation decodes greedily (val_kwargs.do_sample=False)",
        "set actor_rollout_ref.rollout.val_kwargs.do_sample=True and its temperature",
    ),
    "prefetches": Condition(
        lambda root, node: root.actor_rollout_ref.rollout.prefetch_num > 0,
        "samples are made right before they train (actor_rollout_ref.rollout.prefetch_num=0)",
        "set actor_rollout_ref.rollout.prefetch_num above 0",
    ),
    "pages": Condition(
        lambda root, node: (
            node.enable_paged_attention or (node.enable_paged_attention is None and root.trainer.device != "cpu")
        ),
        "the KV cache is not paged (kv_cache_config.enable_paged_attention is False, or null on a CPU)",
        "set actor_rollout_ref.rollout.kv_cache_config.enable_paged_attention=True",
    ),
    "spans_devices": Condition(
        lambda root, node: (
            starts_engine(root)
            or (runs_on_several_devices(root) and not engine_facts(root.actor_rollout_ref.rollout.name).needs_service)
        ),
        "the run is on one device, which holds the whole model, or its samples come from a service",
        "set trainer.n_gpus_per_node above 1",
    ),
    "runs_agents": Condition(
        lambda root, node: runs_agents(root),
        "samples are single turns (actor_rollout_ref.rollout.multi_turn.enable=False)",
        "set actor_rollout_ref.rollout.multi_turn.enable=True",
    ),
    "own_server": Condition(
        lambda root, node: starts_engine(root) and engine_facts(root.actor_rollout_ref.rollout.name).asks_service,
        "the run starts no server",
        f"set actor_rollout_ref.rollout.name={_SERVERS[0]} and no rollout.service.url",
    ),
    "judge": Condition(
        lambda root, node: bool(root.reward.reward_model.judge_template),
        "the reward model is a classifier, since reward.reward_model.judge_template is not set",
        "set reward.reward_model.judge_template",
    ),
    "teacher_pool": Condition(
        lambda root, node: node.nnodes > 0, "the teachers share the policy's devices", "set distillation.nnodes above 0"
    ),
    "off_policy": Condition(
        lambda root, node: node.on_policy_share < 1,
        "every step trains on samples of the student",
        "set distillation.on_policy_share below 1",
    ),
    "judge_process": _judge(*engines_with(lambda facts: facts.holds_weights and not facts.asks_service)),
    "judge_service": _judge(*engines_with("asks_service")),
}
assert not PPO_CONDITIONS.keys() & FACTS.keys()  # a fact of engines is a condition of its name
PPO_CONDITIONS |= {fact: _engine_can(fact) for fact in FACTS}
