"""Checks of the rotary positions in a config.json: transformers warns of most such faults, and computes with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

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
