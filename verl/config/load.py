"""From YAML files and overrides to one typed tree, with the origin of every value."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from verl.config import sources
from verl.config.checks import check_config
from verl.config.command_defaults import NO_FACTS, Face, Facts, command_defaults
from verl.config.derived_defaults import COMPOSED_FOLDER, COMPOSED_NULLS
from verl.config.loaded import LoadedConfig
from verl.config.presets import BRIEFER
from verl.config.roots import PPO, RunConfig
from verl.config.schema import Derived, Leaf, Problem, Schema, error
from verl.config.secrets import holds_mask, remember_secrets
from verl.config.user_settings import ARGUMENT, Setting, UserSettings
from verl.config.values import Misfit, convert, expand_path, merge, nested, unusable_text
from verl.errors import ConfigError, nearest
from verl.foreign_text import clean, quoted
from verl.registry import forget_edited_files

Misfits = dict[str, tuple[object, str]]  # key -> (the value that does not fit it, the sentence of the error)


def load_config(
    overrides: Sequence[str] = (),
    config_path: str | None = None,
    config_name: str | None = None,
    *,
    schema: Schema[Any] = PPO,
    values: Mapping[str, object] | Sequence[Mapping[str, object]] = (),
    arguments: Mapping[str, Mapping[str, object]] | None = None,
    fallbacks: Mapping[str, object] | None = None,
    check: bool = True,
    defaults: Face = "release",
) -> LoadedConfig[Any]:
    """Defaults of `schema`, then `fallbacks`, then the YAML file, then `values` (nested or with dotted keys; a key has one
    value in all of them), then the overrides, resolved and checked. `defaults`: of existing releases, as for a file that
    builds on a config of theirs, or of our commands.

    `arguments` of a Python call have keys that nothing else may give another value: {argument: {key: value}}. `fallbacks`
    are values of arguments that the call lacks, or of a preset. `config_path` and `config_name` are Hydra's
    (a folder and a name), or `config_path` is a YAML file. Raises ConfigError with one sentence per problem, all problems at
    once: an unknown key (with the nearest ones), a value of the wrong type, two values of a key from one source and, unless
    `check` is False, everything that `check_config` calls an error.
    """
    forget_edited_files()
    user = _user_settings(schema, overrides, config_path, config_name, defaults, values, fallbacks)
    for name, keys in filter(lambda item: item[1], (arguments or {}).items()):
        user.add_file(f"{ARGUMENT}{name}", dict(keys))
    return _checked(user, check)


def inspect_config(
    overrides: Sequence[str] = (),
    config_path: str | None = None,
    config_name: str | None = None,
    *,
    schema: Schema[RunConfig] = PPO,
) -> tuple[LoadedConfig[Any], list[Problem]]:
    """The config of `load_config` with every problem of it, defaults standing in for values that do not fit. Raises
    ConfigError for a file that is not there or cannot be read."""
    loaded = _resolve(_user_settings(schema, overrides, config_path, config_name, "release"))
    return loaded, check_config(loaded)


def _user_settings(
    schema: Schema[RunConfig],
    overrides: Sequence[str],
    config_path: str | None,
    config_name: str | None,
    defaults: Face,
    values: Mapping[str, object] | Sequence[Mapping[str, object]] = (),
    fallbacks: Mapping[str, object] | None = None,
) -> UserSettings:
    file, notices = sources.find(schema, config_path, config_name), list[str]()
    parts = [] if file is None else list(sources.read_tree(schema, file, notices))  # each file takes 0.1 s
    face: Face = "release" if sources.builds_on_release(schema, config_name, parts) else defaults
    user = UserSettings(schema, notices=notices, defaults=face, has_preset=bool(fallbacks) and defaults == "command")
    if fallbacks:
        user.add_file("preset", dict(fallbacks))
    for path, tree, _ in parts:
        user.add_file(f"config {path.stem}" if path.parent == sources.BUILT_IN else f"file {path}", tree)
    for values_tree in filter(None, [values] if isinstance(values, Mapping) else values):
        user.add_file("Python", dict(values_tree))
    user.add_overrides(overrides)
    user_paths = {setting.path for setting in user.settings if setting.source != "preset"}
    user.settings = [s for s in user.settings if s.source != "preset" or BRIEFER.get(s.path) not in user_paths]
    return user


def with_fitting_defaults(loaded: LoadedConfig[Any], facts: Facts) -> LoadedConfig[Any] | None:
    """`loaded` with the defaults of our commands that fit its rows and its model; None if it has them. Raises ConfigError if a
    key of the user contradicts them."""
    if loaded.defaults != "command":
        return None
    settings = [setting for entries in loaded.entries.values() for setting in entries]
    users = (UserSettings(loaded.schema, settings, defaults="command", facts=f) for f in (NO_FACTS, facts))
    before, fitted = map(_resolve, users)
    values, flat = loaded.schema.flatten(loaded.config), loaded.schema.flatten(fitted.config)
    changed = {key: flat[key] for key, value in loaded.schema.flatten(before.config).items() if flat[key] != value}
    if changed.items() <= values.items():
        return None
    config = loaded.schema.build(values | changed)  # keeps what the run has set, such as its folder
    fit = dataclasses.replace(loaded, config=config, origins=loaded.origins | {k: fitted.origins[k] for k in changed})
    if errors := [sentence for sentence in _errors(fit) if sentence not in _errors(loaded)]:
        raise ConfigError("\n".join(errors))
    return fit


def _errors(loaded: LoadedConfig[Any]) -> list[str]:
    return list(dict.fromkeys(p.sentence for p in check_config(loaded) if p.level == "error"))


def load_composed(
    tree: dict[str, object], *, schema: Schema[RunConfig] = PPO, check: bool = True, program_reads: Collection[str] = ()
) -> LoadedConfig[Any]:
    """The config of a tree that a program of a user has composed by Hydra from verl/trainer/config, as a plain mapping.

    A key counts as not given if it has the value that the composition gives it by itself. Keys of sections that verl does not
    have are for the program, and so are keys named in `program_reads`: a notice lists them. Raises ConfigError as
    `load_config`.
    """
    user = UserSettings(schema, program_reads=program_reads)
    user.add_file("composed config", tree)
    values = {setting.path: setting.value for setting in user.settings}
    sources = dict(schema.follows)
    folder = f"checkpoints/{values.get('trainer.project_name')}/{values.get('trainer.experiment_name')}"

    def asks(setting: Setting) -> bool:
        path, value = setting.path, setting.value
        same = [schema.leaves[path].default]
        if source := sources.get(path):
            same += [values.get(source), f"${{{source}}}"]
        if path == "trainer.default_local_dir":
            same += [folder, COMPOSED_FOLDER]
        if path in COMPOSED_NULLS:
            same.append(None)
        if schema.leaves[path].default is None:
            same.append("")  # an empty text in a script asks for nothing
        return value not in same

    user.settings = [setting for setting in user.settings if asks(setting)]
    return _checked(user, check)


def _checked(user: UserSettings, check: bool) -> LoadedConfig[Any]:
    loaded = dataclasses.replace(_resolve(user), registers_later=user.program_reads is not None)
    problems = check_config(loaded) if check or loaded.faults else []
    if not check:
        problems = [p for p in problems if p in loaded.faults]
    errors = [p.sentence for p in problems if p.level == "error"]
    if errors:
        raise ConfigError("\n".join(dict.fromkeys(errors)))
    loaded.notices.extend(p.sentence for p in problems)
    return loaded


def _resolve(user: UserSettings) -> LoadedConfig[Any]:
    schema = user.schema
    faults = [*user.faults, *user.conflicts()]
    misfits: Misfits = {}
    values = {path: leaf.default for path, leaf in schema.leaves.items()}
    origins = dict.fromkeys(values, "default")
    last: dict[str, Setting] = {}
    entries: dict[str, list[Setting]] = {}
    for setting in user.settings:
        last[setting.path] = setting
        entries.setdefault(setting.path, []).append(setting)
        misfits.pop(setting.path, None)  # a later value goes before it
        origins[setting.path] = setting.origin
        leaf = schema.leaves[setting.path]
        if (text := unusable_text(setting.value)) is not None:
            sentence = f"{setting.spelled} ({setting.source}) has a NUL or half a character: {clean(text)}."
            misfits[setting.path] = (leaf.default, sentence)
            continue
        try:
            if leaf.key.path or (leaf.names_files and "/" in str(setting.value)):
                setting = dataclasses.replace(setting, value=expand_path(setting.value))
        except Misfit as misfit:
            misfits[setting.path] = (setting.value, _misfit_sentence(setting, misfit))
            continue
        if leaf.free:
            setting = dataclasses.replace(setting, value=merge(values[setting.path], setting.value))
        values[setting.path] = setting.value if _interpolated(setting.value) else _fit(leaf, setting, misfits)
    followed = _complete(user, values, origins, last)
    if any(_interpolated(v) for v in values.values()):
        unresolved = {path: misfit for path, misfit in _interpolate(schema, values, origins).items() if path in last}
        misfits.update(unresolved)  # what follows a key that leads nowhere is not named
        followed = _complete(user, values, origins, last)
    faults += [
        error(p, f"{p} ({origins[p]}) has the mask of a secret, which no run folder keeps. Give the value again.")
        for p, value in values.items()
        if holds_mask(value)
    ]
    faults += [error(path, sentence) for path, (_, sentence) in misfits.items()]
    config = schema.build(values)
    remember_secrets(config)
    return LoadedConfig(
        schema,
        config,
        origins,
        list(user.notices),
        last,
        followed,
        entries,
        faults,
        {path: value for path, (value, _) in misfits.items()},
        user.without_effect,
        user.defaults,
    )


def _fit(leaf: Leaf, setting: Setting, misfits: Misfits) -> object:
    try:
        value = convert(setting.value, leaf.annotation, setting.text)
    except Misfit as misfit:
        if leaf.inert:
            return setting.value  # nothing reads it, so nothing can stumble over it
        misfits[setting.path] = (setting.value, _misfit_sentence(setting, misfit))
        return leaf.default
    problem = _choice_problem(leaf, value)
    if problem:
        misfits[setting.path] = (value, f"{setting.spelled}={clean(value)} ({setting.source}) {problem}")
    return value


def _misfit_sentence(setting: Setting, misfit: Misfit) -> str:
    return f"{setting.spelled} must be {misfit}, got {quoted(setting.value)} ({setting.source})."


def _choice_problem(leaf: Leaf, value: object) -> str:
    choices, words = leaf.key.choices, leaf.key.words
    if words and isinstance(value, str) and value not in words:
        return f"must be a whole number or {' or '.join(words)}."
    wrong = [v for v in (value if isinstance(value, list) else [value]) if v not in choices]
    if not choices or not wrong:
        return ""
    hint = nearest(str(wrong[0]), [str(c) for c in choices])
    return f"is not one of {', '.join('null' if c is None else str(c) for c in choices)}{hint or '.'}"


def _complete(
    user: UserSettings, values: dict[str, object], origins: dict[str, str], settings: dict[str, Setting]
) -> dict[str, object]:
    """Fill in keys that follow a key (also if null was given); returns the values that given keys would follow."""
    schema, set_keys = user.schema, set(settings)
    steps: list[Callable[[dict[str, object], set[str]], Derived]] = [schema.derive]
    if user.defaults == "command" or user.has_preset:
        steps.insert(0, partial(command_defaults, schema.name, facts=user.facts, face=user.defaults))
    for derive in steps:
        for path, (value, origin) in derive(values, set_keys).items():
            values[path], origins[path] = value, origin
    followed = {}
    for path, source in schema.follows:
        if path in settings:
            followed[path] = values[source]
        if path in settings and values[path] is not None:
            continue
        if values[source] != values[path]:
            values[path], origins[path] = values[source], f"follows {source}"
    return followed


def _interpolated(value: object) -> bool:
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, dict):
        return any(_interpolated(v) for v in value.values())
    return isinstance(value, list) and any(_interpolated(v) for v in value)


def _interpolate(schema: Schema[object], values: dict[str, object], origins: dict[str, str]) -> Misfits:
    """Replace every `${...}` by its value, as OmegaConf reads it, or by the key's default without a value."""
    from omegaconf import OmegaConf

    misfits: Misfits = {}
    texts = {path: value for path, value in values.items() if _interpolated(value)}
    tree = OmegaConf.create(nested({path: None if path in texts else value for path, value in values.items()}))
    for step in (_insert, _select):
        for path in [path for path in texts if path not in misfits]:
            leaf, setting = schema.leaves[path], f"{path}={clean(texts[path])} ({origins[path]})"
            values[path] = leaf.default
            try:
                values[path] = step(tree, leaf, texts[path])
            except Misfit as misfit:
                misfits[path] = (texts[path], f"{setting} {misfit}")
            except Exception as error:  # noqa: BLE001 - keys may name one another, and a resolver is a user's function
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                misfits[path] = (texts[path], f"{setting} cannot be resolved: {clean(reason)}.")
    return misfits


def _insert(tree: Any, leaf: Leaf, value: object) -> object:
    """Put a value with `${...}` into the tree. Raises an error of OmegaConf for another form."""
    from omegaconf import OmegaConf

    OmegaConf.update(tree, leaf.path, value)
    return value


def _select(tree: Any, leaf: Leaf, value: object) -> object:
    """The value that the tree has for a key. Raises Misfit with the end of the sentence."""
    from omegaconf import OmegaConf

    selected = OmegaConf.select(tree, leaf.path, throw_on_missing=True)
    if OmegaConf.is_config(selected):
        selected = OmegaConf.to_container(selected, resolve=True)
    try:
        converted = convert(selected, leaf.annotation)
    except Misfit as misfit:
        raise Misfit(f"must be {misfit}, got {quoted(selected)}.") from None
    if problem := _choice_problem(leaf, converted):
        raise Misfit(f"stands for {quoted(selected)}, which {problem}")
    if unusable_text(converted) is not None:
        raise Misfit(f"stands for a text with a NUL or half a character: {quoted(selected)}.")
    return merge(leaf.default, converted) if leaf.free else converted
