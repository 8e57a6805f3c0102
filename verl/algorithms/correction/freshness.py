"""Samples train only under the weights that they may train under."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from verl.errors import ModelError


def require_fresh(weight_version: Tensor, version: int, max_age: int, keys: Sequence[str]) -> None:
    """Raise ModelError naming the first sample (by its key) that was made by weights more than `max_age` versions before
    `version`, which train now, or by later ones. weight_version [batch] is that of each sample's oldest token."""
    age = version - weight_version
    wrong = ((age < 0) | (age > max_age)).nonzero().flatten().tolist()
    if not wrong:
        return
    row = wrong[0]
    allowed = f"version {version}" if max_age == 0 else f"versions {version - max_age} to {version}"
    raise ModelError(
        f"Sample {keys[row]} and {len(wrong) - 1} others of {len(keys)} were made by weights of version "
        f"{int(weight_version[row])}, but only {allowed} may train now; nothing was trained on them. The rollout engine does "
        "not hold the published weights: restart the run, which publishes them anew."
    )
