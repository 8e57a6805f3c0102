"""The resolved tree as YAML, for the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.secrets import hide_values
from verl.config.tree import VerlConfig, leaves, value_at


def write_yaml(config: VerlConfig, origins: Mapping[str, str], folder: Path) -> Path:
    """`folder`/config.yaml, replaced in one step; see LoadedConfig.write."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    temporary = folder / f".config.yaml.{os.getpid()}"
    temporary.write_text(to_yaml(config, origins), encoding="utf-8")
    temporary.replace(file)
    return file


def to_yaml(config: VerlConfig, origins: Mapping[str, str]) -> str:
    """Every key with its value, secrets masked; where that is not the default, a comment says where it comes from."""
    lines = ["# Every key of this run. A comment says where a value comes from; without one it is the default."]
    open_sections: list[str] = []
    for path, leaf in leaves().items():
        *parents, name = path.split(".")
        shared = 0
        while shared < min(len(parents), len(open_sections)) and parents[shared] == open_sections[shared]:
            shared += 1
        lines += ["  " * depth + f"{parents[depth]}:" for depth in range(shared, len(parents))]
        open_sections = parents
        origin = origins[path]
        comment = "" if origin == "default" else f"  # {origin}"
        value = hide_values(value_at(config, leaf.path), name)
        lines.append("  " * len(parents) + f"{name}: {scalar(value)}{comment}")
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(scalar(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _float(value: float) -> str:
    if value != value or abs(value) == float("inf"):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[str(value)]
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text  # YAML 1.1 wants the point
