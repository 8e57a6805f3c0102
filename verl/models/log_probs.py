"""Log-probability, entropy and sum of squared probabilities of tokens, computed from hidden states.

The head's projection, the softmax statistics and both their gradients run over chunks of tokens. So memory grows
with a chunk and not with tokens x vocabulary. Within a chunk, operations other than matrix products run over blocks of rows
that stay in the processor's cache. Statistics are float32 (float64 for float64 inputs) for weights of any dtype.

With z = f(h W^T + b) / T, for f an optional scale and soft cap, and p = softmax(z):
    log p(y)                             d/dz_j = [j = y] - p_j
    H          = -sum_j p_j log p_j      d/dz_j = -p_j (log p_j + H)
    S          = sum_j p_j^2             d/dz_j = 2 p_j (p_j - S)

log p(y) is had at the target, and at further candidates of each token if the loss compares distributions.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from verl.models.grad_buffers import GradientBuffers
from verl.models.hf_module import AutogradContext
from verl.models.kernel_log_probs import KernelLogProbs, kernels_compute
from verl.models.ops import compiled
from verl.models.ops.linear import Matmul

_CHUNK_BYTES = 1 << 28  # of logits held at a time
_CHUNK_BYTES_CUDA = 1 << 30  # a product of fewer tokens is bound by reading the weights
_BLOCK_ELEMENTS = 1 << 19  # of a chunk, worked on at a time on a CPU


@dataclass(frozen=True)
class Head:
    """Logits of hidden states: `softcap * tanh(logit_scale * (h W^T + bias) / softcap) / temperature`."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def log_softmax(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        matmul: Matmul,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        mean: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """log softmax of the logits of `hidden`, in the first rows of `out` [at least rows, vocabulary];
        returns them; in `lse` and `mean` [rows] if given, the log-sum-exp of the rows, and the mean of their logits at
        temperature 1. hidden and weight are operands of `matmul`."""
        z = matmul.product_into(out, hidden, weight)
        for part in _blocks(z):
            block = z[part]
            if matmul.widens:  # rounded as the result of a matmul in the narrow dtype
                block.copy_(block.to(matmul.dtype))
            self.transform_(block, bias)
            if lse is not None:
                torch.logsumexp(block, dim=1, out=lse[part])
            if mean is not None:
                mean[part] = block.mean(dim=1).mul_(self.temperature)
            torch.log_softmax(block, dim=1, out=block)
        return z

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Final logits [rows, vocabulary] at temperature 1, float32 or wider, by autograd."""
        z = torch.nn.functional.linear(hidden, weight, bias)
        z = z.to(torch.promote_types(z.dtype, torch.float32)) * self.logit_scale
        if self.softcap is not None:
            z = (z / self.softcap).tanh() * self.softcap
        return z

    def transform_(self, z: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Final logits of `z` = h W^T, in place."""
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


OPTIONAL = ("entropy", "sum_pi_squared", "correct", "mean_logit")  # fields of TokenStats that a call asks for by name


@dataclass(frozen=True)
class TokenStats:
    """Each [tokens] but for those with a comment, in float32 or wider; None if not asked for."""

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    correct: torch.Tensor | None = None  # 1 if no other token has a greater logit than the target; without gradient
    candidate_log_probs: torch.Tensor | None = None  # [tokens, candidates]
    top_log_probs: torch.Tensor | None = None  # [tokens, top], descending; without gradient
    top_ids: torch.Tensor | None = None  # int64 [tokens, top]
    mean_logit: torch.Tensor | None = None  # over the vocabulary, before the temperature; without gradient


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    optional: Collection[str] = (),
    candidates: torch.Tensor | None = None,
    top: int = 0,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_tokens: int | None = None,
    gradients: GradientBuffers | None = None,
    fused: bool = True,
) -> TokenStats:
    """Statistics of `softmax(logits / temperature)` at `targets` [tokens], for hidden [tokens, hidden_size] and the
    output projection weight [vocabulary, hidden_size]. Differentiable in hidden, weight and bias through log-probs,
    entropy and sum of squares, once; the gradients of weight and bias go to `gradients` if that wants them.

    `optional` are names of OPTIONAL.

    `candidates` int64 [tokens, candidates] are token ids for further log-probs, and `top` the number of
    most probable tokens that are listed.

    `chunk_tokens` is how many tokens' logits exist at a time (default: as many as fit 256 MiB, 1 GiB on CUDA). The
    last chunk's are kept for the backward; earlier ones are computed again there.

    Without `fused` torch computes all logits at once, and autograd their gradients and the weight's gradient.
    """
    wants = tuple(name in optional for name in OPTIONAL)
    top = min(top, weight.shape[0])
    hidden = hidden.to(weight.dtype)  # Mamba's are in float32, and its head is applied in the head's dtype
    if not fused:
        logits = Head(temperature, logit_scale, softcap).logits(hidden, weight, bias)
        return logit_statistics(logits, targets, temperature, optional=optional, candidates=candidates, top=top)
    head = Head(temperature, logit_scale, softcap)
    is_plain = head == Head(temperature) and bias is None and candidates is None and not top and not any(wants)
    compiles = is_plain and compiled.usable(hidden, weight)
    if chunk_tokens is None:
        held = _CHUNK_BYTES_CUDA if weight.device.type == "cuda" else _CHUNK_BYTES
        chunk_tokens = max(1, held // (weight.shape[0] * (weight.itemsize if compiles else 4)))
    chunk_tokens = max(1, min(chunk_tokens, len(targets)))
    if candidates is None and not top and kernels_compute(hidden):
        transform = (temperature, logit_scale, softcap or 0.0)
        parts = list(_chunks(len(targets), chunk_tokens)) or [slice(0)]
        return TokenStats(*KernelLogProbs.apply(hidden, weight, bias, targets, transform, wants, parts, gradients))
    arguments = (hidden, weight, bias, targets, head, wants, candidates, top, chunk_tokens, gradients, compiles)
    return TokenStats(*_FusedLogProbs.apply(*arguments))


def logit_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    *,
    optional: Collection[str] = (),
    candidates: torch.Tensor | None = None,
    top: int = 0,
) -> TokenStats:
    """The statistics of `token_log_probs` from logits [tokens, vocabulary], by autograd."""
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(dim=1)
    log_probs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    p = log_p.exp() if {"entropy", "sum_pi_squared"} & set(optional) else log_p
    top_log_probs, top_ids = log_p.detach().topk(top, dim=1) if top else (None, None)
    return TokenStats(
        log_probs,
        # a token that a model rules out has a logit of minus infinity
        -(p * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(dim=1) if "entropy" in optional else None,
        p.square().sum(dim=1) if "sum_pi_squared" in optional else None,
        (log_probs.detach() >= log_p.detach().amax(dim=1)).to(log_p.dtype) if "correct" in optional else None,
        log_p.gather(1, candidates) if candidates is not None else None,
        top_log_probs,
        top_ids,
        logits.detach().to(log_p.dtype).mean(dim=1) if "mean_logit" in optional else None,
    )


def _chunks(num_tokens: int, size: int) -> Iterator[slice]:
    """Slices of `size` tokens after a shorter one: the last is kept for the backward, so it is a full one."""
    for end in range(num_tokens % size or size, num_tokens + 1, size):
        yield slice(max(0, end - size), end)


def _blocks(z: torch.Tensor) -> Iterator[slice]:
    size = max(1, _BLOCK_ELEMENTS // z.shape[1]) if z.device.type == "cpu" else len(z)
    return _chunks(len(z), size)


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        wants: tuple[bool, ...],
        candidates: torch.Tensor | None,
        top: int,
        chunk: int,
        gradients: GradientBuffers | None,
        compiles: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        num_tokens, wide = hidden.shape[0], torch.promote_types(hidden.dtype, torch.float32)
        matmul = Matmul(hidden.dtype, hidden.device)
        dtype, shape = hidden.dtype if compiles else wide, (chunk, len(weight))
        if gradients is not None and any(ctx.needs_input_grad) and hidden.device.type == "cpu":
            buffer = gradients.borrow(shape, dtype)
        else:
            buffer = hidden.new_empty(shape, dtype=dtype)
        log_probs, lse, entropy, squared = (torch.empty(num_tokens, dtype=wide, device=hidden.device) for _ in range(4))
        correct, mean = (torch.empty_like(log_probs) if want else None for want in wants[2:])
        chosen = None if candidates is None else log_probs.new_empty(candidates.shape)
        best = (log_probs.new_empty(num_tokens, top), targets.new_empty(num_tokens, top)) if top else (None, None)
        operand = matmul.operand(weight)
        for part in _chunks(num_tokens, chunk):
            if compiles:
                z = matmul.product_into(buffer, hidden[part], operand)
                compiled.run_rows(compiled.LOG_SUM_EXP, z, lse[part], columns=z.shape[1], eps=head.temperature)
                log_probs[part] = _at_targets(z, targets[part], lse[part], head)
                continue
            chunk_lse = None if head.softcap is None else lse[part]
            chunk_mean = None if mean is None else mean[part]
            log_p = head.log_softmax(matmul.operand(hidden[part]), operand, bias, matmul, buffer, chunk_lse, chunk_mean)
            log_probs[part] = log_p.gather(1, targets[part].unsqueeze(1)).squeeze(1)
            if correct is not None:
                correct[part] = log_probs[part] >= log_p.amax(dim=1)
            if chosen is not None and candidates is not None:
                torch.gather(log_p, 1, candidates[part], out=chosen[part])
            if best[0] is not None and best[1] is not None:
                torch.topk(log_p, top, dim=1, out=(best[0][part], best[1][part]))
            if any(wants[:2]):
                for block in _blocks(log_p):
                    p = log_p[block].exp()
                    squared[part][block] = torch.linalg.vector_norm(p, dim=1).square_()
                    entropy[part][block] = p.mul_(log_p[block]).sum(dim=1).neg_()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, targets, lse, entropy, squared, candidates)
        ctx.head, ctx.chunk, ctx.matmul, ctx.compiles = head, chunk, matmul, compiles
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        ctx.buffer = buffer if any(ctx.needs_input_grad) else None  # log-probs of the last chunk, or its logits
        ctx.mark_non_differentiable(*(x for x in (correct, *best, mean) if x is not None))
        return log_probs, entropy if wants[0] else None, squared if wants[1] else None, correct, chosen, *best, mean

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, lse, entropy, squared, candidates = ctx.saved_tensors
        columns, column_grads = read_columns(targets, candidates, grads)
        if all(g is None for g in column_grads):
            return (None,) * 11
        matmul: Matmul = ctx.matmul
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        apart = GradientBuffers.rest(ctx.gradients, (ctx.weight, ctx.bias), ctx.needs_input_grad[1:3])
        operand, buffer, ctx.buffer = matmul.operand(ctx.weight), ctx.buffer, None
        is_computed = buffer is not None
        if buffer is None:
            buffer = hidden.new_empty(ctx.chunk, len(ctx.weight), dtype=hidden.dtype if ctx.compiles else lse.dtype)
        for part in reversed(list(_chunks(len(hidden), ctx.chunk))):
            inputs = matmul.operand(hidden[part])
            z = buffer[: len(inputs)]
            if ctx.compiles and grads[0] is not None:  # the one output that has a gradient
                if not is_computed:
                    matmul.product_into(buffer, inputs, operand)
                _compiled_logit_grad_(z, targets[part], grads[0][part], lse[part], ctx.head)
            else:
                if not is_computed:
                    ctx.head.log_softmax(inputs, operand, ctx.bias, matmul, buffer)
                for block in _blocks(z):
                    block_grads = [g if g is None else g[part][block] for g in column_grads]
                    stats = (lse[part][block], entropy[part][block], squared[part][block])
                    logit_grad_(z[block], columns[part][block], block_grads, stats, ctx.head, matmul)
            is_computed = False
            dz = z.to(inputs.dtype)
            if d_hidden is not None:
                d_hidden[part] = matmul.product(dz, operand.t())
            for buffers in (apart, ctx.gradients):
                if buffers is not None:
                    buffers.add_matmul((ctx.weight,), dz, inputs, matmul)
                    if ctx.bias is not None:
                        buffers.add((ctx.bias,), z.sum(dim=0))
        if ctx.gradients is not None:
            ctx.gradients.give_back(buffer)
        return (d_hidden, apart.take(ctx.weight), apart.take(ctx.bias), *(None,) * 8)


def _at_targets(z: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor, head: Head) -> torch.Tensor:
    """Log-probs [tokens], float32, for logits [tokens, vocabulary] at temperature 1."""
    return z.gather(1, targets.unsqueeze(1)).squeeze(1).float().div_(head.temperature).sub_(lse)


def _compiled_logit_grad_(
    z: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor, head: Head
) -> None:
    """Turns logits into their gradient, given the gradient of the log-probs, in one pass over memory."""
    factor, columns, temperature = grad / head.temperature, z.shape[1], head.temperature
    at_targets = (1 - _at_targets(z, targets, lse, head).exp_()).mul_(factor)
    compiled.run_rows(compiled.LOGIT_GRADIENT, z, columns=columns, weight=-factor, scale=lse, eps=temperature)
    z[torch.arange(len(z)), targets] = at_targets.to(z.dtype)


def read_columns(
    targets: torch.Tensor, candidates: torch.Tensor | None, grads: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """(columns [tokens, n] of the vocabulary with a gradient of their log-probs, gradients of those log-probs [tokens, n], of
    entropy and of sum of squares [tokens, 1]), for the gradients of the fields of TokenStats."""
    at_target, entropy, squared, _, at_candidates = grads[:5]
    read = [(targets.unsqueeze(1), at_target.unsqueeze(1))] if at_target is not None else []
    if candidates is not None and at_candidates is not None:
        read.append((candidates, at_candidates))
    columns = torch.cat([column for column, _ in read], dim=1) if read else targets.unsqueeze(1)
    column_grads = torch.cat([grad for _, grad in read], dim=1) if read else None
    return columns, [column_grads, *(None if g is None else g.unsqueeze(1) for g in (entropy, squared))]


def logit_grad_(
    log_p: torch.Tensor,
    columns: torch.Tensor,
    grads: list[torch.Tensor | None],
    stats: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    head: Head,
    matmul: Matmul,
    owned: torch.Tensor | None = None,
) -> None:
    """Turns log-probs [tokens, vocabulary] into the gradient with respect to the raw logits, given the columns and gradients
    of `read_columns`, and log-sum-exp, entropy and sum of squares [tokens]. If a rank has a part of the vocabulary,
    `owned` [tokens, n] says whether a column is here."""
    g_log_prob, g_entropy, g_squared = grads
    lse, entropy, squared = stats
    final = log_p + lse.unsqueeze(1) if head.softcap is not None else None
    total = None if g_log_prob is None else g_log_prob.sum(dim=1, keepdim=True)
    if g_entropy is None and g_squared is None:
        assert total is not None
        dz = log_p.exp_().mul_(-total)
    else:
        p = log_p.exp()
        dz = log_p.zero_() if g_entropy is None else log_p.add_(entropy.unsqueeze(1)).mul_(-g_entropy)
        if g_squared is not None:
            dz.addcmul_(p - squared.unsqueeze(1), 2 * g_squared)
        if total is not None:
            dz.sub_(total)
        dz.mul_(p)
    if g_log_prob is not None:
        at_columns = g_log_prob if owned is None else g_log_prob.where(owned, 0.0)
        dz.scatter_add_(1, columns, at_columns.to(dz.dtype))
    head.pull_back_(dz, final)
    if matmul.widens:  # rounded as an operand of a matmul in the narrow dtype
        dz.copy_(dz.to(matmul.dtype))
