"""From YAML files and overrides to one typed tree, with the origin of every value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from verl.config import sources
from verl.config.checks import check_config
from verl.config.follows import FOLLOWS, derive
from verl.config.keys import Section
from verl.config.loaded import LoadedConfig
from verl.config.secrets import holds_mask, remember_secrets
from verl.config.settings import Given, Setting
from verl.config.tree import Leaf, VerlConfig, leaves
from verl.config.values import Misfit, convert, expected, merge
from verl.errors import ConfigError, nearest


def load_config(
    overrides: Sequence[str] = (), config_path: str | None = None, config_name: str | None = None, *, check: bool = True
) -> LoadedConfig:
    """Defaults, then the YAML file, then the overrides, resolved and checked.

    `config_path` and `config_name` are Hydra's (a folder and a name), or `config_path` is a YAML file. Raises
    ConfigError with one sentence per problem: an unknown key (with the nearest ones), a value of the wrong type, two
    spellings that disagree and, unless `check` is False, everything that `check_config` calls an error.
    """
    given = Given([], [], [])
    file = sources.find(config_path, config_name)
    for path, tree in sources.read(file, given.notices) if file is not None else ():
        given.add_file(f"file {path}", tree)
    given.add_overrides(overrides)
    loaded = _resolve(given)
    if check:
        problems = check_config(loaded)
        _raise([p.sentence for p in problems if p.level == "error"])
        loaded.notices.extend(p.sentence for p in problems)
    return loaded


def _raise(errors: list[str]) -> None:
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))


def _resolve(given: Given) -> LoadedConfig:
    errors = [*given.errors, *given.conflicts()]
    values = {path: leaf.default for path, leaf in leaves().items()}
    origins = dict.fromkeys(values, "default")
    last: dict[str, Setting] = {}
    for setting in given.settings:
        last[setting.path] = setting
        origins[setting.path] = setting.origin
        if leaves()[setting.path].free:
            setting = dataclasses.replace(setting, value=merge(values[setting.path], setting.value))
        values[setting.path] = setting.value if _interpolated(setting.value) else _fit(setting, errors)
    _raise(errors)
    followed = _complete(values, origins, last)
    if any(_interpolated(v) for v in values.values()):
        _interpolate(values, origins)
        followed = _complete(values, origins, last)
    _raise([_masked(path, origins[path]) for path, value in values.items() if holds_mask(value)])
    config = build(values)
    remember_secrets(config)
    return LoadedConfig(config, origins, list(given.notices), last, followed)


def _masked(path: str, origin: str) -> str:
    return f"{path} ({origin}) has the mask of a secret, which no run folder keeps. Give the value again."


def _fit(setting: Setting, errors: list[str]) -> Any:
    leaf = leaves()[setting.path]
    try:
        value = convert(setting.value, leaf.annotation, setting.text)
    except Misfit as misfit:
        if leaf.inert:
            return setting.value  # nothing reads it, so nothing can stumble over it
        errors.append(f"{setting.spelled} must be {misfit}, got {setting.value!r} ({setting.source}).")
        return leaf.default
    problem = _choice_problem(leaf, value)
    if problem:
        errors.append(f"{setting.spelled}={value} ({setting.source}) {problem}")
    return value


def _choice_problem(leaf: Leaf, value: Any) -> str:
    choices = leaf.key.choices
    if not choices or value in choices:
        return ""
    hint = nearest(str(value), [str(c) for c in choices])
    return f"is not one of {', '.join('null' if c is None else str(c) for c in choices)}{hint or '.'}"


def _complete(values: dict[str, Any], origins: dict[str, str], given: dict[str, Setting]) -> dict[str, Any]:
    """Fill in keys that follow others (also where null was given); returns what given keys would have been."""
    for path, (value, origin) in derive(values, set(given)).items():
        values[path], origins[path] = value, origin
    followed = {}
    for path, source in FOLLOWS:
        if path in given:
            followed[path] = values[source]
        if path in given and values[path] is not None:
            continue
        if values[source] != values[path]:
            values[path], origins[path] = values[source], f"follows {source}"
    return followed


def _interpolated(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, dict):
        return any(_interpolated(v) for v in value.values())
    return isinstance(value, list) and any(_interpolated(v) for v in value)


def _interpolate(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Replace every `${...}` by what it stands for, as OmegaConf reads it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create(_nested(values))
    errors = []
    for path in [p for p, v in values.items() if _interpolated(v)]:
        leaf = leaves()[path]
        try:
            found = OmegaConf.select(tree, path, throw_on_missing=True)
            if OmegaConf.is_config(found):
                found = OmegaConf.to_container(found, resolve=True)
            values[path] = convert(found, leaf.annotation)
        except OmegaConfBaseException as error:
            errors.append(f"{path}={values[path]} ({origins[path]}) cannot be resolved: {str(error).splitlines()[0]}.")
        except Misfit:
            errors.append(
                f"{path}={values[path]} ({origins[path]}) must be {expected(leaf.annotation)}, got {found!r}."
            )
        else:
            if problem := _choice_problem(leaf, values[path]):
                errors.append(f"{path}={values[path]} ({origins[path]}) {problem}")
    _raise(errors)


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in values.items():
        *parents, name = path.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return root


def build(values: dict[str, Any]) -> VerlConfig:
    """The typed tree of a value for every key."""
    return _fill(VerlConfig(), "", values)


def _fill(node: Any, prefix: str, values: dict[str, Any]) -> Any:
    changes = {}
    for f in dataclasses.fields(node):
        path, current = prefix + f.name, getattr(node, f.name)
        changes[f.name] = _fill(current, path + ".", values) if isinstance(current, Section) else values[path]
    return dataclasses.replace(node, **changes)
