"""Log-probability, entropy and sum of squared probabilities of tokens, straight from hidden states.

The head's projection, the softmax statistics and both their gradients run over chunks of tokens, so that memory grows
with a chunk and not with tokens x vocabulary. Statistics are float32 (float64 for float64 inputs) whatever the
weights are.

With z = f(h W^T + b) / T, where f is an optional scale and soft cap, p = softmax(z), L = logsumexp(z):
    log p(y)   = z_y - L                 d/dz_j = [j = y] - p_j
    H          = L - sum_j p_j z_j       d/dz_j = -p_j (log p_j + H)
    S          = sum_j p_j^2             d/dz_j = 2 p_j (p_j - S)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 25  # logits held at a time; 128 MiB in float32


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: `softcap * tanh(logit_scale * (h W^T + bias) / softcap) / temperature`."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        """Rows of logits, in `out` [at least rows, vocabulary]; returns the view that was filled."""
        z = out[: hidden.shape[0]]
        if hidden.dtype == z.dtype:
            torch.mm(hidden, weight.t(), out=z)
        else:
            z.copy_(hidden @ weight.t())
        if bias is not None:
            z.add_(bias)
        if self.logit_scale != 1.0:
            z.mul_(self.logit_scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def pull_back_(self, grad: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
        """Gradient with respect to `h W^T + bias`, in place; `z` is the final logits (needed with a soft cap)."""
        factor = self.logit_scale / self.temperature
        if self.softcap is not None:
            assert z is not None
            grad.mul_(1 - (z * (self.temperature / self.softcap)).square_())
        return grad if factor == 1.0 else grad.mul_(factor)


@dataclass(frozen=True)
class TokenStats:
    """Each [tokens], in float32 or wider; None where not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    want_entropy: bool = False,
    want_sum_pi_squared: bool = False,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_tokens: int | None = None,
) -> TokenStats:
    """Statistics of `softmax(logits / temperature)` at `targets` [tokens], for hidden [tokens, hidden_size] and the
    output projection weight [vocabulary, hidden_size]. Differentiable in hidden, weight and bias through all three
    outputs.

    `chunk_tokens` is how many tokens' logits exist at a time (default: as many as fit 128 MiB).
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    head = Head(temperature, logit_scale, softcap)
    log_probs, entropy, squared = _FusedLogProbs.apply(
        hidden,
        weight,
        bias,
        targets,
        head,
        (want_entropy, want_sum_pi_squared),
        max(1, min(chunk_tokens, len(targets))),
    )
    return TokenStats(log_probs, entropy, squared)


def _chunks(num_tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        wants: tuple[bool, bool],
        chunk: int,
    ) -> tuple[torch.Tensor | None, ...]:
        num_tokens, wide = hidden.shape[0], torch.promote_types(hidden.dtype, torch.float32)
        z_buffer, work = (torch.empty(chunk, weight.shape[0], dtype=wide, device=hidden.device) for _ in range(2))
        log_probs, lse, entropy, squared = (torch.empty(num_tokens, dtype=wide, device=hidden.device) for _ in range(4))
        for part in _chunks(num_tokens, chunk):
            z = head.logits(hidden[part], weight, bias, z_buffer)
            exp = work[: len(z)]
            peak = z.amax(dim=1, keepdim=True)
            total = torch.sub(z, peak, out=exp).exp_().sum(dim=1)
            lse[part] = total.log() + peak.squeeze(1)
            log_probs[part] = z.gather(1, targets[part].unsqueeze(1)).squeeze(1) - lse[part]
            if wants[1]:
                squared[part] = torch.linalg.vector_norm(exp, dim=1).div_(total).square_()
            if wants[0]:
                entropy[part] = lse[part] - exp.mul_(z).sum(dim=1) / total
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, squared)
        ctx.head, ctx.chunk = head, chunk
        # the last chunk's logits are still at hand when backward begins, so it need not compute them again
        ctx.kept = z_buffer if any(ctx.needs_input_grad) else None
        return log_probs, entropy if wants[0] else None, squared if wants[1] else None

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy, squared = ctx.saved_tensors
        head, chunk = ctx.head, ctx.chunk
        if all(g is None for g in grads):
            return (None,) * 7
        buffer, ctx.kept = ctx.kept, None
        known = buffer is not None
        if buffer is None:
            buffer = torch.empty(chunk, weight.shape[0], dtype=lse.dtype, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for part in reversed(list(_chunks(hidden.shape[0], chunk))):
            z = buffer[: part.stop - part.start] if known else head.logits(hidden[part], weight, bias, buffer)
            known = False
            per_token = [g if g is None else g[part].unsqueeze(1) for g in grads]
            dz = _logit_grad(z, targets[part], per_token, lse[part], entropy[part], squared[part], head)
            if d_bias is not None:
                d_bias += dz.sum(dim=0)
            _accumulate(
                dz.to(hidden.dtype), hidden[part], weight, None if d_hidden is None else d_hidden[part], d_weight
            )
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None, None, None, None,
        )  # fmt: skip


def _logit_grad(
    z: torch.Tensor,
    targets: torch.Tensor,
    grads: list[torch.Tensor | None],
    lse: torch.Tensor,
    entropy: torch.Tensor,
    squared: torch.Tensor,
    head: Head,
) -> torch.Tensor:
    """Gradient with respect to the raw logits [tokens, vocabulary], given those of the three outputs ([tokens, 1]
    each). Overwrites `z`."""
    g_log_prob, g_entropy, g_squared = grads
    final = z.clone() if head.softcap is not None else None
    log_p = z.sub_(lse.unsqueeze(1))
    if g_entropy is None and g_squared is None:
        assert g_log_prob is not None
        dz = log_p.exp_().mul_(-g_log_prob)
    else:
        p = log_p.exp()
        factor = torch.zeros_like(p) if g_entropy is None else log_p.add_(entropy.unsqueeze(1)).mul_(-g_entropy)
        if g_squared is not None:
            factor.addcmul_(p - squared.unsqueeze(1), 2 * g_squared)
        if g_log_prob is not None:
            factor.sub_(g_log_prob)
        dz = factor.mul_(p)
    if g_log_prob is not None:
        dz.scatter_add_(1, targets.unsqueeze(1), g_log_prob.to(dz.dtype))
    return head.pull_back_(dz, final)


def _accumulate(
    dz: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    d_hidden: torch.Tensor | None,
    d_weight: torch.Tensor | None,
) -> None:
    if d_hidden is not None:
        torch.mm(dz, weight, out=d_hidden)
    if d_weight is None:
        return
    if d_weight.dtype == dz.dtype:
        d_weight.addmm_(dz.t(), hidden)
    else:  # a product in the compute dtype, summed over chunks in float32
        d_weight.add_(dz.t() @ hidden)
