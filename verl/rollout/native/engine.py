"""The native rollout engine: continuous batching over the training module itself, on its device.

A scheduler (scheduler.py) decides the tokens of each step, and a backend computes them. The host drives the steps of
host_backend.py. For a plain decoder on a GPU, the device drives the steps (verl.rollout.native.cuda.backend). A prompt is
computed once for its n samples. A sample that ends frees its row at once, and the next sample takes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from verl.config import RolloutConfig, full_key
from verl.config.active_keys import quantized_keys
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams, TurnRequest
from verl.distributions import load_part, require_part
from verl.errors import ConfigError, ModelError
from verl.families import ROLLOUT_ENGINES
from verl.models.adapter_weights import AdapterWeights
from verl.models.decoder.reuse import version_of
from verl.models.hf_module import HFModule
from verl.models.ops.varlen import FLASH, VarlenKernel
from verl.models.padded import forward_kind
from verl.models.parallel.tensor import check_divisible
from verl.models.randomness import eval_mode
from verl.models.routing import follow_routing
from verl.rollout.api import Invariance, RolloutEngine, Stats, keeps_keys
from verl.rollout.hf import HFRollout
from verl.rollout.native.batch import SavedTokens
from verl.rollout.native.compiled.forward import CpuForward
from verl.rollout.native.compiled.paged_store import PagedStore
from verl.rollout.native.compiled.store import BlockStore
from verl.rollout.native.cuda.backend import DeviceBackend
from verl.rollout.native.experts import ExpertRecords
from verl.rollout.native.host_backend import HostBackend
from verl.rollout.native.paging import Paging
from verl.rollout.native.recording import obstacle, open_records
from verl.rollout.native.scheduler import Scheduler
from verl.rollout.native.torch.forward import DenseForward, compiled, plain_parts, require_quantized
from verl.rollout.native.torch.kv_cache import SlotStore, rounded
from verl.rollout.requests import OpenSamples, StopRules, vocab_size

if TYPE_CHECKING:
    from verl.rollout.native.drafts.costs import DraftMemory

_DRAFTS = "verl.rollout.native.drafts.drafter"
_INVARIANT, _METHODS = full_key("rollout.batch_invariant"), full_key("rollout.speculative.methods")


@dataclass(eq=False)
class NativeRollout(RolloutEngine):
    """See RolloutEngine. `module` is a Hugging Face causal language model built with attn_implementation="verl", or a rank's
    part of one (verl.rollout.rollout_model). In the second case all ranks of the group make the same calls.

    Reads from `config`: max_num_seqs (rows), max_num_batched_tokens (tokens of a forward with prompts), max_model_len,
    kv_cache_config (pages), batch_invariant, prepack_weights (allows a copy of the weights that multiplies faster, until
    `publish` or `release`) and, on a GPU, enforce_eager (no CUDA graphs, nothing compiled).
    `adapters` are LoRA adapters by name; a request without a name gets the base model, and samples of different adapters share
    steps. If `adapters` is None, the module's adapters apply to all requests.
    If `invariance` holds, samples do not depend on max_num_seqs nor on each other. Else the rounding of a matmul may depend on
    its number of rows. Raises ConfigError if batch_invariant=require cannot be kept. `device_kernel` is the attention of the
    GPU backend.
    """

    facts = ROLLOUT_ENGINES.facts["native"]
    _: KW_ONLY
    device_kernel: VarlenKernel = FLASH

    @classmethod
    def require_package(cls, config: RolloutConfig, key: str = "rollout.name") -> None:
        """See RolloutEngine: drafts are a part."""
        if methods := config.speculative.methods:
            require_part(_DRAFTS, f"{_METHODS}={methods}")

    @classmethod
    def require_divisible(cls, config: PreTrainedConfig, size: int) -> None:
        """See RolloutEngine. Ranks divide heads and MLPs as the tensor parallelism of training does."""
        check_divisible(config, size)

    @classmethod
    def for_module(cls, module: HFModule) -> type[RolloutEngine]:
        """See RolloutEngine. For a model without a packed forward, `generate` of transformers samples (HFRollout)."""
        return cls if forward_kind(module) == "packed" else HFRollout

    def __post_init__(self) -> None:
        self.adapters: Mapping[str, AdapterWeights] | None = None
        self.row_store: SlotStore = SlotStore(keys_as_columns=True)
        self.prefix: SlotStore = SlotStore()
        fp8 = self.config.quantization == "fp8"
        self.device = DeviceBackend(self.module, self.device_kernel, eager=self.config.enforce_eager, fp8=fp8)
        self._dense: DenseForward | CpuForward | None = None
        self._dense_of = -1
        self._has_rested = self._has_trained = False  # weights of another version came after a `release`
        self._open: NativeGeneration | None = None
        self._paused: dict[SampleKey, SavedTokens] = {}
        self._invariance: Invariance | None = None
        self._drafts: DraftMemory | None = None
        if self.config.enable_rollout_routing_replay:
            follow_routing(self.module)
        self.require_model(self.module, self.config, next(self.module.parameters()).device)
        if self.config.speculative.methods:
            self._drafts = load_part(_DRAFTS).DraftMemory.of(self.module, self.tokenizer, self.config)

    @classmethod
    def require_model(cls, module: HFModule, config: RolloutConfig, device: torch.device) -> None:
        """See RolloutEngine: numbers of few bits, the guarantee of bits, and drafts."""
        for key, value in quantized_keys(config).items():
            require_quantized(module, key, value, device)
        invariance, methods = _examined(module, config, device), config.speculative.methods
        if config.batch_invariant == "require" and not invariance.holds:
            raise ConfigError(
                f"{_INVARIANT}=require cannot be kept: {invariance.why}. Set it to auto to run without the guarantee."
            )
        if methods and not invariance.holds:
            other = f", or {_INVARIANT}=auto" if config.batch_invariant == "off" else ""
            raise ConfigError(f"{_METHODS}={methods} would change samples: {invariance.why}. Set it to []{other}.")
        if methods:
            load_part(_DRAFTS).require_drafts(module, config.speculative)

    def invariance(self) -> Invariance:
        """Whether a sample's bits depend on the other samples of its batch; determined at the first call."""
        if self._invariance is None:
            self._invariance = _examined(self.module, self.config, next(self.module.parameters()).device)
        return self._invariance

    def recording(self) -> str | None:
        """See RolloutEngine."""
        if next(self.module.parameters()).device.type != "cpu":
            return None
        return obstacle(self.module, self.config) or f"yes: up to {self.config.reuse_activations_gb:g} GB"

    def open(self, params: SamplingParams, *, step: int, keep: bool = False) -> NativeGeneration:
        if self._open is not None and not self._open.is_closed:
            raise ModelError("The rollout engine has an open generation; close it before the next one.")
        # what an earlier step has left over belongs to samples that were given up
        self._paused = {key: saved for key, saved in self._paused.items() if saved.step >= step - 1}
        self._open = NativeGeneration(self, params, step=step, keep=keep)
        return self._open

    def publish(self, version: int) -> None:
        """See RolloutEngine. Only keys and values of paused samples outlive their generation; a copy of the weights goes."""
        self._has_trained |= self._has_rested and version != self.weight_version
        super().publish(version)
        self._dense = None

    def release(self) -> None:
        """Free the memory of both stores and of the copy of the weights. After a first training step has shown its memory, a
        GPU's stores stay if there is room for both."""
        self.row_store.clear()
        self.prefix.clear()
        if self._drafts is not None and self._drafts.model is not None:
            self._drafts.model.clear()
        self._dense, self._has_rested = None, True
        if self._has_trained:
            self.device.rest()
        else:
            self.device.release()

    def forget(self) -> None:
        """See RolloutEngine."""
        self._paused.clear()

    def stores(self, dense: DenseForward | CpuForward | None) -> tuple[SlotStore, SlotStore]:
        """The stores of rows and of prompts, in the form that `dense` reads."""
        shape = dense.store_shape if isinstance(dense, CpuForward) else None
        if shape != getattr(self.row_store, "shape", None):
            kind = PagedStore if self.paged(on_device=False) else BlockStore
            self.row_store = SlotStore(keys_as_columns=True) if shape is None else kind(shape)
            self.prefix = SlotStore() if shape is None else kind(shape)
        return self.row_store, self.prefix

    def paged(self, on_device: bool) -> bool:
        """Whether the cache is paged. The default is True for a GPU backend with a kernel that reads pages."""
        enabled = self.config.kv_cache_config.enable_paged_attention
        return (on_device and self.device.reads_pages) if enabled is None else enabled

    def require_pages(self, dense: DenseForward | CpuForward | None) -> None:
        """Raise ConfigError if `dense` reads no pages."""
        if not isinstance(dense, CpuForward):
            raise ConfigError(
                "kv_cache_config.enable_paged_attention=True needs the compiled decoder for CPUs, or a GPU with the flash "
                f"attention of PyTorch 2.12 or newer (here: {torch.__version__}); neither computes "
                f"{type(self.module).__name__} on {next(self.module.parameters()).device} here. Set it to False, or use "
                f"{full_key('rollout.name')}=vllm, which always pages its cache."
            )

    def mixes_adapters(self) -> bool:
        """Whether a generation may have requests of several `adapters`."""
        return self.dense() is not None

    def dense(self) -> DenseForward | CpuForward | None:
        """The hand-written forward of the module as it is now, or None when the module's own must be called."""
        # an optimizer that writes in place counts up the versions; `publish` covers every other way to change weights
        now, adapters = version_of(self.module), bool(self.named_adapters())
        is_unfit = isinstance(self._dense, CpuForward) and self._dense.decoder.has_experts and adapters
        if self._dense is None or self._dense_of != now or is_unfit:
            self._dense = None  # before the next copy is made
            self._dense = DenseForward.of(
                self.module,
                prepack=self.config.prepack_weights,
                quantization=self.config.quantization,
                adapters=adapters,
                int8_cache=self.config.kv_cache_dtype == "int8",
            )
            self._dense_of = version_of(self.module)
        return self._dense

    def named_adapters(self) -> dict[str | None, AdapterWeights | None]:
        """The adapters of a generation by name, with None for requests that name none."""
        if self.adapters is not None:
            named: list[tuple[str | None, AdapterWeights | None]] = [(None, None), *self.adapters.items()]
            return dict(named)
        adapter = AdapterWeights.of(self.module)
        return {} if adapter is None else {None: adapter}


