"""Older reward sections (`reward_model`, `custom_reward_function`, `sandbox_fusion`) moved under `reward`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl.config import PPO

_OLDER = ("custom_reward_function", "reward_model", "sandbox_fusion")


def migrate_legacy_reward_impl(config: Any) -> Any:
    """Move the keys of the three older sections of an OmegaConf tree to their places under `reward`, in place; null asks for
    nothing. Returns the tree."""
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        for section in _OLDER:
            older = config.pop(section, None)
            tree: Any = OmegaConf.to_container(older, resolve=True) if OmegaConf.is_config(older) else older
            for spelled, value in _leaves(tree or {}, section):
                path, _ = PPO.resolve(spelled)
                if value is not None:
                    OmegaConf.update(config, path, value, force_add=True)
    return config


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}.{name}")
        elif value != {}:
            yield f"{prefix}.{name}", value
