"""The workers of one process, and the calls on them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from verl.config.active_keys import quantized_keys
from verl.engines.api import TrainEngine
from verl.models.forward import computed_by
from verl.parallel import dev_shm
from verl.parallel.collectives import Collectives
from verl.parallel.device import make_current, visible_devices
from verl.parallel.numa import bind_near
from verl.parallel.serialize import from_bytes, to_bytes
from verl.parallel.torch_settings import run_settings
from verl.roles.reward import RewardWorker
from verl.roles.rollout import RolloutWorker
from verl.rollout.api import RolloutEngine
from verl.runtime.build import (
    build_models,
    build_reward,
    build_rollout,
    join_groups,
    rollout_group,
    set_determinism,
)
from verl.runtime.rank import POLICY, RankContext, require_packages, set_queues
from verl.runtime.weight_sync import RankWeightSync


class RankWorkers:
    """The workers of `context`, by role. All ranks of a run make theirs at the same time: engines of several ranks meet while
    they are made. `comm` is None in a run of one process."""

    def __init__(self, context: RankContext, comm: Collectives | None):
        self.context = context = _with_device_names(context, comm)
        self.comm = comm
        self.reward: RewardWorker | None = None
        self.rollout: RolloutWorker | None = None
        self.program_workers: dict[str, object] = {}  # workers of the program's classes
        self.weights: RankWeightSync | None = None
        set_queues(context.specs, context.placement.num_devices)
        make_current(context.device)
        if comm is not None:
            bind_near(context.device)
        try:
            self._build(context)
        except BaseException:
            self.close()
            raise

    @run_settings()
    def _build(self, context: RankContext) -> None:
        specs = context.specs
        require_packages(context)
        set_determinism(specs.run.deterministic)
        if self.comm is not None:
            spans = specs.rollout is not None and context.has_own_weights
            size = len(context.engine_plan.replicas[0].ranks) if spans else 1
            dev_shm.check_ranks(self.comm, size, context.device.type == "cuda")
        if specs.reward is not None and context.holds("reward"):
            # before the models: a wrong reward function costs no model load
            self.reward = build_reward(context, specs.reward)
        self.models = build_models(context)
        worker_of = cache(lambda build, mesh: build(context.device, mesh))
        for spec in specs.workers:
            mesh = context.worker_mesh(spec)
            if context.holds(spec.name):
                self.program_workers[spec.name] = worker_of(spec.build, mesh)
            elif mesh is not None and spec.engine is not None:
                join_groups(context, mesh, spec.engine)
        if specs.rollout is not None:
            policy, group = self.models.get(POLICY), rollout_group(context)
            weights = self.weights = RankWeightSync(context, self.comm, None if policy is None else policy.engine)
            if context.holds("rollout"):
                self.rollout = build_rollout(context, group, policy, self.reward, weights)
            weights.connect(self.rollout)

    def call(self, role: str, method: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a registered method of one of the workers; communication that fails inside names the rank at fault."""
        with run_settings(), self.doing(f"{role}.{method}"):
            return getattr(self.worker(role), method)(*args, **kwargs)

    def worker(self, role: str) -> object:
        """The worker of `role` on this rank."""
        return {"reward": self.reward, "rollout": self.rollout, **self.program_workers}.get(role) or self.models[role]

    def doing(self, call: str) -> AbstractContextManager[object]:
        """Names `call` in errors of other ranks that wait for this one."""
        return nullcontext() if self.comm is None else self.comm.doing(call)

    def facts(self) -> dict[str, Any]:
        """Facts of this rank for the header of a run."""
        engines: list[TrainEngine | RolloutEngine] = [model.engine for model in self.models.values()]
        engines += [] if self.rollout is None else [self.rollout.engine]
        facts = _module_facts(engines[0], self.context.device) if engines else {}
        if self.weights is not None and (way := self.weights.describe()) is not None:
            last = None if self.rollout is None else self.rollout.engine.weights_way()
            facts["weights"] = ", ".join(filter(None, (way, last)))
        return facts | _generation_facts(self.rollout.engine) if self.rollout is not None else facts

    def close(self) -> None:
        """End the children of this process. May be called again."""
        try:
            if self.reward is not None:
                self.reward.close()
        finally:
            if self.rollout is not None:
                self.rollout.close()


def _with_device_names(context: RankContext, comm: Collectives | None) -> RankContext:
    """Add the device names of all ranks: an engine process may span GPUs of several ranks, and a rank may see only its own."""
    if comm is None or context.device.type != "cuda" or context.specs.rollout is None:
        return context
    plan = context.engine_plan
    if plan.where != "process" or len(plan.replicas[0].ranks) == 1:
        return context
    device = visible_devices()[context.device.index or 0]
    return replace(context, device_names=tuple(from_bytes(name) for name in comm.all_gather(to_bytes(device))))


def _generation_facts(engine: RolloutEngine) -> dict[str, str]:
    """The numbers of the sampler, whether samples are batch-invariant, and why, and whether updates read their activations."""
    dtype, recording = str(next(engine.module.parameters()).dtype).removeprefix("torch."), engine.recording()
    reused = {} if recording is None else {"reused_activations": recording}
    parts = {"quantization": "layers", "kv_cache_dtype": "KV cache"}
    narrow = [f"{value} {parts[key.rpartition('.')[2]]}" for key, value in quantized_keys(engine.config).items()]
    sampler = {"sampler": ", ".join(narrow)} if narrow else {}
    return {**sampler, "batch_invariant": f"{engine.invariance()} ({dtype})", **reused}


def _module_facts(engine: TrainEngine | RolloutEngine, device: torch.device) -> dict[str, object]:
    """Device, dtype, size and threads of a run, by one of its engines."""
    module = engine.module
    return {
        "device": str(device),
        "dtype": str(getattr(engine, "compute_dtype", next(module.parameters()).dtype)).removeprefix("torch."),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters()),  # ZeRO 3 empties tensors
        "threads": torch.get_num_threads(),
        "kernels": computed_by(module, device),
    }
