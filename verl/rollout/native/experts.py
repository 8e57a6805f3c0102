"""Records of the experts that computed the tokens of running samples, for routing replay (verl/models/routing.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl.data_proto.samples import SampleKey

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.models.routing import Routing
    from verl.rollout.layout import Chunk
    from verl.rollout.native.batch import BatchRows, Group


class ExpertRecords:
    """Experts chosen during generation: per prompt token in its group, per sampled token here. `config` is the config of the
    model."""

    def __init__(self, config: PreTrainedConfig):
        self._config = config
        self._drawn: dict[SampleKey, list[np.ndarray]] = {}

    def add(self, routing: Routing, rows: BatchRows, chunks: list[tuple[Group, Chunk]]) -> None:
        """The choices of a step, in the order of its tokens: the newest token of each row, then `chunks`."""
        record = routing.recorded(self._config).cpu().numpy()
        for row, group in enumerate(rows.groups[: rows.end]):
            if group is not None:
                key = (group.request.ordinal, group.request.first_sample + int(rows.sample[row]))
                self._drawn.setdefault(key, []).append(record[row])
        start = rows.end
        for group, chunk in chunks:
            end = start + chunk.end - chunk.start
            group.experts.append(record[start:end])
            start = end

    def of(self, key: SampleKey, group: Group) -> np.ndarray:
        """Experts [tokens - 1, layers, k] of a sample: no forward has read its last token."""
        drawn = self._drawn.get(key)
        return np.concatenate([*group.experts, np.stack(drawn)] if drawn else group.experts)

    def drop(self, key: SampleKey) -> None:
        """Forget a sample."""
        self._drawn.pop(key, None)
