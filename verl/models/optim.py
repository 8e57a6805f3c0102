"""The optimizer step: float32 master weights, learning-rate schedule, clipping, and state by parameter name."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from verl.config import OptimConfig
from verl.config.sections.model import OWN_SCHEDULES, SCHEDULES
from verl.errors import CheckpointError, ConfigError, nearest
from verl.models.grad_buffers import GradientBuffers
from verl.models.loss_scale import LossScale
from verl.models.optimizers import Divided, build_optimizer
from verl.models.parallel.collectives import local
from verl.models.rounding import Region, Rounding
from verl.models.visible import VisibleUpdate
from verl.parallel.device import moved
from verl.parallel.pinned import pinned_like

log = logging.getLogger(__name__)


def lr_at(step: int, config: OptimConfig, total_steps: int) -> float:
    """The learning rate of trainer step `step`, counted from 0.

    `constant`, `linear` or `cosine` after a linear warm-up of lr_warmup_steps (when null, 0 or less: lr_warmup_steps_ratio of
    all steps), or a schedule of `transformers.get_scheduler`. With p the share of the steps after warm-up that are done,
    linear is lr * (1 - p), and cosine lr * max(min, cos(2 pi num_cycles p) (1 - min) / 2 + (1 + min) / 2). With
    `zero_indexed_step` the first step has index 0, and a warm-up begins at its lowest rate. Raises ConfigError for an
    unknown schedule, for arguments that it does not take, and for one over a number of steps that is not known (0).
    """
    if config.total_training_steps > 0:
        total_steps = config.total_training_steps
    if total_steps <= 0 and (key := config.over_all_steps):
        raise ConfigError(
            f"optim.{key} depends on the number of steps, which your loop does not say. Set optim.total_training_steps."
        )
    steps = config.lr_warmup_steps or 0
    warmup = steps if steps > 0 else int(config.lr_warmup_steps_ratio * total_steps)
    index = step if config.zero_indexed_step else step + 1
    kind = config.lr_scheduler_type
    if kind in SCHEDULES:
        return config.lr * _factor_of_transformers(index, config, warmup, total_steps)
    if kind not in OWN_SCHEDULES:
        raise ConfigError(f"optim.lr_scheduler_type={kind!r} is unknown.{nearest(kind, [*OWN_SCHEDULES, *SCHEDULES])}")
    least = max(config.min_lr_ratio, config.min_lr / config.lr) if kind == "cosine" else 0.0
    if index < warmup:
        return config.lr * (least + (1 - least) * index / warmup)
    if kind == "constant":
        return config.lr
    progress = (index - warmup) / max(1, total_steps - warmup)
    if kind == "linear":
        return config.lr * max(0.0, 1 - progress)
    wave = math.cos(2 * math.pi * config.num_cycles * progress)
    return config.lr * max(least, wave * (1 - least) / 2 + (1 + least) / 2)


def _factor_of_transformers(index: int, config: OptimConfig, warmup: int, total_steps: int) -> float:
    """The factor of `config.lr` at step `index`. A schedule of transformers is a function of the step, so nothing is saved."""
    from transformers import get_scheduler

    stand_in = torch.optim.SGD([torch.zeros(1)], lr=config.lr)  # the schedule reads its rate
    try:
        schedule = get_scheduler(
            config.lr_scheduler_type, stand_in, warmup, total_steps, dict(config.lr_scheduler_kwargs)
        )
        return float(schedule.lr_lambdas[0](index))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"optim.lr_scheduler_kwargs does not fit {config.lr_scheduler_type}, with {warmup} of {total_steps} steps as "
            f"warm-up: {error}"
        ) from error


@dataclass(frozen=True)
class OptimizerStep:
    """Result of a step. `grad_norm` is the norm before clipping; a step without a finite norm changes nothing."""

    grad_norm: float
    taken: bool


def total_norm(parameters: Mapping[str, nn.Parameter]) -> torch.Tensor:
    """The L2 norm of all gradients."""
    return nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None])


@dataclass(frozen=True)
class AdamStep:
    """Values of one step of an Adam optimizer, in place of the config's. A `clip_grad` of 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    clip_grad: float = 0.0

    def group(self) -> dict[str, Any]:
        """The values as a parameter group of torch has them."""
        betas = (self.beta1, self.beta2)
        return {"lr": self.learning_rate, "betas": betas, "eps": self.eps, "weight_decay": self.weight_decay}


