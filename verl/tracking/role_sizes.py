"""Sizes that a user asks of the roles of a run while it runs: role_sizes.json in its folder.

    {"rollout": 3, "reward": 2}

Numbers count devices, including the placement's devices. A run on Ray writes the roles that it can scale, `verl scale` changes
their sizes. The file stays: a run that is resumed follows it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verl.errors import ConfigError
from verl.tracking.files import each, is_count, json_text, read_json, write_atomically

NAME = "role_sizes.json"
ROLES = ("rollout", "reward")
MOST = 10_000


def read_role_sizes(folder: Path) -> dict[str, int]:
    """Role -> devices, of the roles that were asked for; {} without a file. Raises ConfigError for a file that is damaged."""
    try:
        sizes = read_json(folder / NAME, each(is_count), max_bytes=1 << 12)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder / NAME} cannot be read ({error}). Write it with verl scale, or remove it."
        ) from None
    _check(sizes)
    return dict(sizes)


def ask_role_sizes(folder: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """Ask the run in `folder` for these sizes, in addition to earlier requests; returns all sizes. Raises ConfigError."""
    _check(sizes)
    known = read_role_sizes(folder)
    if other := sorted(sizes.keys() - known.keys()):
        only = f", only {' and '.join(known)}" if known else ""
        raise ConfigError(
            f"The run in {folder} cannot scale {other[0]}{only}. It must run on Ray, "
            "with devices for the rollout that do not train (trainer.placement); see docs/several-gpus.md."
        )
    requested = {**known, **sizes}
    write_role_sizes(folder, requested)
    return requested


def write_role_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Replace the sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NAME, json_text(sizes) + "\n")


def _check(sizes: Mapping[str, int]) -> None:
    for role, size in sizes.items():
        if role not in ROLES:
            raise ConfigError(f"The role {role} cannot be scaled during a run; {' and '.join(ROLES)} can.")
        if not 1 <= size <= MOST:
            raise ConfigError(f"{role}={size}: give a number of devices from 1 to {MOST}.")
