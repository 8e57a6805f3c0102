"""The config tree as Hydra composes it in programs of users; made by verl/compat/hydra_groups.py."""

from verl.config.sections.algorithm import AlgorithmConfig as AlgoConfig

__all__ = ["AlgoConfig"]
