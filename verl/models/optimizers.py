"""Optimizers by name; Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon), also of parameters divided over ranks."""

import importlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from verl.config import OptimConfig
from verl.errors import ConfigError, nearest
from verl.models.parallel.collectives import local
from verl.models.parallel.experts import is_experts

# optimizers that treat each element by itself, so that any part of a tensor is enough for them
ELEMENTWISE = ("AdamW", "Adam", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
_FUSED = ("AdamW", "Adam", "SGD", "Adagrad")  # several times faster than a loop over tensors, on CPU too
_FUSED_SHARDED = ("AdamW", "Adam")  # the fused optimizers that take DTensors
_COEFFICIENTS, _NUM_ROUNDS, _LEAST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7  # of the polynomial that the rounds apply
_MOMENTUM = 0.95
_RMS = 0.2  # of AdamW's steps, Liu et al. 2025 (arXiv:2502.16982), equation 4


class Divided(Protocol):
    """Tensors by name, of which the ranks of `group` hold parts."""

    group: dist.ProcessGroup
    device: torch.device

    def cut_matrices(self, matrices: Collection[str]) -> list[str]:
        """Those of `matrices` on any rank that are divided within a matrix, in an order that is equal on all ranks."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the full tensor."""
        ...

    def whole(self, name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The full tensor of this rank's part `value`; collective."""
        ...

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor."""
        ...


def steps_parts(config: OptimConfig) -> bool:
    """Whether the optimizer steps tensors of which each rank has a part."""
    return config.optimizer in ELEMENTWISE or _is_muon(config)


def _is_muon(config: OptimConfig) -> bool:
    return (config.optimizer_impl, config.optimizer) == ("torch.optim", "Muon")


def build_optimizer(
    config: OptimConfig, named: Mapping[str, nn.Parameter], module: nn.Module, divided: Divided | None = None
) -> torch.optim.Optimizer:
    """The class `optim.optimizer` of the module `optim.optimizer_impl`, over parameters of `module`. torch's Muon, for
    matrices only, is replaced by ours."""
    arguments: dict[str, object] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "Adam" in config.optimizer or _is_muon(config):
        arguments["betas"] = tuple(config.betas)
    parameters = list(named.values())
    fused = _FUSED_SHARDED if any(isinstance(p, DTensor) for p in parameters) else _FUSED
    if config.optimizer_impl == "torch.optim" and config.optimizer in (*fused, "Muon"):
        arguments["fused"] = True
    if _is_muon(config):
        return Muon(named, matrix_names(module), divided, **arguments)
    factory = _factory(config)
    try:
        return cast("torch.optim.Optimizer", factory(_groups(parameters), **arguments))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optim.optimizer={config.optimizer} does not accept {arguments}: {error}") from error


def _factory(config: OptimConfig) -> Any:
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as error:
        raise ConfigError(f"optim.optimizer_impl={config.optimizer_impl} cannot be imported: {error}") from error
    factory = getattr(module, config.optimizer, None)
    if factory is None:
        classes = [n for n, v in vars(module).items() if isinstance(v, type)]
        raise ConfigError(
            f"{config.optimizer_impl} has no optimizer {config.optimizer!r}{nearest(config.optimizer, classes) or '.'}"
        )
    return factory


def _groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """One parameter group for each mesh that parameters are sharded over, and each dtype: a fused step takes no two of
    them."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((mesh, parameter.dtype), []).append(parameter)
    return [{"params": members} for members in groups.values()]


def matrix_names(module: nn.Module) -> set[str]:
    """The trained parameters of `module` that Muon steps: matrices, and experts as stacks of them, not embeddings and heads."""
    head, names = getattr(module, "get_output_embeddings", lambda: None)(), set()
    for path, part in module.named_modules():
        if part is not head and path != "score" and not isinstance(part, nn.Embedding):
            dims = (2, 3) if is_experts(part) else (2,)
            parameters = [(n, p) for n, p in part._parameters.items() if p is not None and p.requires_grad]
            names |= {f"{path}.{n}".strip(".") for n, p in parameters if p.dim() in dims}
    return names


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns]: the nearest matrices with singular values near 1, by Newton-Schulz. A GPU computes in bfloat16."""
    a, b, c = _COEFFICIENTS
    is_tall = update.shape[-2] > update.shape[-1]
    x: torch.Tensor = update.mT if is_tall else update
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_NUM_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.AdamW):
    """Steps parameters in `matrices` by lr * 0.2 sqrt(max(rows, columns)) times their orthogonal momentum, and the others as
    AdamW. Both take the same learning rate and weight decay.

    With `divided`, parameters are parts. The ranks gather as many matrices as they are, each makes one orthogonal, and sends
    it to all.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        matrices: Collection[str],
        divided: Divided | None = None,
        **settings: Any,
    ):
        """`settings`: AdamW's."""
        self.matrices, self._divided = matrices, divided
        self._cut = [] if divided is None else divided.cut_matrices(matrices)
        self._names, self._dtype = {p: name for name, p in named.items()}, next(iter(named.values())).dtype
        groups = []
        for is_matrix in (True, False):
            members = [p for name, p in named.items() if (name in matrices) == is_matrix]
            groups += [{**group, "is_matrix": is_matrix} for group in _groups(members)]
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """See the class."""
        groups, cut, by_name = self.param_groups, set(self._cut), {}
        try:
            self.param_groups = [group for group in groups if not group["is_matrix"]]
            super().step()
        finally:
            self.param_groups = groups
        for group in [group for group in groups if group["is_matrix"]]:
            for p in [p for p in group["params"] if p.grad is not None]:
                if (name := self._names.get(p)) in cut:
                    by_name[name] = (p, group)
                else:
                    update = self._update(p)
                    _move(p, group, orthogonal(update.to(_computes_in(update.dtype, update.device))), update.shape)
        if self._divided is not None:
            size = self._divided.group.size()
            for first in range(0, len(self._cut), size):
                self._step_together(self._cut[first : first + size], by_name, self._divided)

    def _update(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's part of the momentum, with Nesterov's look ahead."""
        slots = self.state[parameter]
        if "momentum_buffer" not in slots:
            slots["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, momentum = local(parameter.grad), local(slots["momentum_buffer"])
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(momentum, _MOMENTUM)

    def _step_together(
        self, names: list[str], parameters: Mapping[str, tuple[nn.Parameter, dict[str, Any]]], divided: Divided
    ) -> None:
        """Step one matrix for each rank of the group, or fewer. `parameters`: of this rank, with their groups."""
        rank, dtype, direction = divided.group.rank(), _computes_in(self._dtype, divided.device), torch.empty(0)
        nothing = torch.empty(0, dtype=self._dtype, device=divided.device)
        for owner, name in enumerate(names):
            update = divided.whole(name, self._update(parameters[name][0]) if name in parameters else nothing, dtype)
            if owner == rank:
                direction = orthogonal(update).contiguous()
        for owner, name in enumerate(names):
            shape = divided.shape(name)
            sent = direction if owner == rank else torch.empty(shape, dtype=dtype, device=divided.device)
            dist.broadcast(sent, group_src=owner, group=divided.group)
            if name in parameters:
                _move(*parameters[name], local(divided.part(name, sent)), shape)


def _move(parameter: nn.Parameter, group: dict[str, Any], step: torch.Tensor, shape: Sequence[int]) -> None:
    """Step `parameter`, a part of a matrix of `shape`, with decoupled weight decay."""
    weights, lr = local(parameter), group["lr"]
    weights.mul_(1 - lr * group["weight_decay"])
    weights.add_(step.to(weights), alpha=-lr * _RMS * math.sqrt(max(shape[-2:])))


def _computes_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type != "cpu" and dtype == torch.float32 else dtype
