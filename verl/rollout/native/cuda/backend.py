"""The scheduler's backend on a GPU: the host stays a step behind the device.

    device   | step t          | step t + 1      | step t + 2 ...
    host      launches t + 1    reads t, ends and starts samples, launches t + 2

A sample that ended in step t still takes part in step t + 1; its token there is dropped. A token depends on its position and
not on the time when it is sampled, so all engines give the same samples.
"""

import numpy as np
import torch

from verl.config import full_key
from verl.errors import ModelError
from verl.models.decoder.weights import DenseDecoder
from verl.models.hf_module import HFModule
from verl.models.ops.varlen import FLASH, VarlenKernel, flash_runs
from verl.parallel.device import most_memory_allocated
from verl.rollout.layout import Chunk
from verl.rollout.native.batch import Group
from verl.rollout.native.cuda.device import (
    DRAWN,
    KEY,
    NUM_COLUMNS,
    OWN_LENGTH,
    OWN_START,
    POSITION,
    DeviceRows,
    DeviceSizes,
    Readback,
    StepBounds,
    next_power,
    step_rows,
)
from verl.rollout.native.cuda.forward import StraightForward, readable
from verl.rollout.native.cuda.graphs import StepGraphs
from verl.rollout.native.cuda.store import TokenStore
from verl.rollout.native.paging import UNLIMITED, Paging
from verl.rollout.native.scheduler import Scheduler
from verl.rollout.native.torch.kv_cache import rounded

_MEMORY_SHARE = 0.8  # of free memory, for keys and values; activations of prompts and graphs take the remaining memory
_RESTING_SHARE = 0.8  # of the device's memory: stores and graphs stay during training if the peak is below this
_PROMPTS_AHEAD = 8  # prompts that are computed before rows are free
_ROWS_AHEAD = 16  # or if these are more, prompts of one sample for so many rows
_SPARE = 2  # tokens: a row that has ended may take part in one more step


