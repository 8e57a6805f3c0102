"""The contract of a rollout engine and of the generation that it opens. Each engine has one file in this package;
`ENGINES` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from verl.config import ModelConfig, RolloutConfig, full_key
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams, TurnRequest
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.families import ROLLOUT_ENGINES as ENGINES  # noqa: F401 - the name in this contract
from verl.families import EngineFacts, engines_with

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from verl.models.hf_module import HFModule

OnFinish = Callable[[Completion], None]
Stats = dict[str, Any]
Weights: TypeAlias = "Iterable[tuple[str, torch.Tensor]]"  # by name, undivided


@dataclass(frozen=True)
class WeightTransfer:
    """Settings of an engine that holds its own weights, and the functions that send it new weights.

    `write_buckets` copies weights, bucket by bucket, to memory that the engine can read, and yields a JSON description of each
    bucket. `write_folder` writes all weights to files, and returns a description of them. The functions named `reader` and
    `folder_reader` ("module:function") read the tensors of such a description.

    `probe`, if set, is called before `write_buckets` and finds out what memory the engine can open. Its argument is a function
    that makes the engine read a trial bucket. That function raises ModelError if the engine cannot. `trial` writes a bucket of
    one tensor to memory of the host, for an engine that may not reach that memory; None if no weights come.

    `in_process`: the engine runs in a separate process. `visible_devices` is its CUDA_VISIBLE_DEVICES ((): derived from
    `device`).
    """

    model: ModelConfig
    device: torch.device
    dtype: torch.dtype  # of the engine's weights
    write_buckets: Callable[[Weights], Iterator[dict[str, object]]]
    reader: str
    write_folder: Callable[[Path, int, Weights], dict[str, Any]]  # folder, number of the update, weights
    folder_reader: str
    start_timeout_s: float
    call_timeout_s: float
    in_process: bool = True
    visible_devices: tuple[str, ...] = ()
    probe: Callable[[Callable[[dict[str, object]], None]], None] | None = None
    trial: Callable[[], dict[str, object]] | None = None


class Invariance(NamedTuple):
    """Whether a sample has the same bits in every batch."""

    holds: bool
    why: str  # a clause

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'no'}: {self.why}"


class Generation(Protocol):
    """Sampling under one SamplingParams and one weight version; requests may be added while it runs.

        generation = engine.open(params, step=3, keep=True)
        generation.add(PromptRequest(7, prompt))
        for done in generation.poll():                                       # Completion(7, 0, ...)
            generation.add(TurnRequest(*done.key, tool_answer))              # the sample continues after these tokens
        generation.close()

    A sample is a function of (params.seed, step, prompt index, sample, the weights and the tokens before it) only: of neither
    the batch nor the order of the calls. Nothing is computed outside `poll`.
    """

    def add(self, request: PromptRequest | TurnRequest) -> None:
        """Start samples of a prompt, or continue a sample that has finished and was kept. The native engine keeps the KV cache
        of such a sample and computes only the new tokens. vLLM and services find the history in their prefix cache. The
        reference engine computes it again. Raises ModelError, before any computation, for an empty or too long
        request, a token outside the vocabulary, or continuing a sample that is not kept."""
        ...

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        """Compute until samples finish, and return them in order of ending. Empty when nothing is running, or after
        `timeout_s` seconds, checked by the engine between its steps (None: no limit). Raises NumericsError when a sampled
        log-prob is not finite. Ranks that share a replica pass None, since their steps must be the same."""
        ...

    def abort(self, keys: Iterable[SampleKey]) -> None:
        """Drop samples, running or kept; they are not returned by `poll`. Unknown keys are ignored."""
        ...

    def close(self) -> Stats:
        """Drop all samples and return the statistics that RolloutEngine.stats names. May be called again."""
        ...


@dataclass(eq=False)
class RolloutEngine:
    """Generates samples from prompts. Constructed as `Engine(module, tokenizer, config, eos_token_ids=...)`.

    `module` is the training module itself (weights are shared, never copied). An engine with the fact `holds_weights` gets a
    meta-device model as `module`, and a WeightTransfer as `transfer`. `facts` of a built-in engine are in its row of
    `ROLLOUT_ENGINES`. A subclass that is a dataclass begins its work in `__post_init__`.
    """

    facts: ClassVar[EngineFacts] = EngineFacts()
    module: HFModule
    tokenizer: Tokenizer  # for stop strings; None without any
    config: RolloutConfig
    _: KW_ONLY
    eos_token_ids: Sequence[int]
    weight_version: int = field(default=0, init=False)  # that new samples carry
    trains: bool = field(default=False, init=False)  # whether updates will read the samples of the next generation
    syncs: bool = field(default=False, init=False)  # whether new weights come before the next generation
    resumes_below: int = field(default=0, init=False)  # tokens of responses that may continue in a later generation
    due: frozenset[SampleKey] | None = field(
        default=None, init=False
    )  # samples of a generation that pauses behind them
    _stats: Stats = field(default_factory=dict, init=False)

    @classmethod
    def require_package(cls, config: RolloutConfig, key: str = "rollout.name") -> None:
        """Raise MissingExtraError if the engine's package is not installed, ConfigError if its keys or the environment refuse
        it whatever the model; `key` has named the engine. No package is imported."""

    @classmethod
    def require_divisible(cls, config: PreTrainedConfig, size: int) -> None:
        """Raise ConfigError if the layers of a model with this config do not divide over `size` devices."""
        num_heads = config.get_text_config().num_attention_heads
        if num_heads % size:
            raise ConfigError(f"it has {num_heads} attention heads; choose a divisor.")

    @classmethod
    def require_model(cls, module: HFModule, config: RolloutConfig, device: torch.device) -> None:
        """Raise ConfigError or ModelError if the engine does not generate with `module` on `device` as `config` asks. `module`
        may lie on the meta device."""

    @classmethod
    def for_module(cls, module: HFModule) -> type[RolloutEngine]:
        """This class, or the class that generates for a model that this class does not support."""
        return cls

    def open(self, params: SamplingParams, *, step: int, keep: bool = False) -> Generation:
        """A generation without requests; one at a time. With `keep`, samples that finish can continue until they are aborted.
        Raises ConfigError for sampling parameters without meaning."""
        raise NotImplementedError

    def generate(
        self, prompts: Sequence[PromptRequest], params: SamplingParams, *, step: int, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """`params.n` samples of each prompt, ordered by (position in `prompts`, sample). `on_finish` is called with each sample
        as soon as it ends, in order of ending. Raises what Generation raises, for a bad request before any token is made."""
        if not prompts:
            return []
        require_reads(self, any(prompt.placed for prompt in prompts))
        completions: dict[SampleKey, Completion] = {}
        generation = self.open(params, step=step)
        try:
            for prompt in prompts:
                generation.add(prompt)
            while ended := generation.poll():
                for done in ended:
                    completions[done.key] = done
                    if on_finish is not None:
                        on_finish(done)
        finally:
            self._stats = generation.close()
        return [completions[p.ordinal, p.first_sample + i] for p in prompts for i in range(p.num_samples or params.n)]

    def load(self, weights: Weights) -> None:
        """Take all weights of an update, (name, undivided tensor) pairs. Does nothing if the engine shares `module`."""

    def publish(self, version: int) -> None:
        """Set the version that new samples carry, after the weights have changed. Drops results of the old weights."""
        self.weight_version = version

    def forget(self) -> None:
        """Drop keys and values that wait for the next part of their response."""

    def release(self) -> None:
        """Free the KV cache, and weights that need not stay because of `syncs` (called before training when `free_cache_engine`
        is set)."""

    def invariance(self) -> Invariance:
        """Whether a sample's bits depend on the other samples of its batch."""
        return Invariance(False, f"nothing was proven about {type(self).__name__}")

    def weights_way(self) -> str | None:
        """A line for the header of a run: the last part of the way of new weights, if the engine decides it."""
        return None

    def recording(self) -> str | None:
        """A line for the header of a run: the memory of activations that updates reuse, or the reason why they reuse none."""
        return None

    def close(self) -> None:
        """End the processes of the engine. May be called again."""

    def stats(self) -> Stats:
        """Statistics of the last generation: num_prompt_tokens, num_prompt_tokens_computed, num_generated_tokens, seconds,
        num_decode_steps, max_running, kv_cache_bytes."""
        return dict(self._stats)


def keeps_keys(config: RolloutConfig) -> bool:
    """Whether keys and values of unfinished responses stay while the weights change."""
    return config.in_flight_keys == "kept" if config.in_flight_updates else config.keep_partial_kv_cache


def require_reads(engine: RolloutEngine, has_images: bool) -> None:
    """Raise ConfigError for images that a rollout engine does not read."""
    if has_images and not engine.facts.reads_images:
        raise ConfigError(
            f"The rollout engine {type(engine).__name__} reads no images. Set {full_key('rollout.name')} to one of "
            f"{', '.join(engines_with('reads_images'))}."
        )
