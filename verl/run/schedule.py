"""Keys of the config that change while a run goes on, by phase of training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from verl.config import VerlConfig
from verl.engines.hybrid_3d import CHANGEABLE, check_change, require_3d_hybrid
from verl.errors import ConfigError, nearest
from verl.registry import load_object
from verl.run.saving import FromLeader
from verl.runtime.rank import engine_section, shares_reference
from verl.runtime.roles import Roles

log = logging.getLogger(__name__)

# how a key may begin -> the role whose engine it is for
_PLACES = {
    "": "actor",
    "fsdp_config.": "actor",
    "actor_model.fsdp_config.": "actor",
    "actor_rollout_ref.actor.fsdp_config.": "actor",
    "actor_rollout_ref.ref.fsdp_config.": "reference",
    "critic.fsdp.": "critic",
    "critic.fsdp_config.": "critic",
}
_AT_THE_END = 1 << 62  # a step behind all phases


class Scheduler(Protocol):
    def values(self, step: int) -> Mapping[str, Any]:
        """The keys that have another value than in the config while `step` (counted from 1) trains. It is asked before each
        step; a run that resumes asks for the step that it resumes with."""
        ...


class DynamicConfigScheduler:
    """Phases of training.

        DynamicConfigScheduler([
            {"from_step": 1, "changes": {"batch_group_size": 1}},
            {"from_step": 101, "changes": {"batch_group_size": 4}},
            {"from_step": 5001, "changes": {"enable_chunked_attention": False}},
        ])

    A value holds from its step on, until another phase changes it. Keys are those that may change (batch_group_size,
    enable_chunked_attention, chunk_size), of the actor, or whole as critic.fsdp.batch_group_size. Raises ConfigError for
    anything else.
    """

    def __init__(self, phases: Sequence[Mapping[str, Any]] = ()):
        for number, phase in enumerate(phases):
            _check_phase(number, phase)
        self._phases = sorted(((p["from_step"], dict(p["changes"])) for p in phases), key=lambda phase: phase[0])
        self._set: dict[str, Any] = {}

    def set(self, changes: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Other values from the next step on, whatever the phases say; not remembered by a run that resumes."""
        given = {**(changes or {}), **named}
        by_role(given)
        self._set.update(given)

    def values(self, step: int) -> dict[str, Any]:
        """See Scheduler."""
        found: dict[str, Any] = {}
        for from_step, changes in self._phases:
            if from_step <= step:
                found.update(changes)
        return {**found, **self._set}


def scheduler_of(config: VerlConfig) -> Scheduler | None:
    """What trainer.dynamic_config or trainer.dynamic_config_scheduler asks for; None without either."""
    trainer = config.trainer
    if trainer.dynamic_config_scheduler is None:
        return DynamicConfigScheduler(trainer.dynamic_config) if trainer.dynamic_config else None
    if trainer.dynamic_config:
        raise ConfigError("trainer.dynamic_config and trainer.dynamic_config_scheduler are both set; keep one of them.")
    found = load_object(trainer.dynamic_config_scheduler)
    if not callable(getattr(found, "values", None)) or isinstance(found, type):
        raise ConfigError(
            f"trainer.dynamic_config_scheduler={trainer.dynamic_config_scheduler} must name an object with a method "
            "values(step), such as a DynamicConfigScheduler."
        )
    scheduler: Scheduler = found
    return scheduler


class Phases:
    """Brings what `scheduler` says to the engines of `roles`; every process of a run does as the leading one's says. A key of
    which nothing is said any more, or not yet after a step back, has its value of `config` again.

    Raises ConfigError at once when a phase to come changes what cannot change in this run.
    """

    def __init__(self, scheduler: Scheduler, roles: Roles, config: VerlConfig, from_leader: FromLeader):
        self.scheduler, self.roles, self.config, self.from_leader = scheduler, roles, config, from_leader
        self._now: dict[str, dict[str, Any]] = {}
        if isinstance(scheduler, DynamicConfigScheduler):
            for role, wanted in by_role(scheduler.values(_AT_THE_END)).items():
                self._require_changeable(role, wanted)

    def begin(self, step: int) -> None:
        """Before `step`. Raises ConfigError for a key or value that cannot be."""
        said = by_role(self.from_leader(dict(self.scheduler.values(step))))
        for role in {**self._now, **said}:
            now, section = self._now.get(role, {}), engine_section(self.config, role)
            wanted = {**{name: getattr(section, name) for name in now}, **said.get(role, {})}
            changes = {name: value for name, value in wanted.items() if name not in now or now[name] != value}
            if not changes:
                continue
            self._require_changeable(role, changes)
            getattr(self.roles, role).reconfigure(changes)
            self._now[role] = wanted
            log.info("From step %d on, %s: %s", step, role, ", ".join(f"{n}={v}" for n, v in changes.items()))

    def figures(self) -> dict[str, float]:
        """The values in force, as metrics."""
        return {
            f"training/dynamic_config/{role}/{name}": float(value)
            for role, values in self._now.items()
            for name, value in values.items()
        }

    def _require_changeable(self, role: str, names: Mapping[str, Any]) -> None:
        if getattr(self.roles, role) is None:
            raise ConfigError(f"{', '.join(names)} cannot change for {role}: this run has no such role.")
        if role == "reference" and shares_reference(self.config):
            raise ConfigError(
                f"{', '.join(names)} cannot change for the reference policy, which with LoRA is the actor without adapters; "
                "change the actor's."
            )
        require_3d_hybrid(engine_section(self.config, role), names)


def by_role(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Role -> its changes, under the short names. Raises ConfigError for a key that cannot change, or a wrong value."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        place, dot, name = key.rpartition(".")
        role = _PLACES.get(place + dot)
        if role is None:
            hint = nearest(key, [p + n for p in _PLACES for n in CHANGEABLE]) or "."
            raise ConfigError(f"{key} is no key that can change while training runs{hint}")
        check_change({name: value})
        found.setdefault(role, {})[name] = value
    return found


def _check_phase(number: int, phase: Any) -> None:
    place = f"trainer.dynamic_config[{number}]"
    if not isinstance(phase, Mapping) or set(phase) != {"from_step", "changes"}:
        raise ConfigError(f"{place} must be {{from_step: N, changes: {{key: value}}}}, not {phase!r}.")
    if type(phase["from_step"]) is not int or phase["from_step"] < 1:
        raise ConfigError(f"{place}: from_step={phase['from_step']!r} must be a whole number of at least 1.")
    if not isinstance(phase["changes"], Mapping):
        raise ConfigError(f"{place}: changes must be a mapping of keys to values, not {phase['changes']!r}.")
    by_role(phase["changes"])