class DeviceBackend:
    """See Backend. Computes on the module's device with `kernel`. Stores and graphs stay until `release`, or until sizes,
    sampling parameters or weight tensors change. Graphs read weights in place, so new values need no new graph. `eager`
    means no graphs. With `fp8` the layers multiply in fp8, by copies of the weights that each generation renews.
    """

    lag, joins_prompts = 1, False

    def __init__(self, module: HFModule, kernel: VarlenKernel = FLASH, *, eager: bool = False, fp8: bool = False):
        self.module, self.kernel, self.eager, self.fp8 = module, kernel, eager, fp8
        self.num_computed = 0
        self.stores: DeviceRows | None = None
        self._made_for: tuple[object, ...] = ()  # the settings that stores and graphs were made for
        self._longest_prompt = 0  # that the stores can hold

    @staticmethod
    def fits(module: HFModule) -> bool:
        """Whether the flash kernels run on the module's device, and the model has a hand-written forward."""
        weight = next(module.parameters())
        if weight.device.type != "cuda":
            return False
        decoder = readable(module)
        if decoder is None or not flash_runs(weight.device, decoder.embed.dtype, decoder.head_dim):
            return False
        return StraightForward.reads(module)

    @property
    def reads_pages(self) -> bool:
        """Whether the kernel reads keys and values from pages."""
        return self.kernel.page_multiple > 0

    def open(self, scheduler: Scheduler, longest: int, paging: Paging | None = None) -> None:
        """Serve the generation of `scheduler`, with sequences of at most `longest` tokens. If an attention window is
        smaller, each row has a copy of its prompt, because the hidden part depends on the row. Sets the block size of
        `paging`."""
        self.paging, self._page_limit = paging, None if paging is None else paging.max_tokens
        if paging is not None:
            multiple = self.kernel.page_multiple
            paging.block_size = -(-paging.block_size // multiple) * multiple
            paging.ahead, paging.is_pool = _SPARE, True
        self.scheduler, self.rows, self.prompts = scheduler, scheduler.rows, scheduler.prompts
        scheduler.shared &= longest <= self._smallest_window()
        self.num_computed, self._changed = 0, True

    def reserve(self, num_rows: int, longest_prompt: int) -> int:
        """See Backend. Stores in use double when they grow, so that few graphs are captured in vain. Without free memory for
        the larger stores they keep their size."""
        params, decoder = self.scheduler.params, readable(self.module)
        assert decoder is not None
        if self.scheduler.shared and longest_prompt + params.max_new_tokens > self._smallest_window():
            raise ModelError(
                f"A prompt of {longest_prompt} tokens was added to a generation of sequences within the attention window "
                f"({self._smallest_window()}). Set {full_key('rollout.max_model_len')} to the longest sequence."
            )
        if self.rows.num_running or self.prompts.by_slot:
            self._grow(decoder, num_rows, longest_prompt)
        else:
            if self.scheduler.samples.keep:  # more episodes will come
                num_rows = self.scheduler.max_num_seqs
            self._renew(decoder, num_rows, longest_prompt)
        assert self.stores is not None
        if self.paging is not None:
            self.paging.max_tokens = self.stores.sizes.num_pages * self.paging.block_size
            self.paging.require(longest_prompt)
        return self.stores.sizes.num_rows

    def _renew(self, decoder: DenseDecoder, num_rows: int, longest_prompt: int) -> None:
        """Prepare stores for a generation; reuse the present stores if their settings are equal and they are large enough."""
        params = self.scheduler.params
        made_for = (
            id(decoder),
            (params.temperature, params.top_k, params.top_p, params.min_p),
            num_rows,
            params.n,
            params.max_new_tokens,
            self.scheduler.shared,
            None if self.paging is None else (self.paging.block_size, self._page_limit),
        )
        enough = self.stores is not None and self._num_prefixes(num_rows) <= self.stores.sizes.num_prefixes
        if self._made_for != made_for or self._longest_prompt < longest_prompt or not enough:
            self.release()
            self.stores = self._build(decoder, self._sizes(decoder, longest_prompt, num_rows))
            self._made_for, self._longest_prompt = made_for, longest_prompt
        assert self.stores is not None
        self.stores.params = params  # equal but for what does not reach the device
        self.stores.forward.refresh()
        self._bound(longest_prompt, num_rows)
        self._slots = np.arange(self.stores.sizes.num_rows)  # of the row store, by row

    def _grow(self, decoder: DenseDecoder, num_rows: int, longest_prompt: int) -> None:
        """Move the contents of the stores into larger stores, if samples need more rows or longer prompts."""
        assert self.stores is not None
        before = self.stores.sizes
        if num_rows <= before.num_rows and longest_prompt <= self._longest_prompt:
            return
        longest = self._longest_prompt
        if longest_prompt > longest:
            longest = min(2 * longest_prompt, max(longest_prompt, self.scheduler.samples.longest_sequence))
        if num_rows > before.num_rows:
            num_rows = min(max(num_rows, 2 * before.num_rows), self.scheduler.max_num_seqs)
        sizes = self._sizes(decoder, longest, max(num_rows, before.num_rows))
        if sizes == before or any(new < old for new, old in zip(sizes, before, strict=True)):
            return
        stores = self._build(decoder, sizes)
        self._slots = np.concatenate([self._slots, np.arange(before.num_rows, sizes.num_rows)])
        stores.continue_from(self.stores, self._slots[: self.rows.end])
        self.stores, self._changed = stores, True
        self._made_for = ()  # the next generation builds the stores that it asks for
        self._longest_prompt = longest
        self._bound(longest, sizes.num_rows)

    def _bound(self, longest_prompt: int, num_rows: int) -> None:
        """Bound the steps of this generation as in stores that were made for it. A kernel's sums may depend on the bounds, and
        samples must not depend on earlier generations."""
        assert self.stores is not None
        sizes = self.stores.sizes
        capacity = sizes.own_capacity if self.scheduler.shared else next_power(longest_prompt) + self._num_new()
        prefixes = min(self._num_prefixes(num_rows), sizes.num_prefixes)
        preempted = 0 if self.paging is None else self._num_new()  # a preempted sample is a prompt with its tokens
        self.stores.bounds = StepBounds(capacity, next_power(longest_prompt + preempted), prefixes)

    def _build(self, decoder: DenseDecoder, sizes: DeviceSizes) -> DeviceRows:
        forward = StraightForward(decoder, self.module.get_output_embeddings().weight, sizes.longest, fp8=self.fp8)
        graphs = StepGraphs(decoder.embed.device, enabled=not self.eager)
        return DeviceRows(forward, sizes, self.scheduler.params, self.kernel, graphs)

    def _smallest_window(self) -> int:
        """Tokens of the smallest attention window of any layer; a large number without windows."""
        decoder = readable(self.module)
        assert decoder is not None
        return min((layer.sliding_window for layer in decoder.layers if layer.sliding_window), default=1 << 31)

    def rest(self) -> None:
        """Free stores and graphs, unless the device has room for them in addition to the peak memory of this process."""
        if self.stores is None or not _has_room(self.stores.device, self.stores.num_bytes):
            self.release()

    def release(self) -> None:
        """Free stores and graphs."""
        self.stores, self._made_for, self._longest_prompt = None, (), 0

    @property
    def ahead(self) -> int:
        """See Backend. Pages that are scarce are for samples that run."""
        assert self.stores is not None
        sizes, size = self.stores.sizes, self.stores.sizes.page_size
        if size and sizes.num_pages * size < sizes.num_tokens() - sizes.own_capacity:
            return 0
        return max(_PROMPTS_AHEAD * self.scheduler.params.n, sizes.num_rows // _ROWS_AHEAD)

    def admits(self, group: Group) -> bool:
        assert self.stores is not None
        sizes = self.stores.sizes
        drawn = 0 if group.drawn is None else len(group.drawn[0])
        fits = len(self.prompts.by_slot) < sizes.num_prefixes and group.num_tokens - drawn <= self._longest_prompt
        return fits and (self.paging is None or self.paging.admits(group))

    def load(self, group: Group) -> None:
        assert self.stores is not None
        self._keep()
        self.stores.prefix.put(group.slot, group.saved.values.to(self.stores.device))

    def save(self, row: int) -> torch.Tensor:
        assert self.stores is not None
        length, group = int(self.rows.own_start[row] + self.rows.length[row]) - 1, self.rows.groups[row]
        values = self.stores.row_store.take(int(self._slots[row]), length)
        if group is not None and self.scheduler.shared:
            values = torch.cat([self.stores.prefix.take(group.slot, group.num_tokens), values], dim=2)
        # a paused sample leaves the device's memory to training
        return values.cpu() if self.scheduler.resumes_below else values.clone()

    def start(self, rows: np.ndarray, logits: torch.Tensor) -> Readback:
        assert self.stores is not None
        self._keep()
        if not self.scheduler.shared:
            for row in rows.tolist():
                group = self.rows.groups[row]
                assert group is not None
                self.stores.row_store.put(int(self._slots[row]), self.stores.prefix.take(group.slot, group.num_tokens))
        columns = np.zeros((NUM_COLUMNS, len(rows)), dtype=np.int64)
        again = self.rows.length[rows]  # tokens of a sample that was preempted
        columns[POSITION] = self.rows.prompt_length[rows] + again + self.rows.shifts()[rows]
        columns[OWN_START] = self.stores.row_store.starts(self._slots[rows])
        columns[OWN_LENGTH] = self.rows.own_start[rows] + again
        columns[KEY] = self.rows.key[rows]
        columns[DRAWN] = self.rows.num_drawn[rows] + again + 1
        return self.stores.begin(rows, columns, logits)

    def step(self, chunks: list[tuple[Group, Chunk]]) -> tuple[Readback | None, torch.Tensor]:
        """See Backend: all rows first. The host launches the kernels of the chunks one by one, while the rows compute."""
        stores, sampled, logits = self.stores, None, torch.empty(0)
        assert stores is not None
        self._keep(counts=True)
        if self.rows.end:
            sampled = self._step_rows(stores)
        if chunks:
            logits = stores.prefill(self.module, chunks)
            self.num_computed += sum(c.end - c.start for _, c in chunks)
        return sampled, logits

    def _step_rows(self, stores: DeviceRows) -> Readback:
        if self._changed:
            self._changed = False
            self._num_rows = min(step_rows(self.rows.end), stores.sizes.num_rows)
            stores.retire(np.arange(self.rows.end, self._num_rows))
            self._num_prompts = self._share() if self.scheduler.shared else 0
        # the device may be a token ahead of what the host has read
        longest = int((self.rows.own_start + self.rows.length)[: self.rows.end].max()) + _SPARE
        return stores.launch(self._num_rows, self._num_prompts, self.rows.end, longest)

    def move_rows(self, sources: list[int], targets: list[int]) -> None:
        """See Backend: only columns move, keys and values keep their slots."""
        assert self.stores is not None
        self.stores.move(np.array(sources), np.array(targets))
        self._slots[sources], self._slots[targets] = self._slots[targets], self._slots[sources]

    def move_prompt(self, source: int, target: int, length: int) -> None:
        if self.stores is not None:
            self.stores.prefix.move(source, target, length)

    def copy_prompt(self, source: int, target: int, length: int) -> None:
        """See Backend: never called."""

    def room(self) -> int:
        """See Backend: without pages, every row has room for its longest sequence."""
        return self.rows.num_rows if self.paging is None else self.paging.room()

    def rows_changed(self) -> None:
        self._changed = True

    def stats(self) -> dict[str, float]:
        """Bytes of the stores, and the number of captured graphs."""
        stores = self.stores
        stats: dict[str, float] = {"kv_cache_bytes": 0, "weight_copy_bytes": 0, "num_graphs": 0}
        if stores is not None:
            copied, graphs = stores.forward.num_copied_bytes, stores.graphs.num_graphs
            stats = {"kv_cache_bytes": stores.num_bytes, "weight_copy_bytes": copied, "num_graphs": graphs}
        return stats if self.paging is None else stats | self.paging.stats()

    def _keep(self, *, counts: bool = False) -> None:
        """Give all sequences the pages of their tokens, and take back the pages of sequences that ended."""
        if self.paging is None:
            return
        assert self.stores is not None
        lengths, prompts = self.paging.lengths()
        rows, prefix = (np.zeros(s.num_slots, np.int64) for s in (self.stores.row_store, self.stores.prefix))
        rows[self._slots[: len(lengths)]], prefix[: len(prompts)] = lengths, prompts
        self.stores.keep(rows, prefix)
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
        n, new = self.scheduler.params.n, self._num_new()
        shared = self.scheduler.shared
        if self.paging is not None:
            return self._paged_sizes(decoder, longest_prompt, num_rows)
        while True:
            sizes = DeviceSizes(
                num_rows=num_rows,
                own_capacity=rounded(new + (0 if shared else longest_prompt)),
                num_prefixes=self._num_prefixes(num_rows),
                prefix_capacity=rounded(longest_prompt),
                width=min(n, num_rows) if shared else 0,
                longest=rounded(longest_prompt + new),
            )
            allowed = _free_bytes(decoder.embed.device)
            if num_rows == 1 or allowed is None or sizes.num_tokens() * TokenStore.bytes_per_token(decoder) <= allowed:
                return sizes
            num_rows = num_rows // 2

    def _num_new(self) -> int:
        return self.scheduler.params.max_new_tokens + _SPARE

    def _num_prefixes(self, num_rows: int) -> int:
        """A prompt keeps its slot until its last sample ends: twice as many as full groups need."""
        n = self.scheduler.params.n
        slots = min(num_rows, 2 * -(-num_rows // n) + 8)
        more_come = self.scheduler.samples.keep or self.paging is not None
        return slots if more_come else min(len(self.prompts.waiting) + len(self.prompts.by_slot), slots)

    def _paged_sizes(self, decoder: DenseDecoder, longest_prompt: int, num_rows: int) -> DeviceSizes:
        """Sizes for `num_rows` rows; pages for all of them, or for as many tokens as the limit and the free memory allow."""
        assert self.paging is not None
        n, new, shared = self.scheduler.params.n, self._num_new(), self.scheduler.shared
        size, pages = self.paging.block_size, lambda length: -(-length // self.paging.block_size)
        row_pages, prompt_pages = pages(new + (0 if shared else longest_prompt)), pages(longest_prompt + new)
        num_prefixes = self._num_prefixes(num_rows)
        num_pages = min(num_rows * row_pages + num_prefixes * prompt_pages + 1, (self._page_limit or UNLIMITED) // size)
        if (allowed := _free_bytes(decoder.embed.device)) is not None:
            num_pages = min(num_pages, allowed // (size * TokenStore.bytes_per_token(decoder)) - 1)
        return DeviceSizes(
            num_rows=num_rows,
            own_capacity=row_pages * size,
            num_prefixes=num_prefixes,
            prefix_capacity=prompt_pages * size,  # a preempted sample is a prompt with its tokens
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


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether the device has room for `num_bytes` in addition to the peak of this process, with a reserve."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    other_processes = total - free - torch.cuda.memory_reserved(device)
    return most_memory_allocated(device) + num_bytes <= _RESTING_SHARE * (total - other_processes)
