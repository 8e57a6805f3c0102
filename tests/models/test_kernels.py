"""Triton's kernels against definitions in float64, with gradients: on a GPU compiled, on a CPU by Triton's interpreter, in
which tests/models/test_interpreted_kernels.py runs this file."""

import contextlib
import os
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.models.test_cpu_decoder import columns_of, gradients_with
from tests.rollout.counted_launches import KERNELS, Launches
from verl.models import forward, kernel_log_probs, log_probs, rounding
from verl.models.load import load_causal_lm
from verl.models.ops import decoding, logits, low_precision, pointwise
from verl.models.ops.table import OPS, by_torch, has_triton, load
from verl.models.packing import pack_rows
from verl.models.tiny import make_tiny_model
from verl.rollout import sampling, uniforms
from verl.rollout.native.cuda import device
from verl.rollout.native.cuda.device import assign_places

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NUM_SHAPES = int(os.environ.get("KERNEL_SHAPES", "12"))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, or Triton's interpreter")
pytestmark = [
    pytest.mark.skipif(not has_triton(), reason="needs Triton, which PyTorch for GPUs brings along"),
    *([] if INTERPRETED else [pytest.mark.gpu, needs_gpu]),
]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SIZES = [1, 2, 3, 7, 16, 31, 64, 65, 100, 127, 128, 200, 256, 300, 515]
VOCABULARIES = [1, 2, 17, 255, 256, 257, 1000, 4096, 4099, 5000]


