"""The config roots, one per program."""

import functools
from typing import TypeAlias

from verl.config.roots.ppo import PPO, PPOConfig
from verl.config.roots.preference import PREFERENCE, PreferenceConfig
from verl.config.roots.reward_model import RM, RMConfig
from verl.config.roots.sft import SFT, SFTConfig
from verl.config.schema import Schema

RunConfig: TypeAlias = PPOConfig | SFTConfig | PreferenceConfig | RMConfig
GivenRowsConfig: TypeAlias = SFTConfig | PreferenceConfig | RMConfig  # of programs that train on given rows

SCHEMAS: dict[str, Schema[RunConfig]] = {schema.name: schema for schema in (PPO, SFT, PREFERENCE, RM)}


def schema_of(config: RunConfig) -> Schema[RunConfig]:
    """The schema of a config object."""
    return next(schema for schema in SCHEMAS.values() if type(config) is schema.root)


@functools.cache
def full_key(ending: str) -> str:
    """Path of the first key or section that ends in `ending`, for messages: full_key("rollout.stop") is
    "actor_rollout_ref.rollout.stop". Raises KeyError without one."""
    for schema in SCHEMAS.values():
        for path in (*schema.sections, *schema.leaves):
            if f".{path}".endswith(f".{ending}"):
                return path
    raise KeyError(ending)
