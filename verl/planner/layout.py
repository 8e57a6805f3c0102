"""Layouts: how the devices of a role divide its model and its work."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes of a role that trains or computes: `data` x `context` x `tensor` x `pipeline` devices, tensor parallel
    ranks next to each other. `expert` ranks, of data, context and tensor, divide the experts of a mixture.

    `micro_batch` is in tokens of a device's data parallel group. `zero` is the stage of ZeRO (arXiv:1910.02054): 1 divides the
    optimizer's state over data and context ranks, 2 gradients too, 3 weights too (FSDP). `offload`: the state lies in the
    host's memory while the role is idle. `chunks`: chunks of a stage in an interleaved pipeline. `recompute` "selective"
    leaves out the scores of attention, which fused attention never keeps (`keeps_scores`). `logit_chunk`: rows of logits that
    exist at once; 0: all.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 1
    offload: bool = False
    recompute: Recompute = "none"
    micro_batch: int = 0
    chunks: int = 1
    sequence_parallel: bool = True
    keeps_scores: bool = False
    dropout: bool = False
    logit_chunk: int = 0

    @property
    def num_devices(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def data_ranks(self) -> int:
        """Ranks that repeat the same dense parameters."""
        return self.data * self.context

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that repeat the same experts."""
        return max(1, self.data * self.context * self.tensor // self.expert)

    @property
    def group_sizes(self) -> tuple[int, int, int]:
        """Sizes of the tensor, pipeline and expert parallel process groups."""
        return self.tensor, self.pipeline, self.expert

    def replace(self, **changes: Any) -> ParallelLayout:
        return dataclasses.replace(self, **changes)

    def text(self) -> str:
        """ "dp 4, tp 2, zero 1, full recompute"."""
        sizes = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline, "cp": self.context, "ep": self.expert}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["dp 1"]
        parts += [f"ZeRO-{self.zero}"] if self.data_ranks > 1 and self.zero else []
        parts += [f"{self.recompute} recompute"] if self.recompute == "full" else []
        parts += ["offload"] if self.offload else []
        return ", ".join(parts)


@dataclass(frozen=True)
class EngineLayout:
    """Parallel sizes of a rollout engine: `replicas` of `tensor` x `pipeline` devices. `slots` samples run at once in a
    replica."""

    replicas: int
    tensor: int = 1
    pipeline: int = 1
    slots: int = 256

    @property
    def num_devices(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    def text(self) -> str:
        sizes = {"replicas": self.replicas, "tp": self.tensor, "pp": self.pipeline}
        shown = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "replicas"]
        return ", ".join([*shown, f"{self.slots} slots"])