@pytest.fixture(autouse=True)
def repaired_interpreter(monkeypatch):
    """The interpreter of Triton 3.6 cuts float32 off to bfloat16, where compiled kernels round to nearest, and drops carries
    in fp8; it multiplies the bits of bfloat16 matrices, and takes no loaded number as the bound of a loop with NumPy 2.4."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        narrow = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}.get(target)
        if source != tl.float32 or narrow is None:
            return convert(values, source, target, mode)
        bits = torch.from_numpy(values.view("float32")).to(narrow)
        return bits.view({2: torch.int16, 1: torch.int8}[bits.itemsize]).numpy().view(f"uint{8 * bits.itemsize}")

    def wide(handle):
        if handle.dtype != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), tl.float32)

    def dot(self, a, b, *rest, multiply=interpreter.InterpreterBuilder.create_dot):
        return multiply(self, wide(a), wide(b), *rest)

    def patched(tensor, scope, patch=interpreter._patch_lang_tensor):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


class Inputs:
    """Random sizes and tensors of one case."""

    def __init__(self, seed, dtype=torch.float32):
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def one_of(self, values):
        return values[int(torch.randint(len(values), (), generator=self._generator))]

    def rows(self):
        return self.one_of([0, 1, 2, 3, 5, 9])

    def normal(self, *shape, dtype=None):
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * self.one_of([0.01, 1.0, 3.0])
        return values.to(DEVICE, dtype or self._dtype)

    def ids(self, end, *shape):
        return torch.randint(end, shape, generator=self._generator).to(DEVICE)

    def uniforms(self, rows):
        return torch.rand(rows, generator=self._generator, dtype=torch.float64).clamp_min(1e-12).to(DEVICE)

    def places(self, count, slots):
        return torch.randperm(slots, generator=self._generator)[:count].to(DEVICE)

    def logits(self, rows, vocab):
        """Some tokens are masked in some rows, in places all but one."""
        z = self.normal(rows, vocab, dtype=torch.float32) * self.one_of([1, 1, 4])
        share = self.one_of([0.0, 0.0, 0.5, 1.0])
        masked = torch.rand(z.shape, generator=self._generator).to(DEVICE) < share
        masked.scatter_(1, self.ids(vocab, rows, 1), False)
        return z.masked_fill(masked, float("-inf"))


def cases(dtype=torch.float32):
    return (Inputs(seed, dtype) for seed in range(NUM_SHAPES))


def assert_near(ours, reference, absolute=2e-6):
    """Equal up to one rounding to the dtype of `ours`, and the sums of float32."""
    relative = {torch.float32: 2e-5, torch.bfloat16: 2**-8}[ours.dtype]
    size = float(reference.abs().max()) if reference.numel() else 0.0
    torch.testing.assert_close(ours.double(), reference.double(), rtol=relative, atol=absolute * (1 + size))


def leaves(*tensors):
    return [None if x is None else x.double().requires_grad_() for x in tensors]


def norm_in_float64(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@both_dtypes
def test_rms_norm(dtype):
    for case in cases(dtype):
        columns = case.one_of(SIZES)
        x, grad = case.normal(case.rows(), columns), case.normal(1, columns)
        weight, through = case.normal(columns), case.normal(*x.shape) if case.one_of([0, 1]) else None
        grad = grad.expand(x.shape)
        wide, factor = leaves(x, weight)
        expected = norm_in_float64(wide, factor, 1e-5)
        d_x, d_weight = torch.autograd.grad(expected, [wide, factor], grad.double())
        assert_near(load("norm:launch_rms_norm")(x, weight, 1e-5), expected.detach())
        ours = load("norm:launch_rms_norm_backward")(grad, x, weight, 1e-5, through)
        assert_near(ours[0], d_x if through is None else d_x + through.double(), 1e-5)
        assert_near(ours[1], d_weight, 1e-5)


@both_dtypes
def test_add_norm(dtype):
    for case in cases(dtype):
        columns = case.one_of(SIZES)
        x = case.normal(case.rows(), columns)
        delta, weight = case.normal(*x.shape), case.normal(columns)
        total, normed = load("norm:launch_add_norm")(x, delta, weight, 1e-5)
        assert torch.equal(total, x + delta)
        assert_near(normed, norm_in_float64(total.double(), weight.double(), 1e-5))


def test_many_rows_share_the_sum_of_the_weights_gradient():
    case = Inputs(0)
    x, grad, weight = case.normal(300, 33), case.normal(300, 33), case.normal(33)
    wide, factor = leaves(x, weight)
    expected = torch.autograd.grad(norm_in_float64(wide, factor, 1e-5), [wide, factor], grad.double())
    for ours, theirs in zip(load("norm:launch_rms_norm_backward")(grad, x, weight, 1e-5, None), expected, strict=True):
        assert_near(ours, theirs, 1e-5)


@both_dtypes
def test_swiglu(dtype):
    for case in cases(dtype):
        gate_up = case.normal(case.rows(), 2 * case.one_of([*SIZES, 1100]))
        grad = case.normal(len(gate_up), gate_up.shape[1] // 2)
        (wide,) = leaves(gate_up)
        gate, up = wide.chunk(2, -1)
        expected = F.silu(gate) * up
        assert_near(load("swiglu:launch_swiglu")(gate_up), expected.detach())
        (d_gate_up,) = torch.autograd.grad(expected, [wide], grad.double())
        assert_near(load("swiglu:launch_swiglu_backward")(grad, gate_up), d_gate_up)


@both_dtypes
def test_write_kv(dtype):
    """In slots back to back and in pages; other places keep what they have."""
    for case in cases(dtype):
        tokens, kv_heads, head_dim = case.rows(), case.one_of([1, 2, 3]), case.one_of([2, 8, 12, 64, 80, 128])
        heads = kv_heads * case.one_of([1, 2, 7])
        qkv = case.normal(tokens, (heads + 2 * kv_heads) * head_dim)
        cos, sin = case.normal(tokens, head_dim), case.normal(tokens, head_dim)
        norms = (case.normal(head_dim), case.normal(head_dim)) if case.one_of([0, 1]) else (None, None)
        store, places = case.normal(2, 40, kv_heads, head_dim), case.places(tokens, 40)
        expected = store.double()
        wide = [None if x is None else x.double() for x in (qkv, cos, sin, *norms)]
        expected_q = by_torch(pointwise.write_kv)(*wide, 1e-5, expected, places)
        assert_near(load("rotary:launch_write_kv")(qkv, cos, sin, *norms, 1e-5, store, places), expected_q, 1e-5)
        assert_near(store, expected, 1e-5)
        values = qkv.view(tokens, heads + 2 * kv_heads, head_dim)[:, heads + kv_heads :]
        assert torch.equal(store[1, places], values)


class StepCase:
    """A decode step of rows in slots back to back or in pages, and of the prompts that the rows share."""

    def __init__(self, case):
        self.rows, self.kv_heads, self.groups = case.one_of([1, 2, 3, 5]), case.one_of([1, 2]), case.one_of([1, 2, 7])
        head_dim, page, num_prompts = case.one_of([2, 12, 64, 80]), case.one_of([0, 0, 4, 16]), case.one_of([1, 2])
        num_slots, capacity = self.rows + num_prompts, case.one_of([16, 64, 144, 400])
        self.scale, self.window = head_dim**-0.5, case.one_of([0, 0, 1, 9, 70])
        self.store = case.normal(2, num_slots * capacity, self.kv_heads, head_dim)
        slots = case.places(num_slots, num_slots)
        pages = case.places(num_slots * capacity // page, num_slots * capacity // page) if page else None
        self.cache = (None if pages is None else pages.int().view(num_slots, -1), page)
        starts = slots if page else slots * capacity
        self.slots_of_rows, self.longest = (starts[: self.rows], case.ids(capacity, self.rows), capacity), capacity
        self.prompts = (starts[self.rows :], 1 + case.ids(capacity, num_prompts), capacity)
        self.qkv = case.normal(self.rows, (self.groups + 2) * self.kv_heads * head_dim)
        self.turns = case.normal(2, self.rows, head_dim)
        self.norms = (case.normal(head_dim), case.normal(head_dim)) if case.one_of([0, 1]) else (None, None)
        if self.qkv.dtype == torch.bfloat16:  # turns without a rounding, so that float64 has the same queries and keys
            turned = case.ids(2, self.rows, head_dim).to(self.qkv)
            self.turns, self.norms = torch.stack([turned, 1 - turned]), (None, None)
        members = case.ids(num_prompts, self.rows).cpu().numpy()
        self.seats = [torch.from_numpy(x).to(DEVICE) for x in assign_places(members, self.rows, num_prompts)]

    def run(self, attend, convert=torch.clone, *, prompts=True):
        """Attention, with or without `prompts`, and the store, with tensors as `convert` makes them."""
        store, second_store = convert(self.store), convert(self.store)
        inputs = [None if x is None else convert(x) for x in (self.qkv, *self.turns, *self.norms)]
        theirs = (second_store, *self.prompts, *self.cache, *self.seats) if prompts else ()
        return attend(
            *inputs, 1e-5, store, *self.slots_of_rows, *self.cache, self.longest, self.window, self.scale, *theirs
        ), store


@both_dtypes
@pytest.mark.parametrize("prompts", [False, True])
def test_attention_of_a_decode_step(dtype, prompts):
    """In slots back to back and in pages, with prompts that rows share; other places of the store keep what they have."""
    for case in cases(dtype):
        step = StepCase(case)
        ours = step.run(load("attend:launch_attend"), prompts=prompts)
        expected = step.run(by_torch(decoding.attend_decode), torch.Tensor.double, prompts=prompts)
        assert_near(ours[1], expected[1], 1e-5)
        if dtype == torch.bfloat16:  # weights are rounded before their product with the values
            torch.testing.assert_close(
                ours[0].double(), expected[0], rtol=2**-8, atol=2**-8 * float(expected[1][1].abs().max())
            )
        else:
            assert_near(ours[0], expected[0], 1e-5)


def test_a_row_of_a_step_has_the_same_bits_whatever_the_others_are():
    for case in cases(torch.bfloat16):
        step = StepCase(case)
        together, _ = step.run(load("attend:launch_attend"))
        row, prompt = step.rows - 1, int(step.seats[1][-1]) // step.rows
        step.slots_of_rows = (*(x[row : row + 1] for x in step.slots_of_rows[:2]), step.slots_of_rows[2])
        step.longest = int(step.slots_of_rows[1]) + 1  # no programs for longer rows
        step.prompts = (*(x[prompt : prompt + 1] for x in step.prompts[:2]), step.prompts[2])
        step.qkv, step.turns = step.qkv[row : row + 1], step.turns[:, row : row + 1]
        step.seats = [torch.zeros(places, dtype=torch.int64, device=DEVICE) for places in (step.rows, 1)]
        assert torch.equal(together[row : row + 1], step.run(load("attend:launch_attend"))[0])


@pytest.mark.parametrize("part", ["prompts", "own"])
def test_a_long_sequence_has_longer_spans(monkeypatch, part):
    step = next(s for s in map(StepCase, cases()) if s.slots_of_rows[2] == 400)
    getattr(step, part)[1].fill_(390)
    step.window = 0
    ours, _ = step.run(load("attend:launch_attend"))
    monkeypatch.setattr(sys.modules["verl.models.ops.triton.attend"], "_MOST_SPANS", 2)
    longer, _ = step.run(load("attend:launch_attend"))
    assert not torch.equal(ours, longer)  # the sums have another order
    assert_near(longer, ours, 1e-5)


@pytest.mark.skipif(not INTERPRETED, reason="counts in Triton's interpreter")
def test_programs_of_four_rows_of_16_thousand_tokens(monkeypatch):
    """Two key heads, as in Qwen2.5-1.5B: 128 programs or more for 132 multiprocessors, and at most 16 blocks of keys each."""
    from triton.runtime.interpreter import interpreter_builder

    attend, rows, tokens = load("attend:launch_attend"), 4, 16_384
    module = sys.modules["verl.models.ops.triton.attend"]
    trips, extended = Counter(), module._extended

    def counted(*arguments):
        trips[(interpreter_builder.grid_dim, interpreter_builder.grid_idx)] += 1
        return extended(*arguments)

    monkeypatch.setattr(module, "_extended", counted)
    case = Inputs(3, torch.bfloat16)
    starts, lengths = torch.arange(rows) * tokens, torch.full((rows,), tokens - 1)
    step = (
        case.normal(rows, 4 * 2 * 2),
        *case.normal(2, rows, 2),
        None,
        None,
        0.0,
        case.normal(2, rows * tokens, 2, 2),
    )
    attend(*step, starts, lengths, tokens, None, 0, tokens, 0, 1.0)
    assert len(trips) >= 128
    assert max(trips.values()) <= 16
    assert sum(trips.values()) == rows * 2 * tokens // 64  # each key once


def test_a_row_without_a_prompt_reads_none():
    """As a row of no sample, with another row in its place."""
    for step in map(StepCase, cases()):
        last = step.rows - 1
        step.seats = [torch.full_like(step.seats[0], last), torch.zeros_like(step.seats[1])]
        ours, _ = step.run(load("attend:launch_attend"))
        without_prompts, _ = step.run(load("attend:launch_attend"), prompts=False)
        assert torch.equal(ours[:last], without_prompts[:last])  # the last has prompt 0


def test_random_numbers_and_columns_of_rows_are_exact():
    for case in cases():
        rows = case.one_of([1, 5, 127, 128, 300])
        keys, positions = case.ids(1 << 62, rows) * 2 - (1 << 62), case.ids(1 << 40, rows)
        assert torch.equal(
            load("draws:launch_uniforms_at")(keys, positions), by_torch(uniforms.uniforms_at)(keys, positions)
        )
        tokens, log_probs = case.ids(200_000, rows), case.normal(rows, dtype=torch.float32)
        columns, step, limit = case.ids(1 << 50, 6, rows + 3), case.ids(2, 6, 1), case.ids(1 << 50, 6, 1)
        step[0], limit[0], copy = 0, torch.iinfo(torch.int64).max, columns.clone()
        out, expected = (torch.zeros(2, rows, dtype=torch.int32, device=DEVICE) for _ in range(2))
        load("draws:launch_advance")(tokens, log_probs, columns[:, :rows], step, limit, out)
        by_torch(device.advance)(tokens, log_probs, copy[:, :rows], step, limit, expected)
        assert torch.equal(columns, copy)
        assert torch.equal(out, expected)


def test_ops_of_a_decode_step_launch_as_many_kernels_as_are_counted(monkeypatch):
    """Operations of torch between them count too."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    launches, (owner, name) = Launches(), (GridExecutor, "__call__") if INTERPRETED else (JITFunction, "run")
    launch = getattr(owner, name)

    def counted(*args, **kwargs):
        launches.names["Triton"] += 1
        launches.paused = True
        try:
            return launch(*args, **kwargs)
        finally:
            launches.paused = False

    monkeypatch.setattr(owner, name, counted)
    case = Inputs(3, torch.bfloat16)
    step, x, z, rows = StepCase(case), case.normal(5, 64), case.logits(5, 4120), torch.arange(5, device=DEVICE)
    columns, u = torch.zeros(6, 9, dtype=torch.int64, device=DEVICE)[:, :5], case.uniforms(5)
    slots = (*step.slots_of_rows, *step.cache, 128, 0, 1.0)
    attention = (step.store, *slots, step.store, *step.prompts, *step.cache, *step.seats)
    ops = {
        "rms_norm": ("norm:launch_rms_norm", x, x[0], 1e-5),
        "add_norm": ("norm:launch_add_norm", x, x, x[0], 1e-5),
        "swiglu": ("swiglu:launch_swiglu", x),
        "attend_decode": ("attend:launch_attend", step.qkv, *step.turns, *step.norms, 1e-5, *attention),
        "uniforms_at": ("draws:launch_uniforms_at", rows, rows),
        "sample_unfiltered": ("sampler:launch_sample", z, u, 1.0),
        "advance": (
            "draws:launch_advance", rows, x[:, 0].float(), columns, columns[:, :1].clone(), columns[:, :1].clone(),
            torch.zeros(2, 5, dtype=torch.int32, device=DEVICE),
        ),
    }  # fmt: skip
    for name, (path, *arguments) in ops.items():
        launches.names.clear()
        with launches:
            load(path)(*arguments)
        assert sum(launches.names.values()) == KERNELS.get(name, 1), (name, launches.names)


