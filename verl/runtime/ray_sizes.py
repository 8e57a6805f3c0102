"""role_sizes.json of a run folder: the sizes that a user asks of the roles of a running run on Ray.

    {"rollout": 3, "reward": 2}

Numbers count devices, including the placement's devices. The run writes the roles that it can scale, `verl scale` changes
their sizes. The file stays: a run that is resumed follows it too.
"""

from collections.abc import Mapping
from pathlib import Path

from verl.errors import ConfigError
from verl.tracking.files import each, is_count, json_text, read_json, write_atomically

NAME = "role_sizes.json"
ROLES = ("rollout", "reward")
MAX_DEVICES = 10_000


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
    configured = read_role_sizes(folder)
    if other := sorted(sizes.keys() - configured.keys()):
        only = f", only {' and '.join(configured)}" if configured else ""
        raise ConfigError(
            f"The run in {folder} cannot scale {other[0]}{only}. It must run on Ray, "
            "with devices for the rollout that do not train (trainer.placement); see docs/several-gpus.md."
        )
    requested = {**configured, **sizes}
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
        if not 1 <= size <= MAX_DEVICES:
            raise ConfigError(f"{role}={size}: give a number of devices from 1 to {MAX_DEVICES}.")
