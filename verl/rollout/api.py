"""What a rollout engine is. One file per engine beside this one; `ENGINES` names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.registry import Registry

ENGINES = Registry(
    "rollout engine",
    {
        "native": "verl.rollout.native:NativeRollout",
        "hf": "verl.rollout.hf:HFRollout",
    },
)

OnFinish = Callable[[Completion], None]


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates samples from prompts. Constructed as `Engine(module, tokenizer, config, eos_token_ids=..., pad_token_id=...)`
    where `module` is the training module itself (weights are shared, never copied) and `config` a RolloutConfig.
    """

    weight_version: int

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """`params.n` samples of each prompt, ordered by (position in `prompts`, sample).

        A sample is a function of (params.seed, step, ordinal, sample, the weights) only. `on_finish` is called with each
        sample as soon as it ends, in order of ending. Raises ModelError when a prompt plus max_new_tokens exceeds what the
        model can hold, before any token is made.
        """
        ...

    def publish(self, version: int) -> None:
        """The weights have changed; samples made from now on carry `version`. Drops what depended on the old weights."""
        ...

    def release(self) -> None:
        """Free the KV cache (called before training when `free_cache_engine` is set)."""
        ...

    def stats(self) -> dict[str, Any]:
        """Figures of the last `generate`: num_prompt_tokens, num_prompt_tokens_computed, num_generated_tokens, seconds,
        num_decode_steps, max_running, kv_cache_bytes."""
        ...
