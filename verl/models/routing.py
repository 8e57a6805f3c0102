"""Routing replay: experts that the routers of a mixture chose in one forward are chosen again in another.

    recording   router -> top-k experts ---------------> record [tokens, layers, k]
    replaying   router -> experts of the record -------> their weights from the scores of this forward, with gradients

A router near a tie chooses another expert after a rounding error, and then log-probs of sampler and trainer differ by far more
than rounding. "R3" replays the choices of rollout (Ma et al. 2025, arXiv:2510.11370), "R2" the choices of the pass that
computes old log-probs (Zheng et al. 2025, arXiv:2507.18071 and 2512.01374). A Routing travels on the layout of a forward,
so that a layer that is computed again in the backward makes the same choices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from verl.errors import ConfigError
from verl.models.hf_module import HFModule
from verl.models.parallel.collectives import gather_into
from verl.models.parallel.experts import is_experts

_TOP_K = (torch.topk, torch.Tensor.topk)
UNKNOWN = -1  # in a record: the router chooses


class Routing:
    """The choices of one forward: of `replayed` [tokens, layers, k], int64, -1 if the router chooses; None: the forward
    records its own. Layers without a router have choices without meaning."""

    def __init__(self, replayed: torch.Tensor | None = None):
        self.replayed = replayed
        self._recorded: dict[int, torch.Tensor] = {}

    def choose(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        """The experts [tokens, k] of a layer with the router's choice `chosen`."""
        if self.replayed is None:
            self._recorded[layer] = chosen
            return chosen
        past = self.replayed[:, layer]
        return torch.where(past == UNKNOWN, chosen, past)

    def padded(self, num_tokens: int) -> Routing:
        """The choices of `num_tokens` tokens; routers choose the experts of those that are added."""
        if self.replayed is None:
            return Routing()
        return Routing(F.pad(self.replayed, (0, 0, 0, 0, 0, num_tokens - len(self.replayed)), value=UNKNOWN))

    def part(self, num_local: int, group: dist.ProcessGroup) -> Routing:
        """The choices of this rank's `num_local` tokens, one of equal slices over the ranks of `group`."""
        replayed = self.padded(num_local * group.size()).replayed
        return Routing(None if replayed is None else replayed[num_local * group.rank() :][:num_local])

    def gather(self, part: Routing, num_tokens: int, group: dist.ProcessGroup) -> None:
        """Take over what the ranks of `group` recorded for their parts of `num_tokens` tokens."""
        for layer, chosen in part._recorded.items():
            gathered = chosen.new_empty(len(chosen) * group.size(), chosen.shape[1])
            gather_into(gathered, chosen.contiguous(), group=group)
            self._recorded[layer] = gathered[:num_tokens]

    def chosen(self) -> dict[str, torch.Tensor]:
        """The recorded choices [tokens, k] by layer, on the CPU."""
        return {str(layer): experts.cpu() for layer, experts in self._recorded.items()}

    def record(self, chosen: Mapping[int, torch.Tensor]) -> None:
        """Take over choices [tokens, k] by layer."""
        self._recorded.update(chosen)

    def recorded(self, config: PreTrainedConfig) -> torch.Tensor:
        """[tokens, layers, k], in the smallest dtype that holds the experts of a model with `config`."""
        num_experts, _ = expert_counts(config)
        some = next(iter(self._recorded.values()))
        nothing = torch.zeros_like(some)
        layers = range(config.get_text_config().num_hidden_layers)
        record = torch.stack([self._recorded.get(layer, nothing) for layer in layers], dim=1)
        return record.to(torch.uint8 if num_experts <= 256 else torch.int16)


def expert_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """(experts of a layer, experts of a token) of a model. Raises ConfigError for a model without experts."""
    config = config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if num_experts is None:
        raise ConfigError(
            f"Routing replay is for mixtures of experts, and {config.model_type} has none. Set "
            "actor_rollout_ref.actor.router_replay.mode=disabled."
        )
    return int(num_experts), int(config.num_experts_per_tok)


def follow_routing(module: HFModule) -> None:
    """Let the routers of `module`, a causal language model, follow the Routing of their layout, if it has one. May be called
    again. Raises ConfigError for a model without experts, or with experts in a form that is not known."""
    sizes = expert_counts(module.config)
    names = [name for name, part in module.named_modules() if is_experts(part)]
    if not names:
        raise ConfigError(
            f"Routing replay does not find the experts of {type(module).__name__}, whose layers have none with joined weights. "
            "Set actor_rollout_ref.actor.router_replay.mode=disabled."
        )
    for name in names:
        block, layer = module.get_submodule(name.rpartition(".")[0]), re.match(r".*\.(\d+)(?=\.)", name)
        assert layer is not None, name
        if not isinstance(block.forward, RoutedForward):
            block.forward = RoutedForward(block.forward, int(layer[1]), sizes)
            module.get_submodule(layer[0]).register_forward_pre_hook(block.forward.enter, with_kwargs=True)


class RoutedForward:
    """The forward of the part of a layer that has its router and experts."""

    def __init__(self, forward: Any, layer: int, sizes: tuple[int, int]):
        self.forward, self.layer, self.sizes = forward, layer, sizes
        self.routing: Routing | None = None

    def enter(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Take the Routing of the layer's call."""
        self.routing = getattr(kwargs.get("layout"), "routing", None)

    def __call__(self, *args: Any, **kwargs: object) -> object:
        if self.routing is None:
            return self.forward(*args, **kwargs)
        with _Choice(self.routing, self.layer, self.sizes):
            return self.forward(*args, **kwargs)


class _Choice(TorchFunctionMode):
    """Inside, the top-k of scores [tokens, experts] has the indices of `routing`. A router's other top-k, such as of groups of
    experts, has other sizes."""

    def __init__(self, routing: Routing, layer: int, sizes: tuple[int, int]):
        super().__init__()
        self.routing, self.layer, self.sizes = routing, layer, sizes

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.dim() != 2 or (scores.shape[1], result.indices.shape[1]) != self.sizes:
            return result
        experts = self.routing.choose(self.layer, result.indices)
        if experts is result.indices:
            return result
        return torch.return_types.topk((scores.gather(1, experts), experts))


def balancing_share(root: Any) -> str:
    """The term that transformers adds to a loss for balanced experts, with its weight; "" if it adds none."""
    config = root.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", 0)
    return f"router_aux_loss_coef={weight}" if weight and getattr(config, "output_router_logits", False) else ""