class ComputeShard(Protocol):
    """Compute weights of a parameter that has its master as shard in the module."""

    region: Region

    @property
    def weights(self) -> torch.Tensor:
        """The weights in the shape of the local shard."""
        ...


class Rounded(NamedTuple):
    """A parameter with different dtypes for computing and training; this rank has `region` of it (None: all)."""

    name: str
    weights: torch.Tensor
    master: torch.Tensor
    region: Region | None


class MasterOptimizer:
    """An optimizer over the parameters of `module` that require gradients.

    If the module computes in a narrower dtype than `master_dtype`, or with weights of fewer bits, masters of that dtype are
    kept: gradients of the micro-batches are summed into them, the step acts on them, and the module receives the result as
    `rounding` rounds it. Elsewhere the module's parameters are their own masters and nothing is copied. `gradients` are the
    buffers in which the fused decoder sums gradients; hooks add autograd's gradients to the masters.

    `norm` measures the gradients by name of parameter; parameters that are spread over ranks need their own norm. Sharded
    parameters that compute in a narrower dtype need `shards`, their compute weights by name. With `offloads` the optimizer's
    state is in host memory, and with `host_masters` the masters that are kept and their gradients: pinned, and on the device
    for one parameter at a time while that parameter steps. With a `loss_scale` the gradients are of the loss times its value.
    Muon gathers matrices by `divided`.
    """

    loss_scale: LossScale | None = None

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        compute_dtype: torch.dtype,
        norm: Callable[[Mapping[str, nn.Parameter]], torch.Tensor] = total_norm,
        rounding: Rounding | None = None,
        shards: Mapping[str, ComputeShard] | None = None,
        offloads: bool = False,
        host_masters: bool = False,
        loss_scale: LossScale | None = None,
        divided: Divided | None = None,
    ):
        self.loss_scale = loss_scale
        self.config, self.offloads, self.host_masters = config, offloads, host_masters
        self.norm = norm
        self.rounding, self.shards = rounding or Rounding(), shards or {}
        self.num_steps = 0
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        at_first = self.rounding.measured(self.parameters.items())
        self.masters = {
            name: _make_master(name, p, compute_dtype, at_first, host_masters) for name, p in self.parameters.items()
        }
        holders = {} if host_masters else {p: self.masters[name] for name, p in self.parameters.items()}
        self.gradients = GradientBuffers(holders)
        self.copied = [name for name, p in self.parameters.items() if self.masters[name] is not p]
        self.optimizer = build_optimizer(config, self.masters, module, divided)
        self._visible = VisibleUpdate(self.rounded())

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a loss to the gradients."""
        (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()

    def step(self, lr: float | AdamStep, accept: Callable[[float], bool] | None = None) -> OptimizerStep:
        """Clip the gathered gradients to `clip_grad`, step at rate `lr` or with the values of an AdamStep, and forget them.
        `accept` gets the norm and may refuse the step. Then it changes nothing."""
        grads = [local(p.grad) for p in self.masters.values() if p.grad is not None]
        if self.loss_scale is not None and grads:
            torch._foreach_mul_(grads, 1 / self.loss_scale.value)
        norm = self.norm(self.masters) if grads else torch.zeros(())
        grad_norm = norm.item()
        accepted = accept is None or accept(grad_norm)  # asked on every rank, also after a refusal here
        taken = bool(grads) and accepted and math.isfinite(grad_norm)
        if taken:
            for master in self.masters.values():
                if master.grad is None:  # of a vision tower in a batch of text; on several ranks it has zeros too
                    master.grad = torch.zeros_like(master)
            values = {**self.optimizer.defaults, **(lr.group() if isinstance(lr, AdamStep) else {"lr": lr})}
            if clip_grad := lr.clip_grad if isinstance(lr, AdamStep) else self.config.clip_grad:
                scale = torch.clamp(clip_grad / (norm + 1e-6), max=1.0)
                for device in {grad.device for grad in grads}:
                    torch._foreach_mul_([grad for grad in grads if grad.device == device], scale.to(device))
            for group in self.optimizer.param_groups:
                group.update(values)
            self._step_in_turn() if self.offloads or self.host_masters else self.optimizer.step()
            self.num_steps += 1
            self.round_masters()
        elif self.loss_scale is not None and self.loss_scale.overflows(grad_norm):
            log.info("The gradients overflow float16; this step is skipped and halves the loss scale of %g.",
                     self.loss_scale.value)  # fmt: skip
        elif grads and not math.isfinite(grad_norm):
            log.warning(
                "The gradient norm is %s; this optimizer step is skipped and no weight changes. %s.",
                grad_norm, self._broken_gradients(),
            )  # fmt: skip
        if self.loss_scale is not None and (taken or not math.isfinite(grad_norm)):
            self.loss_scale.update(grad_norm)
        self.forget_gradients()
        return OptimizerStep(grad_norm, taken)

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients.release()

    def _step_in_turn(self) -> None:
        gradients = {master: master.grad for master in self.masters.values() if master.grad is not None}
        devices = {self.masters[name]: p.device for name, p in self.parameters.items()}
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.param_groups:
            members = group["params"]
            for master in members:
                if master in gradients:
                    self._step_one(group, master, gradients.pop(master), devices[master])
            group["params"] = members

    def _step_one(
        self, group: dict[str, object], master: nn.Parameter, gradient: torch.Tensor, device: torch.device
    ) -> None:
        """Step `master`, of `group`, on `device`; a master of the host is copied there and back."""
        on_device = master if master.device == device else nn.Parameter(moved(master, device))
        self._move_slots(master, device)
        self.optimizer.state[on_device] = self.optimizer.state.pop(master, {})
        on_device.grad, group["params"] = moved(gradient, device), [on_device]
        self.optimizer.step()
        on_device.grad = None
        self.optimizer.state[master] = self.optimizer.state.pop(on_device)
        if self.offloads:
            self._move_slots(master, torch.device("cpu"))
        if on_device is not master:
            master.detach().copy_(on_device.detach())

    @torch.no_grad()
    def _broken_gradients(self) -> str:
        """The gradients that are not finite, and the dtypes that may be the cause."""
        grads = {name: local(p.grad) for name, p in self.masters.items() if p.grad is not None}
        broken = [name for name, grad in grads.items() if not torch.isfinite(grad).all()]
        if not broken:
            return (
                "All gradients of this rank are finite: look at the other ranks, or for values whose squares overflow"
            )
        nearest = broken[-1]  # backward goes from the last parameters to the first
        computes = (self.shards[nearest].weights if nearest in self.shards else self.parameters[nearest]).dtype
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in self.parameters.values()})
        symptom = (
            f"{len(broken)} of {len(grads)} gradients are not finite, nearest to the loss that of {nearest}, which computes in "
            f"{str(computes).removeprefix('torch.')} and trains in {str(self.masters[nearest].dtype).removeprefix('torch.')}"
        )
        mixed = f"; the model's parameters are of {' and '.join(kinds)}" if len(kinds) > 1 else ""
        advice = "" if computes == torch.float32 else ". fsdp_config.dtype=float32 shows whether the dtype is the cause"
        return symptom + mixed + advice

    @torch.no_grad()
    def round_masters(self) -> None:
        """Write the masters into the module, rounded to its dtype."""
        rounding = self.rounding.measured((name, master) for name, _, master, _ in self.rounded())
        for name, weights, master, region in self.rounded():
            rounding.write(weights, name, master, region)

    def rounded(self) -> Iterator[Rounded]:
        """The weights that `round_masters` writes, and their masters."""
        for name in self.copied:
            yield Rounded(name, self.parameters[name].detach(), self.masters[name].detach(), None)
        for name, shard in self.shards.items():
            if name in self.masters:
                yield Rounded(name, shard.weights, local(self.masters[name].detach()), shard.region)

    def movement(self) -> dict[str, torch.Tensor]:
        """See VisibleUpdate.sums; empty if masters compute themselves."""
        return self._visible.sums(self.rounded())

    def move_state(self, device: torch.device) -> None:
        """Keep the optimizer's state of each parameter on `device` from now on."""
        for master in list(self.optimizer.state):
            self._move_slots(master, device)

    def _move_slots(self, master: torch.Tensor, device: torch.device) -> None:
        slots = self.optimizer.state.get(master, {})
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor) and value.dim():
                slots[slot] = moved(value, device)

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors as "{parameter name}/{slot}", not copied. Slots that are numbers become float64
        tensors."""
        slots: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            for slot, value in self.optimizer.state.get(master, {}).items():
                if value is not None:
                    is_tensor = isinstance(value, torch.Tensor)
                    slots[f"{name}/{slot}"] = value.detach() if is_tensor else torch.tensor(value, dtype=torch.float64)
        return slots

    def load_state(self, tensors: Iterable[tuple[str, torch.Tensor]], num_steps: int) -> None:
        """The inverse of `state`, tensor by tensor; raises CheckpointError for a parameter that is not trained here or of
        another shape."""
        self.optimizer.state.clear()
        self.num_steps = num_steps
        for key, value in tensors:
            name, _, slot = key.rpartition("/")
            master = self.masters.get(name)
            if master is None:
                raise CheckpointError(
                    f"The checkpoint has optimizer state for {name!r}, which this model does not train; it "
                    "belongs to another model."
                )
            if value.dim() and value.shape != master.shape:
                raise CheckpointError(
                    f"The checkpoint's {key} has shape {list(value.shape)}, the model's {list(master.shape)}; it "
                    "belongs to another model."
                )
            steps_on = self.parameters[name].device if self.host_masters else master.device
            device = torch.device("cpu") if self.offloads and value.dim() else steps_on
            self.optimizer.state[master][slot] = value.to(device, copy=True)


def _make_master(
    name: str, parameter: nn.Parameter, compute_dtype: torch.dtype, rounding: Rounding, on_host: bool
) -> nn.Parameter:
    """Narrow the module's parameter to `compute_dtype`, keeping the wide values as the master; with `on_host` it is in host
    memory with its gradient. Heads named `score`, and the lengths of rows of DoRA, stay wide."""
    narrower = torch.finfo(compute_dtype).bits < torch.finfo(parameter.dtype).bits or name in rounding.four_bit
    if not narrower or name.startswith("score.") or name.endswith(".lora_magnitude_vector"):
        return parameter
    master = nn.Parameter(moved(parameter, "cpu", copy=True) if on_host else parameter.data)
    parameter.data = rounding.rounded(name, parameter.data, compute_dtype)

    def sum_into_master(narrow: torch.Tensor) -> None:
        if narrow.grad is None:  # it went to the buffers
            return
        gradient = moved(narrow.grad, master.device)
        if master.grad is None:
            is_pinned = on_host and narrow.device.type == "cuda"
            master.grad = (pinned_like if is_pinned else torch.empty_like)(master.detach()).copy_(gradient)
        else:
            master.grad.add_(gradient)
        narrow.grad = None

    parameter.register_post_accumulate_grad_hook(sum_into_master)
    return master
