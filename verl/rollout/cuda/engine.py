"""Where a generation can run on the device alone, and what is kept from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.data_proto.samples import PromptRequest, SamplingParams
from verl.models.cpu.weights import DenseDecoder
from verl.models.cuda.varlen import FLASH, VarlenKernel, flash_runs
from verl.rollout.api import OnFinish
from verl.rollout.cuda.device import DeviceRows, Sizes
from verl.rollout.cuda.forward import StraightForward
from verl.rollout.cuda.fused import parts
from verl.rollout.cuda.graphs import StepGraphs
from verl.rollout.cuda.run import DeviceRun
from verl.rollout.cuda.store import TokenStore
from verl.rollout.requests import vocab_size
from verl.rollout.stopping import StopRules

_MEMORY_SHARE = 0.8  # of what is free, for keys and values; the rest is for a prompt wave's activations and the graphs
_SPARE = 2  # tokens: a row that has ended may run on for a step
_ROUND = 16


class DeviceSampler:
    """Generates on the module's device with `kernel`. Stores and graphs stay while the sizes, the way of drawing and the
    arrangement of the weights do, and until `release`; new values of the weights are seen by the old graphs.

    `eager` means neither graphs nor compiled kernels.
    """

    def __init__(self, module: Any, kernel: VarlenKernel = FLASH, *, eager: bool = False):
        self.module, self.kernel, self.eager = module, kernel, eager
        self._made_for: tuple[Any, ...] = ()
        self._rows: DeviceRows | None = None

    @staticmethod
    def fits(module: Any, prompts: Sequence[PromptRequest], params: SamplingParams) -> bool:
        """Whether the flash kernels run on the module's device and the model is one that is computed straight through."""
        weight = next(module.parameters())
        if not prompts or weight.device.type != "cuda":
            return False
        decoder = DenseDecoder.of(module)
        if decoder is None or not flash_runs(weight.device, decoder.embed.dtype, decoder.head_dim):
            return False
        return StraightForward.reads(module, _longest(prompts, params))

    def start(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        step: int,
        weight_version: int,
        config: Any,
        eos_token_ids: Sequence[int],
        tokenizer: Any,
        on_finish: OnFinish | None,
    ) -> DeviceRun:
        """A generation, ready to `finish`. Reads max_num_seqs and max_num_batched_tokens of `config`."""
        return DeviceRun(
            self._device_rows(prompts, params, config.max_num_seqs),
            prompts,
            params,
            StopRules(params, eos_token_ids, vocab_size(self.module), tokenizer),
            step=step,
            weight_version=weight_version,
            max_num_batched_tokens=config.max_num_batched_tokens,
            on_finish=on_finish,
        )

    def release(self) -> None:
        """Free stores and graphs."""
        self._rows, self._made_for = None, ()

    def _device_rows(self, prompts: Sequence[PromptRequest], params: SamplingParams, max_num_seqs: int) -> DeviceRows:
        decoder = DenseDecoder.of(self.module)
        assert decoder is not None
        num_rows = min(max_num_seqs, params.n * len(prompts))
        longest_prompt = max(len(p.token_ids) for p in prompts)
        drawing = (params.temperature, params.top_k, params.top_p, params.min_p)
        wanted = (id(decoder), drawing, num_rows, params.n, params.max_new_tokens, len(prompts), longest_prompt)
        if self._rows is None or self._made_for[:-1] != wanted[:-1] or self._made_for[-1] < longest_prompt:
            self.release()
            sizes = self._sizes(decoder, len(prompts), longest_prompt, params, num_rows)
            self._rows = self._make(decoder, sizes, params)
            self._made_for = wanted
        self._rows.params = params  # equal but for what does not reach the device
        return self._rows

    def _make(self, decoder: DenseDecoder, sizes: Sizes, params: SamplingParams) -> DeviceRows:
        on_gpu = decoder.embed.device.type == "cuda"
        head = self.module.get_output_embeddings().weight
        forward = StraightForward(decoder, head, sizes.longest, parts(on_gpu and not self.eager))
        graphs = StepGraphs(decoder.embed.device, enabled=not self.eager)
        return DeviceRows(forward, sizes, params, self.kernel, graphs)

    def _sizes(
        self, decoder: DenseDecoder, num_prompts: int, longest_prompt: int, params: SamplingParams, num_rows: int
    ) -> Sizes:
        """Sizes for `num_rows` rows, or for as many as fit the memory that is free."""
        shared, new = params.n > 1, params.max_new_tokens + _SPARE
        while True:
            # a prompt keeps its slot until its last sample ends: twice as many as full groups need
            prefixes = min(num_prompts, num_rows, 2 * -(-num_rows // params.n) + 8) if shared else 0
            sizes = Sizes(
                num_rows=num_rows,
                own_capacity=_rounded(new + (0 if shared else longest_prompt)),
                num_prefixes=prefixes,
                prefix_capacity=_rounded(longest_prompt) if shared else 0,
                width=min(params.n, num_rows),
                longest=_rounded(longest_prompt + new),
            )
            allowed = _free_bytes(decoder.embed.device)
            if num_rows == 1 or allowed is None or sizes.num_tokens() * TokenStore.bytes_per_token(decoder) <= allowed:
                return sizes
            num_rows = num_rows // 2


def _longest(prompts: Sequence[PromptRequest], params: SamplingParams) -> int:
    return _rounded(max(len(p.token_ids) for p in prompts) + params.max_new_tokens + _SPARE)


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_MEMORY_SHARE * (free + unused))
