"""Training on one device in this process: packed micro-batches, gradient accumulation, one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.engines.base import TrainedEngine
from verl.engines.hybrid_3d import Dimensions
from verl.engines.loading import build_module
from verl.engines.state import Parameters, TrainedState
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.forward import fused_decoder, packed_outputs
from verl.models.lora import LoRASpec
from verl.models.optim import MasterOptimizer
from verl.models.packing import PackedBatch
from verl.models.rounding import Rounding
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
        self.neftune_alpha = getattr(model, "neftune_alpha", None) or 0.0  # sections of SFT have it
        self.share_prompts = share_prompts and not self.neftune_alpha  # the noise of a row is its own
        self.config, self.dimensions = engine, Dimensions.of(engine)
        self.optim = optim if trainable else None
        self.compute_dtype = narrow = compute_dtype(engine.dtype, device)
        self.rounding = rounding = Rounding(engine.master_rounding)
        self.module = build_module(model, head, device, narrow, rounding, trains=self.optim is not None)
        self.spec = LoRASpec.of(model) if self.optim is not None else None
        self.optimizer: MasterOptimizer | None = None
        if self.optim is None:
            self.module.requires_grad_(False).eval()
        else:
            self.module.train()
            self.optimizer = MasterOptimizer(self.module, self.optim, narrow, rounding=rounding)
        parameters = Parameters(self.module, self.optimizer)
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path, rounding)

    def local_weights(self) -> dict[str, torch.Tensor]:
        """See TrainEngine."""
        masters = self.optimizer.masters if self.optimizer is not None and self.spec is not None else {}
        return {name: masters.get(name, p).detach() for name, p in self.module.named_parameters()}

    def _ready(self, *, trains: bool = False) -> AbstractContextManager[None]:
        """The fused decoder reads the chunks from the layout; modules are made to compute in chunks."""
        chunk_tokens = self.dimensions.chunk_tokens
        if chunk_tokens is not None and fused_decoder(self.module, self.device) is not None:
            chunk_tokens = None
        return chunked_feed_forward(self.module, chunk_tokens)

    def _outputs(self, packed: PackedBatch, outputs: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        gradients = self.optimizer.gradients if self.optimizer else None
        return packed_outputs(self.module, packed, outputs, temperature, gradients=gradients)
