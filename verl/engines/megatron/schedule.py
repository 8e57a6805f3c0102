"""Micro-batches through Megatron's schedule of the pipeline: forward, or forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, LossFn
from verl.engines.megatron.groups import broadcast_value
from verl.engines.megatron.library import get_forward_backward_func
from verl.engines.megatron.model import DecoderStage, gather_choices, stage_inputs
from verl.models.packed import PackedLayout, PackedSegment
from verl.models.packing import PackedBatch
from verl.models.parallel.forward import empty_batch

Part = tuple[DataProto, PackedBatch]  # the rows of a micro-batch, and their layout
Outputs = dict[str, torch.Tensor]


class PipelineSchedule:
    """Runs `chunks`, the stages of this rank or what sums their gradients, with the other ranks of `pipeline`. The tokens of a
    micro-batch are a multiple of `divides`."""

    def __init__(
        self, chunks: list[object], stages: list[DecoderStage], pipeline: Any, divides: int, device: torch.device
    ):
        self.chunks, self.pipeline, self.divides, self.device = chunks, pipeline, divides, device
        self.stage_of = dict(zip(map(id, chunks), stages, strict=True))
        self.is_last = pipeline.rank() == pipeline.size() - 1

    def filled(self, plan: list[list[int]]) -> list[list[int]]:
        """Interleaved stages take as many micro-batches at a time as the pipeline has ranks: the last ones are empty."""
        return plan + [[] for _ in range(-len(plan) % self.pipeline.size())] if len(self.chunks) > 1 else plan

    def padded(self, packed: PackedBatch) -> PackedBatch:
        """`packed` with at least one token, padded by a separate segment to a multiple of `divides`."""
        packed = packed if packed.num_tokens else empty_batch(packed)
        missing = -packed.num_tokens % self.divides
        if not missing:
            return packed
        zeros = packed.input_ids.new_zeros(1, missing)
        return replace(
            packed,
            input_ids=torch.cat([packed.input_ids, zeros], 1),
            position_ids=torch.cat([packed.position_ids, zeros], 1),
            layout=PackedLayout(
                [*packed.layout.segments, PackedSegment(packed.num_tokens, missing)],
                routing=packed.layout.routing and packed.layout.routing.padded(packed.num_tokens + missing),
            ),
        )

    def forward(self, parts: list[Part], outputs: Sequence[str], temperature: float) -> list[Outputs]:
        """The outputs of all micro-batches, equal on all stages."""

        def read(stage: DecoderStage, states: torch.Tensor, part: Part) -> Outputs:
            return stage.outputs(states, part[1], outputs, temperature)

        return self._from_last(self._run(parts, read, trains=False))

    def train(
        self, parts: list[Part], outputs: Sequence[str], temperature: float, loss: LossFn, totals: BatchTotals
    ) -> list[dict[str, Metric]]:
        """Sum the gradients of the losses; returns their metrics, equal on all stages. The last stage computes them, and
        earlier stages once more from its outputs: then an objective remembers the same on all of them."""
        metrics: list[dict[str, Metric]] = []

        def add_loss(
            stage: DecoderStage, states: torch.Tensor, part: Part
        ) -> tuple[torch.Tensor, torch.Tensor, Outputs]:
            named_outputs = stage.outputs(states, part[1], outputs, temperature)
            value = states.sum() * 0  # every stage goes backward, whether something trains or not
            if len(part[0]):
                computed, loss_metrics = loss(named_outputs, part[0], totals)
                metrics.append({**loss_metrics, "loss": Metric.sum(computed.detach())})
                value = computed if computed.requires_grad else value
            one = torch.ones(
                (), dtype=torch.int, device=states.device
            )  # the number of tokens that Megatron would divide by
            return value, one, {name: v.detach() for name, v in named_outputs.items()}

        results = self._from_last(self._run(parts, add_loss, trains=True))
        for (rows, _), named_outputs in zip(parts, results, strict=True) if not self.is_last else ():
            if len(rows):
                value, loss_metrics = loss(named_outputs, rows, totals)
                metrics.append({**loss_metrics, "loss": Metric.sum(value.detach())})
        return metrics

    def _run(self, parts: list[Part], read: Any, *, trains: bool) -> list[Any]:
        def step(iterator: Iterator[Part], chunk: Any) -> tuple[torch.Tensor, Any]:
            part = next(iterator)

            def end(states: torch.Tensor, non_loss_data: bool = False) -> Any:
                return read(self.stage_of[id(chunk)], states, part)

            inputs = stage_inputs(part[1], self.stage_of[id(chunk)].config)
            states = chunk(**inputs)
            gather_choices(part[1], inputs["packed_seq_params"])
            return states, end

        results: list[object] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(parts) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(parts),
            seq_length=1,  # shapes are sent along
            micro_batch_size=1,
            forward_only=not trains,
            collect_non_loss_data=not trains,
        )
        return results

    def share_choices(self, packed: PackedBatch) -> None:
        """Let every stage have the experts that the routers of all stages chose for `packed`, if they are recorded."""
        routing = packed.layout.routing
        if routing is None or routing.replayed is not None:
            return
        for stage in range(self.pipeline.size()):
            rank = dist.get_global_rank(self.pipeline, stage)
            chosen = broadcast_value(routing.chosen(), rank, self.pipeline, self.device)
            routing.record({int(layer): experts.to(self.device) for layer, experts in chosen.items()})

    def _from_last(self, results: list[Outputs]) -> list[Outputs]:
        if self.pipeline.size() == 1:
            return results
        sent = [{name: v.cpu() for name, v in outputs.items()} for outputs in results] if self.is_last else None
        last = dist.get_global_rank(self.pipeline, self.pipeline.size() - 1)
        outputs: list[Outputs] = broadcast_value(sent, last, self.pipeline, self.device)
        return [{name: v.to(self.device) for name, v in values.items()} for values in outputs]
