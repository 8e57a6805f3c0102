"""verl/trainer/config, which Hydra composes in programs of users. setup.py writes the files when the package is installed.

`@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer")` gives the whole tree, in the groups that
existing programs override. `load_composed` (verl/config/load.py) reads the result.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config.derived_defaults import COMPOSED_FOLDER, COMPOSED_NULLS
from verl.config.loaded import scalar
from verl.config.roots import PPO, SFT
from verl.config.schema import Schema
from verl.config.values import nested

HEADER = "# Made by `python -m verl.compat.hydra_groups verl/trainer/config`; docs/config.md explains each key.\n"

# (group, file, section of the tree); the rest of the tree is in ppo_trainer.yaml itself
GROUPS: tuple[tuple[str, str, str], ...] = (
    ("actor", "dp_actor", "actor_rollout_ref.actor"),
    ("ref", "dp_ref", "actor_rollout_ref.ref"),
    ("rollout", "rollout", "actor_rollout_ref.rollout"),
    ("model", "hf_model", "actor_rollout_ref.model"),
    ("critic", "dp_critic", "critic"),
    ("data", "legacy_data", "data"),
    ("reward", "reward", "reward"),
    ("algorithm", "rollout_correction", "algorithm.rollout_correction"),
    ("distillation", "distillation", "distillation"),
    ("transfer_queue", "transfer_queue", "transfer_queue"),
)
# sections under older names that existing programs set without a +; null asks for nothing
_OLDER_SECTIONS = ("custom_reward_function.", "sandbox_fusion.", "reward_model.")
# settings of a free-form section under its older name
_OLDER_SETTINGS = tuple(f"reward_model.overlong_buffer.{name}" for name in ("enable", "len", "penalty_factor", "log"))
_SPELLED_SECTIONS = ("actor_rollout_ref", "critic", "data", "engine", "optim", "model")
_COMPUTED = {"trainer.default_local_dir": COMPOSED_FOLDER}


SFT_GROUPS: tuple[tuple[str, str, str], ...] = (
    ("model", "hf_model", "model"),
    ("engine", "fsdp", "engine"),
    ("optim", "fsdp", "optim"),
)


def files() -> dict[str, str]:
    """{path below the folder: text} of every file."""
    return _sft_files() | _ppo_files()


def _ppo_files() -> dict[str, str]:
    values = {path: _value(PPO, path) for path in PPO.leaves}
    older = _older_spellings(PPO)
    engines = ("dp", "megatron")
    texts = {f"model_engine/{name}.yaml": f"# @package _global_\n{HEADER}model_engine: {name}\n" for name in engines}
    for role in ("actor", "ref", "critic"):  # model_engine chooses the strategy
        texts[f"{role}/megatron_{role}.yaml"] = f"{HEADER}defaults:\n  - dp_{role}\n  - _self_\n"
    names = ["ppo_trainer", "_self_", "override model_engine: megatron"]
    texts["ppo_megatron_trainer.yaml"] = "\n".join([f"{HEADER}defaults:", *(f"  - {name}" for name in names), ""])
    for group, name, section in GROUPS:
        entries = _taken(values, section) | _taken(older, section)
        if section == "critic":
            entries = {path: value for path, value in entries.items() if not path.startswith("model.")} | {
                f"model.{path}": value for path, value in _taken(entries, "model").items() if _differs(path, value)
            }
        texts[f"{group}/{name}.yaml"] = _text(entries)
        for path in entries:
            values.pop(f"{section}.{path}", None)
            older.pop(f"{section}.{path}", None)
    by_group = ("critic.model.", "model_engine")  # which their groups give
    rest = {path: value for path, value in {**values, **older}.items() if not path.startswith(by_group)}
    defaults = ["  - model_engine: dp"]
    for group, name, section in GROUPS:
        if group == "critic":
            defaults.append("  - model@critic.model: hf_model")
        defaults.append(f"  - {group}@{section}: {name.replace('dp_', '${model_engine}_')}")
    texts["ppo_trainer.yaml"] = _text(rest, ["defaults:", *defaults, "  - _self_", ""])
    return texts


def _sft_files() -> dict[str, str]:
    """The model's group is ppo_trainer's, which has other spellings too; keys that only `verl sft` has are in the root."""
    values = {path: _value(SFT, path) for path in SFT.leaves}
    older = {path: value for path, value in _older_spellings(SFT).items() if path.startswith(("engine.", "optim."))}
    shared = {f"model.{path}" for path in _taken(dict.fromkeys(PPO.leaves), "actor_rollout_ref.model")}
    texts = {f"{group}/{name}.yaml": _text(_taken(values | older, group)) for group, name, _ in SFT_GROUPS[1:]}
    rest = {path: v for path, v in values.items() if not path.startswith(("engine.", "optim.")) and path not in shared}
    defaults = [f"  - {group}@{section}: {name}" for group, name, section in SFT_GROUPS]
    texts["sft_trainer_engine.yaml"] = _text(rest, ["defaults:", *defaults, "  - _self_", ""])
    return texts


def _differs(path: str, value: object) -> bool:
    """Whether a key has different defaults for the critic's model and the policy's model."""
    same = f"actor_rollout_ref.model.{path}"
    return same in PPO.leaves and value != _value(PPO, same)


def _value(schema: Schema[object], path: str) -> object:
    """The default of a key; where it follows another key, a reference to that one."""
    source = dict(schema.follows).get(path)
    default = None if path in COMPOSED_NULLS else f"${{{source}}}" if source else schema.leaves[path].default
    return _COMPUTED.get(path, default)


def _older_spellings(schema: Schema[object]) -> dict[str, object]:
    """Other spellings of keys, at values with which they ask for nothing."""
    older: dict[str, object] = {}
    aliases, leaves = schema.compat.aliases, schema.leaves
    for alias in aliases:
        if alias.old in _OLDER_SECTIONS:
            names = (path.removeprefix(alias.new) for path in leaves if path.startswith(alias.new))
            older.update({alias.old + name: None for name in names})
    exact = (a for a in aliases if not a.old.endswith("."))
    older.update({a.old: a.ignore[0] for a in exact if a.old.partition(".")[0] in _SPELLED_SECTIONS})
    older.update({a.old: None for a in aliases if a.old.startswith(_OLDER_SECTIONS) and not a.old.endswith(".")})
    if "reward" in {path.partition(".")[0] for path in leaves}:
        older.update(dict.fromkeys(_OLDER_SETTINGS))
    sections = {path.rpartition(".")[0] for path in (*leaves, *older)}
    # keys of earlier releases that mean nothing here; Hydra refuses what no file has
    older.update({row.key: None for row in schema.compat.removed if row.key.rpartition(".")[0] in sections})
    return {path: value for path, value in older.items() if path not in leaves and not _is_section(path, older, leaves)}


def _is_section(path: str, *sections: Mapping[str, object]) -> bool:
    return any(other.startswith(path + ".") for keys in sections for other in keys)


def _taken(values: dict[str, object], section: str) -> dict[str, object]:
    return {path[len(section) + 1 :]: value for path, value in values.items() if path.startswith(section + ".")}


def _text(values: dict[str, object], head: list[str] | None = None) -> str:
    return HEADER + "\n".join([*(head or []), *_lines(nested(values, _Section), 0)]) + "\n"


class _Section(dict[str, Any]):
    """A section, as against a key that holds a mapping."""


def _lines(node: Mapping[str, object], depth: int) -> list[str]:
    lines = []
    for name, value in node.items():
        if isinstance(value, _Section):
            lines += [f"{'  ' * depth}{name}:", *_lines(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {scalar(value)}")
    return lines


def main(argv: list[str]) -> int:
    """Write the files below the folder in `argv`; those that are current stay untouched."""
    for name, text in files().items():
        file = Path(argv[0]) / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
