"""The policy for keys: each key that is given acts, is noticed, or is refused, always with a reason.

- A key that no release knows is refused, with the nearest names (settings.py).
- A feature that is not available is refused, before anything is said about keys below it (unavailable.py).
- A key that is not read is *noticed* where the existing verl, given the same keys, would train the same without it: it
  reads the key under the same condition (conditions.py), or the key only sizes hardware or observes the run.
- A key that is not read is *refused* where it asks for something that would not happen: the existing verl acts on it
  there, or only this version has the key (`strict` and `refused` in its declaration).

`trainer.strict_config=True` makes errors of the notices (checks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.active_keys import CONDITIONS
from verl.config.loaded import LoadedConfig
from verl.config.tree import Leaf, VerlConfig, leaves, value_at
from verl.config.unavailable import missing_features
from verl.config.user_settings import Setting


@dataclass(frozen=True)
class Verdict:
    """`acts`, `noticed` (`reason` says why the key has no effect) or `refused` (`reason` is the sentence of the error)."""

    kind: Literal["acts", "noticed", "refused"]
    reason: str = ""


ACTS = Verdict("acts")


def verdicts(loaded: LoadedConfig) -> dict[str, Verdict]:
    """{key: Verdict} of every key that was given, and of keys that choose a feature which is not available."""
    found = {key: Verdict("refused", sentence) for key, sentence in missing_features(loaded.config)}
    for path, setting in loaded.given.items():
        if path not in found:
            found[path] = verdict(loaded, path, setting)
    return found


def verdict(loaded: LoadedConfig, path: str, setting: Setting) -> Verdict:
    """That of one key, all features being there."""
    leaf, value = leaves()[path], value_at(loaded.config, path)
    as_default = value == leaf.default or (path in loaded.followed and value == loaded.followed[path])
    if as_default and setting.source != "command line" and path not in loaded.misfits:
        return ACTS  # a file may list every key, as the one in the run folder does
    if leaf.inert:
        if not leaf.key.refused or as_default:
            return Verdict("noticed", leaf.inert)
        return Verdict(
            "refused", f"{shown(setting, value)} ({_place(setting)}) has no effect: {leaf.inert}. {leaf.key.refused}."
        )
    failed = _failed_condition(leaf, loaded.config)
    if failed is None:
        return ACTS
    because, fix = failed
    if as_default or leaf.sizing or value in leaf.key.neutral or not leaf.key.strict:
        return Verdict("noticed", because)
    return Verdict(
        "refused",
        f"{shown(setting, value)} ({_place(setting)}) is not read: {because}; {leaf.key.strict}. Remove it, or {fix}.",
    )


def _failed_condition(leaf: Leaf, config: VerlConfig) -> tuple[str, str] | None:
    for name, place in leaf.conditions:
        condition = CONDITIONS[name]
        if not condition.holds(config, value_at(config, place)):
            return condition.because, condition.fix
    return None


def shown(setting: Setting, value: Any) -> str:
    """The key as it was written, with its value; entries of a free-form key by their own names."""
    free = leaves()[setting.path].free and setting.spelled != setting.path
    return setting.spelled if free else f"{setting.spelled}={value}"


def _place(setting: Setting) -> str:
    renamed = setting.origin != setting.source
    return f"{setting.source}; it is another spelling of {setting.path}" if renamed else setting.source
