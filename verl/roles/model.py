"""A model of a run on one rank: a training engine and the objective it minimises, or a frozen engine that only computes."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from verl.checkpoint.background import RoleSave, write_and_report
from verl.checkpoint.role import RoleCheckpoint, read_role, require_parts
from verl.config import CheckpointConfig, StepGuardsConfig
from verl.data_proto.extras import EXPERTS, MEDIA_COLUMNS
from verl.data_proto.merge import object_array
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import TrainEngine
from verl.manifest import FileRecord
from verl.parallel.device import most_memory_allocated
from verl.parallel.process_settings import give_back_holes
from verl.parallel.register import Dispatch, Execute, register
from verl.parallel.serialize import record
from verl.parallel.trace import OF_PROCESS
from verl.parallel.traffic import TRAFFIC
from verl.registry import load_object
from verl.roles.api import RoleSpec
from verl.roles.guards import StepGuard
from verl.roles.objectives.function import FunctionLoss
from verl.roles.updates import MiniBatchSchedule, Updates, Utilization

log = logging.getLogger(__name__)

_NOT_READ = ("token_weight_version",)  # 8 of 38 bytes a token; some objectives read scores and rewards

record(FileRecord)


def require_saved(checkpoint: Path, spec: RoleSpec) -> None:
    """Raise CheckpointError when the role cannot resume from its part of the folder `checkpoint`, as far as files say."""
    contents = (spec.checkpoint or CheckpointConfig()).load_contents
    require_parts(checkpoint / spec.name, contents, spec.trains and spec.model.lora_rank > 0)


class ModelRole:
    """The worker of a RoleSpec; see ModelHandle for its calls. `hf_files` writes into a folder the files that
    `from_pretrained` needs in addition to the weights. `writes` is true on the one rank that writes the role's part of a
    checkpoint; `number` counts the ranks of the role. `followed` is the engine of the role that it follows. `utilization`
    counts operations if the device's peak is known."""

    def __init__(
        self,
        spec: RoleSpec,
        engine: TrainEngine,
        hf_files: Callable[[Path], None],
        *,
        writes: bool = True,
        number: int = 0,
        total_steps: int = 0,
        followed: TrainEngine | None = None,
        utilization: Utilization | None = None,
    ):
        self.spec = spec
        self.engine = engine
        self.guard = _guard_of(spec)
        self.objective = spec.objective(self.guard) if spec.objective is not None and spec.trains else None
        self.schedule = schedule_of(spec)
        self._hf_files = hf_files
        self._writes, self._number = writes, number
        self._total_steps = total_steps
        self._followed = followed
        self._utilization = utilization
        self._saving: RoleSave | None = None

    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False, objects=(*MEDIA_COLUMNS, EXPERTS))
    def forward(self, batch: DataProto, outputs: Mapping[str, str]) -> DataProto:
        """Columns of model outputs without gradient, float32: `outputs` maps an output of verl/engines/api.py to the name of
        its column. A role that shares an engine computes without its adapters. With router_replay=R2 the experts are
        recorded in the column `routed_experts`."""
        records: dict[int, np.ndarray] = {}
        with ExitStack() as stack:
            if self.spec.shares:
                stack.enter_context(self.engine.reference())
            if self.spec.router_replay == "R2":
                records = stack.enter_context(self.engine.routing.recording())
            columns = self.engine.forward(batch, tuple(outputs), self.spec.forward_micro, self.spec.temperature)
        named = {column: columns[output] for output, column in outputs.items()}
        if self.spec.router_replay != "R2":
            return DataProto.from_dict(named)
        return DataProto.from_dict(named, {EXPERTS: object_array([records.get(row) for row in range(len(batch))])})

    @register(Dispatch.ND_MINI_BATCHES, blocking=False, objects=(*MEDIA_COLUMNS, EXPERTS), left_out=_NOT_READ)
    def update(self, batch: DataProto, step: int, mini_batches: Sequence[Sequence[int]] | None = None) -> Updates:
        """All optimizer steps on `batch`; advances the learning-rate schedule by one, unless guards have refused all steps.

        `mini_batches` are the rows of each optimizer step; without them the role's own schedule decides.
        """
        assert self.objective is not None, "a frozen role is not updated"
        start = time.perf_counter()
        rows = self.schedule.rows(batch, step) if mini_batches is None else mini_batches
        log.debug("Step %d, %s: optimizer steps of %s rows", step, self.spec.name, [len(mini) for mini in rows])
        steps = [self._train(mini, step, index) for index, mini in enumerate(_mini_batches(batch, rows))]
        observed = self.objective.pop_observed()
        self._measure(step, steps)
        rate = self.engine.end_step(advance=not self.guard.refused_all(len(steps)))
        give_back_holes(step)
        findings, device = self.guard.pop_findings(), _device_metrics()
        if self._utilization is not None:
            device |= self._utilization.take(self.spec.name, time.perf_counter() - start)
        return Updates(self.spec.name, steps, rate, observed, findings, device)

    @register(dispatch_mode=Dispatch.ND_MINI_BATCHES, blocking=False, objects=(*MEDIA_COLUMNS, EXPERTS))
    def forward_backward(
        self,
        batch: DataProto,
        step: int,
        loss: str,
        outputs: Sequence[str] = ("log_probs",),
        mini_batches: Sequence[Sequence[int]] | None = None,
    ) -> Updates:
        function, metrics = FunctionLoss(load_object(loss)), []
        try:
            for rows in _mini_batches(batch, [range(len(batch))] if mini_batches is None else mini_batches):
                metrics.append(
                    self.engine.forward_backward(rows, function, outputs, self.spec.micro, self.spec.temperature)
                )
        except BaseException:  # gradients of a part of the rows are of no use
            self.engine.forget_gradients()
            raise
        return Updates(self.spec.name, metrics, lr=0.0)

    @register(dispatch_mode=Dispatch.ALL_REDUCE)
    def optim_step(self, learning_rate: float | None = None) -> dict[str, Metric]:
        metrics = self.engine.optim_step(learning_rate)
        rate = self.engine.end_step()
        return {**metrics, "lr": Metric.last(rate if learning_rate is None else learning_rate)}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def follow(self, share: float) -> None:
        """See ModelHandle; in float32, on each rank by itself, since both engines divide their weights alike."""
        assert self._followed is not None, "the role follows no other one"
        followed = self._followed.local_weights()
        for name, tensor in self.engine.local_weights().items():
            tensor.copy_(torch.lerp(tensor.to(torch.float32), followed[name].to(torch.float32), share))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, folder: str) -> dict[str, FileRecord] | None:
        """Write the role into the new folder `folder`; returns the records of its files on the rank that writes. All further
        ranks help to gather its tensors, and return None."""
        checkpoint = self._checkpoint()
        if self._writes:
            return checkpoint.write(Path(folder))
        checkpoint.take_part()
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_save(self, folder: str) -> None:
        """As `save`, but the rank that writes does so on a thread, from a copy; `folder` records the outcome. Without
        checkpoint.async_save of this role everything is written when this returns."""
        checkpoint = self._checkpoint()
        if not self._writes:
            checkpoint.take_part()
        elif self._checkpoint_config.async_save:
            self._saving = RoleSave(checkpoint.copied(), Path(folder))
        else:
            write_and_report(checkpoint, Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_save(self, timeout_s: float) -> None:
        """Return when the files of `start_save` are written. Raises DeadlineError."""
        if self._saving is not None:
            self._saving.end(timeout_s)
            self._saving = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def num_bytes_saved(self) -> int:
        """Bytes of the tensors that `save` writes."""
        return self._checkpoint().num_bytes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, checkpoint: str) -> None:
        """Resume from the role's part of the folder `checkpoint`, bit for bit. Raises CheckpointError when it has none, or
        when it does not fit the model."""
        require_saved(Path(checkpoint), self.spec)
        self.engine.forget_gradients()
        contents = self._checkpoint_config.load_contents
        self.engine.load_state(read_role(Path(checkpoint) / self.spec.name, contents))
        if self._writes and not {"optimizer", "extra"} <= set(contents):
            log.warning("Optimizer and learning rate of %s start over, see checkpoint.load_contents.", self.spec.name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reconfigure(self, changes: Mapping[str, object]) -> None:
        """See TrainEngine."""
        self.engine.reconfigure(changes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_trace(self, name: str) -> None:
        trace = self.spec.trace
        if trace is not None and (trace.ranks is None or self._number in trace.ranks):
            OF_PROCESS.start(trace.folder / f"{name}_rank_{self._number}.json", memory=trace.memory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_trace(self) -> None:
        OF_PROCESS.stop()

    @property
    def _checkpoint_config(self) -> CheckpointConfig:
        return self.spec.checkpoint or CheckpointConfig()

    def _train(self, mini: DataProto, step: int, index: int) -> dict[str, Metric]:
        """Optimizer step `index` of an update."""
        assert self.objective is not None
        self.objective.start_mini_batch((self.schedule.seed * 1_000_003 + step) * 1_009 + index, index)
        self.guard.start_mini_batch(index, len(mini))
        computed, outputs = self.schedule.computed(mini), tuple(self.objective.outputs)
        if self._utilization is not None:
            self._utilization.add(mini, computed)
        metrics = self.engine.train_batch(
            mini, self.objective, outputs, self.spec.micro, self.spec.temperature, self.guard,
            rows=computed,
            unit=self.schedule.unit,
        )  # fmt: skip
        if len(mini) and self.schedule.needed is not None:
            metrics["skipped_row_ratio"] = Metric.mean(1 - len(computed) / len(mini), len(mini))
        return metrics

    def _measure(self, step: int, steps: list[dict[str, Metric]]) -> None:
        """Add `visible_update_ratio` to the last of the metrics `steps`, in the steps that are measured."""
        every = self.spec.measure_every
        is_measured = step == self._total_steps or (every > 0 and step % every == 0)
        share = self.engine.visible_update_ratio() if steps and is_measured else None
        if share is not None:
            steps[-1]["visible_update_ratio"] = Metric.last(share)

    def _checkpoint(self) -> RoleCheckpoint:
        config = self._checkpoint_config
        return RoleCheckpoint(
            self.engine.state(), self._hf_files, config.save_contents, lora_only=config.save_lora_only
        )


def schedule_of(spec: RoleSpec) -> MiniBatchSchedule:
    """The mini-batches of a role, with the unit of its objective."""
    schedule = spec.schedule or MiniBatchSchedule()
    return schedule if spec.objective is None else replace(schedule, unit=spec.objective(_guard_of(spec)).unit)


def _device_metrics() -> dict[str, Metric]:
    """perf/*, the largest over ranks: memory in GB of this process, or of its allocator on a GPU, and milliseconds of an
    all-gather of parameters since the last update."""
    values = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 1e9}
    if torch.cuda.is_initialized():  # the device of this process
        device = torch.cuda.current_device()
        values["perf/max_memory_allocated_gb"] = most_memory_allocated(device) / 1e9
        values["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
        reserved = torch.cuda.memory_reserved(device)
        values["perf/memory_fragmentation"] = 1 - torch.cuda.memory_allocated(device) / reserved if reserved else 0.0
    gathers = TRAFFIC.take_gathers()
    if gathers.count:
        values["perf/all_gather_ms"] = gathers.mean_ms
    return {name: Metric.max(value) for name, value in values.items()}


def _guard_of(spec: RoleSpec) -> StepGuard:
    return StepGuard(spec.guards or StepGuardsConfig())


def _mini_batches(batch: DataProto, rows: Sequence[Sequence[int] | np.ndarray]) -> Iterator[DataProto]:
    """The rows of each optimizer step, one batch after the other."""
    for chosen in rows:
        is_batch = len(chosen) == len(batch) and bool(np.array_equal(chosen, np.arange(len(batch))))
        yield batch if is_batch else batch.select_idxs(np.asarray(chosen, dtype=np.int64))
