"""The switch between training and generation as a `with` block: `verl.workers.sharding_manager.*`."""

from __future__ import annotations

from typing import Any

from verl.compat.hybrid_worker import ActorRolloutRefWorker
from verl.errors import ConfigError


class FSDPVLLMShardingManager:
    """`with FSDPVLLMShardingManager(worker):` generate, with the order of verl/runtime/mode_switch.py at entry and end.
    `worker` is an ActorRolloutRefWorker. Raises ConfigError for the parts that other releases pass in its place, ModelError
    when weights that train have changed inside the block."""

    def __init__(self, worker: object = None, **parts: object):
        if parts or not isinstance(worker, ActorRolloutRefWorker):
            arguments = ", ".join(parts) or type(worker).__name__
            raise ConfigError(
                f"{type(self).__name__} was given {arguments}; it takes an ActorRolloutRefWorker (verl.worker), which holds "
                "the module, the engine and their layouts."
            )
        self.worker = worker

    def __enter__(self) -> FSDPVLLMShardingManager:
        self.worker.update_weights()
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.rollout.end_generation()

    def preprocess_data(self, data: object) -> Any:
        """`data` itself: calls divide their rows over ranks."""
        return data

    postprocess_data = preprocess_data


class MegatronVLLMShardingManager(FSDPVLLMShardingManager):
    """The same for the layouts of Megatron: the worker's engine knows its own."""