class NativeGeneration:
    """See Generation. Samples that are kept have their keys and values copied out of the batch, and back when they continue.

    With `keep`, samples of a group do not share one copy of their prompt in memory; it is still computed once."""

    def __init__(self, engine: NativeRollout, params: SamplingParams, *, step: int, keep: bool):
        config, module = engine.config, engine.module
        self.engine, self.params = engine, params
        self.samples = OpenSamples(params, module, config.max_model_len, keep=keep)
        stop = StopRules(params, engine.eos_token_ids, vocab_size(module), engine.tokenizer)
        self.scheduler = Scheduler(
            self.samples,
            stop,
            step=step,
            weight_version=engine.weight_version,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            shared=params.n > 1 and not keep,
            max_saved_bytes=_kept_bytes(config) if keep else None,
            paused=engine._paused if keeps_keys(config) and engine.trains and not keep else None,
            resumes_below=engine.resumes_below,
        )
        if config.enable_rollout_routing_replay and not keep:  # episodes are not recorded
            self.scheduler.experts = ExpertRecords(module.config)
        self.is_closed = False
        self._backend: HostBackend | DeviceBackend | None = None
        self._mode = contextlib.ExitStack()
        self._mode.enter_context(eval_mode(module))

    def add(self, request: PromptRequest | TurnRequest) -> None:
        """See Generation. Also raises ModelError for an unknown adapter, or if the engine cannot mix adapters."""
        admitted = self._admitted(request)
        if admitted.adapter is not None:
            self._require_adapter(admitted.adapter)
        self.scheduler.add(admitted)

    def _admitted(self, request: PromptRequest | TurnRequest) -> PromptRequest:
        """The request with its history, and with a grammar that can be used."""
        if grammar := request.grammar or self.params.grammar:
            if self.scheduler.grammars is None:
                self.scheduler.grammars = load_part("verl.agents.grammars").Grammars(self.engine)
                self.scheduler.drafter = None  # a draft may break a grammar
            self.scheduler.grammars.require(grammar)
            request = replace(request, grammar=grammar)
        return self.samples.admit(request)

    def _require_adapter(self, name: str) -> None:
        if name not in (self.engine.adapters or {}):
            raise ModelError(f"There is no adapter {name!r}. Add it to the rollout engine's `adapters` first.")
        if not self.engine.mixes_adapters():
            raise ModelError(
                f"{type(self.engine.module).__name__} is computed by its own modules, which have one adapter at a time."
            )

    def poll(self, timeout_s: float | None = None) -> list[Completion]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            # not inference_mode: some rotary embeddings renew their buffers in forward, and training reads them later
            with torch.no_grad():
                while not self.scheduler.is_finished:
                    self._choose_backend()
                    done = self.scheduler.step()
                    if done and self._is_due():
                        done += self.scheduler.pause()
                    if done or (until is not None and time.monotonic() >= until):
                        return done
        except BaseException:
            self.engine.release()
            self.engine.forget()
            self.engine.device.release()  # the stores may hold values that are not finite
            self.close()
            raise
        return []

    def _is_due(self) -> bool:
        """Whether the samples to wait for have ended, and there are fewer samples than slots."""
        due = self.engine.due
        return due is not None and self.scheduler.lacks_samples and due.isdisjoint(self.samples.running)

    def abort(self, keys: Iterable[SampleKey]) -> None:
        keys = list(keys)
        self.samples.drop(keys)
        self.scheduler.abort(keys)

    def close(self) -> Stats:
        """See Generation. The statistics also have weight_copy_bytes, and num_graphs on a GPU."""
        self._mode.close()
        if not self.is_closed:
            self.is_closed = True
            backend = self._backend
            num_computed, more = (0, {}) if backend is None else (backend.num_computed, backend.stats())
            scheduler = self.scheduler
            if scheduler.drafter is not None:
                more |= scheduler.drafter.stats(scheduler.num_decode_steps)
            if self.samples.keep:
                more |= {"num_row_steps": scheduler.num_row_steps, "num_evicted": scheduler.num_evicted}
            self._stats = self.samples.stats(num_computed, scheduler.num_decode_steps, scheduler.max_running, **more)
            # they refer to each other, and the backend has a copy of the weights: it would live until a garbage collection
            self._backend = None
            vars(scheduler).pop("backend", None)
        return dict(self._stats)

    def _choose_backend(self) -> None:
        if self._backend is not None:
            return
        engine = self.engine
        longest = rounded(self.scheduler.longest_prompt + self.params.max_new_tokens)
        if self.samples.keep or engine.config.max_model_len is not None:
            longest = self.samples.longest_sequence
        on_device = engine.adapters is None and engine.device.fits(engine.module)
        cache, paging = engine.config.kv_cache_config, None
        if engine.paged(on_device):
            paging = Paging(self.scheduler, cache.block_size, cache.max_tokens)
        # only the forward of the family's modules records routers, and the device drives steps without it
        on_device = on_device and self.scheduler.experts is None
        if on_device and (paging is None or engine.device.reads_pages):
            engine.device.open(self.scheduler, longest, paging)
            self._backend = engine.device
        else:
            dense = engine.dense()
            if paging is not None:
                engine.require_pages(dense)
            stores = engine.stores(dense)
            is_plain = isinstance(dense, CpuForward) and engine.adapters is None and not self.samples.keep
            if engine.trains and is_plain:
                self.scheduler.slots = open_records(engine.module, engine.config, self.scheduler.step_number)
            if engine._drafts is not None and isinstance(dense, CpuForward) and self.scheduler.grammars is None:
                engine._drafts.open(dense)
                self.scheduler.drafter = load_part(_DRAFTS).Drafter(engine._drafts, self.scheduler.rows, self.params)
            self._backend = HostBackend(
                self.scheduler, engine.module, dense, stores, paging=paging,
                adapters=None if dense is None else engine.named_adapters(),
            )  # fmt: skip
        self.scheduler.backend = self._backend


