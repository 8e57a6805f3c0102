"""Keys of reinforcement learning that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl.config.active_keys import (
    LABELLED_LOSSES,
    learns_from_pairs,
    runs_agents,
    selects_samples,
    uses_critic,
    uses_rewards,
)
from verl.config.rules.agents import check_agents, check_branches
from verl.config.rules.ppo_parts import (
    check_ahead,
    check_correction,
    check_distillation,
    check_drafts,
    check_policy,
    check_qat,
    check_quantization,
    check_routing,
)
from verl.config.schema import Problem, error, value_at, warning
from verl.config.sections.rollout import RolloutConfig, ValKwargsConfig
from verl.families import ADVANTAGES, REWARD_MANAGERS, engine_facts, needs_engine

if TYPE_CHECKING:
    from verl.config.roots.ppo import PPOConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
VAL = f"{ROLLOUT}.val_kwargs"
CORRECTION = "algorithm.rollout_correction"


def check_micro_batches(c: object, set_keys: set[str]) -> Iterator[Problem]:
    """Micro-batch sizes that are given under both of their names."""
    for section, name in (
        (ACTOR, "ppo_micro_batch_size"),
        ("critic", "ppo_micro_batch_size"),
        ("critic", "forward_micro_batch_size"),
        (ROLLOUT, "log_prob_micro_batch_size"),
        ("actor_rollout_ref.ref", "log_prob_micro_batch_size"),
    ):
        node, key = value_at(c, section), f"{section}.{name}"
        if node[name] is not None and node[f"{name}_per_gpu"] is not None:
            yield error(key, f"{key} and {key}_per_gpu are both set. Keep the second and remove the first.")


def check_batches(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Batch sizes that must fit together."""
    batch, size = c.data.train_batch_size, f"data.train_batch_size={c.data.train_batch_size}"
    for key, mini_batch in (
        (f"{ACTOR}.ppo_mini_batch_size", c.actor_rollout_ref.actor.ppo_mini_batch_size),
        ("critic.ppo_mini_batch_size", c.critic.ppo_mini_batch_size if uses_critic(c) else 0),
    ):
        if batch < mini_batch:
            yield error(
                key,
                f"{size} is smaller than {key}={mini_batch}; both count prompts. Set the second to at most {batch}.",
            )
        if key.startswith(ACTOR) and batch > mini_batch and mini_batch > 0 and batch % mini_batch:
            yield warning(
                key,
                f"{size} is no multiple of {key}={mini_batch}: the last optimizer step of each batch has fewer prompts "
                "than the others.",
            )
    generated = c.data.gen_batch_size or batch
    if c.algorithm.filter_groups.enable and generated < batch:
        yield error(
            "data.gen_batch_size",
            f"data.gen_batch_size={generated} is smaller than {size}. Set it to at least that, or remove it.",
        )


