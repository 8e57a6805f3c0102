"""What is wrong, or worth saying, about a resolved configuration, without looking at models or data.

Three families: keys that the chosen path never reads, features that this version has not, and keys that contradict one
another (rules/).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from verl.config.conditions import CONDITIONS
from verl.config.loaded import LoadedConfig
from verl.config.rules import RULES
from verl.config.settings import Setting
from verl.config.tree import Leaf, VerlConfig, leaves, value_at
from verl.config.unavailable import missing_features

Level = Literal["error", "warning", "notice"]


@dataclass(frozen=True)
class Problem:
    level: Level  # an error stops the run, a warning is probably a mistake, a notice says that a key has no effect here
    key: str
    sentence: str


def check_config(loaded: LoadedConfig) -> list[Problem]:
    """Every problem of a configuration, errors first."""
    missing = [Problem("error", key, sentence) for key, sentence in missing_features(loaded.config)]
    problems = [*missing, *_unread(loaded, {p.key for p in missing}), *_broken_rules(loaded, {p.key for p in missing})]
    order = ("error", "warning", "notice")
    return sorted(problems, key=lambda p: order.index(p.level))


def _broken_rules(loaded: LoadedConfig, missing: set[str]) -> Iterator[Problem]:
    given = set(loaded.given)
    for rule in RULES:
        if rule.key not in missing and rule.broken(loaded.config, given):
            yield Problem(rule.level, rule.key, rule.sentence(loaded.config))


def _unread(loaded: LoadedConfig, missing: set[str]) -> list[Problem]:
    """Errors for keys that are set and not read; one notice per reason for those that ask for nothing."""
    problems: list[Problem] = []
    quiet: dict[str, list[str]] = {}
    for path, setting in loaded.given.items():
        leaf, value = leaves()[path], value_at(loaded.config, path)
        as_default = value == leaf.default or (path in loaded.followed and value == loaded.followed[path])
        if path in missing or (as_default and setting.source != "command line"):
            continue  # a file may list every key, as the one in the run folder does
        if leaf.inert:
            quiet.setdefault(leaf.inert, []).append(_shown(setting, value))
            continue
        failed = _failed_condition(leaf, loaded.config)
        if failed is None:
            continue
        because, fix = failed
        if as_default or leaf.sizing or value in leaf.key.neutral:
            quiet.setdefault(because, []).append(_shown(setting, value))
        else:
            problems.append(
                Problem(
                    "error",
                    path,
                    f"{_shown(setting, value)} ({_place(setting)}) is not read: {because}. Remove it, or {fix}.",
                )
            )
    problems.extend(
        Problem("notice", "", f"No effect: {', '.join(keys)} ({reason}).") for reason, keys in quiet.items()
    )
    return problems


def _failed_condition(leaf: Leaf, config: VerlConfig) -> tuple[str, str] | None:
    for name, place in leaf.conditions:
        condition = CONDITIONS[name]
        if not condition.holds(config, value_at(config, place)):
            return condition.because, condition.fix
    return None


def _shown(setting: Setting, value: Any) -> str:
    free = leaves()[setting.path].free and setting.spelled != setting.path
    return setting.spelled if free else f"{setting.spelled}={value}"


def _place(setting: Setting) -> str:
    renamed = setting.origin != setting.source
    return f"{setting.source}; it is another spelling of {setting.path}" if renamed else setting.source
