"""Everything that is taken from vLLM. Importing this file imports vLLM, which takes seconds, and fails where it is missing.

The names are those of the versions in `versions.KNOWN`; another version may have moved them.
"""

from __future__ import annotations

from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm import __version__ as version
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import LogitsProcessor

from verl.rollout.vllm.draw import Draws

__all__ = [
    "LLM",
    "Draw",
    "ParallelLMHead",
    "RequestOutputKind",
    "SamplingParams",
    "TokensPrompt",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "set_current_vllm_config",
    "version",
]


class Draw(Draws, LogitsProcessor):
    """`Draws` as vLLM makes it: `LLM(logits_processors=["verl.rollout.vllm.library:Draw"])`."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
        super().__init__()
