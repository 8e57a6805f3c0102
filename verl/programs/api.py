"""The contract between the host (verl/run) and a program: PPO, SFT, preferences, reward models, distillation.

    config ──► Program.select ──► load_data ──► roles ──► Program(config, data, roles, run) ──► step, step, ...

The host does what all programs share: runtime and roles, the loop, validation and saving on schedule, resuming, metrics on
disk, the console, interruption, the run folder. A program declares its roles and takes one step. It is the same code in one
process, under torchrun (every rank runs it) and on Ray (the driver runs it). A new program is a class with the methods of
`Program`, and a row in `PROGRAMS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from verl.config import SCHEMAS, RunConfig, schema_of
from verl.config.schema import value_at
from verl.config.secrets import remember_secrets
from verl.data_proto.tokenizer import Tokenizer
from verl.families import ADVANTAGES, AGENT_LOOPS, POLICY_LOSSES, REWARD_MANAGERS, TOOL_PARSERS
from verl.registry import Registry, load_object

if TYPE_CHECKING:
    from verl.checkpoint.store import CheckpointWriter
    from verl.roles.api import Broadcast, Roles, RoleSpecs
    from verl.roles.guards import RollBack
    from verl.tracking.console import StepMetrics
    from verl.tracking.files import Check
    from verl.tracking.run_folder import Curves
    from verl.tracking.summary import Result
    from verl.tracking.timeline import SpanPhases, Spans

C = TypeVar("C", bound=RunConfig)  # the config tree of a program

# name that an entry point gives to verl.run.host.train -> class of the program; also `path/to/file.py:Class`
PROGRAMS = Registry(
    "program",
    {
        "ppo": "verl.programs.ppo_async:AsyncPPO",
        "rejection_sampling": "verl.programs.rejection:RejectionSampling",
        "online_dpo": "verl.programs.online_preference:OnlinePreference",
        "rm": "verl.programs.reward_model:RewardModelProgram",
        "sft": "verl.programs.sft:SFT",
        "preference": "verl.programs.preference:PreferenceOptimization",
    },
    base="verl.programs.api:Program",
)


@dataclass(frozen=True)
class StepResult:
    """The outcome of one training step.

    `metrics` are written to metrics.jsonl under these names. `num_tokens` counts the tokens of all rows that trained, prompt
    and response. `rows` makes the rows of samples/train/{step}.jsonl; only the rank that writes them calls it. `span_tokens`
    gives the tokens that a span has worked on, for timing_per_token_ms/{span}. `skipped` is the reason why nothing trained.

    >>> StepResult({"critic/score/mean": 0.5}, num_tokens=4096, span_tokens={"gen": 2048}).num_tokens
    4096
    """

    metrics: dict[str, float]
    num_tokens: int
    rows: Callable[[], Iterable[dict[str, Any]]] = list
    span_tokens: Mapping[str, int] = field(default_factory=dict)
    skipped: str = ""


@dataclass(frozen=True)
class RunContext:
    """The host's services for a program. In a run under torchrun every rank has one; one of them is rank 0 and writes files.

    `broadcast(value)` returns rank 0's value on all ranks that run the program. `check_stop()` raises when a stop was
    requested; a program calls it between phases, before any weight of the step has changed. `spans(name)` times a phase.
    `log_samples(split, step, rows)` writes rows to samples/{split}/{step}.jsonl. `total_steps` is the length of the run.
    """

    folder: Path
    is_rank_zero: bool
    broadcast: Broadcast
    check_stop: Callable[[], None]
    spans: Spans
    log_samples: Callable[[str, int, list[dict[str, object]]], None]
    total_steps: int = 1


class ProgramData(Protocol):
    """The data of a run, read and checked before any model is loaded. It may also have `inputs`, the digests of files that rows
    name, see verl/run/inputs.py, and `num_rows`, the rows that train."""

    tokenizer: Tokenizer

    @property
    def num_steps(self) -> int:
        """Training steps of the run."""
        ...

    @property
    def num_steps_per_epoch(self) -> int:
        """Training steps of one pass over the data, for `after_each_epoch`."""
        ...

    @property
    def has_validation(self) -> bool:
        """Whether `validate` has rows to work on."""
        ...

    @property
    def data_sources(self) -> list[str]:
        """Names of data sources, for reward functions; empty without rewards."""
        ...


class Program(ABC, Generic[C]):
    """One kind of training. Subclasses define the abstract methods; all further methods are optional.

    The constructor takes `(config, data, roles, run)`: the config tree, the result of `load_data`, the roles that the runtime
    has built, and a RunContext. For evaluation (`train=False` in `roles` and `load_data`) only `validate` is called.
    """

    # metric -> (short name, format) for the line of a step on the console; metrics that are absent are left out
    console_metrics: ClassVar[StepMetrics] = {}
    # title of a panel -> metric -> label, for the learning curve and `verl show`; the most important panel first
    curves: ClassVar[Curves] = {}
    # timed span -> (phase, role that is busy in it), for the timeline; other spans count as "other"
    span_phases: ClassVar[SpanPhases] = {}
    # key of `state_dict` -> check of its value in a checkpoint, from verl/tracking/files.py; a checkpoint that fails is refused
    state_schema: ClassVar[Mapping[str, Check]] = {}
    # "validation" and "checkpoint", if the last step requests one in addition to the schedule
    requests: frozenset[str] = frozenset()
    # whether it validates and saves behind its last step, whatever the keys of the schedule
    ends_with_checkpoint: ClassVar[bool] = False
    # words of the header for "validation" and "checkpoints" that the program adds to the schedule of the keys
    schedule: Mapping[str, str] = {}

    @classmethod
    def select(cls, config: C) -> type[Program[Any]]:
        """The class that trains with `config`, for a program with variants."""
        return cls

    @classmethod
    @abstractmethod
    def load_data(cls, config: C, *, train: bool = True) -> ProgramData:
        """Read and check the data files. Raises DataError or ConfigError, before any model is loaded."""

    @classmethod
    @abstractmethod
    def roles(cls, config: C, *, train: bool = True) -> RoleSpecs:
        """The roles to build. They depend only on the config, since every process of a run calls this method. Without `train`:
        only the roles that `validate` uses, frozen."""

    @abstractmethod
    def __init__(self, config: C, data: object, roles: Roles, run: RunContext): ...

    @abstractmethod
    def step(self, step: int) -> StepResult:
        """Training step `step`, counted from 1. When it raises, `state_dict` is as it was before the call."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Metrics on the held-out rows after `step` (0: before training). Called only when the data has validation rows."""

    def fingerprint(self, metrics: Mapping[str, float]) -> object:
        """A value of the newest validation, with these `metrics`, that stays equal only if the weights hardly move; None
        without such a value."""
        return None

    def drain(self) -> None:
        """Return when nothing is in flight. Called before a checkpoint."""

    def state_dict(self) -> dict[str, object]:
        """The state that a resumed run needs in addition to the weights, as JSON. trainer_state.json has it next to the host's
        keys (step, seconds, num_tokens, first_validation); it must not use those."""
        return {}

    def load_state_dict(
        self, state: Mapping[str, object] | None, checkpoint: Path | None, rolled_back: RollBack | None = None
    ) -> None:
        """Start, or start again: called once before the first step, and after each RollBack. The weights of the roles are in
        place. `state` holds all keys of trainer_state.json of the folder `checkpoint`; both are None for a fresh run."""

    def move_records(self, folder: Path) -> None:
        """Copy to `folder` the files that this program writes next to checkpoints and needs to resume. The run folder was
        lost, and its last checkpoint is saved in `folder`."""

    def checkpoint_writers(self) -> Mapping[str, CheckpointWriter]:
        """Further folders of a checkpoint: name -> its writer. Called after `drain`."""
        return {}

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a finished step, the host's included; for warnings."""

    def header(self) -> dict[str, object]:
        """Facts for the header of the run, by name."""
        return {}

    def results(self, before: Mapping[str, float], after: Mapping[str, float]) -> Sequence[Result]:
        """Rows of the closing table and of summary.json, from the metrics of the first and of the last validation."""
        return ()

    def close(self) -> None:
        """Release files and threads. May be called after an error."""


