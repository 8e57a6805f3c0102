"""What is wrong, or worth saying, about a resolved configuration, without looking at models or data.

Three families: problems of loading it, verdicts on single keys (policy.py), and keys that contradict one another (rules/).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.loaded import LoadedConfig
from verl.config.policy import Verdict, shown, verdicts
from verl.config.problems import LEVELS, Problem, no_effect
from verl.config.rules import RULES
from verl.config.tree import leaves, value_at
from verl.config.unavailable import MISSING

__all__ = ["Problem", "check_config"]


def check_config(loaded: LoadedConfig) -> list[Problem]:
    """Every problem of a configuration: features that are not available, other errors, warnings, notices."""
    found = verdicts(loaded)
    features = {row.path for row in MISSING}
    refused = [Problem("error", key, v.reason) for key, v in found.items() if v.kind == "refused"]
    problems = [
        *sorted(refused, key=lambda p: p.key not in features),
        *(p for p in loaded.faults if p.key not in loaded.misfits or _is_fault(loaded, found, p.key)),
        *_broken_rules(loaded, {p.key for p in refused if p.key in features} | {p.key for p in loaded.faults}),
        *_notices(loaded, found),
    ]
    return sorted(problems, key=lambda p: LEVELS.index(p.level))


def _is_fault(loaded: LoadedConfig, found: dict[str, Verdict], key: str) -> bool:
    """A value that does not fit is an error, but where its feature is missing, and for null to a key that is not read."""
    return found[key].kind == "acts" or (found[key].kind == "noticed" and loaded.misfits[key] is not None)


def _broken_rules(loaded: LoadedConfig, faulty: set[str]) -> Iterator[Problem]:
    given = set(loaded.given)
    broken: set[str] = set()
    for rule in RULES:
        if rule.key in faulty:
            continue
        if loaded.origins[rule.key].removeprefix("follows ") in broken | faulty:
            broken.add(rule.key)  # the key that it follows has been named
            continue
        if rule.broken(loaded.config, given):
            broken.add(rule.key)
            yield Problem(rule.level, rule.key, rule.sentence(loaded.config))


def _notices(loaded: LoadedConfig, found: dict[str, Verdict]) -> list[Problem]:
    """One notice per reason, each with all keys it is the reason of; errors under trainer.strict_config."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in loaded.without_effect:
        by_reason.setdefault(reason, []).append(key)
    for path, verdict in found.items():
        if verdict.kind == "noticed":
            value = loaded.misfits.get(path, value_at(loaded.config, path))
            by_reason.setdefault(verdict.reason, []).extend(_all_shown(loaded, path, value))
    strict = loaded.config.trainer.strict_config
    end = " Remove it, or set trainer.strict_config=False." if strict else ""
    return [
        Problem("error" if strict else "notice", "", no_effect(keys, reason) + end)
        for reason, keys in by_reason.items()
    ]


def _all_shown(loaded: LoadedConfig, path: str, value: object) -> list[str]:
    """A key as it was given; all entries that were given of a free-form one."""
    settings = loaded.entries.get(path) or [loaded.given[path]]
    if not leaves()[path].free:
        settings = settings[-1:]
    return list(dict.fromkeys(shown(setting, value) for setting in settings))
