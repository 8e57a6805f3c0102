"""Training on one device in this process: packed micro-batches, gradient accumulation, one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from verl.config import FSDPConfig, ModelConfig, OptimConfig
from verl.data_proto.metrics import Metric, merge_metrics
from verl.data_proto.proto import DataProto
from verl.engines.api import BatchTotals, EngineState, LossFn, MicroBatching, Output
from verl.engines.micro_batches import plan_micro_batches
from verl.errors import CheckpointError
from verl.models.forward import policy_outputs, value_outputs
from verl.models.load import load_causal_lm, load_external, load_value_model
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
        narrow = compute_dtype(engine.dtype, device)
        wide = torch.promote_types(narrow, torch.float32)
        self.module = _load(model, kind, device, narrow if self.optim is None else wide, trains=self.optim is not None)
        self.optimizer: MasterOptimizer | None = None
        if self.optim is None:
            self.module.requires_grad_(False).eval()
        else:
            self.module.train()
            self.optimizer = MasterOptimizer(self.module, self.optim, narrow)

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

    def state(self) -> EngineState:
        """See TrainEngine. Tied parameters appear once, under the name of the first."""
        masters = self.optimizer.masters if self.optimizer else {}
        model = {name: masters.get(name, p).detach() for name, p in self.module.named_parameters()}
        optimizer = self.optimizer.state() if self.optimizer else {}
        num_steps = self.optimizer.num_steps if self.optimizer else 0
        return EngineState(model, optimizer, {"num_lr_steps": self.num_lr_steps, "num_optimizer_steps": num_steps})

    def load_state(self, state: EngineState) -> None:
        """See TrainEngine. Parts that were not saved or not asked for are empty and stay as they are. Raises
        CheckpointError when names or shapes are not this model's."""
        if state.model:
            self._load_weights(state)
        if state.extra:
            self.num_lr_steps = state.extra["num_lr_steps"]
        if self.optimizer is not None and state.optimizer:
            self.optimizer.load_state(state.optimizer, state.extra.get("num_optimizer_steps", 0))

    def _load_weights(self, state: EngineState) -> None:
        mine = self.state().model
        different = sorted(set(mine) ^ set(state.model)) or [n for n in mine if mine[n].shape != state.model[n].shape]
        if different:
            raise CheckpointError(
                f"The checkpoint does not fit this model: {different[0]} and {len(different) - 1} other tensors are "
                "missing, superfluous or of another shape. Resume with the model that the run was started with."
            )
        with torch.no_grad():
            for name, value in state.model.items():
                mine[name].copy_(value)
        if self.optimizer is not None:
            self.optimizer.publish()

    def _micro_batches(self, batch: DataProto, micro: MicroBatching) -> Iterator[tuple[list[int], DataProto]]:
        plan = plan_micro_batches(read_rows(batch.batch), micro, self.share_prompts)
        for rows in plan:
            yield rows, batch if len(plan) == 1 else batch.select_idxs(rows)

    def _pack(self, part: DataProto) -> PackedBatch:
        return pack_rows(part.batch, share_prompts=self.share_prompts, device=self.device)

    def _outputs(self, packed: PackedBatch, outputs: Sequence[Output], temperature: float) -> dict[str, torch.Tensor]:
        if self.kind == "value":
            return value_outputs(self.module, packed, outputs)
        return policy_outputs(self.module, packed, outputs, temperature)


def _load(model: ModelConfig, kind: str, device: torch.device, dtype: torch.dtype, *, trains: bool) -> Any:
    load_external(model.external_lib)
    load = load_value_model if kind == "value" else load_causal_lm
    return load(
        model.path,
        device=device,
        dtype=dtype,
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing and trains,
    )
