"""The three dimensions of `use_3d_hybrid`, for the division of training work: layers, tokens of a sequence, micro-batches.

    layer_per_group           decoder layers whose parameters are gathered, freed and added up together
    chunk_size                tokens that attention and feed-forward compute at a time (enable_chunked_attention)
    batch_group_size          micro-batches for which parameters are gathered, and gradients added up, once

None of them changes a loss. The first is fixed when a model is sharded, the second and third may change between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl.config import FSDPConfig
from verl.errors import ConfigError, nearest

CHANGEABLE: dict[str, type] = {"enable_chunked_attention": bool, "chunk_size": int, "batch_group_size": int}


@dataclass(frozen=True)
class Dimensions:
    """`chunk_tokens` None: sequences are not divided."""

    layer_per_group: int = 1
    chunk_tokens: int | None = None
    batch_group_size: int = 1

    @classmethod
    def of(cls, config: FSDPConfig) -> Dimensions:
        """The dimensions of a `fsdp_config` section."""
        if not config.use_3d_hybrid:
            return cls()
        chunk_tokens = config.chunk_size if config.enable_chunked_attention else None
        return cls(config.layer_per_group, chunk_tokens, config.batch_group_size)


def check_change(changes: Mapping[str, object]) -> None:
    """Raise ConfigError for a key that cannot change while training runs, or a value that is not of its type."""
    for name, value in changes.items():
        if name == "layer_per_group":
            raise ConfigError(
                "fsdp_config.layer_per_group is fixed when the model is sharded and cannot change while training runs. Set it "
                "in the config."
            )
        if name not in CHANGEABLE:
            hint = nearest(name, CHANGEABLE) or f"; there are {', '.join(CHANGEABLE)}."
            raise ConfigError(f"{name!r} is no key that can change while training runs{hint}")
        expected_type = CHANGEABLE[name]
        if type(value) is not expected_type or (isinstance(value, int) and expected_type is int and value < 1):
            words = "True or False" if expected_type is bool else "a whole number of at least 1"
            raise ConfigError(f"{name}={value!r} must be {words}.")


def require_3d_hybrid(config: FSDPConfig, changes: Mapping[str, object]) -> None:
    """Raise ConfigError for `changes` of an engine that does not divide its work in three dimensions."""
    if not config.use_3d_hybrid:
        raise ConfigError(
            f"{', '.join(changes)} can only change in a run that began with fsdp_config.use_3d_hybrid=True; set it."
        )
