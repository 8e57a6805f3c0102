"""Everything that is taken from vLLM. Importing this file imports vLLM: it takes seconds, and fails if vLLM is missing.

The names are from the versions in `core.TESTED_RELEASES`; another version may have moved them.
"""

from __future__ import annotations

import os
import random
from typing import Any, cast

import torch
import torch.distributed as dist
from vllm import LLM, SamplingParams, TokensPrompt
from vllm import __version__ as version
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind
from vllm.triton_utils import HAS_TRITON
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.logits_processor import LogitsProcessor

from verl.rollout.vllm.sample import BatchSampler, SlotSampler

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotProcessor
except ImportError:  # before 0.32 the second model runner has no processors

    class SlotProcessor: ...  # type: ignore[no-redef]


RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # environment variable, read as vLLM starts
HAS_SLOTS = SlotProcessor.__module__ != __name__

__all__ = [
    "LLM",
    "RUNNER",
    "ParallelLMHead",
    "Ranks",
    "RequestOutputKind",
    "Sampler",
    "SamplingParams",
    "TokensPrompt",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "runs_in_slots",
    "set_current_vllm_config",
    "tensor_parallel_group",
    "version",
]


class Sampler(LogitsProcessor, SlotProcessor):
    """The sampling of verl.rollout.vllm.sample as vLLM makes it, with either model runner:
    `LLM(logits_processors=["verl.rollout.vllm.library:Sampler"])`."""

    def __init__(self, vllm_config: Any, where: object, *is_pin_memory: bool):
        """The first runner gives a device as `where`, and whether memory is pinned; the second one the state of requests."""
        if is_pin_memory and vllm_config.scheduler_config.async_scheduling:
            raise ValueError(
                "vLLM's first model runner schedules ahead of what verl samples: set async_scheduling=False."
            )
        self._sampler: Any = BatchSampler() if is_pin_memory else SlotSampler(where)

    def is_argmax_invariant(self) -> bool:
        """False: it changes the maximum of the logits, so vLLM must also call it in greedy decoding."""
        return False

    def update_state(self, batch_update: object) -> None:
        """See BatchSampler."""
        self._sampler.update_state(batch_update)

    def add_request(self, req_idx: int, sampling_params: object) -> bool:
        """See SlotSampler."""
        return bool(self._sampler.add_request(req_idx, sampling_params))

    def apply_staged_writes(self) -> None:
        """See SlotSampler."""
        self._sampler.apply_staged_writes()

    def apply(self, logits: torch.Tensor, *context: object) -> torch.Tensor:
        """See BatchSampler and SlotSampler."""
        return cast("torch.Tensor", self._sampler.apply(logits, *context))


def runs_in_slots() -> bool:
    """Whether vLLM's second model runner is there and calls processors; the environment may choose the first one."""
    return HAS_SLOTS and HAS_TRITON and os.environ.get(RUNNER) != "0"


class Ranks(ExecutorWithExternalLauncher):
    """vLLM's worker in each rank of a run, on the existing process group. `tensor_parallel_size` consecutive ranks share a
    model and make the same calls. All ranks construct it at the same time."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """(rendezvous, rank, device). The rendezvous is only a name, by which workers of vLLM on a CPU find each other."""
        name = torch.tensor(random.SystemRandom().getrandbits(62))
        on_gpu = torch.cuda.is_available()
        name = name.cuda() if on_gpu and dist.get_backend() == "nccl" else name
        dist.broadcast(name, src=0)
        return f"file://verl-{name.item()}", dist.get_rank(), torch.cuda.current_device() if on_gpu else 0


def tensor_parallel_group() -> dist.ProcessGroup | None:
    """The processes (not devices) that share this worker's model; None if there is one."""
    group = get_tp_group()
    return group.cpu_group if group.world_size > 1 else None
