"""What a rollout engine is. One file per engine beside this one; `ENGINES` names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from verl.config import ModelConfig
from verl.data_proto.samples import Completion, PromptRequest, SamplingParams
from verl.registry import Registry

if TYPE_CHECKING:
    import torch

ENGINES = Registry(
    "rollout engine",
    {
        "native": "verl.rollout.native.engine:NativeRollout",
        "hf": "verl.rollout.hf:HFRollout",
        "vllm": "verl.rollout.vllm.engine:VLLMRollout",
        "http": "verl.rollout.http.engine:HTTPRollout",
        "sglang": "verl.rollout.http.engine:SGLangRollout",
    },
)

OnFinish = Callable[[Completion], None]
Weights: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"  # by name, whole


@dataclass(frozen=True)
class OwnCopy:
    """What an engine needs that holds weights of its own. `portions` lays weights out, piece by piece, in memory that processes
    of this host can read, and gives JSON that describes each piece; `write` does so with all of them in a folder. The
    functions named `reader` and `folder_reader` ("module:function") give the tensors of such a description.

    `in_process` says that the engine runs in a process of its own and not in this one, `visible_devices` what
    CUDA_VISIBLE_DEVICES is there ((): it is worked out from `device`).

    `settle`, where there is one, is called before `portions`, with a function that lets the engine read a piece for trial and
    raises ModelError when it cannot: it finds out which memory the engine reaches."""

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype  # of the engine's weights
    portions: Callable[[Weights], Iterator[dict[str, Any]]]
    reader: str
    write: Callable[[Path, int, Weights], dict[str, Any]]  # folder, number of the update, weights
    folder_reader: str
    start_timeout_s: float
    call_timeout_s: float
    in_process: bool = True
    visible_devices: tuple[str, ...] = ()
    settle: Callable[[Callable[[dict[str, Any]], None]], None] | None = None


def holds_weights(name: str) -> bool:
    """Whether the engine `name` has a copy of the weights, which it is sent by `load`, instead of the training module. Such an
    engine gets the model without numbers as `module`, and an OwnCopy as `own`. Raises ConfigError for an unknown name."""
    return bool(getattr(ENGINES.get(name), "holds_weights", False))


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
