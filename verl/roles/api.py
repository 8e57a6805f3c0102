"""The roles of a run: their declarations by a program, and their handles for its calls.

    specs = RoleSpecs(models=(RoleSpec("model", "lm", ...),))     # a program declares, the runtime builds
    updates = roles.models["model"].update(batch, step).get()     # the same call in one process, under torchrun and on Ray
    roles.weights.sync(version)                                   # the rollout gets the trained weights

A model role is an engine with an objective. Calls that may run in parallel return a future.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from verl.engines.api import MicroBatching

if TYPE_CHECKING:
    import torch

    from verl.config import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig, StepGuardsConfig
    from verl.config.sections.actor import QATConfig
    from verl.config.sections.deepspeed import DeepSpeedConfig
    from verl.config.sections.megatron import MegatronConfig
    from verl.data_proto.future import Future
    from verl.data_proto.metrics import Metric
    from verl.data_proto.proto import DataProto
    from verl.data_proto.samples import SamplingParams
    from verl.engines.api import BatchTotals
    from verl.manifest import FileRecord
    from verl.parallel.mesh import Mesh
    from verl.parallel.placement import Placement
    from verl.roles.guards import StepGuard
    from verl.roles.updates import MiniBatchSchedule, Updates
    from verl.specs import RewardSpec, RolloutSpec, RunSpec

Value = TypeVar("Value")
ENGINES_WITH_SETTINGS = ("megatron", "deepspeed")
_WHOLE = MicroBatching()  # all rows at once


def _nothing() -> None:
    pass


class Objective:
    """The loss of a model role. Subclasses set `outputs` and define `__call__`.

    `outputs` names the model outputs that it reads (verl/engines/api.py). `unit` is "row", or a column: rows with equal values
    in it stay in one micro-batch and on one rank (the two rows of a preference pair).
    """

    outputs: Sequence[str] = ("log_probs",)
    unit: str = "row"

    def __call__(
        self, outputs: dict[str, torch.Tensor], batch: DataProto, totals: BatchTotals
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Loss and metrics of one micro-batch. The loss is a sum divided by `totals`, the totals of the mini-batch over all
        ranks, so that micro-batch losses add up. `outputs` are [batch, response] with gradient, zero outside response_mask; the
        outputs of a sequence head are [batch]."""
        raise NotImplementedError

    def start_mini_batch(self, seed: int, index: int) -> None:
        """Called before optimizer step `index` of an `update`. Random choices of the loss depend only on `seed`."""

    def pop_observed(self) -> list[torch.Tensor]:
        """Tensors that the objective kept during an `update`; Updates.observed concatenates the tensors of all ranks."""
        return []


@dataclass(frozen=True)
class TraceSpec:
    """Traces of torch.profiler in `folder`, written by `ranks` of a role, counted from 0; None: by all. With `memory` also
    snapshots of GPU memory."""

    folder: Path
    ranks: tuple[int, ...] | None = (0,)
    memory: bool = False


