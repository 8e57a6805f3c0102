"""YAML files: finding them as Hydra does, and reading them with the files they build upon."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.keys import yaml_loader
from verl.config.schema import Schema
from verl.config.values import MAX_DEPTH
from verl.errors import ConfigError, nearest
from verl.foreign_text import clean
from verl.regular_files import kind_of, read_user_text, require_regular

_MAX_BYTES = 10_000_000  # of a file
_MAX_VALUES = 100_000  # of a file, counting the values of an alias each time
BUILT_IN = Path(__file__).parent / "yaml"
PACKAGE = Path(__file__).parents[1] / "trainer"  # Hydra looks for --config-path relative to it


class ConfigPart(NamedTuple):
    """Values of `file`, with the entries of its defaults list, or of a choice in this list."""

    file: Path
    values: dict[str, object]
    entries: Sequence[object] = ()


def built_in_names(schema: Schema[object]) -> list[str]:
    """Names that `config_name` may take without a `config_path`."""
    files = [f.stem for f in BUILT_IN.glob("*.yaml") if f.stem.partition("_")[0] in schema.config_prefixes]
    return sorted({*(name for name in schema.config_names if not name.startswith("_")), *files})


def find(schema: Schema[object], config_path: str | None, config_name: str | None) -> Path | None:
    """The requested YAML file, or None for only the defaults.

    `config_path` is a folder (then `config_name` is a file in it, with or without .yaml) or a YAML file. Without it,
    `config_name` is a built-in name or a file. A folder `config` (or pkg://verl.trainer.config) without such a file
    stands for the folder of the installed package, as in Hydra; its names are the built-in names. Raises ConfigError
    when the file does not exist.
    """
    if config_path is not None and config_path.endswith((".yaml", ".yml")):
        return _existing(Path(config_path).expanduser())
    if config_name is None:
        if config_path is not None:
            kind = kind_of(Path(config_path).expanduser()) if config_path else "an empty name"
            kind = kind or "not the name of a YAML file"
            raise ConfigError(
                f"--config-path {config_path} is {kind}; name a .yaml file, or a folder and --config-name."
            )
        return None
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    unavailable = schema.compat.unavailable_configs
    if config_path is not None:
        file = Path(config_path).expanduser() / f"{name}.yaml"
        is_built_in = name in schema.config_names or (name in unavailable and _is_of_package(config_path))
        if (file.is_file() and not _is_of_package(config_path)) or not is_built_in:
            return _existing(file)
    if name in schema.config_names:
        defaults = schema.config_names[name]
        return BUILT_IN / f"{defaults}.yaml" if defaults else None
    if name in unavailable:
        raise ConfigError(f"--config-name {config_name} chooses {unavailable[name]}.")
    for file in (BUILT_IN / f"{name}.yaml", Path(f"{name}.yaml")):
        if file.is_file():
            return file
    hint = nearest(name, built_in_names(schema)) or f"; there are {', '.join(built_in_names(schema))}."
    raise ConfigError(f"There is no config named {config_name!r}{hint} To use a file, give --config-path as well.")


def builds_on_release(schema: Schema[object], config_name: str | None, parts: Iterable[ConfigPart]) -> bool:
    """Whether `config_name`, or a defaults list of `parts`, names a config of existing releases."""
    names = [entry for part in parts for entry in part.entries if isinstance(entry, str)]
    return any(name in schema.config_names for name in [(config_name or "").removesuffix(".yaml"), *names])


def _is_of_package(config_path: str) -> bool:
    """Whether the folder is the package's own, named relative to its programs, relative to a checkout, or in full."""
    if config_path.startswith("pkg://"):
        return config_path == "pkg://verl.trainer.config"
    path = Path(config_path).expanduser()
    if path.is_dir():
        return path.resolve() == PACKAGE / "config"
    return path.parts[-1:] == ("config",) and (not path.is_absolute() or path.parts[-3:-1] == ("verl", "trainer"))


def _existing(file: Path) -> Path:
    if kind_of(file) is not None:
        return require_regular(file, "The config file", fix="Name a YAML file.")
    siblings = ", ".join(sorted(f.name for f in file.parent.glob("*.yaml"))) if file.parent.is_dir() else ""
    raise ConfigError(
        f"The config file {file} does not exist"
        + (f"; its folder has {siblings}." if siblings else " and its folder has no YAML file.")
    )


def read_tree(
    schema: Schema[object], file: Path, notices: list[str], above: tuple[Path, ...] = ()
) -> Iterator[ConfigPart]:
    """`file`, and the files and choices of its `defaults:` list, in the order of their application. `above` are the files that
    name this one."""
    if file in above:
        raise ConfigError(
            f"The config file {file} includes itself through its defaults list ({' -> '.join(map(str, above))})."
        )
    tree = _parse(file)
    values = {k: v for k, v in tree.items() if k not in ("defaults", "hydra")}
    if tree.get("hydra"):
        notices.append(f"hydra: in {file} has no effect: outputs go to trainer.default_local_dir.")
    entries = _entries(file, tree)
    if "_self_" not in entries:
        entries = [*entries, "_self_"]
    for entry in entries:
        if entry == "_self_":
            yield ConfigPart(file, values, entries)
            continue
        for group, option in entry.items() if isinstance(entry, dict) else ():
            choices = schema.group_choices.get(str(group).partition("@")[0], {})
            if str(option) in choices:
                yield ConfigPart(file, dict(choices[str(option)]))
                entry = ""
        names = [entry, schema.config_names.get(entry)] if isinstance(entry, str) and entry else []
        candidates = [folder / f"{name}.yaml" for name in names if name for folder in (file.parent, BUILT_IN)]
        if included := next((f for f in candidates if f.is_file()), None):
            yield from read_tree(schema, included, notices, (*above, file))
        elif entry and not (isinstance(entry, str) and entry in schema.config_names):
            notices.append(f"defaults: {entry!r} in {file} has no effect: no such file lies in its folder.")


def _entries(file: Path, tree: Mapping[str, object]) -> list[Any]:
    """The defaults list of a file: names, and choices of groups."""
    entries = tree.get("defaults") or ["_self_"]
    if not isinstance(entries, list):
        raise ConfigError(f"defaults: in {file} is not a list.")
    return entries


def _parse(file: Path) -> dict[str, object]:
    from omegaconf import OmegaConf

    tree = read_limited(file, lambda text: OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False))
    if not isinstance(tree, dict):
        raise ConfigError(f"The config file {file} does not hold sections (key: value).")
    return {str(k): v for k, v in tree.items()}


