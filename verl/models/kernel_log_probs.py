"""Log-probs of targets with entropy and sum of squares on a GPU: chunks of logits are read once forward and once backward."""

from collections.abc import Sequence
from typing import Any

import torch

from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import AutogradContext
from verl.models.ops.linear import Matmul, wide_product
from verl.models.ops.logits import ChunkStatistics, target_gradient, target_statistics
from verl.models.ops.table import has_triton


def kernels_compute(hidden: torch.Tensor) -> bool:
    """Whether the ops of verl.models.ops.logits are faster than torch for these hidden states."""
    return hidden.device.type == "cuda" and hidden.dtype != torch.float64 and has_triton()


class KernelLogProbs(torch.autograd.Function):
    """apply(hidden, weight, bias, targets, transform, wants, parts, gradients) -> the fields of TokenStats, see
    verl.models.log_probs.token_log_probs. `transform` is (temperature, logit_scale, softcap); `parts` are slices of tokens;
    the logits of the last one are kept for the backward."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: tuple[float, float, float],
        wants: tuple[bool, ...],
        parts: Sequence[slice],
        gradients: GradientBuffers | None,
    ) -> tuple[torch.Tensor | None, ...]:
        z, chunks = hidden.new_empty(0), []
        for part in parts:
            del z  # its memory is the next chunk's
            z = wide_product(hidden[part], weight)
            chunks.append(target_statistics(z, bias, targets[part], *transform))
        stats = ChunkStatistics(*(torch.cat(fields) for fields in zip(*chunks, strict=True)))
        ctx.set_materialize_grads(False)
        numbers = torch.stack([stats.top, stats.log_sum, stats.entropy, stats.squared])
        ctx.save_for_backward(hidden, targets, numbers)
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        ctx.transform, ctx.parts = transform, parts
        ctx.logits = z if any(ctx.needs_input_grad) else None
        optional = (stats.entropy, stats.squared, stats.correct, stats.mean)
        entropy, squared, correct, mean = (x if want else None for x, want in zip(optional, wants, strict=True))
        ctx.mark_non_differentiable(*(x for x in (correct, mean) if x is not None))
        return stats.log_probs, entropy, squared, correct, None, None, None, mean

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (hidden, targets, numbers), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        if all(grad is None for grad in grads[:3]):
            return (None,) * 8
        upstream = torch.stack([numbers.new_zeros(len(hidden)) if grad is None else grad for grad in grads[:3]])
        matmul, z, ctx.logits = Matmul(hidden.dtype, hidden.device), ctx.logits, None
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        apart = GradientBuffers.rest(ctx.gradients, (weight, bias), ctx.needs_input_grad[1:3])
        for part in reversed(ctx.parts):
            inputs = hidden[part]
            z = wide_product(inputs, weight) if z is None else z
            columns = (targets[part], numbers[:, part], upstream[:, part])
            arguments: tuple[Any, ...] = (z, bias, *columns, *ctx.transform, hidden.dtype)
            dz = target_gradient(*arguments)
            z = None
            if d_hidden is not None:
                d_hidden[part] = matmul.product(dz, weight.t())
            for buffers in (apart, ctx.gradients):
                if buffers is not None:
                    buffers.add_matmul((weight,), dz, inputs, matmul)
                    if bias is not None:
                        buffers.add((bias,), dz.sum(dim=0, dtype=numbers.dtype))
        return (d_hidden, apart.take(weight), apart.take(bias), *(None,) * 5)