def test_the_sampler_draws_the_tokens_of_torch():
    """A uniform within a rounding of the boundary between two tokens may choose the neighbour on a GPU."""
    for case in cases():
        rows, vocab = case.rows(), case.one_of(VOCABULARIES)
        z, u, temperature = case.logits(rows, vocab), case.uniforms(rows), case.one_of([0.0, 1.0, 0.7, 1.3])
        tokens, log_probs = load("sampler:launch_sample")(z, u, temperature)
        expected, expected_log_probs = sampling._sample(z, u, temperature)
        if INTERPRETED or temperature == 0:
            assert torch.equal(tokens, expected)
        assert bool((z.gather(1, tokens[:, None]) > float("-inf")).all())
        exact = (z.double() / (temperature or 1.0)).log_softmax(1)
        assert_near(log_probs, exact.gather(1, tokens[:, None]).squeeze(1))
        if temperature != 0:
            ends = exact.exp().cumsum(1).gather(1, torch.stack([tokens, expected], 1)).sort(1).values
            parted = tokens != expected
            assert bool(((ends[:, 0] - u).abs()[parted] < 1e-6).all())


def test_the_threshold_of_top_p_equals_the_threshold_of_torch():
    for case in cases():
        probs = case.logits(case.rows(), case.one_of(VOCABULARIES)).softmax(1)
        needed = case.one_of([1e-6, 0.3, 0.9, 0.999]) * probs.sum(1, keepdim=True).double()
        threshold = load("threshold:launch_top_p_threshold")(probs, needed)
        assert torch.equal(threshold, sampling._bisected_threshold(probs, needed))


