"""Diff between a config and the one saved in the run folder, shown on resume."""

from pathlib import Path

from verl.config.load import load_config
from verl.config.loaded import LoadedConfig, scalar
from verl.config.schema import value_at
from verl.config.secrets import hide_values
from verl.errors import ConfigError
from verl.registry import without_ids

# of the start of a run, not of its work
_OF_THE_START = (
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.resume_changed_inputs",
    "trainer.default_local_dir",
    "trainer.logger",
)

# key -> behaviour of versions that did not have it: a saved config without the key means this value, not the default
_WITHOUT_KEY = {"actor_rollout_ref.actor.fsdp_config.master_rounding": "nearest"}


def changed_keys(loaded: LoadedConfig[object], folder: Path) -> list[str]:
    """ "key: before -> now" for each key with another value in `folder`/config.yaml; none if it cannot be read."""
    file = folder / "config.yaml"
    if not file.is_file():
        return []
    try:
        if file.read_bytes() == loaded.to_yaml().encode():  # as after a kill; loading it takes 0.1 s
            return []
        before = load_config([], str(file), schema=loaded.schema, check=False)
    except (ConfigError, OSError):  # of another version, or with the masks of secrets
        return []
    changes = []
    for path, new in settings_of_work(loaded).items():
        old = value_at(before.config, path)
        if before.origins[path] == "default":
            old = _WITHOUT_KEY.get(path, old)
        name = path.rpartition(".")[2]
        before_text, text = (without_ids(scalar(hide_values(value, name))) for value in (old, new))
        if before_text == text or loaded.origins[path].startswith("follows "):  # the key that it follows is listed
            continue
        changes.append(f"{path}: {before_text} -> {text}")
    return changes


def settings_of_work(loaded: LoadedConfig[object]) -> dict[str, object]:
    """The values of the keys that a run's results depend on: all but sizes, keys without effect, and keys of its start."""
    return {
        path: value_at(loaded.config, path)
        for path, leaf in loaded.schema.leaves.items()
        if not (leaf.sizing or leaf.inert or path in _OF_THE_START)
    }
