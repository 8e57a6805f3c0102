"""Rotary positions: checks of a config.json (transformers warns at most), and the rows that a model takes."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from verl.errors import ModelError
from verl.foreign_text import clean

_SETTINGS = ("rope_parameters", "rope_scaling")
_NUMBERS = "rope_theta global_rope_theta local_rope_theta rope_local_base_freq rotary_emb_base".split()
_SHARES = ("partial_rotary_factor", "rotary_pct")
_MAY_BE_0 = ("mscale", "mscale_all_dim", "llama_4_scaling_beta", "mrope_section")
_ASCENDING = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))


def check_rope(file: Path, entries: Mapping[str, object], place: str = "") -> None:
    """Raise ModelError for numbers of positions in the entries of `file`, those of nested configs too, that no model has."""
    for key, value in entries.items():
        if isinstance(value, dict) and key in _SETTINGS:
            _check_settings(file, f"{place}{key}.", value)
        elif isinstance(value, dict) and key.endswith("_config"):
            check_rope(file, value, f"{place}{key}.")
        elif key in _NUMBERS or key in _SHARES:
            _check_number(file, f"{place}{key}", value)


def _check_settings(file: Path, place: str, settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        if isinstance(value, dict):  # of one kind of layers
            _check_settings(file, f"{place}{name}.", value)
            continue
        for number in value if isinstance(value, list) else [value]:
            _check_number(file, f"{place}{name}", number)
    for low, high in _ASCENDING:
        a, b = settings.get(low), settings.get(high)
        if isinstance(a, int | float) and isinstance(b, int | float) and a >= b:
            raise ModelError(f"{file}: {place}{low} is {a}; it is below {high}, which is {b}.")


def _check_number(file: Path, key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    name = key.rpartition(".")[2]
    is_fine = 0 <= value <= 1 if name in _SHARES else value >= 0 if name in _MAY_BE_0 else value > 0
    if not (is_fine and math.isfinite(value)):
        limits = "from 0 to 1" if name in _SHARES else "of 0 or more" if name in _MAY_BE_0 else "above 0"
        raise ModelError(f"{file}: {key} is {clean(value, 40)}; it is a number {limits}.")


def fixed_rotation(config: PreTrainedConfig) -> int | None:
    """Tokens up to which every row has the same rotary frequencies; None if length does not change them. In transformers
    the longest row of a batch decides for all, and earlier keys of a growing row keep their frequencies."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = [settings] if "rope_type" in settings else [kind for kind in settings.values() if isinstance(kind, dict)]
    limits = []
    for kind in kinds:
        if kind.get("rope_type") == "dynamic":
            limits.append(config.max_position_embeddings)
        elif kind.get("rope_type") == "longrope" and kind.get("short_factor") != kind.get("long_factor"):
            limits.append(kind["original_max_position_embeddings"])
    return min(limits, default=None)


def row_limits(config: PreTrainedConfig) -> list[tuple[int, str]]:
    """Tokens of the longest rows that are computed, each limit with its reason."""
    positions, fixed = getattr(config, "max_position_embeddings", None), fixed_rotation(config)
    limits = [(positions, "the model's max_position_embeddings"), (fixed, "the length at which its rotations change")]
    return [(limit, name) for limit, name in limits if limit is not None]


def rotation_problem(config: PreTrainedConfig) -> str:
    """The reason why rows beyond `fixed_rotation` are refused, and what to do."""
    fixed = fixed_rotation(config)
    return (
        f"Rows of more than {fixed} tokens have other rotary frequencies in this model (rope_parameters of config.json), and "
        "the longest row of a batch would decide for the others. Set lower lengths (data.max_length, or "
        "data.max_prompt_length and data.max_response_length). Or set model.override_config.rope_parameters to a rotation "
        "without this change: a longrope with long_factor as its short_factor too, or yarn."
    )


def guard_rotations(module: nn.Module) -> None:
    """A forward of `module` over rows beyond `fixed_rotation` raises ModelError."""
    for part in module.modules():
        config = getattr(part, "config", None) if hasattr(part, "rope_type") else None
        if config is not None and (fixed := fixed_rotation(config)) is not None:
            part.register_forward_pre_hook(partial(_require_fixed, fixed=fixed, config=config), with_kwargs=True)


def _require_fixed(part: nn.Module, args: Any, kwargs: Any, *, fixed: int, config: PreTrainedConfig) -> None:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if positions.numel() and int(positions.max()) >= fixed:
        raise ModelError(rotation_problem(config))