def _kept_bytes(config: RolloutConfig) -> int | None:
    """Bytes for the keys and values of samples that wait for their next turn; None for no limit."""
    size_mb = config.agent.kv_cache_mb
    return None if size_mb is None else int(size_mb * (1 << 20))


def _examined(module: HFModule, config: RolloutConfig, device: torch.device) -> Invariance:
    """Whether samples of `module` on `device` are batch-invariant: the compiled kernels add up every row in one order, and
    torch in an order that depends on the number of rows."""
    if config.batch_invariant == "off":
        return Invariance(False, f"{_INVARIANT}=off")
    if device.type != "cpu":
        return Invariance(False, f"it is not verified on {device.type}")
    if (read := plain_parts(module)) is None:
        return Invariance(False, "the model's own modules compute it, by kernels that were not verified")
    is_divided = config.tensor_model_parallel_size > 1  # torch computes its parts
    kernels = None if is_divided else compiled(module, *read, prepack=config.prepack_weights)
    if kernels is None:
        return Invariance(False, "torch computes it, whose order of adding depends on the number of rows")
    if config.quantization == "fp8":
        return Invariance(False, "torch emulates fp8, and its order of adding depends on the number of rows")
    is_bfloat16 = read[1].weight.dtype == torch.bfloat16
    equal = is_bfloat16 and not quantized_keys(config) and kernels.equals_trainer(read[0])
    trainers = ", the order of the fused training forward" if equal else ""
    return Invariance(True, f"the compiled kernels add up every row in one order{trainers}")
