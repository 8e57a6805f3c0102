"""New weights for the rollout of one rank: its copy, the transfer from ranks that train, the switch to generation and back.

sync(version)       weights reach the rollout: they are its own already, or a transfer plan runs, or they are gathered whole
end_generation()    the rollout keeps the weights that it was sent; the rank returns to the state that training left
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verl.config import ModelConfig, full_key
from verl.distributions import load_part, require_part
from verl.engines.api import TrainEngine, gather_adapters
from verl.engines.loading import build_module
from verl.errors import ConfigError
from verl.families import engine_facts
from verl.models.decoder.reuse import lend_records
from verl.models.hf_module import HFModule
from verl.models.load import load_external, meta_model
from verl.models.padded import require_packed
from verl.models.rounding import Rounding
from verl.models.vision import is_vision_model
from verl.parallel.collectives import Collectives
from verl.parallel.device import compute_dtype
from verl.reshard.grouping import consecutive_engines
from verl.reshard.layout import RolloutLayout, TrainingLayout
from verl.reshard.update import PlannedUpdate, plan_update
from verl.roles.rollout import RolloutWorker
from verl.rollout.api import Weights
from verl.rollout.rollout_model import Replica
from verl.runtime.mode_switch import ModeSwitch, SwitchMemory
from verl.runtime.rank import POLICY, RankContext
from verl.specs import RolloutSpec

if TYPE_CHECKING:
    from verl.reshard.delivery import Delivery

ENGINE_TRANSFER = "verl.reshard.engine_transfer"


def load_replica(spec: RolloutSpec, device: torch.device, group: dist.ProcessGroup | None) -> Replica:
    """A copy of the policy in the compute dtype, only for generation; divided over `group`, if there is one. Weights
    are rounded as in a policy that trains, and adapters are merged in."""
    place = device if group is None else torch.device("cpu")  # all of a divided model may not fit the device
    dtype, rounding = compute_dtype(spec.dtype, device), Rounding(spec.rounding)
    module = build_module(spec.model, "lm", place, dtype, rounding, trains=False)
    if group is not None:
        require_packed(module, "rollout.tensor_model_parallel_size")
        if is_vision_model(module):
            raise ConfigError(
                "A vision-language model generates whole on each device. Set "
                f"{full_key('rollout.tensor_model_parallel_size')}=1."
            )
    replica = Replica(module, group)
    module.to(device)
    return replica


def skeleton(model: ModelConfig, dtype: torch.dtype) -> HFModule:
    """The policy on the meta device: configurations and shapes, no values."""
    load_external(model.external_lib)
    return meta_model(model, dtype)


log = logging.getLogger(__name__)


class RankWeightSync:
    """The WeightSync of one rank; all ranks of a run call `sync` together. `engine` trains the policy on this rank, None if
    another rank does. `comm` is None in a run of one process."""

    def __init__(self, context: RankContext, comm: Collectives | None, engine: TrainEngine | None):
        self.context = context
        self.comm = comm
        self.engine = engine
        self.switch = ModeSwitch(engine, context.rollout.section, context.device, gives_back=context.has_own_weights)
        self.rollout: RolloutWorker | None = None
        self.memory: SwitchMemory | None = None  # None: nothing is copied
        self._sync_s = 0.0  # of the last sync
        self.update: PlannedUpdate | None = None  # None: there is one set of weights, or all of them are gathered
        self.delivery: Delivery | None = None  # None: the engine has no copy of the weights
        if context.has_own_weights and not context.shares_weights:
            require_part(ENGINE_TRANSFER, "A rollout engine with a copy of the weights")
            trains = context.placement.devices[POLICY]
            self.delivery = load_part(ENGINE_TRANSFER).make_delivery(
                context.rollout, context.specs.run, context.device, context.engine_plan, comm, trains
            )

    def connect(self, rollout: RolloutWorker | None) -> None:
        """The rollout of this rank, None without one. Plans the transfer, with all ranks."""
        self.rollout = rollout
        context = self.context
        if self.comm is not None and not context.shares_weights and not context.has_own_weights:
            training, layout = layouts(context)
            replica = None if rollout is None else rollout.replica
            self.update = plan_update(
                self.comm, training, layout, engine=self.engine, replica=replica, device=context.device
            )
        if not context.shares_weights:
            self.memory = SwitchMemory(context.device, self._weight_bytes())
        if self.delivery is not None:
            self.delivery.connect()

    def sync(self, version: int, weights: Weights | None = None) -> None:
        """See WeightSync. A rank in no process group gets all `weights`, by name."""
        began = time.perf_counter()
        with nullcontext() if self.comm is None else self.comm.doing("weights.sync"):
            self.switch.to_generation()
            if self.context.has_own_weights:  # the transfer needs memory for them
                self._free_training_memory()
            with nullcontext() if self.memory is None else self.memory.measuring():
                self._transfer(version, weights)
            self._free_training_memory()
        self._sync_s = time.perf_counter() - began

    def _free_training_memory(self) -> None:
        """On all ranks, before one continues: an engine process allocates memory on devices of other ranks, too."""
        self.switch.free_training_memory()
        if self.comm is not None and self.context.has_own_weights:
            self.comm.any(False)

    def end_generation(self) -> dict[str, float]:
        """Generation has ended and the KV cache is freed; returns the memory of the last switch and what the last sync moved.
        Raises ModelError when weights have changed since `sync`."""
        if self.update is not None:
            self.update.check_held()  # before a sample trains that other weights have made
        self.switch.to_training()
        return {} if self.memory is None else {**self.memory.metrics(), **self._moved()}

    def _moved(self) -> dict[str, float]:
        """Of the last sync: GB that this rank received from others or its service fetched, GB copied for engines, seconds."""
        received = copied = 0
        if self.update is not None:
            received = self.update.plan.received_bytes.get(self.context.rank, 0)
        elif self.delivery is not None:
            delivery = self.delivery
            received, copied = delivery.num_received_bytes, delivery.num_copied_bytes + delivery.num_other_bytes
            received += getattr(self.rollout and self.rollout.engine, "num_fetched_bytes", 0)
        return {"sync_gb": received / 1e9, "sync_copied_gb": copied / 1e9, "sync_s": self._sync_s}

    def describe(self) -> str | None:
        """The way of the weights, for the header of a run; None if there is one set of them."""
        if self.update is not None:
            return f"by a plan of slices, {len(self.update.plan.received_bytes)} ranks receive some"
        return None if self.delivery is None else self.delivery.describe()

    def _weight_bytes(self) -> int:
        """Bytes of the weights that this rank generates with, or of the full model if another process generates, or none."""
        if self.rollout is not None and self.rollout.replica is not None:
            return sum(p.nbytes for p in self.rollout.replica.module.parameters())
        if self.engine is None:
            return 0
        layout = self.engine.weight_layout()
        return 0 if layout is None else sum(map(math.prod, layout.shapes.values())) * layout.dtype.itemsize

    def _transfer(self, version: int, weights: Weights | None) -> None:
        way = (
            "are shared" if self.context.shares_weights else "come by plan" if self.update is not None else "come whole"
        )
        log.debug("Weights of version %d %s.", version, way)
        if self.update is not None:
            self.update()
            if self.engine is not None and self.rollout is not None and self.rollout.replica is not None:
                lend_records(self.rollout.replica.module, self.engine.module)
        elif self.delivery is not None and weights is None:
            by_name, engine = self.context.rollout.section.adapters_by_name, self.engine
            gathered: Weights = ()
            if engine is not None:
                gathered = gather_adapters(engine) if by_name else engine.gather_weights()
            weights = self._delivered(self.delivery, gathered)
        if self.rollout is not None:
            self.rollout.set_weights(version, weights)
        for _ in weights or ():  # a rank that trains and does not generate takes part
            pass

    def _delivered(self, delivery: Delivery, gathered: Weights) -> Weights | None:
        """The weights for the engine of this rank; None if the rank has taken part already."""
        rollout = self.context.rollout.section
        if rollout.adapters_by_name or not engine_facts(rollout.name).takes_buckets:
            return delivery.tensors(gathered)
        if self.rollout is not None and self.context.engine_plan.runs_engine(self.context.rank):
            return gathered
        delivery.probe(None)
        for _ in delivery(gathered):
            pass
        return None


def layouts(context: RankContext) -> tuple[TrainingLayout, RolloutLayout]:
    """Layouts of the policy in training, and in the rollout replicas. The ranks of a replica divide the experts."""
    copies = context.rollout_mesh()
    engines = consecutive_engines(copies.ranks, dict(copies.axes)["tp"])
    return context.training_layout(POLICY), RolloutLayout(engines, expert_groups=engines)
