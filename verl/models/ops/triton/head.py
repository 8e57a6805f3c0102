"""Statistics of logits and their gradient by Triton: one read each, and the gradient is written in the compute dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from verl.models.ops.triton.softmax import Transform, chunk_sums, final_logits

_BLOCK = 4096


def launch_statistics(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float,
) -> tuple[torch.Tensor, ...]:
    """See verl.models.ops.logits."""
    transform = Transform(bias, logit_scale, softcap, temperature)
    sums = chunk_sums(z, transform, moments=True)
    _, rows, num_chunks = sums.shape
    out = sums.new_empty(7, rows)
    if rows:
        _rows_kernel[(rows,)](
            z, sums, targets, out, rows, z.stride(0), z.shape[1], num_chunks, sums.stride(0), **transform.arguments(),
            CHUNKS_BLOCK=triton.next_power_of_2(num_chunks), num_warps=4,
        )  # fmt: skip
    return tuple(out.unbind())


def launch_gradient(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    statistics: torch.Tensor,
    grads: torch.Tensor,
    temperature: float,
    logit_scale: float,
    softcap: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See verl.models.ops.logits."""
    rows, vocab = z.shape
    assert z.stride(1) == 1
    out = torch.empty(rows, vocab, dtype=dtype, device=z.device)
    transform = Transform(bias, logit_scale, softcap, temperature)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        _gradient_kernel[(rows, triton.cdiv(vocab, block))](
            z, out, targets, statistics.contiguous(), grads.contiguous(), rows, z.stride(0), vocab, **transform.arguments(),
            BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    z, sums, targets, out, rows, row_stride, vocab, num_chunks, plane, bias, scale, softcap, temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_BLOCK)
    exists = chunks < num_chunks
    start = sums + row * num_chunks + chunks
    peaks = tl.load(start, mask=exists, other=float("-inf"))
    masses = tl.load(start + plane, mask=exists, other=0.0)
    slopes = tl.load(start + 2 * plane, mask=exists, other=0.0)
    squares = tl.load(start + 3 * plane, mask=exists, other=0.0)
    top = tl.max(peaks, axis=0)
    share = tl.exp(peaks - top)
    total = tl.max(tl.cumsum((masses * share).to(tl.float64), axis=0), axis=0).to(tl.float32)  # as the sampler sums it
    below = tl.where(share == 0.0, 0.0, peaks - top)
    slope = tl.sum(share * (slopes + below * masses), axis=0)
    log_sum = tl.log(total)
    target = tl.load(targets + row)
    raw = tl.load(z + row * row_stride + target).to(tl.float32)
    chosen = final_logits(raw, bias, target, target < vocab, scale, softcap, temperature, HAS_BIAS, HAS_CAP)
    tl.store(out + row, chosen - top - log_sum)
    tl.store(out + rows + row, top)
    tl.store(out + 2 * rows + row, log_sum)
    tl.store(out + 3 * rows + row, log_sum - slope / total)
    tl.store(out + 4 * rows + row, tl.sum(share * share * squares, axis=0) / (total * total))
    tl.store(out + 5 * rows + row, (chosen >= top).to(tl.float32))
    sum_logits = tl.sum(tl.load(start + 4 * plane, mask=exists, other=0.0), axis=0)
    tl.store(out + 6 * rows + row, sum_logits / vocab * temperature)


@triton.jit(do_not_specialize=["rows"])
def _gradient_kernel(
    z, out, targets, statistics, grads, rows, row_stride, vocab, bias, scale, softcap, temperature,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    raw = tl.load(z + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    f = final_logits(raw, bias, at, inside, scale, softcap, temperature, HAS_BIAS, HAS_CAP)
    top, log_sum = tl.load(statistics + row), tl.load(statistics + rows + row)
    entropy, squared = tl.load(statistics + 2 * rows + row), tl.load(statistics + 3 * rows + row)
    g_target, g_entropy = tl.load(grads + row), tl.load(grads + rows + row)
    g_squared = tl.load(grads + 2 * rows + row)
    log_p = f - top - log_sum
    p = tl.exp(log_p)
    slope = 2 * g_squared * (p - squared) - g_target - g_entropy * (log_p + entropy)
    d_f = tl.where(p == 0.0, 0.0, p * slope) + tl.where(at == tl.load(targets + row), g_target, 0.0)
    if HAS_CAP:
        bent = f * temperature / softcap
        d_f *= 1 - bent * bent
    tl.store(out + row * vocab + at, (d_f * (scale / temperature)).to(out.dtype.element_ty), mask=inside)
