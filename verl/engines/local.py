"""Training on one device in this process: packed micro-batches, gradient accumulation, one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from verl.engines.base import TrainedEngine
from verl.engines.loading import build_module
from verl.engines.mapped import MappedWeights, check_place
from verl.engines.state import Parameters, TrainedState
from verl.engines.streamed import StreamedWeights
from verl.models.check import require_dtype
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import decoder_for, packed_outputs
from verl.models.loss_scale import LossScale
from verl.models.optim import MasterOptimizer
from verl.models.packing import PackedBatch
from verl.models.padded import forward_kind
from verl.models.vision import freeze_towers
from verl.parallel.device import move_module


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
        **settings: Any,
    ):
        """Settings: see TrainedEngine. `build` makes the model in place of the folder's. With `memory_map`, map_weights
        follows."""
        super().__init__(**settings)
        model, narrow, rounding, trains = self.model_config, self.compute_dtype, self.rounding, self.optim is not None
        self.optimizer: MasterOptimizer | None = None
        at_first = torch.device("cpu") if memory_map or self._holds_on_host else self.device
        self.module = build_module(
            model, self.head, at_first, narrow, rounding, trains=trains, build=build, adapts_head=self.adapts_head
        )
        if freezes_vision_tower:
            freeze_towers(self.module)
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