def test_the_greatest_uniform_draws_a_token_that_is_possible():
    z = torch.full((2, 600), float("-inf"), device=DEVICE)
    z[:, [3, 70, 300]] = torch.tensor([0.3, -4.0, 1.1], device=DEVICE)
    u = torch.tensor([1 - 2.0**-53, 2.0**-53], dtype=torch.float64, device=DEVICE)
    assert load("sampler:launch_sample")(z, u, 0.9)[0].tolist() == [300, 3]


def head_case(case):
    rows, vocab = case.rows(), case.one_of(VOCABULARIES)
    cap, scale = case.one_of([(0.0, 1.0), (0.0, 1.0), (5.0, 1.0), (30.0, 0.25)])
    bias = case.normal(vocab, dtype=torch.float32) if case.one_of([0, 0, 1]) else None
    z = case.logits(rows, vocab) if cap == 0 else case.normal(rows, vocab, dtype=torch.float32)
    targets = z.argmax(1) if case.one_of([0, 1]) else case.ids(vocab, rows)
    return z, bias, targets, (case.one_of([1.0, 0.7, 1.6]), scale, cap)


def test_statistics_of_the_head():
    for case in cases():
        z, bias, targets, (temperature, scale, cap) = head_case(case)
        ours = load("head:launch_statistics")(z, bias, targets, temperature, scale, cap)
        wide = None if bias is None else bias.double()
        expected = by_torch(logits.target_statistics)(z.double(), wide, targets, temperature, scale, cap)
        for name, a, b in zip(logits.ChunkStatistics._fields, ours, expected, strict=True):
            if name == "correct" and (bias is not None or cap):
                continue  # a rounding may part two tokens
            is_finite = b.isfinite()
            assert torch.equal(a[~is_finite], b[~is_finite].float()), name
            assert_near(a[is_finite], b[is_finite], 1e-5)


