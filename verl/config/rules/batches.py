"""Sizes of batches and lengths that must fit together."""

from __future__ import annotations

from verl.config.active_keys import uses_critic
from verl.config.rules.api import Rule
from verl.config.unavailable import value_in

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def _both_spellings(section: str, name: str) -> Rule:
    return Rule(
        f"{section}.{name}",
        "error",
        lambda c, given: (
            value_in(c, f"{section}.{name}") is not None and value_in(c, f"{section}.{name}_per_gpu") is not None
        ),
        f"{section}.{name} and {section}.{name}_per_gpu are both set. Keep the second and remove the first.",
    )


BATCHES = [
    _both_spellings(_ACTOR, "ppo_micro_batch_size"),
    _both_spellings("critic", "ppo_micro_batch_size"),
    _both_spellings("critic", "forward_micro_batch_size"),
    _both_spellings(_ROLLOUT, "log_prob_micro_batch_size"),
    _both_spellings("actor_rollout_ref.ref", "log_prob_micro_batch_size"),
    Rule(
        f"{_ACTOR}.ppo_mini_batch_size",
        "error",
        lambda c, given: c.data.train_batch_size < c.actor_rollout_ref.actor.ppo_mini_batch_size,
        "data.train_batch_size={c.data.train_batch_size} is smaller than actor_rollout_ref.actor.ppo_mini_batch_size="
        "{actor.ppo_mini_batch_size}; both count prompts. Set the second to at most {c.data.train_batch_size}.",
    ),
    Rule(
        "critic.ppo_mini_batch_size",
        "error",
        lambda c, given: uses_critic(c) and c.data.train_batch_size < c.critic.ppo_mini_batch_size,
        "data.train_batch_size={c.data.train_batch_size} is smaller than critic.ppo_mini_batch_size="
        "{c.critic.ppo_mini_batch_size}; both count prompts. Set the second to at most {c.data.train_batch_size}.",
    ),
    Rule(
        f"{_ACTOR}.ppo_mini_batch_size",
        "warning",
        lambda c, given: (
            c.data.train_batch_size > c.actor_rollout_ref.actor.ppo_mini_batch_size
            and c.data.train_batch_size % c.actor_rollout_ref.actor.ppo_mini_batch_size != 0
        ),
        "data.train_batch_size={c.data.train_batch_size} is no multiple of actor_rollout_ref.actor.ppo_mini_batch_size="
        "{actor.ppo_mini_batch_size}: the last optimizer step of each batch has fewer prompts than the others.",
    ),
    Rule(
        "data.gen_batch_size",
        "error",
        lambda c, given: c.algorithm.filter_groups.enable and c.data.gen_batch_size < c.data.train_batch_size,
        "data.gen_batch_size={c.data.gen_batch_size} is smaller than data.train_batch_size={c.data.train_batch_size}. "
        "Set it to at least that, or remove it.",
    ),
    Rule(
        f"{_ROLLOUT}.max_model_len",
        "error",
        lambda c, given: (
            c.actor_rollout_ref.rollout.max_model_len is not None
            and c.actor_rollout_ref.rollout.max_model_len
            < c.actor_rollout_ref.rollout.prompt_length + c.actor_rollout_ref.rollout.response_length
        ),
        "actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is smaller than the longest prompt plus "
        "response ({rollout.prompt_length} + {rollout.response_length} tokens). Raise it, or lower "
        "data.max_response_length.",
    ),
    Rule(
        f"{_ROLLOUT}.prompt_length",
        "error",
        lambda c, given: c.actor_rollout_ref.rollout.prompt_length < c.data.max_prompt_length,
        "actor_rollout_ref.rollout.prompt_length={rollout.prompt_length} is smaller than data.max_prompt_length="
        "{c.data.max_prompt_length}. Remove the first; it follows the second.",
    ),
    Rule(
        f"{_ROLLOUT}.response_length",
        "error",
        lambda c, given: (
            {f"{_ROLLOUT}.response_length", "data.max_response_length"} <= given
            and c.actor_rollout_ref.rollout.response_length != c.data.max_response_length
        ),
        "actor_rollout_ref.rollout.response_length={rollout.response_length} and data.max_response_length="
        "{c.data.max_response_length} are one limit. Remove the first; it follows the second.",
    ),
]