@dataclass(frozen=True)
class RoleSpec:
    """One model of a run. `name` is also its folder in a checkpoint: `huggingface/` in it opens with `from_pretrained`.

    `head`: "lm" (log-probs of tokens), "token_value" (a value per token) or "sequence_score" (a score per row). Without `optim`
    or `objective` the role is frozen. `shares` names a role: this one uses its engine without the LoRA adapters, as a frozen
    reference that costs no memory. `follows` names a role of the same layout: a frozen role can move towards its weights
    (ModelHandle.follow). `objective` is called with the role's StepGuard on each of its ranks, and on the controller, for its
    `unit`.
    """

    name: str
    head: str
    model: ModelConfig
    engine: FSDPConfig
    optim: OptimConfig | None = None
    objective: Callable[[StepGuard], Objective] | None = None
    shares: str | None = None
    follows: str | None = None
    strategy: str = "fsdp"  # the training engine when the role is on several devices
    settings: MegatronConfig | DeepSpeedConfig | None = None  # a section in addition to `engine`, see `settings_of`
    engine_keys: tuple[str, ...] = ()  # config paths of `engine`, the first one for messages; "" for bare keys
    micro: MicroBatching = _WHOLE  # of `update`
    forward_micro: MicroBatching = _WHOLE  # of `forward`
    temperature: float = 1.0  # logits are divided by it
    schedule: MiniBatchSchedule | None = None  # the rows of each optimizer step of an `update`
    checkpoint: CheckpointConfig | None = None
    checkpoints_to_keep: int | None = None  # None or 0: all; a run keeps as many as the role that wants most
    guards: StepGuardsConfig | None = None
    build: Callable[[], object] | None = None  # builds a user's model, in place of the model folder's; on one device
    freezes_vision_tower: bool = False  # its vision tower keeps its weights
    rounds: QATConfig | None = None  # its layers train in few bits (verl/models/qat.py); on one device
    memory_map: bool = False  # a frozen role's weights are in a file, mapped into memory (verl/engines/mapped.py)
    router_replay: str = "disabled"  # or R2, or R3: the experts for its training (verl/models/routing.py)
    trace: TraceSpec | None = None  # the traces of its ranks
    measure_every: int = 0  # steps from one visible_update_ratio to the next; the last step is always measured

    @property
    def trains(self) -> bool:
        return self.optim is not None and self.objective is not None

    @property
    def changes(self) -> bool:
        """Whether the role's weights can differ from the weights in its model's files."""
        return self.trains or self.follows is not None

    def describe_sharding(self, num_devices: int, *, without_gpus: bool) -> str:
        """The training engine and its policy, for the header of a run."""
        if num_devices > 1:
            adapters = f", LoRA of rank {self.model.lora_rank}" if self.trains and self.model.lora_rank else ""
            policy = (
                self.engine.describe(without_gpus=without_gpus) if self.settings is None else self.settings.describe()
            )
            return f"{self.strategy}, {policy}{adapters}"
        parts = [
            "none: one device",
            *([f"strategy={self.strategy} acts on several"] if self.settings is not None else []),
        ]
        return ", ".join([*parts, *self.engine.describe_dimensions()])


@dataclass(frozen=True)
class WorkerSpec:
    """A role with an object of the program's class as worker: `build(device, mesh)` makes it on each of the role's ranks, and
    `worker_class` registers its calls. Roles with the same `build` share the object on a shared rank. If the ranks train
    together, `engine` is the section of their engine, and `mesh` their arrangement; else it is None."""

    name: str
    worker_class: type
    build: Callable[[torch.device, Mesh | None], object]
    engine: FSDPConfig | None = None


def settings_of(section: Any) -> Any:
    """The section of the engine that `section.strategy` names; None for FSDP."""
    return getattr(section, section.strategy, None) if section.strategy in ENGINES_WITH_SETTINGS else None


@dataclass(frozen=True)
class RoleSpecs:
    """All roles of a run. `models` are built in this order, and the first model that trains is the model of the run.

    `rollout` declares the role that generates, `reward` the role that scores (if any), and `workers` roles of the program's
    classes. `place(num_devices)` assigns roles to devices; the number is a launcher's, or None.
    """

    models: tuple[RoleSpec, ...]
    place: Callable[[int | None], Placement]
    run: RunSpec
    rollout: RolloutSpec | None = None
    reward: RewardSpec | None = None
    workers: tuple[WorkerSpec, ...] = ()

    def model(self, name: str) -> RoleSpec | None:
        return next((spec for spec in self.models if spec.name == name), None)

    @property
    def names(self) -> set[str]:
        """Every role of the run."""
        named = {"rollout": self.rollout, "reward": self.reward, **{spec.name: spec for spec in self.workers}}
        return {*(spec.name for spec in self.models), *(name for name, spec in named.items() if spec is not None)}

    @property
    def main(self) -> RoleSpec | None:
        """The model that the run is for."""
        return next((spec for spec in self.models if spec.trains), None)


class Broadcast(Protocol):
    """Returns rank 0's value, in every process that runs the program."""

    def __call__(self, value: Value, /) -> Value: ...


class SpecSource(Protocol):
    """The source of a run's specs: a program with its config, see ProgramSpecs in verl/programs/api.py. Every process of a run
    has one, since specs hold functions and do not travel."""

    def specs(self, *, train: bool = True) -> RoleSpecs:
        """The roles to build. Without `train`: only the roles that an evaluation uses, frozen."""
        ...

    def recipe(self) -> tuple[object, ...]:
        """("module:function", arguments ...): another process makes its SpecSource from it."""
        ...


