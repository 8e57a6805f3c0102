"""The native engine in a separate process, in place of vLLM's: the same calls, the same bucketed weight updates and the same
ends of the process. Engine processes can thus be killed where vLLM is not installed.
"""

from dataclasses import replace
from typing import Any

import torch

from verl.config import RolloutConfig
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams
from verl.errors import ModelError
from verl.models.load import load_causal_lm, load_tokenizer
from verl.registry import load_object
from verl.rollout.api import Stats
from verl.rollout.native.engine import NativeRollout
from verl.rollout.vllm.core import Setup
from verl.rollout.vllm.engine import VLLMRollout
from verl.rollout.vllm.weights import Description, Manifest


class EngineOfItsOwn(VLLMRollout):
    """VLLMRollout with a separate engine process on any plan of devices, made by another factory."""

    factory = f"{__file__}:start"

    def _start(self, setup: Setup) -> Any:
        self.transfer = replace(self.transfer, in_process=True)
        return super()._start(setup)


class NativeCore:
    """The calls of verl.rollout.vllm.core.Core."""

    def __init__(self, setup: Setup):
        self.setup = setup
        path, longest = setup.llm["model"], setup.llm["max_model_len"]
        self.module = load_causal_lm(path, device="cpu", dtype=getattr(torch, setup.llm["dtype"])).requires_grad_(False)
        self.engine = NativeRollout(
            self.module,
            load_tokenizer(path),
            RolloutConfig(max_model_len=longest, max_num_seqs=setup.llm["max_num_seqs"]),
            eos_token_ids=setup.eos_token_ids,
        )
        self.manifest = Manifest()

    def open(self, params: SamplingParams, step: int) -> None:
        self.generation = self.engine.open(params, step=step)

    def add(self, requests: list[PromptRequest]) -> None:
        for request in requests:
            self.generation.add(request)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        return self.generation.poll(timeout_s)

    def abort(self, keys: list[SampleKey]) -> None:
        self.generation.abort(keys)

    def close_generation(self) -> Stats:
        return self.generation.close()

    def begin_update(self) -> None:
        self.manifest = Manifest()

    @torch.no_grad()
    def update(self, bucket: Description) -> None:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, tensor in load_object(self.setup.reader)(bucket):
            parameters[name].copy_(tensor)
        self.manifest.add(bucket)

    def finish_update(self, manifest: str) -> None:
        if self.manifest.digest != manifest:
            raise ModelError("The engine did not receive the tensors that were sent.")
        self.engine.publish(self.engine.weight_version + 1)

    def abandon_update(self) -> None:
        """The weights are not whole; the other side allows nothing to be generated with them."""

    def sleep(self, discards: bool = False) -> None:
        self.engine.release()


def start(setup: dict[str, Any]) -> NativeCore:
    """The factory that verl.rollout.process_main calls."""
    return NativeCore(Setup(**setup))
