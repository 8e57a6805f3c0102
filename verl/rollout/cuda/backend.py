"""The scheduler's backend on a GPU: the host stays a step behind the device.

    device   | step t          | step t + 1      | step t + 2 ...
    host      launches t + 1    reads t, ends and starts samples, launches t + 2

A sample that ended in step t takes part in step t + 1 in vain; its token there is dropped. A token depends on its position and
not on the time when it is sampled, so samples are those of the other engines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl.errors import ModelError
from verl.models.cpu.weights import DenseDecoder
from verl.models.cuda.varlen import FLASH, VarlenKernel, flash_runs
from verl.rollout.cuda.device import (
    DRAWN,
    KEY,
    NUM_COLUMNS,
    OWN_LENGTH,
    OWN_START,
    POSITION,
    DeviceRows,
    DeviceSizes,
    Readback,
    next_power,
)
from verl.rollout.cuda.forward import StraightForward
from verl.rollout.cuda.fused import parts
from verl.rollout.cuda.graphs import StepGraphs
from verl.rollout.cuda.store import TokenStore
from verl.rollout.layout import Chunk
from verl.rollout.native.batch import Group
from verl.rollout.native.kv_cache import rounded
from verl.rollout.native.paging import UNLIMITED, Paging
from verl.rollout.native.scheduler import Scheduler

_MEMORY_SHARE = 0.8  # of what is free, for keys and values; the rest is for a prompt wave's activations and the graphs
_SPARE = 2  # tokens: a row that has ended may take part in one more step


class DeviceBackend:
    """See Backend. Computes on the module's device with `kernel`. Stores and graphs stay while the sizes, the sampling
    parameters and the arrangement of the weights do, and until `release`; new values of the weights are seen by the old
    graphs. `eager` means neither graphs nor compiled kernels.
    """

    lag = 1

    def __init__(self, module: Any, kernel: VarlenKernel = FLASH, *, eager: bool = False):
        self.module, self.kernel, self.eager = module, kernel, eager
        self.num_computed = 0
        self.stores: DeviceRows | None = None
        self._made_for: tuple[Any, ...] = ()  # its last item is the longest prompt

    @staticmethod
    def fits(module: Any, longest: int) -> bool:
        """Whether the flash kernels run on the module's device, and the model has a hand-written forward up to `longest`
        tokens."""
        weight = next(module.parameters())
        if weight.device.type != "cuda":
            return False
        decoder = DenseDecoder.of(module)
        if decoder is None or not flash_runs(weight.device, decoder.embed.dtype, decoder.head_dim):
            return False
        return StraightForward.reads(module, longest)

    def open(self, scheduler: Scheduler, paging: Paging | None = None) -> None:
        """Serve a generation. `paging` gets the sizes that the kernel and the memory allow."""
        self.paging, self._page_limit = paging, None if paging is None else paging.max_tokens
        if paging is not None:
            multiple = self.kernel.page_multiple
            paging.block_size = -(-paging.block_size // multiple) * multiple
            paging.ahead, paging.is_pool = _SPARE, True
        self.scheduler, self.rows, self.prompts = scheduler, scheduler.rows, scheduler.prompts
        self.num_computed, self._changed = 0, True

    def reserve(self, num_rows: int, longest_prompt: int) -> int:
        """See Backend: while samples run, the stores stay as they are."""
        if self.rows.num_running or self.prompts.prefilling or self.prompts.ready:
            assert self.stores is not None
            return self.stores.sizes.num_rows
        params, decoder = self.scheduler.params, DenseDecoder.of(self.module)
        assert decoder is not None
        windows = [layer.sliding_window for layer in decoder.layers if layer.sliding_window is not None]
        if longest_prompt + params.max_new_tokens > min(windows, default=1 << 31):
            raise ModelError(
                f"A prompt of {longest_prompt} tokens was added to a generation of sequences within the attention window "
                f"({min(windows)}). Set actor_rollout_ref.rollout.max_model_len to the longest sequence."
            )
        drawing = (params.temperature, params.top_k, params.top_p, params.min_p)
        wanted = (
            id(decoder),
            drawing,
            num_rows,
            params.n,
            params.max_new_tokens,
            self.scheduler.shared,
            None if self.paging is None else (self.paging.block_size, self._page_limit),
            longest_prompt,
        )
        if self.stores is None or self._made_for[:-1] != wanted[:-1] or self._made_for[-1] < longest_prompt:
            self.release()
            sizes = self._sizes(decoder, longest_prompt, num_rows)
            head = self.module.get_output_embeddings().weight
            on_gpu = decoder.embed.device.type == "cuda"
            forward = StraightForward(decoder, head, sizes.longest, parts(on_gpu and not self.eager))
            graphs = StepGraphs(decoder.embed.device, enabled=not self.eager)
            self.stores = DeviceRows(forward, sizes, params, self.kernel, graphs)
            self._made_for = wanted
        if self.paging is not None:
            self.paging.max_tokens = self.stores.sizes.num_pages * self.paging.block_size
            self.paging.require(longest_prompt)
        self.stores.params = params  # equal but for what does not reach the device
        self._slots = np.arange(self.stores.sizes.num_rows)  # of the own store, by row
        return self.stores.sizes.num_rows

    def release(self) -> None:
        """Free stores and graphs."""
        self.stores, self._made_for = None, ()

    def admits(self, group: Group) -> bool:
        """See Backend."""
        assert self.stores is not None
        sizes = self.stores.sizes
        drawn = 0 if group.drawn is None else len(group.drawn[0])
        fits = len(self.prompts.by_slot) < sizes.num_prefixes and group.num_tokens - drawn <= self._made_for[-1]
        return fits and (self.paging is None or self.paging.admits(group))

    def load(self, group: Group) -> None:
        """See Backend."""
        assert self.stores is not None
        self._keep()
        self.stores.prefix.put(group.slot, group.saved)

    def save(self, row: int) -> torch.Tensor:
        """See Backend."""
        assert self.stores is not None
        length = int(self.rows.own_start[row] + self.rows.length[row]) - 1
        return self.stores.own.take(int(self._slots[row]), length).clone()

    def start(self, rows: np.ndarray, logits: torch.Tensor) -> Readback:
        """See Backend."""
        assert self.stores is not None
        self._keep()
        if not self.scheduler.shared:
            for row in rows.tolist():
                group = self.rows.groups[row]
                assert group is not None
                self.stores.own.put(int(self._slots[row]), self.stores.prefix.take(group.slot, group.num_tokens))
        columns = np.zeros((NUM_COLUMNS, len(rows)), dtype=np.int64)
        again = self.rows.length[rows]  # tokens of a sample that was preempted
        columns[POSITION] = self.rows.prompt_length[rows] + again
        columns[OWN_START] = self.stores.own.starts(self._slots[rows])
        columns[OWN_LENGTH] = self.rows.own_start[rows] + again
        columns[KEY] = self.rows.key[rows]
        columns[DRAWN] = self.rows.num_drawn[rows] + again + 1
        return self.stores.begin(rows, columns, logits)

    def step(self, chunks: list[tuple[Group, Chunk]]) -> tuple[Readback | None, torch.Tensor]:
        """See Backend: the chunks first, and then all rows."""
        stores = self.stores
        assert stores is not None
        logits = torch.empty(0)
        self._keep(counts=True)
        if chunks:
            logits = stores.prefill(chunks)
            self.num_computed += sum(c.end - c.start for _, c in chunks)
        if not self.rows.end:
            return None, logits
        if self._changed:
            self._changed = False
            self._num_rows = min(
                next_power(self.rows.end), stores.sizes.num_rows
            )  # few sizes: each has graphs of its own
            stores.retire(np.arange(self.rows.end, self._num_rows))
            self._num_prompts = self._share() if self.scheduler.shared else 0
        return stores.launch(self._num_rows, self._num_prompts, self.rows.end), logits

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """See Backend: keys and values stay where they are."""
        assert self.stores is not None
        self.stores.move(np.array(sources), np.array(targets))
        self._slots[sources], self._slots[targets] = self._slots[targets], self._slots[sources]

    def move_prompt(self, source: int, target: int, length: int) -> None:
        """See Backend."""
        if self.stores is not None:
            self.stores.prefix.move(source, target, length)

    def room(self) -> int:
        """See Backend: without pages, every row has room for its longest sequence."""
        return self.rows.num_rows if self.paging is None else self.paging.room()

    def rows_changed(self) -> None:
        """See Backend."""
        self._changed = True

    def stats(self) -> dict[str, float]:
        """Bytes of the stores, and the number of captured graphs."""
        stores = self.stores
        num_bytes, num_graphs = (stores.num_bytes, stores.graphs.num_graphs) if stores is not None else (0, 0)
        found: dict[str, float] = {"kv_cache_bytes": num_bytes, "weight_copy_bytes": 0, "num_graphs": num_graphs}
        return found if self.paging is None else found | self.paging.stats()

    def _keep(self, *, counts: bool = False) -> None:
        """Give all sequences the pages of their tokens, and take back those of the ones that ended."""
        if self.paging is None:
            return
        assert self.stores is not None
        lengths, prompts = self.paging.lengths()
        own, prefix = np.zeros(self.stores.own.num_slots, np.int64), np.zeros(self.stores.prefix.num_slots, np.int64)
        own[self._slots[: len(lengths)]], prefix[: len(prompts)] = lengths, prompts
        self.stores.keep(own, prefix)
        if counts:
            self.paging.record(np.concatenate([lengths, prompts]))

    def _share(self) -> int:
        """Tell the device the prompt of each row; returns the number of prompts that a step computes."""
        assert self.stores is not None
        running = list(dict.fromkeys(g for g in self.rows.groups[: self.rows.end] if g is not None))
        number = {group: i for i, group in enumerate(running)}
        members = np.full(self._num_rows, -1)
        members[: self.rows.end] = [number[g] for g in self.rows.groups[: self.rows.end] if g is not None]
        return self.stores.share(
            np.array([g.slot for g in running]), np.array([g.num_tokens for g in running]), members
        )

    def _sizes(self, decoder: DenseDecoder, longest_prompt: int, num_rows: int) -> DeviceSizes:
        """Sizes for `num_rows` rows, or for as many as fit the memory that is free."""
        n, new = self.scheduler.params.n, self.scheduler.params.max_new_tokens + _SPARE
        shared = self.scheduler.shared
        if self.paging is not None:
            return self._paged_sizes(decoder, longest_prompt, num_rows)
        num_prompts = len(self.prompts.waiting)
        while True:
            # a prompt keeps its slot until its last sample ends: twice as many as full groups need
            sizes = DeviceSizes(
                num_rows=num_rows,
                own_capacity=rounded(new + (0 if shared else longest_prompt)),
                num_prefixes=min(num_prompts, num_rows, 2 * -(-num_rows // n) + 8),
                prefix_capacity=rounded(longest_prompt),
                width=min(n, num_rows) if shared else 0,
                longest=rounded(longest_prompt + new),
            )
            allowed = _free_bytes(decoder.embed.device)
            if num_rows == 1 or allowed is None or sizes.num_tokens() * TokenStore.bytes_per_token(decoder) <= allowed:
                return sizes
            num_rows = num_rows // 2

    def _paged_sizes(self, decoder: DenseDecoder, longest_prompt: int, num_rows: int) -> DeviceSizes:
        """Sizes for `num_rows` rows; pages for all of them, or for as many tokens as the limit and the free memory allow."""
        assert self.paging is not None
        n, new, shared = self.scheduler.params.n, self.scheduler.params.max_new_tokens + _SPARE, self.scheduler.shared
        size, pages = self.paging.block_size, lambda length: -(-length // self.paging.block_size)
        own, prefix = pages(new + (0 if shared else longest_prompt)), pages(longest_prompt + new)
        num_prefixes = min(num_rows, 2 * -(-num_rows // n) + 8)
        num_pages = min(num_rows * own + num_prefixes * prefix + 1, (self._page_limit or UNLIMITED) // size)
        if (allowed := _free_bytes(decoder.embed.device)) is not None:
            num_pages = min(num_pages, allowed // (size * TokenStore.bytes_per_token(decoder)) - 1)
        return DeviceSizes(
            num_rows=num_rows,
            own_capacity=own * size,
            num_prefixes=num_prefixes,
            prefix_capacity=prefix * size,  # a preempted sample is a prompt with its tokens
            width=min(n, num_rows) if shared else 0,
            longest=rounded(longest_prompt + new),
            page_size=size,
            num_pages=max(0, num_pages),
        )


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_MEMORY_SHARE * (free + unused))
