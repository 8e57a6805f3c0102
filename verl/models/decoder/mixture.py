"""The backward of a mixture of experts by hand: of all of it on a CPU, and of its last product on a GPU.

With rows sorted by expert, r of token t and weight w_r:   y_t = sum of w_r down(swiglu(gate_up(x_t)))

The outputs of experts are not kept: <d_y, down(a)> = <down^T(d_y), a> is the gradient of a weight.
"""

from typing import NamedTuple

import torch

from verl.models.decoder.adapted import add_weight_gradient, input_gradient
from verl.models.decoder.layers import Mixture, SharedExpert
from verl.models.decoder.projection import Projection
from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import AutogradContext
from verl.models.ops.experts import ExpertChoice, choose_experts_backward, grouped_outer, grouped_product, weighted_sum
from verl.models.ops.linear import Matmul
from verl.models.ops.pointwise import swiglu_backward_
from verl.models.parallel.experts import Places


class WeightedDown(torch.autograd.Function):
    """(activated [rows, width], weights [tokens, k], down [experts, hidden, width], places) -> y [tokens, hidden]."""

    @staticmethod
    def forward(
        ctx: AutogradContext, activated: torch.Tensor, weights: torch.Tensor, down: torch.Tensor, places: Places
    ) -> torch.Tensor:
        ctx.save_for_backward(activated, weights, down, *places.tensors)
        ctx.places = places.replaced([torch.empty(0)] * 3)  # a checkpoint keeps no tensors of a context
        return weighted_sum(places.from_experts(grouped_product(activated, down, places.ends)), weights)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        activated, weights, down, *tensors = ctx.saved_tensors
        places = ctx.places.replaced(tensors)
        d_rows, row_weights = places.to_experts(grads[0]), places.to_experts(weights.flatten().unsqueeze(1))
        d_inner = grouped_product(d_rows, down.transpose(1, 2), places.ends)
        d_weights = places.from_experts((d_inner * activated.to(weights.dtype)).sum(1, keepdim=True))
        d_down = None
        if ctx.needs_input_grad[2]:
            d_down = grouped_outer(d_rows, (activated * row_weights).to(down.dtype), down, places.ends)
        return (d_inner * row_weights).to(activated.dtype), d_weights.view_as(weights), d_down, None


class SavedMixture(NamedTuple):
    """Activations, in the order of the forward: of experts [rows, ...], of the shared expert [tokens, ...]."""

    choice: ExpertChoice
    places: Places
    gate_up: torch.Tensor
    shared_gate_up: torch.Tensor | None = None
    shared_out: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None  # before the sigmoid


def mixture_backward(
    mixture: Mixture,
    saved: SavedMixture,
    x: torch.Tensor,
    d_y: torch.Tensor,
    matmul: Matmul,
    gradients: GradientBuffers,
) -> torch.Tensor:
    """The gradient of the input x [tokens, hidden], given the output's; adds the gradients of weights. Overwrites `saved`."""
    (choice, places, gate_up), dtype = saved[:3], x.dtype
    d_rows, ends = places.to_experts(d_y), places.ends
    weights = places.to_experts(choice.weights.flatten().unsqueeze(1))
    d_inner = matmul.grouped(d_rows, mixture.down.transpose(1, 2), ends)
    activated = swiglu_backward_((d_inner * weights).to(dtype), gate_up)  # gate_up is now its own gradient
    d_weights = places.from_experts((d_inner.to(weights.dtype) * activated).sum(1, keepdim=True))
    gradients.add_grouped(mixture.down, d_rows, (activated * weights).to(dtype), ends, matmul)
    gradients.add_grouped(mixture.gate_up, gate_up, places.to_experts(x), ends, matmul)
    d_x_rows = places.from_experts(matmul.grouped(gate_up, mixture.gate_up.transpose(1, 2), ends))
    d_x: torch.Tensor = d_x_rows.unflatten(0, choice.experts.shape).sum(1)
    d_logits = choose_experts_backward(d_weights.view(choice.weights.shape), choice, mixture.rule).to(dtype)
    gradients.add_matmul((mixture.router,), d_logits, x, matmul)
    d_x += matmul.input_gradient(d_logits, mixture.router)
    return (
        d_x if mixture.shared is None else d_x.add_(_shared_backward(mixture.shared, saved, x, d_y, matmul, gradients))
    )


def _shared_backward(
    shared: SharedExpert,
    saved: SavedMixture,
    x: torch.Tensor,
    d_y: torch.Tensor,
    matmul: Matmul,
    gradients: GradientBuffers,
) -> torch.Tensor:
    _, _, _, gate_up, out, gate = saved
    assert gate_up is not None
    d_out, d_gates = d_y, list[tuple[Projection, torch.Tensor]]()
    if shared.gate is not None:
        assert out is not None
        assert gate is not None
        share, wide = gate.sigmoid(), torch.promote_types(x.dtype, torch.float32)
        slope = (share * (1 - share)).to(wide)
        d_gates.append((shared.gate, ((d_y.to(wide) * out).sum(1, keepdim=True) * slope).to(x.dtype)))
        d_out = d_y * share
    activated = swiglu_backward_(input_gradient(d_out, shared.down, matmul), gate_up)  # as above
    add_weight_gradient(shared.down, d_out, activated, matmul, gradients)
    d_x = torch.zeros_like(x)
    for projection, d_part in ((shared.gate_up, gate_up), *d_gates):
        add_weight_gradient(projection, d_part, x, matmul, gradients)
        d_x += input_gradient(d_part, projection, matmul)
    return d_x
