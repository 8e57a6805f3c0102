"""Training on one device in this process: packed micro-batches, gradient accumulation, one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, EngineState, LossFn, MicroBatching, Output
from verl.engines.loading import load_module
from verl.engines.micro_batches import plan_micro_batches
from verl.engines.state import LocalParameters, TrainedState
from verl.errors import ConfigError
from verl.models.forward import policy_outputs, value_outputs
from verl.models.lora import LoRASpec, adapters_off
from verl.models.optim import MasterOptimizer, lr_at
from verl.models.packing import PackedBatch, pack_rows, read_rows
from verl.parallel.device import compute_dtype


class LocalEngine:
    """The TrainEngine of one device. `kind` says what the model outputs: log-probs and entropy, or values.

    A frozen model (`trainable=False` or no `optim`) is held in the compute dtype alone. Equal configs and inputs give
    equal results to the last bit on a CPU: micro-batches run in a fixed order.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        engine: FSDPConfig,
        optim: OptimConfig | None,
        kind: Literal["policy", "value"],
        device: torch.device,
        total_steps: int,
        trainable: bool = True,
        share_prompts: bool = True,
    ):
        self.kind = kind
        self.device = device
        self.total_steps = total_steps
        self.share_prompts = share_prompts
        self.optim = optim if trainable else None
        self.num_lr_steps = 0
        self.compute_dtype = narrow = compute_dtype(engine.dtype, device)
        self.module = load_module(model, kind, device, narrow, trains=self.optim is not None)
        self.spec = LoRASpec.of(model) if self.optim is not None else None
        self.optimizer: MasterOptimizer | None = None
        if self.optim is None:
            self.module.requires_grad_(False).eval()
        else:
            self.module.train()
            self.optimizer = MasterOptimizer(self.module, self.optim, narrow)
        parameters = LocalParameters(self.module, self.optimizer)
        self._trained = TrainedState(self.module, parameters, self.optimizer, self.spec, model.path)

    @torch.no_grad()
    def forward(
        self, batch: DataProto, outputs: Sequence[Output], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """See TrainEngine."""
        shape = tuple(batch.batch["responses"].shape)
        found: dict[str, torch.Tensor] = {}
        for rows, part in self._micro_batches(batch, micro):
            for name, values in self._outputs(self._pack(part), outputs, temperature).items():
                if name not in found:
                    wide = values.dtype if values.dtype == torch.float64 else torch.float32
                    found[name] = torch.zeros(shape, dtype=wide)
                found[name][rows] = values.to("cpu", found[name].dtype)
        return found

    def train_batch(
        self, batch: DataProto, loss: LossFn, outputs: Sequence[Output], micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Metric]:
        """See TrainEngine. `num_skipped_updates` is added when the gradient norm was not finite."""
        assert self.optim is not None, "a frozen model cannot be trained"
        assert self.optimizer is not None
        totals = BatchTotals(num_tokens=int(batch.batch["response_mask"].sum()), num_sequences=len(batch))
        parts: list[dict[str, Metric]] = []
        for _, part in self._micro_batches(batch, micro):
            value, metrics = loss(self._outputs(self._pack(part), outputs, temperature), part, totals)
            if value.requires_grad:  # a micro-batch in which nothing trains has no graph
                value.backward()
            parts.append({**metrics, "loss": Metric.sum(value.detach())})
        result = self.optimizer.step(lr_at(self.num_lr_steps, self.optim, self.total_steps))
        merged = merge_metrics(parts)
        merged["grad_norm"] = Metric.last(result.grad_norm)
        if not result.taken:
            merged["num_skipped_updates"] = Metric.last(1.0)
        return merged

    def end_step(self) -> float:
        """See TrainEngine."""
        assert self.optim is not None, "a frozen model has no learning rate"
        rate = lr_at(self.num_lr_steps, self.optim, self.total_steps)
        self.num_lr_steps += 1
        return rate

    @contextmanager
    def reference(self) -> Iterator[None]:
        """See TrainEngine."""
        if self.spec is None:
            raise ConfigError("There are no adapters to leave out; set model.lora_rank, or build a reference policy.")
        with adapters_off(self.module):
            yield

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See TrainEngine."""
        return self._trained.weights(self.compute_dtype)

    def state(self) -> EngineState:
        """See TrainEngine. Tied parameters appear once, under the name of the first."""
        return self._trained.save({"num_lr_steps": self.num_lr_steps})

    def load_state(self, state: EngineState) -> None:
        """See TrainEngine. Parts that were not saved or not asked for are empty and stay as they are. Raises
        CheckpointError when names or shapes are not this model's."""
        self._trained.load(state)
        if state.extra:
            self.num_lr_steps = state.extra["num_lr_steps"]

    def _micro_batches(self, batch: DataProto, micro: MicroBatching) -> Iterator[tuple[list[int], DataProto]]:
        plan = plan_micro_batches(read_rows(batch.batch), micro, self.share_prompts)
        for rows in plan:
            yield rows, batch if len(plan) == 1 else batch.select_idxs(rows)

    def _pack(self, part: DataProto) -> PackedBatch:
        return pack_rows(part.batch, share_prompts=self.share_prompts, device=self.device)

    def _outputs(self, packed: PackedBatch, outputs: Sequence[Output], temperature: float) -> dict[str, torch.Tensor]:
        gradients = self.optimizer.gradients if self.optimizer else None
        if self.kind == "value":
            return value_outputs(self.module, packed, outputs, gradients)
        return policy_outputs(self.module, packed, outputs, temperature, gradients=gradients)
