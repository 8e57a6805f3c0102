"""The config roots, one per program."""

from typing import Any

from verl.config.roots.ppo import PPO, PPOConfig
from verl.config.roots.preference import PREFERENCE, PreferenceConfig
from verl.config.roots.reward_model import RM, RMConfig
from verl.config.roots.sft import SFT, SFTConfig
from verl.config.schema import Schema

SCHEMAS: dict[str, Schema[Any]] = {schema.name: schema for schema in (PPO, SFT, PREFERENCE, RM)}


def schema_of(config: Any) -> Schema[Any]:
    """The schema of a config object."""
    return next(schema for schema in SCHEMAS.values() if type(config) is schema.root)


__all__ = [
    "PPO",
    "PREFERENCE",
    "RM",
    "SCHEMAS",
    "SFT",
    "PPOConfig",
    "PreferenceConfig",
    "RMConfig",
    "SFTConfig",
    "schema_of",
]
