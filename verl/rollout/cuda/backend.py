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

    def open(self, scheduler: Scheduler) -> None:
        """Serve a generation."""
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
        return len(self.prompts.by_slot) < sizes.num_prefixes and group.num_tokens <= self._made_for[-1]

    def load(self, group: Group) -> None:
        """See Backend."""
        assert self.stores is not None
        self.stores.prefix.put(group.slot, group.saved)

    def save(self, row: int) -> torch.Tensor:
        """See Backend."""
        assert self.stores is not None
        length = int(self.rows.own_start[row] + self.rows.length[row]) - 1
        return self.stores.own.take(int(self._slots[row]), length).clone()

    def start(self, rows: np.ndarray, logits: torch.Tensor) -> Readback:
        """See Backend."""
        assert self.stores is not None
        if not self.scheduler.shared:
            for row in rows.tolist():
                group = self.rows.groups[row]
                assert group is not None
                self.stores.own.put(int(self._slots[row]), self.stores.prefix.take(group.slot, group.num_tokens))
        columns = np.zeros((NUM_COLUMNS, len(rows)), dtype=np.int64)
        columns[POSITION] = self.rows.prompt_length[rows]
        columns[OWN_START] = self._slots[rows] * self.stores.sizes.own_capacity
        columns[OWN_LENGTH] = self.rows.own_start[rows]
        columns[KEY] = self.rows.key[rows]
        columns[DRAWN] = self.rows.num_drawn[rows] + 1
        return self.stores.begin(rows, columns, logits)

    def step(self, chunks: list[tuple[Group, Chunk]]) -> tuple[Readback | None, torch.Tensor]:
        """See Backend: the chunks first, and then all rows."""
        stores = self.stores
        assert stores is not None
        logits = torch.empty(0)
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
            self.stores.prefix.put(target, self.stores.prefix.take(source, length))

    def room(self) -> int:
        """See Backend: every row has room for its longest sequence."""
        return self.rows.num_rows

    def rows_changed(self) -> None:
        """See Backend."""
        self._changed = True

    def stats(self) -> dict[str, int]:
        """Bytes of the stores, and the number of captured graphs."""
        stores = self.stores
        num_bytes, num_graphs = (stores.num_bytes, stores.graphs.num_graphs) if stores is not None else (0, 0)
        return {"kv_cache_bytes": num_bytes, "weight_copy_bytes": 0, "num_graphs": num_graphs}

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


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_MEMORY_SHARE * (free + unused))
