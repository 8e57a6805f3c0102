"""A resolved configuration with the origin of every value, and its YAML file in the run folder."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

from verl.config.active_keys import runs_on_several_devices
from verl.config.command_defaults import Face
from verl.config.schema import Problem, R, Schema
from verl.config.secrets import hide_values
from verl.config.user_settings import Setting
from verl.config.values import absolute_path, escape_path, escape_references
from verl.errors import ConfigError
from verl.foreign_text import printable
from verl.regular_files import whole_file

if TYPE_CHECKING:
    from verl.config.roots.ppo import PPOConfig

# ends of keys of what a run creates, and of what may be a folder
CREATED_FILES = ("reply_cache", "prometheus.file", "rejection.file")
_CREATED = ("_dir", "save_path", *CREATED_FILES)
_FOLDERS = ("_files", "model.path", "model_path", "tokenizer_path", "adapter_path", "resume_from_path")


@dataclass
class LoadedConfig(Generic[R]):
    """A resolved configuration.

    `origins` maps every key to the source of its value: "default", "config X" (built into verl), "file X",
    "command line", "follows <key>", with ", renamed from <spelling>" if the user wrote an older name. `settings` holds the keys
    the user set. `followed` holds the value that such a key would have followed. `entries` holds every setting of a key; a
    free-form key may have several. `faults` are the problems found while loading. `misfits` are the values that do not fit
    their key; the key has its default instead. `without_effect` are keys that are not in the tree, each with the reason why
    that is no fault. `defaults`: of keys that are not set. `registers_later`: a program of the user composed it, whose modules
    may register names that it has; the start of the run looks them up.
    """

    schema: Schema[R]
    config: R
    origins: dict[str, str]
    notices: list[str]
    settings: dict[str, Setting] = field(default_factory=dict)
    followed: dict[str, object] = field(default_factory=dict)
    entries: dict[str, list[Setting]] = field(default_factory=dict)
    faults: list[Problem] = field(default_factory=list)
    misfits: dict[str, object] = field(default_factory=dict)
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    defaults: Face = "release"
    registers_later: bool = False

    def absolute(self) -> LoadedConfig[R]:
        """The config with every file named from the root: code of the user may leave the current folder."""
        values = self.schema.flatten(self.config)
        for path, value in values.items():
            if self.schema.leaves[path].names_files:
                # a key of other paths may name a module
                is_folder = os.path.lexists if path.endswith(_FOLDERS) else os.path.isfile
                values[path] = absolute_path(value, bool if path.endswith(_CREATED) else is_folder)
        return replace(self, config=self.schema.build(values))

    def require_outputs(self) -> None:
        """Raises ConfigError for chosen files and folders that the run writes, and this user cannot make. Of a run on several
        devices only outputs of the trainer: other machines may write further ones."""
        faults, only = [], "trainer." if runs_on_several_devices(cast("PPOConfig", self.config)) else ""
        for path, value in self.schema.flatten(self.config).items():
            is_chosen = value != self.schema.leaves[path].default or path == "trainer.default_local_dir"
            if not (is_chosen and isinstance(value, str) and path.endswith(_CREATED) and path.startswith(only)):
                continue
            place = Path(value).expanduser().absolute()
            above = next(p for p in (place, *place.parents) if os.path.lexists(p))
            kind = "a file" if above == place and path.endswith(CREATED_FILES) else "a folder"
            fits = above.is_file() if kind == "a file" else above.is_dir()
            if not fits or not os.access(above, os.W_OK):
                faults.append(f"{path}={value} cannot be written: {above} is not {kind} that this user can write to.")
        if faults:
            raise ConfigError("\n".join(faults))

    def write(self, folder: str | Path) -> Path:
        """Write `folder`/config.yaml in one step: every key with its value, and the origin of a value that is not the default.
        The file is a valid `--config-path` again, except secrets: they must be given again. Returns its path."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "config.yaml"
        with whole_file(file) as temporary:
            temporary.write_text(self.to_yaml(), encoding="utf-8")
        return file

    def to_yaml(self) -> str:
        """Every key with its value, secrets masked; a comment names the origin of a value that is not the default."""
        lines = ["# Every key of this run. A comment says where a value comes from; without one it is the default."]
        for path, value in self.schema.flatten(self.config).items():
            leaf, origin, (head, default) = self.schema.leaves[path], self.origins[path], _lines(self.schema)[path]
            if origin == "default" and value is leaf.default:
                lines.append(default)
                continue
            value = hide_values(value, path.rpartition(".")[2])
            if leaf.names_files and origin != "default":
                value = escape_path(value)
            lines.append(f"{head}: {scalar(escape_references(value))}" + (origin != "default") * f"  # {origin}")
        return "\n".join(lines) + "\n"


@functools.cache
def _lines(schema: Schema[Any]) -> dict[str, tuple[str, str]]:
    """By key: the lines that open its sections, with its name; and the same with its default value."""
    lines: dict[str, tuple[str, str]] = {}
    open_sections: list[str] = []
    for path, leaf in schema.leaves.items():
        *parents, name = path.split(".")
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parents, open_sections, strict=False)))
        opened = [*parents[shared:], name]
        head = ":\n".join("  " * (shared + depth) + part for depth, part in enumerate(opened))
        lines[path] = head, f"{head}: {scalar(escape_references(leaf.default))}"
        open_sections = parents
    return lines


def scalar(value: object) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text  # YAML 1.1 wants the point
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(str(k))}: {scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(scalar(v) for v in value) + "]"
    return printable(json.dumps(value, ensure_ascii=False))  # the escapes of both are YAML's too
