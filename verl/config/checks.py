"""Problems of a resolved configuration, without a look at models or data.

Three families: problems of loading it, verdicts on single keys, and keys that contradict one another (rules/).

Each key that is given acts, is noticed, or is refused, always with a reason:

- A key that no release knows is refused, with the nearest names (user_settings.py).
- A feature that is not available is refused, before keys below it are checked (compat.yaml).
- A key that is not read is *noticed* if the existing verl, given the same keys, would train the same without it: it
  reads the key under the same condition (active_keys.py), or the key only sizes hardware or observes the run.
- A key that is not read is *refused* if it asks for something that would not happen: the existing verl acts on it
  there, or only this version has the key (`strict` and `refused` in its declaration).

`trainer.strict_config=True` makes errors of the notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl.config.derived_defaults import FALLS_BACK
from verl.config.loaded import LoadedConfig
from verl.config.roots import RunConfig
from verl.config.schema import LEVELS, Leaf, Problem, error, value_at
from verl.config.user_settings import Setting

__all__ = ["Problem", "Verdict", "check_config", "verdict", "verdicts"]


@dataclass(frozen=True)
class Verdict:
    """`acts`, `noticed` (`reason` says why the key has no effect) or `refused` (`reason` is the sentence of the error)."""

    kind: Literal["acts", "noticed", "refused"]
    reason: str = ""


ACTS = Verdict("acts")


def check_config(loaded: LoadedConfig[RunConfig]) -> list[Problem]:
    """Every problem of a configuration: features that are not available, other errors, warnings, notices."""
    missing = _missing_features(loaded)
    by_key = verdicts(loaded)
    refused = [error(key, v.reason) for key, v in by_key.items() if v.kind == "refused"]
    faults = [p for p in loaded.faults if not _hidden(loaded, missing, p)]
    replaced, unread = _replaced_features(loaded), list[str]()
    for fault in [p for p in faults if _hidden(loaded, replaced, p) and p.key not in loaded.misfits]:
        faults.remove(fault)
        unread.append(fault.key)
    faults = [p for p in faults if p.key not in replaced]
    problems = [
        *sorted(refused, key=lambda p: p.key not in missing),
        *(p for p in faults if p.key not in loaded.misfits or _is_fault(loaded, by_key, p.key)),
        *_broken_rules(loaded, {p.key for p in refused if p.key in missing} | {p.key for p in faults}),
        *_notices(loaded, by_key, {key: f"a key of {next(iter(replaced.values()))}" for key in unread}),
    ]
    return sorted(problems, key=lambda p: LEVELS.index(p.level))


def verdicts(loaded: LoadedConfig[object]) -> dict[str, Verdict]:
    """{key: Verdict} of every key that was given, and of keys that choose a missing feature."""
    by_key = {key: Verdict("refused", sentence) for key, sentence in _missing_features(loaded).items()}
    for path, setting in loaded.settings.items():
        if path not in by_key:
            by_key[path] = verdict(loaded, path, setting)
    return by_key


def verdict(loaded: LoadedConfig[object], path: str, setting: Setting) -> Verdict:
    """The verdict on one key, if all features are available."""
    leaf, value = loaded.schema.leaves[path], value_at(loaded.config, path)
    as_default = value == leaf.default or (path in loaded.followed and value == loaded.followed[path])
    if as_default and setting.source != "command line" and path not in loaded.misfits:
        return ACTS  # a file may list every key, as the one in the run folder does
    if leaf.inert:
        if as_default and any(path == row.path for row in loaded.schema.compat.unavailable):
            return ACTS  # a feature that is left off
        if not leaf.key.refused or as_default:
            return Verdict("noticed", leaf.inert)
        sentence = f"{setting.shown(leaf, value)} ({_place(setting)}) has no effect: {leaf.inert}. {leaf.key.refused}."
        return Verdict("refused", sentence)
    failed = _failed_condition(loaded, leaf)
    if failed is None:
        return ACTS
    because, fix = failed
    if as_default or leaf.sizing or value in leaf.key.neutral or not leaf.strict:
        return Verdict("noticed", because)
    return Verdict(
        "refused",
        f"{setting.shown(leaf, value)} ({_place(setting)}) is not read: {because}; {leaf.strict}. Remove it, or {fix}.",
    )


def _missing_features(loaded: LoadedConfig[object]) -> dict[str, str]:
    """Key -> sentence, for each feature that the config chooses and this version does not have."""
    sentences: dict[str, str] = {}
    for row in loaded.schema.compat.unavailable:
        value = value_at(loaded.config, row.path)
        if row.chosen(value) and not loaded.origins.get(row.path, "").startswith("follows "):
            sentences[row.path] = f"{row.what} is not available in this version ({row.path}={value}). {row.instead}."
    return sentences


def _replaced_features(loaded: LoadedConfig[object]) -> dict[str, str]:
    """Key -> the engine that it named, if trainer.engine_fallback has replaced that engine."""
    origins = {row.path: loaded.origins.get(row.path, "") for row in loaded.schema.compat.unavailable}
    return {key: origin.removeprefix(FALLS_BACK) for key, origin in origins.items() if origin.startswith(FALLS_BACK)}


def _hidden(loaded: LoadedConfig[object], missing: dict[str, str], fault: Problem) -> bool:
    """Whether the fault is an unknown key that may be one of a missing feature."""
    rows = [row for row in loaded.schema.compat.unavailable if row.path in missing]
    return fault.key not in loaded.schema.leaves and any(fault.key.startswith(tuple(row.hides)) for row in rows)


def _failed_condition(loaded: LoadedConfig[object], leaf: Leaf) -> tuple[str, str] | None:
    for name, place in leaf.conditions:
        condition = loaded.schema.condition(name, place)
        if not condition.holds(loaded.config, value_at(loaded.config, place)):
            return condition.because, condition.fix
    return None


def _place(setting: Setting) -> str:
    renamed = setting.origin != setting.source
    return f"{setting.source}; it is another spelling of {setting.path}" if renamed else setting.source


def _is_fault(loaded: LoadedConfig[object], by_key: dict[str, Verdict], key: str) -> bool:
    """A value that does not fit is an error, unless its feature is missing, or it is null for a key without effect."""
    return by_key[key].kind == "acts" or (by_key[key].kind == "noticed" and loaded.misfits[key] is not None)


def _broken_rules(loaded: LoadedConfig[object], faulty: set[str]) -> Iterator[Problem]:
    broken: set[str] = set()
    for problem in loaded.schema.problems(loaded.config, set(loaded.settings), loaded.registers_later):
        broken.add(problem.key)
        # one problem is enough for a key and for the keys that take its value
        if problem.key not in faulty and not _followed(loaded, problem.key) & (broken | faulty):
            yield problem


def _followed(loaded: LoadedConfig[object], key: str) -> set[str]:
    """The keys that `key` follows, directly or through further keys."""
    source, sources = key, set[str]()
    while (origin := loaded.origins.get(source, "")).startswith("follows ") and source not in sources:
        source = origin.removeprefix("follows ")
        sources.add(source)
    return sources - {key}  # a key whose older spelling was replaced follows itself


def _notices(loaded: LoadedConfig[RunConfig], by_key: dict[str, Verdict], unread: dict[str, str]) -> list[Problem]:
    """One notice per reason, each with all keys it is the reason of; errors under trainer.strict_config."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in (*loaded.without_effect, *unread.items()):
        by_reason.setdefault(reason, []).append(key)
    for path, verdict in by_key.items():
        if verdict.kind == "noticed":
            value = loaded.misfits.get(path, value_at(loaded.config, path))
            by_reason.setdefault(verdict.reason, []).extend(_all_shown(loaded, path, value))
    strict = loaded.config.trainer.strict_config
    end = " Remove it, or set trainer.strict_config=False." if strict else ""
    return [
        Problem("error" if strict else "notice", "", f"No effect: {', '.join(keys)} ({reason}).{end}")
        for reason, keys in by_reason.items()
    ]


def _all_shown(loaded: LoadedConfig[object], path: str, value: object) -> list[str]:
    """A key as it was given; all entries that were given of a free-form one."""
    leaf, settings = loaded.schema.leaves[path], loaded.entries.get(path) or [loaded.settings[path]]
    if not leaf.free:
        settings = settings[-1:]
    return list(dict.fromkeys(setting.shown(leaf, value) for setting in settings))
