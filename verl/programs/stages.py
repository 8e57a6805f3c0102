"""User-defined stages between the phases of PPO: online filters, extra columns, records of earlier prompts.

    algorithm:
      stages: [stages.py:keep_long_answers, {path: "stages.py:DropSolved", after: 3}]

Stages run in the order of the list, in every process that runs the program, on equal rows. So that a run repeats, a stage
depends only on its rows, the step and its state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.data_proto.proto import DataProto
from verl.data_proto.stored_column import copied
from verl.errors import ConfigError
from verl.registry import load_object
from verl.tracking.ledger.records import keys_of
from verl.user_objects import require_call

Call = Callable[[DataProto, int], DataProto]


class Stage:
    """Base of a stage with settings or state. A plain function `stage(batch, step)` is a stage that defines `scored`.

    Columns of a batch are in docs/stages.md. Methods return the rows that continue: the rows of `batch`, or some of them, with
    changed or further columns. They do not return rows twice, nor rows of earlier steps.
    """

    def __init__(self, **settings: object):
        """`settings` are the entries of the config other than `path`."""
        if settings:
            raise TypeError(f"{type(self).__name__} takes no settings, but got {', '.join(settings)}")

    def scored(self, batch: DataProto, step: int) -> DataProto:
        """Called with each generation batch after its rewards. Prompts are added until as many groups remain as a step has."""
        return batch

    def credited(self, batch: DataProto, step: int) -> DataProto:
        """Called once a step, after advantages and before the update."""
        return batch

    def state_dict(self) -> dict[str, object]:
        """State that a resumed run needs, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take the state of a checkpoint; called before the first step of a resumed run."""


class Stages:
    """The stages that `algorithm.stages` names, loaded once. Raises ConfigError for a stage that cannot be made."""

    def __init__(self, entries: Sequence[object]):
        self._stages = [(name, _make(name, settings)) for name, settings in map(_named, entries)]

    def scored(self, batch: DataProto, step: int) -> DataProto:
        """`batch` after `scored` of every stage. Raises ConfigError when a stage raises, or returns other rows."""
        return self._apply("scored", [(name, stage.scored) for name, stage in self._stages], batch, step)

    def credited(self, batch: DataProto, step: int) -> DataProto:
        """`batch` after `credited` of every stage. Raises ConfigError as `scored`, and when no row is left."""
        return self._apply("credited", [(name, stage.credited) for name, stage in self._stages], batch, step)

    def _apply(self, point: str, calls: Sequence[tuple[str, Call]], batch: DataProto, step: int) -> DataProto:
        columns = {} if batch.batch is None else {key: copied(value) for key, value in batch.batch.items()}
        batch = DataProto.from_dict(columns, batch.non_tensor_batch, batch.meta_info)  # stages may write to columns
        for name, call in calls:
            before = batch
            try:
                batch = call(batch, step)
            except Exception as error:  # a user's stage may raise anything
                raise ConfigError(
                    f"algorithm.stages: {name} failed in step {step} ({point}): {type(error).__name__}: {error}"
                ) from error
            _check(name, point, batch, before)
        return batch

    def state_dict(self) -> list[dict[str, object]]:
        """One entry per stage, in order."""
        return [stage.state_dict() for _, stage in self._stages]

    def load_state_dict(self, states: Sequence[Mapping[str, object]]) -> None:
        """Raises ConfigError when the checkpoint was saved with another number of stages."""
        if len(states) != len(self._stages):
            raise ConfigError(
                f"The checkpoint has the state of {len(states)} stages, but algorithm.stages lists {len(self._stages)}. Resume "
                "with the same stages, or start a new run from its weights."
            )
        for (_, stage), state in zip(self._stages, states, strict=True):
            stage.load_state_dict(state)


class _Function(Stage):
    """A plain function as a stage."""

    def __init__(self, function: Any):
        self.scored = function  # type: ignore[method-assign]


def _named(entry: object) -> tuple[str, dict[str, object]]:
    """(path, settings) of an entry of the config."""
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and isinstance(entry.get("path"), str):
        return entry["path"], {name: value for name, value in entry.items() if name != "path"}
    raise ConfigError(
        f"algorithm.stages: {entry!r} is neither path/to/file.py:name nor {{path: path/to/file.py:name, setting: value}}."
    )


def _make(name: str, settings: dict[str, object]) -> Stage:
    stage = load_object(name)
    if isinstance(stage, type) and issubclass(stage, Stage):
        try:
            return stage(**settings)
        except Exception as error:  # a user's class may raise anything
            raise ConfigError(f"algorithm.stages: {name} cannot be made: {type(error).__name__}: {error}") from error
    if isinstance(stage, type) or not callable(stage) or settings:
        raise ConfigError(
            f"algorithm.stages: {name} must be a function stage(batch, step), without settings, or a subclass of "
            "verl.programs.stages.Stage."
        )
    require_call(f"algorithm.stages: {name}", stage, "batch", "step")
    return _Function(stage)


def _check(name: str, point: str, batch: object, before: DataProto) -> None:
    if not isinstance(batch, DataProto):
        raise ConfigError(
            f"algorithm.stages: {name} ({point}) returned {type(batch).__name__}; it must return the DataProto."
        )
    if len(batch) > len(before) or not set(_keys(before)).issuperset(_keys(batch)):
        raise ConfigError(
            f"algorithm.stages: {name} ({point}) returned rows that it was not given. Return rows of the batch, for instance "
            "batch.select_idxs(indices)."
        )
    if point == "credited" and not len(batch):
        raise ConfigError(
            f"algorithm.stages: {name} (credited) left no row to train on. Leave rows out in scored: others replace them."
        )


def _keys(batch: DataProto) -> list[object]:
    return list(keys_of(batch))
