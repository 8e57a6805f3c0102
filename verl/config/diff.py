"""What a run that goes on does otherwise than before: its config against the one in its folder."""

from __future__ import annotations

from pathlib import Path

from verl.config.load import load_config
from verl.config.loaded import LoadedConfig
from verl.config.secrets import hide_values
from verl.config.tree import leaves, value_at
from verl.config.write import scalar
from verl.errors import ConfigError

# they say how a run is started, not what it does
_OF_THE_START = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir", "trainer.logger")


def changed_keys(loaded: LoadedConfig, folder: Path) -> list[str]:
    """ "key: before -> now" for each key whose value is another one in `folder`/config.yaml. Nothing for a file that is missing
    or that this version cannot read."""
    file = folder / "config.yaml"
    if not file.is_file():
        return []
    try:
        before = load_config([], str(file), check=False).config
    except ConfigError:  # of another version, or with the masks of secrets
        return []
    found = []
    for path, leaf in leaves().items():
        old, new = value_at(before, path), value_at(loaded.config, path)
        follows = loaded.origins[path].startswith("follows ")  # the key that it follows is told
        if old == new or follows or leaf.sizing or leaf.inert or path in _OF_THE_START:
            continue
        name = path.rpartition(".")[2]
        found.append(f"{path}: {scalar(hide_values(old, name))} -> {scalar(hide_values(new, name))}")
    return found
