"""Engines with memory of their own: the way of new weights from the ranks that train, and the settings of such an engine."""

from collections.abc import Sequence
from functools import partial

import torch

from verl.families import engine_facts
from verl.parallel.collectives import Collectives
from verl.parallel.device import compute_dtype
from verl.parallel.engine_plan import EnginePlan
from verl.parallel.placement import Placement
from verl.reshard.delivery import Delivery
from verl.reshard.weight_files import write_folder
from verl.rollout.api import WeightTransfer
from verl.specs import RolloutSpec, RunSpec

_READER = "verl.reshard.shared_memory:read_shared_bucket"
_DEVICE_READER = "verl.reshard.device_memory:read_device_bucket"  # and of the host's memory
_FOLDER_READER = "verl.reshard.weight_files:read_folder"


def make_delivery(
    spec: RolloutSpec,
    run: RunSpec,
    device: torch.device,
    plan: EnginePlan,
    comm: Collectives | None = None,
    trains: Sequence[int] = (0,),
) -> Delivery:
    """The way of new weights from the ranks that train to an engine with a copy of them."""
    rollout, facts = spec.section, engine_facts(plan.engine)
    replicas = [replica.ranks for replica in plan.replicas]
    is_service = plan.where == "service"  # on devices that the run does not know
    if is_service or not facts.takes_buckets:
        replicas = [(replica.owner,) for replica in plan.replicas]
    first, devices = device.index or 0, [device]
    if comm is None and device.type == "cuda":  # the engine takes devices in addition to this process's
        devices += [torch.device("cuda", first + number) for number in range(1, plan.sizes.tensor)]
    may_come_back = (plan.where == "process" or rollout.mode == "async") and rollout.max_engine_restarts > 0
    return Delivery(
        comm,
        device,
        trains,
        replicas,
        dtype=compute_dtype(spec.dtype, device),
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        keeps=facts.restarts and may_come_back,
        delta=rollout.checkpoint_engine.backend == "delta",
        devices=devices,
        on_device=facts.takes_buckets and device.type == "cuda" and not is_service,
        timeout_s=run.collective_timeout_s,
    )


def weight_transfer(
    spec: RolloutSpec,
    run: RunSpec,
    device: torch.device,
    plan: EnginePlan | None = None,
    visible_devices: tuple[str, ...] = (),
    delivery: Delivery | None = None,
) -> WeightTransfer:
    """The transfer to an engine on `device`, in the actor's compute dtype. `plan` says how the engine spans the run's devices
    (default: a run of only this process). `visible_devices` are its process's devices, as CUDA_VISIBLE_DEVICES has them."""
    plan = plan or EnginePlan.of(spec, Placement.from_roles({}, 1))
    delivery = delivery or make_delivery(spec, run, device, plan)
    return WeightTransfer(
        model=spec.model,
        device=device,
        dtype=delivery.dtype,
        write_buckets=delivery,
        probe=delivery.probe if delivery.on_device else None,
        trial=delivery.trial,
        reader=_DEVICE_READER if delivery.on_device else _READER,
        write_folder=partial(write_folder, bucket_bytes=delivery.bucket_bytes),
        folder_reader=_FOLDER_READER,
        start_timeout_s=run.start_timeout_s,
        call_timeout_s=run.collective_timeout_s,
        in_process=plan.where == "process",
        visible_devices=visible_devices,
    )
