"""Everything that is taken from vLLM. Importing this file imports vLLM, which takes seconds, and fails where it is missing.

The names are from the versions in `core.KNOWN`; another version may have moved them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from vllm import LLM, SamplingParams, TokensPrompt
from vllm import __version__ as version
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.logits_processor import LogitsProcessor

from verl.rollout.vllm.sample import Draws

__all__ = [
    "LLM",
    "ParallelLMHead",
    "Ranks",
    "RequestOutputKind",
    "Sampler",
    "SamplingParams",
    "TokensPrompt",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "set_current_vllm_config",
    "tensor_parallel_group",
    "version",
]


class Sampler(Draws, LogitsProcessor):
    """`Draws` as vLLM makes it: `LLM(logits_processors=["verl.rollout.vllm.library:Sampler"])`."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
        super().__init__()


class Ranks(ExecutorWithExternalLauncher):
    """vLLM's worker in each rank of a run, on the process group that is there: consecutive ranks share a model by
    tensor_parallel_size, and all of them do the same. All ranks make it at the same time."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """(rendezvous, rank, device). No new rendezvous; workers of vLLM on a CPU find each other by this name."""
        name = torch.tensor(random.SystemRandom().getrandbits(62))
        on_gpu = torch.cuda.is_available()
        name = name.cuda() if on_gpu and dist.get_backend() == "nccl" else name
        dist.broadcast(name, src=0)
        return f"file://verl-{name.item()}", dist.get_rank(), torch.cuda.current_device() if on_gpu else 0


def tensor_parallel_group() -> dist.ProcessGroup | None:
    """The processes (not devices) that share this worker's model; None where there is one."""
    group = get_tp_group()
    return group.cpu_group if group.world_size > 1 else None