def check_reward_debug(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Rewards in the process of the run need a run of one process."""
    if c.reward.debug and c.trainer.nnodes * c.trainer.n_gpus_per_node > 1:
        yield error(
            "reward.debug",
            "reward.debug=True scores in the process of the run, and this run has several. Set trainer.nnodes=1 and "
            "trainer.n_gpus_per_node=1.",
        )


def check_lengths(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Lengths of prompts and responses that must fit together."""
    rollout, data = c.actor_rollout_ref.rollout, c.data
    prompt, response, longest = rollout.prompt_length, rollout.response_length, rollout.max_model_len
    if longest is not None and longest < prompt + response:
        yield error(
            f"{ROLLOUT}.max_model_len",
            f"{ROLLOUT}.max_model_len={longest} is smaller than the longest prompt plus response ({prompt} + {response} "
            "tokens). Raise it, or lower data.max_response_length.",
        )
    if prompt < data.max_prompt_length:
        yield error(
            f"{ROLLOUT}.prompt_length",
            f"{ROLLOUT}.prompt_length={prompt} is smaller than data.max_prompt_length={data.max_prompt_length}. Remove "
            "the first; it follows the second.",
        )
    if {f"{ROLLOUT}.response_length", "data.max_response_length"} <= set_keys and response != data.max_response_length:
        yield error(
            f"{ROLLOUT}.response_length",
            f"{ROLLOUT}.response_length={response} and data.max_response_length={data.max_response_length} are one "
            "limit. Remove the first; it follows the second.",
        )


def check_estimator(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Needs of the advantage estimator."""
    if selects_samples(c) or learns_from_pairs(c):
        return
    algorithm, num_samples = c.algorithm, c.actor_rollout_ref.rollout.n
    estimator = algorithm.adv_estimator
    if estimator == "grpo_passk" and num_samples < 2:
        yield error(
            f"{ROLLOUT}.n",
            f"algorithm.adv_estimator=grpo_passk compares the best two samples of a prompt. Set {ROLLOUT}.n to 2 or more.",
        )
    elif estimator in ADVANTAGES.reading("index") and num_samples == 1 and uses_rewards(c):
        yield warning(
            f"{ROLLOUT}.n",
            f"algorithm.adv_estimator={estimator} compares the samples of a prompt, and {ROLLOUT}.n=1 gives only one, which "
            "most of these estimators train with its raw reward. Set it to 5 or so.",
        )
    if estimator == "gdpo" and not algorithm.gdpo_reward_keys:
        yield error(
            "algorithm.gdpo_reward_keys",
            "algorithm.adv_estimator=gdpo needs the reward parts to weigh. Set algorithm.gdpo_reward_keys to keys that "
            "the reward function returns, for example [accuracy,format].",
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if weights and len(weights) != len(keys or []):
        yield error(
            "algorithm.gdpo_reward_weights",
            f"algorithm.gdpo_reward_weights={weights} does not have one weight per key of algorithm.gdpo_reward_keys={keys}.",
        )
    if algorithm.use_pf_ppo and not uses_critic(c):
        yield error(
            "algorithm.use_pf_ppo",
            "algorithm.use_pf_ppo=True resamples rows of PPO with a critic. Set algorithm.adv_estimator=gae, or remove it.",
        )
    if estimator in ADVANTAGES.reading("values") and c.critic.enable is False and uses_rewards(c):
        yield error(
            "critic.enable",
            f"algorithm.adv_estimator={estimator} needs the critic that critic.enable=False leaves out. Remove critic.enable, "
            "or choose an estimator without a critic, such as grpo.",
        )
    if c.critic.enable is True and not ADVANTAGES.may_read(estimator, "values"):
        yield warning(
            "critic.enable",
            f"critic.enable=True trains a critic whose values algorithm.adv_estimator={estimator} does not use.",
        )
    if algorithm.use_kl_in_reward and c.actor_rollout_ref.actor.use_kl_loss:
        yield warning(
            "algorithm.use_kl_in_reward",
            f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss are both True: the KL term acts twice.",
        )
    if algorithm.filter_groups.enable and num_samples == 1:
        yield warning(
            "algorithm.filter_groups.enable",
            f"algorithm.filter_groups.enable=True compares the samples of a prompt, and {ROLLOUT}.n=1 gives only one: "
            "nothing is left out.",
        )


# of advantages, policy losses and KL terms
_UNREAD_BY_REJECTION = (
    *(f"algorithm.{name}" for name in ("adv_estimator", "use_kl_in_reward", "use_pf_ppo")),
    f"{CORRECTION}.",
    f"{ACTOR}.policy_loss.",
    *(
        f"{ACTOR}.{name}"
        for name in ("clip_ratio", "use_kl_loss", "kl_loss", "entropy_coeff", "loss_agg_mode", "rollout_n")
    ),
)


def check_rejection(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Needs of rejection sampling, and keys that it does not read."""
    if not selects_samples(c):
        return
    n, keep, file = c.actor_rollout_ref.rollout.n, c.rejection.keep, c.rejection.write
    if keep > n:
        yield error("rejection.keep", f"rejection.keep={keep} is more than the {ROLLOUT}.n={n} samples of a prompt.")
    if keep == n and c.rejection.min_score is None:
        yield warning(
            "rejection.keep",
            f"rejection.keep={keep} of {ROLLOUT}.n={n} samples keeps them all, whatever their score. Raise the second, or "
            "set rejection.min_score.",
        )
    if file is not None and not file.endswith(".jsonl"):
        yield error(
            "rejection.write", f"rejection.write={file} is written row by row. Give a name that ends with .jsonl."
        )
    yield from _without_advantages(c, set_keys, "rejection sampling")


def _without_advantages(c: PPOConfig, set_keys: set[str], program: str) -> Iterator[Problem]:
    if c.actor_rollout_ref.rollout.prefetch_num:
        yield error(
            f"{ROLLOUT}.prefetch_num",
            f"algorithm.program={c.algorithm.program} samples from the weights that it trains. Set {ROLLOUT}.prefetch_num=0 "
            "and trainer.v1.trainer_mode=sync.",
        )
    for key in sorted(k for k in set_keys if k.startswith(_UNREAD_BY_REJECTION)):
        yield Problem("notice", key, f"{key} is not read: {program} has no advantages. Remove it.")


def check_online(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Needs of online preference optimization, and keys that it does not read."""
    if not learns_from_pairs(c):
        return
    n, loss = c.actor_rollout_ref.rollout.n, c.preference
    if n < 2:
        yield error(
            f"{ROLLOUT}.n", f"algorithm.program=online_dpo needs at least 2 samples of a prompt. Set {ROLLOUT}.n=2."
        )
    if wrong := [name for name in loss.losses if name in ("aot", "aot_unpaired", *LABELLED_LOSSES)]:
        yield error(
            "preference.loss", f"preference.loss={wrong[0]} needs more than the pairs of one step. Choose another one."
        )
    if len(loss.weights) != len(loss.losses):
        yield error("preference.loss_weights", "preference.loss_weights needs one weight for each loss.")
    if c.online.sync_steps and c.actor_rollout_ref.model.lora_rank:
        yield error(
            "online.sync_steps",
            "online.sync_steps moves whole weights, and lora_rank trains adapters. Set one of them to 0.",
        )
    yield from _without_advantages(c, set_keys, "online preference optimization")


def check_loss(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Needs of the policy loss."""
    loss = c.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield error(
            f"{ACTOR}.policy_loss.dro_beta",
            f"{ACTOR}.policy_loss.loss_mode=dro needs {ACTOR}.policy_loss.dro_beta, a number above 0.",
        )
    if loss.loss_mode == "bypass_mode" and not c.algorithm.rollout_correction.bypass_mode:
        yield error(
            f"{ACTOR}.policy_loss.loss_mode",
            f"{ACTOR}.policy_loss.loss_mode=bypass_mode belongs to {CORRECTION}.bypass_mode=True. Set that instead.",
        )


_LEAST_TEMPERATURE = 1e-4  # below it, a logit that is larger by 0.01 decides
_LEAST_TOP_P = 1e-6
_MOST_MIN_P = 0.999


def _is_greedy(sampling: RolloutConfig | ValKwargsConfig) -> bool:
    """Whether all samples of a prompt are equal. The likeliest of less than 10^6 tokens has a probability above 1e-6."""
    keeps_one = sampling.top_k == 1 or sampling.top_p <= _LEAST_TOP_P or sampling.min_p >= _MOST_MIN_P
    return not sampling.do_sample or sampling.temperature < _LEAST_TEMPERATURE or keeps_one


def check_sampling(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Settings of generation."""
    rollout = c.actor_rollout_ref.rollout
    facts, invariant = engine_facts(rollout.name), f"{ROLLOUT}.batch_invariant"
    if rollout.batch_invariant == "require" and not facts.verifies_invariance:
        yield error(
            invariant,
            f"{needs_engine(f'{invariant}=require', 'verifies_invariance')}. Set {ROLLOUT}.name, or {invariant}=auto.",
        )
    val = rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        yield error(
            f"{VAL}.temperature",
            f"{VAL}.do_sample=True needs a temperature above 0. Set {VAL}.temperature, or do_sample=False.",
        )
    if val.n > 1 and _is_greedy(val):
        yield warning(
            f"{VAL}.n",
            f"{VAL}.n={val.n} gives equal samples, because validation decodes greedily. Set {VAL}.do_sample=True, its "
            "temperature and top_p well above 0, and top_k other than 1.",
        )
    if rollout.n > 1 and _is_greedy(rollout):
        # an agent's environment may answer equal actions differently
        level = warning if runs_agents(c) else error
        yield level(
            f"{ROLLOUT}.do_sample",
            f"{ROLLOUT}.n={rollout.n} gives equal samples, because rollout decodes greedily: there is nothing to learn from "
            f"their comparison. Set {ROLLOUT}.do_sample=True, a temperature and a top_p well above 0, top_k other than 1, or "
            "n=1.",
        )


def check_rewards(c: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Reward manager and reward model."""
    reward, manager, model = c.reward, c.reward.reward_manager, c.reward.reward_model
    own_function = reward.custom_reward_function.path  # it may ask a service itself
    is_users = manager.source != "register" or ":" in manager.name or c.actor_rollout_ref.model.external_lib is not None
    if not is_users and manager.name not in REWARD_MANAGERS:
        yield error(
            "reward.reward_manager.name",
            f"There is no reward manager '{manager.name}'; there are {', '.join(REWARD_MANAGERS)}. For a class of "
            "your own set reward.reward_manager.source=importlib and reward.reward_manager.module.path.",
        )
    buffer = reward.reward_kwargs.get("overlong_buffer_cfg")
    if isinstance(buffer, dict) and buffer.get("enable"):
        if manager.name in ("naive", "batch", "prime", "gdpo"):
            yield error(
                "reward.reward_kwargs",
                f"reward.reward_kwargs.overlong_buffer_cfg is not read by the reward manager '{manager.name}'. Set "
                "reward.reward_manager.name=dapo.",
            )
        longest = reward.reward_kwargs.get("max_resp_len") or c.actor_rollout_ref.rollout.response_length
        if not 0 < (buffer.get("len") or 0) <= longest:
            yield error(
                "reward.reward_kwargs",
                "reward.reward_kwargs.overlong_buffer_cfg.len must be above 0 and at most the longest response "
                "(max_resp_len).",
            )
    if manager.source == "importlib" and manager.module.path is None:
        yield error(
            "reward.reward_manager.module.path",
            "reward.reward_manager.source=importlib needs reward.reward_manager.module.path, the file or module of the "
            "class.",
        )
    judge = engine_facts(model.rollout.name)
    at_a_service = model.judge_template and judge.asks_service
    if model.enable and not model.model_path and not at_a_service:
        yield error(
            "reward.reward_model.model_path",
            "reward.reward_model.enable=True needs reward.reward_model.model_path, a folder or hub name.",
        )
    if model.enable and judge.needs_service and not (model.judge_template or own_function):
        yield error(
            "reward.reward_model.rollout.name",
            f"reward.reward_model.rollout.name={model.rollout.name} asks a service in words, and a classifier runs in the "
            "scoring process. Set reward.reward_model.judge_template, or remove the name.",
        )


RULES = (
    check_agents,
    check_branches,
    check_distillation,
    check_micro_batches,
    check_batches,
    check_reward_debug,
    check_lengths,
    check_estimator,
    check_drafts,
    check_rejection,
    check_online,
    check_loss,
    check_policy,
    check_correction,
    check_quantization,
    check_qat,
    check_sampling,
    check_ahead,
    check_rewards,
    check_routing,
)
