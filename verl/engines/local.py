"""Training on one device in this process: packed micro-batches, gradient accumulation, one optimizer step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl.config.sections.actor import QATConfig
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, EngineState, LossFn, whole
from verl.engines.base import TrainedEngine
from verl.engines.loading import build_module
from verl.engines.mapped import MappedWeights, check_place
from verl.engines.state import Parameters, TrainedState
from verl.engines.streamed import StreamedWeights
from verl.models.check import require_dtype
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.decoder.rounded import round_layers
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import decoder_for, packed_outputs
from verl.models.further_heads import FurtherHead
from verl.models.loss_scale import LossScale
from verl.models.optim import AdamStep, MasterOptimizer
from verl.models.packing import PackedBatch
from verl.models.padded import forward_kind
from verl.models.qat import four_bit_weights
from verl.models.vision import freeze_towers
from verl.parallel.device import move_module

_MTP = "mtp."  # before a name of the optimizer's state of a further head


class LocalEngine(TrainedEngine):
    """The TrainEngine of one device. Equal configs and inputs give equal results to the last bit on a CPU: micro-batches run
    in a fixed order."""

    computes_images = True
    _mapped: MappedWeights | None = None
    _streamed: StreamedWeights | None = None

    def __init__(
        self,
        *,
        build: Callable[[], object] | None = None,
        memory_map: bool = False,
        freezes_vision_tower: bool = False,
        rounds: QATConfig | None = None,
        **settings: Any,
    ):
        """Settings: see TrainedEngine. `build` makes the model in place of the folder's. With `memory_map`, map_weights
        follows. With `rounds` layers train in few bits (verl/models/qat.py)."""
        super().__init__(**settings)
        model, narrow, rounding, trains = self.model_config, self.compute_dtype, self.rounding, self.optim is not None
        self.optimizer: MasterOptimizer | None = None
        at_first = torch.device("cpu") if memory_map or self._holds_on_host else self.device
        self.module = build_module(
            model, self.head, at_first, narrow, rounding, trains=trains, build=build, adapts_head=self.adapts_head
        )
        if freezes_vision_tower:
            freeze_towers(self.module)
        if rounds is not None and rounds.mode == "int8":
            round_layers(self.module)
        elif rounds is not None:
            self.rounding = rounding = replace(rounding, four_bit=four_bit_weights(self.module, rounds.ignore_patterns))
        if self.optim is None:
            self.module.requires_grad_(False)
        else:
            offloads, on_host = self.config.optimizer_offload, self.config.param_offload and self.spec is None
            may_offload = self.device.type != "cpu"
            self.optimizer = MasterOptimizer(
                self.module,
                self.optim,
                narrow,
                rounding=rounding,
                offloads=offloads and may_offload,
                host_masters=on_host and may_offload,
                loss_scale=LossScale.of(narrow),
            )
            require_dtype(self.module)
        self._keep_prompts_apart(forward_kind(self.module))
        parameters = Parameters(self.module, self.optimizer)
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path, rounding)
        self._further: FurtherHead | None = None
        if self.optim is not None and self.head == "lm" and model.mtp.enable and model.mtp.enable_train:
            self._further = FurtherHead(self.module, model.path)
            self._further_optimizer = MasterOptimizer(self._further, self.optim, narrow, rounding=rounding)

    def _backward(
        self, named_outputs: dict[str, torch.Tensor], part: DataProto, loss: LossFn, totals: BatchTotals
    ) -> dict[str, Metric]:
        metrics = super()._backward(named_outputs, part, loss, totals)
        if self._further is not None:
            value, further = self._further.loss(self.module, part, totals.num_tokens)
            self._further_optimizer.backward(value * self.model_config.mtp.mtp_loss_scaling_factor)
            metrics |= further
        return metrics

    def _after_step(self, metrics: dict[str, Metric], learning_rate: float | AdamStep | None) -> None:
        if self._further is not None and "num_skipped_updates" in metrics:
            self._further_optimizer.forget_gradients()
        elif self._further is not None:
            rate = self.end_step(advance=False) if learning_rate is None else learning_rate
            metrics["mtp_grad_norm"] = Metric.last(self._further_optimizer.step(rate).grad_norm)

    def forget_gradients(self) -> None:
        """See TrainEngine."""
        super().forget_gradients()
        if self._further is not None:
            self._further_optimizer.forget_gradients()

    def state(self) -> EngineState:
        """See TrainEngine. Copies of the embedding and the projection in a trained head are the policy's."""
        state = super().state()
        if self._further is not None:
            copies = {name: state.model[source] for name, source in self._further.copies.items()}
            masters = {name: master.detach() for name, master in self._further_optimizer.masters.items()}
            state.model = {**state.model, **self._further.in_checkpoint(masters), **copies}
            state.optimizer = {**state.optimizer, **{_MTP + k: v for k, v in self._further_optimizer.state().items()}}
            state.extra["untrained"] = [n for n in state.extra.get("untrained", ()) if n not in state.model]
        return state

    @torch.no_grad()
    def load_state(self, state: EngineState) -> None:
        """See TrainEngine."""
        if self._further is not None:
            masters = {name: master.detach() for name, master in self._further_optimizer.masters.items()}
            for name, view in self._further.in_checkpoint(masters).items() if state.model else ():
                view.copy_(whole(state.model[name]))
            self._further_optimizer.round_masters()
            slots = {k.removeprefix(_MTP): whole(v) for k, v in state.optimizer.items() if k.startswith(_MTP)}
            self._further_optimizer.load_state(slots.items(), state.extra.get("num_optimizer_steps", 0))
            state = replace(state, optimizer={k: v for k, v in state.optimizer.items() if not k.startswith(_MTP)})
        super().load_state(state)

    def map_weights(self, folder: Path, kind: str) -> None:
        """Keep the weights of this frozen engine, made with `memory_map`, in a file below `folder`, on a file system of `kind`,
        in place of memory; a GPU reads them layer by layer. Raises ConfigError if the device cannot have them."""
        check_place(folder, kind)
        DenseDecoder.of(self.module)  # it lays projections back to back: once mapped, they cannot move
        self._mapped = MappedWeights([(p, "data") for p in self.module.parameters()], folder)
        if self.device.type != "cpu":
            self._streamed = StreamedWeights(self.module, self.device)

    @contextmanager
    def _ready(self, *, trains: bool = False) -> Iterator[None]:
        """verl's decoder reads the chunks from the layout; modules are made to compute in chunks."""
        if self._holds_on_host:
            move_module(self.module, self.device)
        chunk_tokens = self.dimensions.chunk_tokens
        if chunk_tokens is not None and decoder_for(self.module, self.device) is not None:
            chunk_tokens = None
        streamed = nullcontext() if self._streamed is None else self._streamed.ready()
        try:
            with streamed, chunked_feed_forward(self.module, chunk_tokens):
                yield
        finally:
            if self._holds_on_host:
                move_module(self.module, "cpu")
            if self._mapped is not None:
                self._mapped.release()

    @property
    def _holds_on_host(self) -> bool:
        """Whether the host holds the module between calls: only if frozen, since rollout uses a trained module's weights. Of a
        trained module it holds the masters."""
        return self.config.param_offload and self.optim is None and self.device.type != "cpu" and self._mapped is None

    def _outputs(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        gradients = self.optimizer.gradients if self.optimizer else None
        return packed_outputs(self.module, packed, outputs, temperature, gradients=gradients)