@both_dtypes
def test_gradient_of_the_head(dtype):
    for case in cases():
        z, bias, targets, (temperature, scale, cap) = head_case(case)
        z = z.masked_fill(z == float("-inf"), -1e4)  # autograd can compute its gradients
        (wide,) = leaves(z)
        f = (wide if bias is None else wide + bias.double()) * scale
        final = (cap * torch.tanh(f / cap) if cap else f) / temperature
        log_p = final.log_softmax(1)
        p = log_p.exp()
        fields = log_p.gather(1, targets[:, None])[:, 0], -(p * log_p).sum(1), p.square().sum(1)
        statistics = torch.stack([final.amax(1), -log_p.amax(1), *fields[1:]])
        grads = case.normal(3, len(z), dtype=torch.float32)
        (expected,) = torch.autograd.grad(fields, [wide], tuple(grads.double()))
        arguments = (z, bias, targets, statistics.detach().float(), grads, temperature, scale, cap, dtype)
        ours = load("head:launch_gradient")(*arguments)
        assert ours.dtype == dtype
        assert_near(ours, expected, 1e-5)


@both_dtypes
def test_log_probs_of_hidden_states(dtype, monkeypatch):
    """The whole path of training, with gradients of hidden states and weights."""
    monkeypatch.setattr(kernel_log_probs, "target_statistics", load("head:launch_statistics"))
    monkeypatch.setattr(kernel_log_probs, "target_gradient", load("head:launch_gradient"))
    monkeypatch.setattr(log_probs, "kernels_compute", lambda hidden: True)
    if INTERPRETED:  # a CPU rounds logits of bfloat16
        monkeypatch.setattr(
            "verl.models.kernel_log_probs.wide_product", lambda hidden, weight: hidden.float() @ weight.float().t()
        )
    for case in cases(dtype):
        tokens, vocab, size = case.one_of([1, 2, 5, 9]), case.one_of(VOCABULARIES[1:6]), case.one_of([4, 32])
        hidden, weight = case.normal(tokens, size).requires_grad_(), case.normal(vocab, size).requires_grad_()
        targets, upstream = case.ids(vocab, tokens), case.normal(3, tokens, dtype=torch.float32)
        wants = {"optional": ("entropy", "sum_pi_squared"), "chunk_tokens": case.one_of([1, 2, 4, 50])}
        stats = log_probs.token_log_probs(hidden, weight, targets, 0.7, **wants)
        ours = stats.log_probs, stats.entropy, stats.sum_pi_squared
        wide = leaves(hidden.detach(), weight.detach())
        log_p = (wide[0] @ wide[1].t() / 0.7).log_softmax(1)
        p = log_p.exp()
        theirs = log_p.gather(1, targets[:, None])[:, 0], -(p * log_p).sum(1), p.square().sum(1)
        gradients = torch.autograd.grad(ours, [hidden, weight], tuple(upstream))
        expected = torch.autograd.grad(theirs, wide, tuple(upstream.double()))
        tolerance = 2e-6 if dtype == torch.float32 else 0.01
        for a, b in zip(ours, theirs, strict=True):
            rounding_of_logits = 0.1 * float((wide[0] @ wide[1].t()).detach().abs().max())
            assert float((a - b).detach().norm()) <= tolerance * (1 + float(b.detach().norm()) + rounding_of_logits)
        for a, b, factor in zip(
            gradients, expected, (weight, hidden), strict=True
        ):  # terms of these products may cancel
            terms = upstream.norm() * factor.detach().double().norm()
            assert float((a - b).norm()) <= tolerance * float(b.norm() + terms)


