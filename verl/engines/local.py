"""Training on one device in this process: packed micro-batches, gradient accumulation, one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import LossFn, MicroBatching, Output, StepCheck
from verl.engines.base import TrainedEngine
from verl.engines.hybrid_3d import Dimensions
from verl.engines.loading import load_module
from verl.engines.micro_batches import batch_totals, plan_micro_batches, sizes_of
from verl.engines.state import LocalParameters, TrainedState
from verl.engines.step_check import random_state
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.forward import packed_outputs, written_out
from verl.models.lora import LoRASpec
from verl.models.optim import MasterOptimizer
from verl.models.outputs import positions_read
from verl.models.packing import Reads, pack_rows, read_rows
from verl.models.rounding import Rounding
from verl.parallel.balance import unit_ids
from verl.parallel.device import compute_dtype


class LocalEngine(TrainedEngine):
    """The TrainEngine of one device. `head` is a row of verl.models.heads.HEADS.

    A frozen model (`trainable=False` or no `optim`) is held in the compute dtype alone. Equal configs and inputs give
    equal results to the last bit on a CPU: micro-batches run in a fixed order.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: FSDPConfig,
        optim: OptimConfig | None,
        head: str,
        device: torch.device,
        total_steps: int,
        trainable: bool = True,
        share_prompts: bool = True,
    ):
        self.head = head
        self.device = device
        self.total_steps = total_steps
        self.share_prompts = share_prompts
        self.config, self.dimensions = engine, Dimensions.of(engine)
        self.optim = optim if trainable else None
        self.compute_dtype = narrow = compute_dtype(engine.dtype, device)
        self.rounding = rounding = Rounding(engine.master_rounding)
        self.module = load_module(model, head, device, narrow, rounding, trains=self.optim is not None)
        self.spec = LoRASpec.of(model) if self.optim is not None else None
        self.optimizer: MasterOptimizer | None = None
        if self.optim is None:
            self.module.requires_grad_(False).eval()
        else:
            self.module.train()
            self.optimizer = MasterOptimizer(self.module, self.optim, narrow, rounding=rounding)
        parameters = LocalParameters(self.module, self.optimizer)
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path, rounding)

    @torch.no_grad()
    def forward(
        self, batch: DataProto, outputs: Sequence[Output], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """See TrainEngine."""
        reads = positions_read(outputs, self.head)
        found: dict[str, torch.Tensor] = {}
        with self._chunked():
            for rows, part in self._micro_batches(batch, micro, reads):
                for name, values in self._outputs(part, reads, outputs, temperature).items():
                    if name not in found:
                        wide = values.dtype if values.dtype == torch.float64 else torch.float32
                        found[name] = torch.zeros(len(batch), *values.shape[1:], dtype=wide)
                    found[name][rows] = values.to("cpu", found[name].dtype)
        return found

    def train_batch(
        self,
        batch: DataProto,
        loss: LossFn,
        outputs: Sequence[Output],
        micro: MicroBatching,
        temperature: float = 1.0,
        check: StepCheck | None = None,
        rows: Sequence[int] | None = None,
        unit: str = "row",
    ) -> dict[str, Metric]:
        """See TrainEngine. `num_skipped_updates` is added when the step was not taken."""
        assert self.optimizer is not None, "a frozen model cannot be trained"
        drawn = random_state(self.device)
        totals = batch_totals(sizes_of(batch, rows, unit))
        reads = positions_read(outputs, self.head)
        parts: list[dict[str, Metric]] = []
        with self._chunked():
            for _, part in self._micro_batches(batch, micro, reads, rows, unit):
                value, metrics = loss(self._outputs(part, reads, outputs, temperature), part, totals)
                if value.requires_grad:  # a micro-batch in which nothing trains has no graph
                    value.backward()
                parts.append({**metrics, "loss": Metric.sum(value.detach())})
        return self._step(parts, check, drawn)

    def _micro_batches(
        self,
        batch: DataProto,
        micro: MicroBatching,
        reads: Reads,
        rows: Sequence[int] | None = None,
        unit: str = "row",
    ) -> Iterator[tuple[list[int], DataProto]]:
        chosen = read_rows(batch.batch, rows, reads)
        for members in plan_micro_batches(chosen, micro, self.share_prompts, unit_ids(batch, unit)):
            yield members, batch if len(members) == len(batch) else batch.select_idxs(members)

    def _chunked(self) -> AbstractContextManager[None]:
        """The passes that are written out read the chunks from the layout; modules are made to compute in chunks."""
        chunk_tokens = self.dimensions.chunk_tokens
        if chunk_tokens is not None and written_out(self.module, self.device) is not None:
            chunk_tokens = None
        return chunked_feed_forward(self.module, chunk_tokens)

    def _outputs(
        self, part: DataProto, reads: Reads, outputs: Sequence[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        packed = pack_rows(
            part.batch,
            share_prompts=self.share_prompts,
            device=self.device,
            chunk_tokens=self.dimensions.chunk_tokens,
            reads=reads,
        )
        gradients = self.optimizer.gradients if self.optimizer else None
        return packed_outputs(self.module, packed, outputs, temperature, gradients=gradients)