def read_limited(file: Path, load: Callable[[str], object] | None = None, kind: str = "config file") -> object:
    """The content of a user's YAML file, read by `load` (plain values without it). Raises ConfigError for a file that is
    missing, unreadable, too large or nested too deep, or has aliases that stand for too many values."""
    what = f"The {kind} {clean(file)}"
    text = read_user_text(file, f"The {kind}", fix="Name a YAML file.", max_bytes=_MAX_BYTES)
    try:
        _require_small(text, what)
        return load(text) if load else yaml_loader()(text).get_single_data()
    except ConfigError:
        raise
    except Exception as error:
        # PyYAML raises what Python does for the values of tags, such as !!int
        if "maximum nesting depth" in str(error):  # libyaml's own limit, met while it reads ahead
            raise _too_deep(what) from error
        raise ConfigError(f"{what} cannot be read: {clean(error)}") from error


def _too_deep(what: str) -> ConfigError:
    return ConfigError(f"{what} is nested more than {MAX_DEPTH} deep; make it flat.")


def _require_small(text: str, what: str) -> None:
    """Raise ConfigError for a file that is nested too deep, or has aliases that stand for too many values."""
    import yaml

    sizes: dict[str | None, int] = {}  # of what an anchor names, aliases in it counted each time
    parents: list[tuple[str | None, int]] = []  # (anchor, values so far) of the open lists and mappings
    size = 0
    for event in yaml.parse(text, Loader=yaml_loader()):
        if isinstance(event, yaml.CollectionStartEvent):
            parents.append((event.anchor, size))
            size = 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = parents.pop()
            sizes[anchor], size = size, before + size
        elif isinstance(event, yaml.NodeEvent):
            size += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if len(parents) > MAX_DEPTH:
            raise _too_deep(what)
        if size > _MAX_VALUES:
            raise ConfigError(f"{what} has more than {_MAX_VALUES:,} values, counting aliases each time.")