class ModelHandle(Protocol):
    """A model role (verl/roles/model.py), here or on other ranks."""

    def forward(self, batch: DataProto, outputs: Mapping[str, str]) -> Future[DataProto]:
        """Model outputs without gradient, float32: `outputs` maps the name of an output to the column that it becomes."""
        ...

    def update(self, batch: DataProto, step: int) -> Future[Updates]:
        """All optimizer steps on `batch`, and one step of the learning-rate schedule."""
        ...

    def forward_backward(
        self, batch: DataProto, step: int, loss: str, outputs: Sequence[str] = ("log_probs",)
    ) -> Future[Updates]:
        """Add the gradient of a loss function to the gradients since the last `optim_step`. `loss` is a reference to a
        function of the form of verl.roles.objectives.function. `step` seeds the role's schedule, as in `update`."""
        ...

    def optim_step(self, learning_rate: float | None = None) -> dict[str, Metric]:
        """One optimizer step on the gradients of `forward_backward`, at `learning_rate` or the schedule's rate, and one step of
        the schedule; returns grad_norm and lr."""
        ...

    def follow(self, share: float) -> object:
        """Move a frozen role's weights towards the weights of the role that it follows: own + share (other - own)."""
        ...

    def num_bytes_saved(self) -> int: ...

    def save(self, folder: str) -> list[dict[str, FileRecord] | None]:
        """Write the role into the new folder; returns the records of its files by rank, None for ranks that write nothing."""
        ...

    def start_save(self, folder: str) -> object:
        """As `save`, on a thread, from a copy."""
        ...

    def finish_save(self, timeout_s: float) -> object: ...

    def load(self, checkpoint: str) -> object:
        """Take the state of the role from the checkpoint folder, bit for bit."""
        ...

    def reconfigure(self, changes: Mapping[str, object]) -> object: ...

    def start_trace(self, name: str) -> object:
        """Start the traces `name`, on the ranks of the role's TraceSpec."""
        ...

    def stop_trace(self) -> object:
        """Write the traces that were started."""
        ...


class RolloutHandle(Protocol):
    """The role that generates (verl/roles/rollout.py)."""

    def generate(
        self, prompts: DataProto, *, step: int, params: SamplingParams, split: str = "train", limit: int | None = None
    ) -> Future[DataProto]:
        """`params.n` rows per prompt, samples of a prompt adjacent."""
        ...

    def advance(
        self, prompts: DataProto, rows: DataProto, step: int, params: SamplingParams, first: int, split: str, limit: int,
        due: int | None = None,
    ) -> Future[tuple[DataProto, DataProto]]:  # fmt: skip
        """Both in one generation: new samples of `prompts`, `first` tokens at most, and more tokens for unfinished `rows`. With
        `due` it pauses on each rank when samples of prompts before `due` have ended and a slot lacks a sample."""
        ...

    def end_generation(self, *, syncs: bool = False) -> Future[dict[str, Metric]]:
        """Free the KV cache if configured; returns the metrics of the generation since the last call. `syncs`: the weights are
        synced before the next generation."""
        ...

    def exact_log_probs(self) -> bool:
        """Whether the sampler's log-probs equal the training forward's log-probs to rounding."""
        ...


class RewardHandle(Protocol):
    """The role that scores samples (verl/roles/reward.py)."""

    def start_scoring(self, batch: DataProto) -> Future[object]:
        """Start to score the rows that are not being scored yet."""
        ...

    def collect(self, batch: DataProto) -> DataProto:
        """Wait for the scores: columns token_level_scores [batch, response], reward_parts, reward_error, is_scored."""
        ...

    def num_defaulted(self) -> int:
        """Samples of this run with a failed scorer."""
        ...


class WeightSync(Protocol):
    """Brings trained weights to the rollout engine, and switches the process from training to generation if it does both."""

    def sync(self, version: int) -> None:
        """Samples made from now on carry `version` and are made by the current weights. Every rank takes part."""
        ...


@dataclass
class Roles:
    """Handles of one run, made by a runtime; a program cannot tell the runtime. `rollout`, `reward` and `weights` are set if
    the program's RoleSpecs declare them."""

    models: dict[str, ModelHandle] = field(default_factory=dict)
    rollout: RolloutHandle | None = None
    reward: RewardHandle | None = None
    weights: WeightSync | None = None
    workers: dict[str, object] = field(default_factory=dict)  # groups of WorkerSpecs
    specs: tuple[RoleSpec, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # device, dtype, parameters, for the header
    num_devices: int = 1
    end: Callable[[], None] = _nothing

    def trained(self) -> dict[str, ModelHandle]:
        """Roles with changing weights, by name, in the order of saving."""
        return {spec.name: self.models[spec.name] for spec in self.specs if spec.changes}

    def close(self) -> None:
        """End every child process."""
        self.end()
