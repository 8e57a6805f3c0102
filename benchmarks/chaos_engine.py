"""The native engine in a process of its own, behind what the vLLM engine has there: the same calls, the same updates of the
weights in buckets, the same ends of the process. So that engine processes can be killed where vLLM is not installed.

    actor_rollout_ref.rollout.name=benchmarks/chaos_engine.py:EngineOfItsOwn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from verl.config import RolloutConfig
from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.errors import ModelError
from verl.models.load import load_causal_lm, load_tokenizer
from verl.registry import load_object
from verl.rollout.api import OnFinish, OwnCopy
from verl.rollout.native.engine import NativeRollout
from verl.rollout.requests import vocab_size
from verl.rollout.vllm.core import Setup
from verl.rollout.vllm.engine import VLLMRollout
from verl.rollout.vllm.process import RemoteCore, ServedCore
from verl.rollout.vllm.restart import RebuiltCore
from verl.rollout.vllm.settings import longest_sequence, make_setup
from verl.rollout.vllm.weights import Manifest
from verl.rollout.weight_version import CopyState


class EngineOfItsOwn(VLLMRollout):
    """See VLLMRollout; only what is started differs."""

    def __init__(
        self,
        module: Any,
        tokenizer: Any,
        config: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int | None = None,
        own: OwnCopy,
    ):
        del tokenizer, pad_token_id
        self.skeleton, self.config, self.own = module, config, own
        self.state = CopyState()
        self._longest = longest_sequence(config, module)
        self._stats: dict[str, Any] = {}
        setup = make_setup(config, own, module, eos_token_ids=tuple(eos_token_ids), vocab_size=vocab_size(module))
        self.core = self._start(setup)

    def _start(self, setup: Setup) -> Any:
        own, factory = self.own, f"{__file__}:start"
        start = partial(
            RemoteCore,
            setup,
            start_timeout_s=own.start_timeout_s,
            call_timeout_s=own.call_timeout_s,
            factory=factory,
        )
        return RebuiltCore(start, self.config.max_engine_restarts)


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

    def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        step: int,
        on_finish: OnFinish,
        on_step: Callable[[], None],
    ) -> dict[str, Any]:
        del on_step  # it never takes long
        self.engine.generate(prompts, params, step=step, on_finish=on_finish)
        return self.engine.stats()

    def begin_update(self) -> None:
        self.manifest = Manifest()

    @torch.no_grad()
    def update(self, bucket: dict[str, Any]) -> None:
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

    def sleep(self) -> None:
        self.engine.release()


def start(setup: dict[str, Any]) -> ServedCore:
    """What verl.rollout.process_main calls."""
    return ServedCore(NativeCore(Setup(**setup)))
