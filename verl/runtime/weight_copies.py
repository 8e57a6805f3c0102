"""Copies of the policy for generation: a replica in this process, or a meta-device model and a transfer for an engine that has
its own weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.config import ModelConfig, full_key
from verl.errors import ConfigError
from verl.models.hf_module import HFModule
from verl.models.load import load_causal_lm, load_external, meta_model
from verl.models.padded import require_packed
from verl.models.vision import is_vision_model
from verl.parallel.device import compute_dtype
from verl.parallel.engine_plan import EnginePlan
from verl.parallel.placement import Placement
from verl.reshard.device_memory import DeviceSender
from verl.reshard.shared_memory import Named, SharedBuckets, bucketed
from verl.reshard.weight_files import MANIFEST, read_files, write_files
from verl.rollout.api import Weights, WeightTransfer
from verl.rollout.rollout_model import Replica
from verl.specs import RolloutSpec, RunSpec

_READER = "verl.reshard.shared_memory:read_shared_bucket"
_DEVICE_READER = "verl.reshard.device_memory:read_device_bucket"  # and of the host's memory
_FOLDER_READER = "verl.runtime.weight_copies:read_folder"


def weight_transfer(
    spec: RolloutSpec,
    run: RunSpec,
    device: torch.device,
    plan: EnginePlan | None = None,
    visible_devices: tuple[str, ...] = (),
) -> WeightTransfer:
    """The transfer to an engine on `device`, in the actor's compute dtype. `plan` says how the engine spans the run's devices
    (default: a run of only this process). `visible_devices` are its process's devices, as CUDA_VISIBLE_DEVICES has them."""
    rollout = spec.section
    where = (plan or EnginePlan.of(spec, Placement.from_roles({}, 1))).where
    bucket_bytes = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    may_come_back = (where == "process" or rollout.mode == "async") and rollout.max_engine_restarts > 0
    place = KeptBuckets(bucket_bytes).place if may_come_back else _in_turns(bucket_bytes)
    on_device = DeviceSender(device, bucket_bytes, place, keeps=may_come_back) if device.type == "cuda" else None
    return WeightTransfer(
        model=spec.model,
        device=device,
        dtype=compute_dtype(spec.dtype, device),
        write_buckets=on_device or (lambda weights: map(place, count(), bucketed(weights, bucket_bytes))),
        probe=on_device.probe if on_device else None,
        reader=_DEVICE_READER if on_device else _READER,
        write_folder=lambda folder, number, weights: write_folder(folder, number, weights, bucket_bytes),
        folder_reader=_FOLDER_READER,
        start_timeout_s=run.start_timeout_s,
        call_timeout_s=run.collective_timeout_s,
        in_process=where == "process",
        visible_devices=visible_devices,
    )


class KeptBuckets:
    """All buckets of an update at once, until the next one writes over them: an engine that was lost is sent them again."""

    def __init__(self, bucket_bytes: int):
        self._bucket_bytes = bucket_bytes
        self._buckets: list[SharedBuckets] = []

    def write(self, weights: Weights) -> Iterator[dict[str, object]]:
        """A description of each bucket, see SharedBuckets."""
        return map(self.place, count(), bucketed(weights, self._bucket_bytes))

    def place(self, index: int, some: Sequence[Named]) -> dict[str, Any]:
        """Write bucket `index` of an update over the same bucket of the last update, and describe it."""
        if index == len(self._buckets):
            self._buckets.append(SharedBuckets(self._bucket_bytes, num_segments=1))
        return self._buckets[index].write(some)


def _in_turns(bucket_bytes: int) -> Callable[[int, Sequence[Named]], dict[str, object]]:
    buckets = SharedBuckets(bucket_bytes)
    return lambda index, some: buckets.write(some)


def write_folder(folder: Path, number: int, weights: Weights, bucket_bytes: int) -> dict[str, object]:
    """Write update `number` under `folder`; the result is what `read_folder` takes, with an entry for each tensor."""
    place = write_files(folder, number, weights, bucket_bytes)
    manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    return {"folder": str(place), "number": number, "entries": manifest["tensors"]}


def read_folder(description: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a described folder. Raises ModelError when a tensor is missing or differs from the written one."""
    return read_files(Path(description["folder"]).parent, description["number"])


def load_replica(spec: RolloutSpec, device: torch.device, group: dist.ProcessGroup | None) -> Replica:
    """A copy of the policy in the compute dtype, only for generation; divided over `group`, if there is one."""
    model = spec.model
    load_external(model.external_lib)
    module = load_causal_lm(
        model.path,
        device=device if group is None else "cpu",  # a divided model may not fit the device whole
        dtype=compute_dtype(spec.dtype, device),
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
    ).requires_grad_(False)
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
