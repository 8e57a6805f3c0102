"""Our registries as the mappings of name -> function that recipes read and write.

A built-in row is handed out as the function of the older contract (`compute_grpo_outcome_advantage`, ...); a function that a
recipe has put there is handed out as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.older_contract import older_advantage, older_policy_loss
from verl.algorithms.policy_losses import POLICY_LOSSES
from verl.registry import Registry

Function = Callable[..., Any]


class RegistryMapping(MutableMapping[str, Function]):
    """A view of `registry`: what is assigned or deleted here is what runs choose from. Keys may be members of a string
    enumeration. `built_in` are the functions handed out for rows that nobody has replaced."""

    def __init__(self, registry: Registry, built_in: dict[str, Function]):
        self._registry = registry
        self._built_in = {name: (registry.get(name), function) for name, function in built_in.items()}

    def __getitem__(self, name: str) -> Function:
        if name not in self:
            raise KeyError(name)
        return self.find(name)

    def find(self, name: str) -> Function:
        """The function of `name`, which may also be "module:object". Raises ConfigError with the nearest names."""
        key = _plain(name)
        found = self._registry.get(key)
        ours, handed_out = self._built_in.get(key, (None, found))
        return handed_out if found is ours else found

    def __setitem__(self, name: str, function: Function) -> None:
        self._registry.set(_plain(name), function)

    def __delitem__(self, name: str) -> None:
        self._registry.remove(_plain(name))

    def __contains__(self, name: object) -> bool:
        return _plain(name) in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"


def _plain(name: Any) -> Any:
    return getattr(name, "value", name)


_GROUP_ORDER = ("token_level_rewards", "response_mask", "index", "epsilon", "norm_adv_by_std_in_grpo")
_ORDERS = {
    "gae": ("token_level_rewards", "values", "response_mask", "gamma", "lam"),
    **dict.fromkeys(("grpo", "grpo_vectorized", "gdpo", "grpo_passk"), _GROUP_ORDER),
    "remax": ("token_level_rewards", "reward_baselines", "response_mask"),
}


def _built_in(registry: Registry) -> list[str]:
    """Rows that are ours: a recipe may have added some before this module is imported."""
    return [name for name in registry if registry.get(name).__module__.startswith("verl.algorithms.")]


ADV_ESTIMATOR_REGISTRY = RegistryMapping(
    ADVANTAGES, {name: older_advantage(name, *_ORDERS.get(name, ())) for name in _built_in(ADVANTAGES)}
)
POLICY_LOSS_REGISTRY = RegistryMapping(
    POLICY_LOSSES, {name: older_policy_loss(name) for name in _built_in(POLICY_LOSSES)}
)