def test_log_probs_of_sampler_and_head_are_the_same_bits():
    for case in cases():
        z, u = case.logits(case.rows(), case.one_of(VOCABULARIES)), case.uniforms(9)
        temperature = case.one_of([1.0, 0.7])
        tokens, log_probs = load("sampler:launch_sample")(z, u[: len(z)], temperature)
        assert torch.equal(load("head:launch_statistics")(z, None, tokens, temperature, 1.0, 0.0)[0], log_probs)


def test_dithered_rounding_has_the_bits_of_torch():
    """Also of a part of a tensor, and of what is not finite."""
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, -3.3953e38, 0.0, -0.0, 1e-45])
    for case in cases():
        dims = case.one_of([1, 2, 3])
        first = [case.one_of([0, 1, 5]) for _ in range(dims)]
        shape = [case.one_of([1, 3, 8, 40]) for _ in range(dims)]
        full_shape = [f + n + case.one_of([0, 2, 50_000]) for f, n in zip(first, shape, strict=True)]
        master = case.normal(*shape) * 10.0 ** case.ids(70, *shape).sub(35)
        if master.numel() > len(special):
            master.view(-1)[: len(special)] = special.to(DEVICE)
        rounded, expected = (torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        phase = rounding._phase(str(shape))
        load("dither:launch_dither")(master, rounded, phase, full_shape, first)
        by_torch(rounding.dither)(master, expected, phase, full_shape, first)
        assert torch.equal(rounded.isnan(), expected.isnan())
        assert torch.equal(*(x.nan_to_num(0.0).view(torch.int16) for x in (rounded, expected)))


@pytest.mark.skipif(not INTERPRETED, reason="the dispatcher calls Triton on a GPU by itself")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_selective_checkpointing_changes_no_bit(family, tmp_path, monkeypatch):
    """Of the layers that train on a GPU, in bfloat16."""
    monkeypatch.setattr(forward, "_FUSED_DEVICES", ())
    monkeypatch.setattr(forward, "_STRAIGHT_DEVICES", ("cpu",))
    module = load_causal_lm(make_tiny_model(tmp_path, family), dtype=torch.bfloat16)
    packed, calls = pack_rows(columns_of(5, [2])), Counter()
    with interpreted_ops(calls):
        runs = [gradients_with(module, packed, recompute) for recompute in ("none", "selective", "full")]
    assert min(calls.values()) > 0
    assert len(calls) == 5
    for gradients in runs[1:]:
        assert all(torch.equal(runs[0][name], gradient) for name, gradient in gradients.items())


@contextlib.contextmanager
def interpreted_ops(calls):
    """Inside, the dispatcher calls the kernels of pointwise ops on a CPU; `calls` counts them by name."""
    library = torch.library.Library("verl", "IMPL")
    for name in ("rms_norm", "add_norm", "swiglu", "rms_norm_backward", "swiglu_backward"):

        def call(*arguments, name=name):
            calls[name] += 1
            return load(OPS[name].triton)(*arguments)

        library.impl(name, call, "CPU")
    yield
    library._destroy()


@pytest.mark.skipif(INTERPRETED, reason="the dispatcher calls torch on a CPU")
def test_ops_on_a_gpu_are_differentiable():
    case = Inputs(3)
    x, delta, weight, gate_up = (case.normal(*s).requires_grad_() for s in ((5, 64), (5, 64), (64,), (5, 128)))
    for arguments, op in (
        ((x, weight, 1e-5), pointwise.rms_norm),
        ((x, delta, weight, 1e-5), pointwise.add_norm),
        ((gate_up,), pointwise.swiglu),
    ):
        on = [a for a in arguments if isinstance(a, torch.Tensor)]
        wide = [a.detach().double().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]
        ours, theirs = op(*arguments), op(*wide)
        ours, theirs = (y if isinstance(y, torch.Tensor) else y[0] + y[1] for y in (ours, theirs))
        expected = torch.autograd.grad(theirs.sum(), [a for a in wide if isinstance(a, torch.Tensor)])
        for a, b in zip(torch.autograd.grad(ours.sum(), on), expected, strict=True):
            assert_near(a, b, 1e-5)


@both_dtypes
def test_rows_in_fp8(dtype):
    """Levels and scales are torch's bits: of outliers, tiny numbers, zeros, and one row that is not finite."""
    for seed in range(NUM_SHAPES):
        inputs = Inputs(seed, dtype)
        rows, columns = inputs.one_of([1, 2, 5]), inputs.one_of([1, 7, 64, 300, 8192, 9000])
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul_(10.0 ** (seed % 9 - 4))
        x[0, 0], x[-1] = 1000.0, 0.0
        x[0, -1] = float("nan") if seed % 4 == 3 else x[0, -1]
        x = x.to(dtype=dtype, device=DEVICE)
        (level, scale), (expected, scales) = load("fp8:launch_fp8_rows")(x), by_torch(low_precision.fp8_rows)(x)
        assert torch.equal(scale.nan_to_num(-1.0), scales.nan_to_num(-1.0))
        finite = scales[:, 0].isfinite()
        assert torch.equal(level[finite].view(torch.uint8), expected[finite].view(torch.uint8))
