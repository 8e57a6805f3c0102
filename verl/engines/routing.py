"""The experts of an engine's forwards: replayed from a batch, or recorded for it (verl/models/routing.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.models.hf_module import HFModule
from verl.models.packing import by_row, group_rows, unpadded_rows
from verl.models.padded import require_packed
from verl.models.routing import Routing, follow_routing

if TYPE_CHECKING:
    from verl.engines.micro_batches import BatchPlan
    from verl.models.packing import PackedBatch


class EngineRouting:
    """Of one engine. Until `follow` its routers choose the experts of every token, for any batch."""

    def __init__(self) -> None:
        self._config: Any = None  # of the model, after `follow`
        self._records: dict[int, np.ndarray] | None = None

    def follow(self, module: HFModule) -> None:
        """From now on the routers of `module` choose the experts in the column `routed_experts`, if a batch has it. Raises
        ConfigError for a model without experts, or without a forward for packed batches."""
        require_packed(module, "actor.router_replay.mode")
        follow_routing(module)
        self._config = module.config

    @contextmanager
    def recording(self) -> Iterator[dict[int, np.ndarray]]:
        """Inside, forwards record the experts of each row of their batch [tokens, layers, k], by row, in place of a replay."""
        assert self._config is not None, "follow a module first"
        self._records = {}
        try:
            yield self._records
        finally:
            self._records = None

    @property
    def replays(self) -> bool:
        """Whether a forward chooses the experts that its batch has."""
        return self._config is not None and self._records is None

    def begin(self, packed: PackedBatch) -> None:
        """Called before a forward without gradient."""
        if self._records is not None:
            packed.layout.routing = Routing()

    def end(self, packed: PackedBatch, plan: BatchPlan, rows: Sequence[int], share: bool) -> None:
        """Called after it: `packed` has the rows `rows` of a planned batch, with or without shared prompts."""
        if self._records is not None and packed.layout.routing is not None and packed.num_tokens:
            record = packed.layout.routing.recorded(self._config).cpu().numpy()
            groups = group_rows(unpadded_rows(plan.batch.batch, rows, plan.requested.reads, plan.extras), share)
            self._records.update(by_row(groups, record))
