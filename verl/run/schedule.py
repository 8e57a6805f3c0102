"""Keys of the config that change during a run, by phase of training, and the times of validations and checkpoints."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from verl.config import RunConfig
from verl.config.sections.trainer import TrainerConfig
from verl.engines.hybrid_3d import CHANGEABLE, check_change, require_3d_hybrid
from verl.errors import ConfigError, nearest
from verl.registry import load_object
from verl.roles.api import Broadcast, Roles, RoleSpec

log = logging.getLogger(__name__)

_AT_THE_END = 1 << 62  # a step behind all phases


class PhaseScheduler(Protocol):
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

    A value holds from its step on, until another phase changes it. The keys are batch_group_size, enable_chunked_attention and
    chunk_size of the actor, or full keys such as critic.fsdp.batch_group_size. Raises ConfigError for anything else.
    """

    def __init__(self, phases: Sequence[Mapping[str, Any]] = ()):
        for number, phase in enumerate(phases):
            _check_phase(number, phase)
        self._phases = sorted(((p["from_step"], dict(p["changes"])) for p in phases), key=lambda phase: phase[0])
        self._set: dict[str, object] = {}

    def set(self, changes: Mapping[str, object] | None = None, **named: object) -> None:
        """Other values from the next step on, in place of the values of the phases; not remembered by a run that resumes."""
        merged = {**(changes or {}), **named}
        _check_changes(merged)
        self._set.update(merged)

    def values(self, step: int) -> dict[str, Any]:
        values: dict[str, object] = {}
        for from_step, changes in self._phases:
            if from_step <= step:
                values.update(changes)
        return {**values, **self._set}


def scheduler_of(config: RunConfig) -> PhaseScheduler | None:
    """The scheduler of trainer.dynamic_config or trainer.dynamic_config_scheduler; None without either."""
    trainer = config.trainer
    if trainer.dynamic_config_scheduler is None:
        return DynamicConfigScheduler(trainer.dynamic_config) if trainer.dynamic_config else None
    if trainer.dynamic_config:
        raise ConfigError("trainer.dynamic_config and trainer.dynamic_config_scheduler are both set; keep one of them.")
    loaded = load_object(trainer.dynamic_config_scheduler)
    if not callable(getattr(loaded, "values", None)) or isinstance(loaded, type):
        raise ConfigError(
            f"trainer.dynamic_config_scheduler={trainer.dynamic_config_scheduler} must name an object with a method "
            "values(step), such as a DynamicConfigScheduler."
        )
    return cast("PhaseScheduler", loaded)


class Phases:
    """Applies the values of `scheduler` to the engines of `roles`; every process of a run does as rank 0's scheduler says. A
    key that the scheduler does not name (any more, or not yet after a step back) has its value of the config again.

    Raises ConfigError at once when a phase to come changes a key that cannot change in this run.
    """

    def __init__(self, scheduler: PhaseScheduler, roles: Roles, broadcast: Broadcast):
        self.scheduler, self.roles, self.broadcast = scheduler, roles, broadcast
        self._specs = {spec.name: spec for spec in roles.specs}
        self._now: dict[str, dict[str, Any]] = {}
        if isinstance(scheduler, DynamicConfigScheduler):
            for role, changes in by_role(scheduler.values(_AT_THE_END), roles.specs).items():
                self._require_changeable(role, changes)

    def start_step(self, step: int) -> None:
        """Before `step`. Raises ConfigError for a key or value that is not possible."""
        changes_by_role = by_role(self.broadcast(dict(self.scheduler.values(step))), self.roles.specs)
        for role in {**self._now, **changes_by_role}:
            now, section = self._now.get(role, {}), self._specs[role].engine
            settings = {**{name: getattr(section, name) for name in now}, **changes_by_role.get(role, {})}
            changes = {name: value for name, value in settings.items() if name not in now or now[name] != value}
            if not changes:
                continue
            self._require_changeable(role, changes)
            self.roles.models[role].reconfigure(changes)
            self._now[role] = settings
            log.info("From step %d on, %s: %s", step, role, ", ".join(f"{n}={v}" for n, v in changes.items()))

    def metrics(self) -> dict[str, float]:
        """The values in force."""
        return {
            f"training/dynamic_config/{role}/{name}": float(value)
            for role, values in self._now.items()
            for name, value in values.items()
        }

    def _require_changeable(self, role: str, names: Mapping[str, object]) -> None:
        spec = self._specs[role]
        if spec.shares is not None:
            raise ConfigError(
                f"{', '.join(names)} cannot change for the {role}, which with LoRA is the {spec.shares} without adapters; "
                f"change the {spec.shares}'s."
            )
        require_3d_hybrid(spec.engine, names)


def by_role(values: Mapping[str, object], specs: Sequence[RoleSpec]) -> dict[str, dict[str, object]]:
    """Role -> its changes, under the short names. Raises ConfigError for a key of no role of the run, a key that cannot change,
    or a wrong value."""
    places = {f"{key}." if key else "": spec.name for spec in specs for key in spec.engine_keys}
    changes: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        place, dot, name = key.rpartition(".")
        role = places.get(place + dot)
        if role is None:
            hint = nearest(key, [p + n for p in places for n in CHANGEABLE]) or "."
            raise ConfigError(f"{key} is no key of this run that can change while training runs{hint}")
        check_change({name: value})
        changes.setdefault(role, {})[name] = value
    return changes


def _check_changes(changes: Mapping[str, object]) -> None:
    """Raise ConfigError for a key that cannot change in any role, or a wrong value."""
    check_change({key.rpartition(".")[2]: value for key, value in changes.items()})


def _check_phase(number: int, phase: object) -> None:
    place = f"trainer.dynamic_config[{number}]"
    if not isinstance(phase, Mapping) or set(phase) != {"from_step", "changes"}:
        raise ConfigError(f"{place} must be {{from_step: N, changes: {{key: value}}}}, not {phase!r}.")
    if type(phase["from_step"]) is not int or phase["from_step"] < 1:
        raise ConfigError(f"{place}: from_step={phase['from_step']!r} must be a whole number of at least 1.")
    if not isinstance(phase["changes"], Mapping):
        raise ConfigError(f"{place}: changes must be a mapping of keys to values, not {phase['changes']!r}.")
    _check_changes(phase["changes"])


def validation_times(trainer: TrainerConfig, step: int, added: str) -> str:
    """The times of validation, with the key of the time that is missing. `added`: times that the program adds."""
    before = "before training" if trainer.val_before_train else "trainer.val_before_train=True adds it before training"
    after = named_steps(trainer.test_freq) or added
    if step and after:  # a resumed run
        return after
    missing = after or "trainer.test_freq above 0 adds it after steps"
    return f"{before}; {missing}" if trainer.val_before_train or after else f"none: {before}, {missing}"


def named_steps(freq: int | str) -> str:
    """The steps of trainer.save_freq or test_freq; "" for none."""
    if isinstance(freq, str):
        return f"{freq.replace('_', ' ')} and at the end"
    if freq > 0:
        return f"every {freq} steps and at the end" if freq > 1 else "every step"
    return ""