class DeclaresRoles(Protocol):
    """The part of a program class that makes specs."""

    @classmethod
    def roles(cls, tree: Any, /, *, train: bool = True) -> RoleSpecs:
        """See Program."""
        ...


@dataclass(frozen=True)
class ProgramSpecs:
    """The SpecSource of a run: a program with its config. Other processes import the program by its module and name."""

    program: type[DeclaresRoles] | str
    config: RunConfig

    def specs(self, *, train: bool = True) -> RoleSpecs:
        program = load_object(self.program) if isinstance(self.program, str) else self.program
        return program.roles(self.config, train=train)

    def recipe(self) -> tuple[object, ...]:
        assert not isinstance(self.program, str)
        schema, name = schema_of(self.config), f"{self.program.__module__}:{self.program.__qualname__}"
        registered = {place: registry.own_rows() for place, registry in _OPEN.items()}
        return f"{__name__}:specs_of_recipe", name, schema.name, schema.flatten(self.config), registered


# registries with functions and classes of scripts; the other processes of a run need them too
_OPEN = {
    registry.family: registry for registry in (ADVANTAGES, POLICY_LOSSES, REWARD_MANAGERS, TOOL_PARSERS, AGENT_LOOPS)
}


def specs_of_recipe(
    program: str, schema: str, values: Mapping[str, object], registered: Mapping[str, Mapping[str, str]]
) -> ProgramSpecs:
    """The ProgramSpecs of a recipe, in another process. Logs do not show secrets of the config from here on."""
    config = SCHEMAS[schema].build(values)
    remember_secrets(config)
    load_plugins(config)
    for family, rows in registered.items():
        for name, reference in rows.items():
            if name not in _OPEN[family] or _OPEN[family].is_built_in(name):
                _OPEN[family].set(name, reference)
    return ProgramSpecs(program, config)


def load_plugins(config: RunConfig) -> None:
    """Import the modules of `model.external_lib`: they may register functions and classes that the config names."""
    from verl.models.load import load_external

    for section in ("actor_rollout_ref.model", "model"):
        load_external(value_at(config, f"{section}.external_lib"))
