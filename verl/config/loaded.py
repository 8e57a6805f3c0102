"""A resolved configuration with the origin of every value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.problems import Problem
from verl.config.tree import VerlConfig
from verl.config.user_settings import Setting
from verl.config.write import write_yaml


@dataclass
class LoadedConfig:
    """A resolved configuration.

    `origins` says for every key where its value comes from: "default", "file X", "command line", "follows <key>", with
    ", renamed from <spelling>" where the user wrote an older name. `given` holds the keys the user set, and for those
    that would follow another key, `followed` the value they would have had. `entries` holds every setting of a key, which are
    several for a free-form one. What went wrong on the way: `faults`; `misfits` are the values that do not fit their key, for
    which the default stands in; `without_effect` are keys that the tree has not, each with the reason why that is no fault.
    """

    config: VerlConfig
    origins: dict[str, str]
    notices: list[str]
    given: dict[str, Setting] = field(default_factory=dict)
    followed: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, list[Setting]] = field(default_factory=dict)
    faults: list[Problem] = field(default_factory=list)
    misfits: dict[str, Any] = field(default_factory=dict)
    without_effect: list[tuple[str, str]] = field(default_factory=list)

    def write(self, folder: str | Path) -> Path:
        """Write `folder`/config.yaml: every key with its value and, where it is not the default, its origin. The file
        is a valid `--config-path` again, but for secrets, which must be given anew. Returns its path."""
        return write_yaml(self.config, self.origins, Path(folder))
