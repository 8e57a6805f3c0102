"""Attention over packed sequences of different lengths: the definition against dense attention, the packed parts against
the other paths, and, with a card, the flash kernels against the definition."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.plain_attention import PLAIN
from tests.models.recorded_modes import RecordedModes
from tests.models.reference import make_columns, random_rows
from verl.models import packed as packed_module
from verl.models.attention import Scoring
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.ops import varlen
from verl.models.ops.varlen import FLASH, TokenSpans, VarlenPlan, flash_runs, spans_of, varlen_attention
from verl.models.packed import PackedLayout, PackedSegment, choose_kernel, masked_attention
from verl.models.packing import pack_rows
from verl.parallel.device import to_device

CPU = torch.device("cpu")
HAS_FLASH = torch.cuda.is_available() and flash_runs(torch.device("cuda:0"), torch.bfloat16, 64)
needs_flash = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FLASH, reason="needs an NVIDIA GPU with flash attention")]
needs_pages = pytest.mark.skipif(
    not FLASH.page_multiple, reason=f"the flash attention of PyTorch {torch.__version__} reads no pages; 2.12 does"
)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def heads_first(x):
    return x.transpose(0, 1)


def dense(q, k, v, causal, scale):
    """One sequence, differentiable: q [queries, heads, dim] -> out, lse [heads, queries]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        last = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        scores = scores.masked_fill(torch.arange(k.shape[0]) > last, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def random_qkv(tokens_q, tokens_k, *, heads=4, kv_heads=2, dim=8, value_dim=8, dtype=torch.float64, device=CPU, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens_q, heads, dim), (tokens_k, kv_heads, dim), (tokens_k, kv_heads, value_dim))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def paged(k, lengths, size, device=CPU):
    """`k` [tokens, ...] of sequences of `lengths`, in pages in another order; returns (pool, pages, used)."""
    counts = [-(-n // size) for n in lengths]
    numbers = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1).split(counts)
    pages = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    pool = k.new_zeros((sum(counts) + 1) * size, *k.shape[1:])
    for row, page_numbers, part in zip(pages, numbers, k.split(lengths), strict=True):
        row[: len(page_numbers)] = page_numbers
        places = (page_numbers[:, None] * size + torch.arange(size)).flatten()[: len(part)]
        pool[places] = part
    return pool, pages.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize("causal", [True, False])
def test_keys_in_pages_are_the_same_keys(causal):
    lengths_q, lengths_k = [3, 1, 5], [3, 4, 17]
    q, k, v = random_qkv(9, 24)
    spans = spans_of(lengths_q, lengths_k, CPU)
    unpaged = PLAIN.forward(q, k, v, spans, causal, 0.3)
    (keys, pages, used), (values, *_) = (paged(x, lengths_k, 4) for x in (k, v))
    in_pages = spans._replace(used_k=used, pages=pages, page_size=4)
    assert all(map(torch.equal, PLAIN.forward(q, keys, values, in_pages, causal, 0.3), unpaged))


@needs_pages
def test_flash_attention_takes_pages():
    """Only shapes are compared: the kernel is for GPUs."""

    def meta(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k = (meta(*shape, dtype=torch.bfloat16) for shape in ((5, 4, 64), (4 * 256, 2, 64)))
    spans = TokenSpans(meta(6), meta(6), 1, 512, meta(5), meta(5, 2), 256)
    out, lse = FLASH.forward(q, k, k, spans, False, 0.125)
    assert (out.shape, lse.shape) == ((5, 4, 64), (4, 5))


@pytest.mark.parametrize("causal", [True, False])
def test_the_definition_equals_dense_attention_with_gradients(causal):
    lengths_q, lengths_k = [3, 1, 5], [3, 4, 7]
    q, k, v = (x.requires_grad_() for x in random_qkv(9, 14, value_dim=6))
    spans = spans_of(lengths_q, lengths_k, CPU)
    out, lse = PLAIN.forward(q, k, v, spans, causal, 0.3)
    parts = [
        dense(a, b, c, causal, 0.3)
        for a, b, c in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    ]
    expected = torch.cat([p for p, _ in parts])
    assert relative(out, expected) < 1e-14
    assert relative(lse, torch.cat([x for _, x in parts], dim=1)) < 1e-14
    upstream = torch.randn_like(expected)
    with torch.no_grad():
        ours = PLAIN.backward(upstream, q, k, v, out, lse, spans, causal, 0.3)
    for gradient, reference in zip(ours, torch.autograd.grad(expected, (q, k, v), upstream), strict=True):
        assert relative(gradient, reference) < 1e-13


def test_keys_may_be_shared_and_lie_anywhere():
    """As decoding uses it: one query a row, keys in slots, several rows of one slot, slots not full."""
    q, k, v = random_qkv(4, 30)
    spans = TokenSpans(
        torch.arange(5, dtype=torch.int32),
        torch.tensor([20, 0, 20, 10, 0], dtype=torch.int32),
        1,
        10,
        torch.tensor([7, 10, 7, 1], dtype=torch.int32),
    )
    out, lse = PLAIN.forward(q, k, v, spans, False, 0.5)
    for row, (start, used) in enumerate([(20, 7), (0, 10), (20, 7), (10, 1)]):
        keys = slice(start, start + used)
        expected, expected_lse = dense(q[row : row + 1], k[keys], v[keys], False, 0.5)
        assert relative(out[row : row + 1], expected) < 1e-14
        assert relative(lse[:, row : row + 1], expected_lse) < 1e-14


@st.composite
def layouts(draw):
    """Prompts with their responses, lone rows between them."""
    segments, start = [], 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 9))
        segments.append(PackedSegment(start, prompt))
        first = start + prompt
        for length in draw(st.lists(st.integers(1, 7), max_size=4)):
            segments.append(PackedSegment(first, length, start, prompt))
            first += length
        start = first
    return segments, start


@settings(max_examples=50, deadline=None)
@given(layouts(), st.sampled_from([(8, 8), (8, 6), (5, 5)]), st.integers(0, 10**6), st.none() | st.integers(1, 14))
def test_packed_parts_equal_masked_segments(layout, dims, seed, window):
    segments, tokens = layout
    flat = random_qkv(tokens, tokens, dim=dims[0], value_dim=dims[1], seed=seed)
    qkv = [heads_first(x).unsqueeze(0).requires_grad_() for x in flat]
    packed_layout = PackedLayout(segments)
    plan = VarlenPlan(packed_layout.segments, packed_layout.prefix_runs, CPU, window)
    ours = varlen_attention(plan, *qkv, 0.3, PLAIN)
    theirs = masked_attention(*qkv, segments, Scoring(0.3, window))
    assert relative(ours, theirs) < 1e-13
    upstream = torch.randn_like(theirs)
    references = torch.autograd.grad(theirs, qkv, upstream)
    for gradient, other in zip(torch.autograd.grad(ours, qkv, upstream), references, strict=True):
        assert torch.allclose(gradient, other, rtol=1e-11, atol=1e-13)


def outputs_and_gradients(module, packed):
    module.zero_grad()
    out = packed_outputs(module, packed, ("log_probs", "entropy"), 0.8)
    (out["log_probs"].sum() + 0.3 * out["entropy"].sum()).backward()
    return out["log_probs"].detach(), {n: p.grad.clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_a_training_pass_through_the_parts_equals_the_other_paths_in_float64(family, tiny_folder, monkeypatch):
    module = load_causal_lm(tiny_folder(family), dtype=torch.float64)
    # Gemma makes its rotary embedding, and every family its norms, in float32: the same on both sides
    columns = make_columns(*random_rows(8, [4, 1, 3], longest_prompt=12, longest_response=10))
    expected, expected_gradients = outputs_and_gradients(module, pack_rows(columns))
    monkeypatch.setattr(packed_module, "choose_kernel", lambda *_: "varlen")
    monkeypatch.setattr(
        packed_module, "varlen_attention", lambda plan, q, k, v, scale: varlen_attention(plan, q, k, v, scale, PLAIN)
    )
    outputs, gradients = outputs_and_gradients(module, pack_rows(columns))
    assert relative(outputs, expected) < 1e-10
    for name, gradient in gradients.items():
        assert relative(gradient, expected_gradients[name]) < 1e-10 or gradient.norm() < 1e-9, name


def test_what_goes_to_a_device_is_the_same_there():
    x = torch.arange(6).reshape(2, 3)
    assert torch.equal(to_device(x, CPU), x)
    assert torch.equal(to_device(x, "cpu"), x)
    assert to_device(torch.empty(0), torch.device("meta")).device.type == "meta"


def test_which_kernel_computes_a_layer(monkeypatch):
    half = torch.empty(1, 4, 3, 64, dtype=torch.bfloat16, device="meta")
    assert choose_kernel(half, Scoring(1.0)) == "masked"
    assert choose_kernel(torch.empty(1, 4, 3, 64), Scoring(1.0)) == "flash_cpu"
    assert choose_kernel(torch.empty(1, 4, 3, 64), Scoring(1.0, 2)) == "masked"
    with monkeypatch.context() as patch:
        patch.setattr(packed_module, "flash_runs", lambda *_: True)
        assert [choose_kernel(half, Scoring(1.0, 2)), choose_kernel(half, Scoring(1.0, None, 30.0))] == [
            "varlen",
            "masked",
        ]
    assert not flash_runs(CPU, torch.bfloat16, 64)
    assert not flash_runs(torch.device("cuda:0"), torch.float32, 64)
    assert not flash_runs(torch.device("cuda:0"), torch.bfloat16, 320)


@pytest.mark.parametrize("installed", [True, False])
def test_an_installed_flash_attention_3_is_taken_on_hopper(installed, monkeypatch):
    activated, capability = [], (9, 0)
    spec = importlib.util.find_spec("json") if installed else None
    monkeypatch.setattr(varlen.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append, raising=False)
    has_flash = varlen._has_flash.__wrapped__
    assert has_flash(torch.device("cuda", 0))
    assert activated == ["FA3"] * installed
    capability = (8, 0)
    assert has_flash(torch.device("cuda", 0))
    assert activated == ["FA3"] * installed, "its kernels are for Hopper"

    def fail(name):
        raise RuntimeError("no kernels")

    capability = (9, 0)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", fail, raising=False)
    assert has_flash(torch.device("cuda", 0)), "PyTorch's own kernels stay"


@pytest.mark.parametrize(("dim", "value_dim", "window"), [(64, 64, None), (20, 12, None), (64, 64, 3)])
def test_the_calls_of_the_flash_kernels_fit_this_pytorch(dim, value_dim, window):
    """On meta tensors: the operators exist, take these arguments and return these shapes."""
    shapes = ((9, 4, dim), (14, 2, dim), (14, 2, value_dim))
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    start = torch.empty(4, dtype=torch.int32, device="meta")
    used = torch.empty(3, dtype=torch.int32, device="meta")
    spans = TokenSpans(start, start, 5, 7, used, window=window)
    out, lse = FLASH.forward(q, k, v, spans, True, 0.1)
    assert out.shape == (9, 4, value_dim)
    assert lse.shape == (4, 9)
    assert lse.dtype == torch.float32
    grads = FLASH.backward(torch.empty_like(out), q, k, v, out, lse, spans, True, 0.1)
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v)]


@pytest.fixture
def deterministic():
    """As trainer.deterministic=True has it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_training_sorts_no_index(deterministic):
    """On a GPU, deterministic mode sorts the places of every write by index; all places of a layer are different."""
    layout = PackedLayout(
        [PackedSegment(0, 6), PackedSegment(6, 3, 0, 6), PackedSegment(9, 5, 0, 6), PackedSegment(14, 2)]
    )
    plan = VarlenPlan(layout.segments, layout.prefix_runs, CPU)
    qkv = [heads_first(x).unsqueeze(0).requires_grad_() for x in random_qkv(16, 16)]
    with RecordedModes() as modes:
        varlen_attention(plan, *qkv, 0.3, PLAIN).sum().backward()
    assert modes.of_indexed_writes() == {(False, False)}
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_the_backward_of_flash_attention_is_deterministic(deterministic):
    """It keeps to a fixed order only in deterministic mode without warn_only."""
    q, k, v, grad = (torch.empty(9, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(4))
    lse = torch.empty(4, 9, device="meta")
    start = torch.empty(4, dtype=torch.int32, device="meta")
    with RecordedModes() as modes:
        FLASH.backward(grad, q, k, v, q, lse, TokenSpans(start, start, 5, 7), True, 0.1)
    assert modes.of("_flash_attention_backward") == {(True, False)}
    assert torch.is_deterministic_algorithms_warn_only_enabled()


class TestOnACard:
    pytestmark = needs_flash

    def test_two_backwards_are_equal_bit_for_bit(self, deterministic):
        lengths = [700, 300, 1000]
        spans = spans_of(lengths, lengths, torch.device("cuda"))
        q, k, v = random_qkv(2000, 2000, heads=14, dim=64, value_dim=64, dtype=torch.bfloat16, device="cuda")
        out, lse = FLASH.forward(q, k, v, spans, True, 0.125)
        first, *repeats = [FLASH.backward(out, q, k, v, out, lse, spans, True, 0.125) for _ in range(5)]
        assert all(torch.equal(a, b) for other in repeats for a, b in zip(first, other, strict=True))

    @pytest.mark.parametrize("dim", [64, 128, 20])
    @pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 40)])
    def test_flash_equals_the_definition(self, causal, window, dim):
        lengths_q, lengths_k = [300, 1, 129], [300, 77, 512]
        spans = spans_of(lengths_q, lengths_k, torch.device("cuda"))._replace(window=window)
        qkv = random_qkv(430, 889, heads=14, dim=dim, value_dim=dim, dtype=torch.bfloat16, device="cuda")
        wide = [x.double() for x in qkv]
        out, lse = FLASH.forward(*qkv, spans, causal, dim**-0.5)
        expected, expected_lse = PLAIN.forward(*wide, spans, causal, dim**-0.5)
        assert relative(out, expected) < 1e-2
        assert (lse - expected_lse).abs().max() < 1e-2
        upstream = torch.randn_like(out)
        gradients = FLASH.backward(upstream, *qkv, out, lse, spans, causal, dim**-0.5)
        references = PLAIN.backward(upstream.double(), *wide, expected, expected_lse, spans, causal, dim**-0.5)
        for a, b in zip(gradients, references, strict=True):
            assert relative(a, b) < 2e-2

    @needs_pages
    @pytest.mark.parametrize(
        ("lengths_q", "causal"), [([1, 1, 1], False), ([300, 7, 129], True), ([28, 28, 28], False)]
    )
    def test_flash_reads_pages(self, lengths_q, causal):
        lengths_k, size = [300, 7, 700], FLASH.page_multiple
        q, k, v = random_qkv(sum(lengths_q), 1007, heads=14, dim=64, value_dim=64, dtype=torch.bfloat16, device="cuda")
        spans = spans_of(lengths_q, lengths_k, torch.device("cuda"))
        expected, expected_lse = PLAIN.forward(*(x.double() for x in (q, k, v)), spans, causal, 0.125)
        (keys, pages, used), (values, *_) = (paged(x.cpu(), lengths_k, size, "cuda") for x in (k, v))
        in_pages = spans._replace(used_k=used, pages=pages, page_size=size)
        out, lse = FLASH.forward(q, keys.cuda(), values.cuda(), in_pages, causal, 0.125)
        assert relative(out, expected) < 1e-2
        assert (lse - expected_lse).abs().max() < 1e-2

    def test_one_query_a_row_against_slots(self):
        """The kernel swaps groups of query heads into the query axis here: the order of the log-sum-exp must hold."""
        rows, capacity = 5, 256
        q, k, v = random_qkv(rows, rows * capacity, heads=14, dim=64, value_dim=64, dtype=torch.bfloat16, device="cuda")
        used = torch.tensor([1, 256, 100, 7, 255], dtype=torch.int32, device="cuda")
        start = torch.tensor([2, 0, 1, 4, 3, 0], dtype=torch.int32, device="cuda") * capacity
        spans = TokenSpans(torch.arange(rows + 1, dtype=torch.int32, device="cuda"), start, 1, capacity, used)
        out, lse = FLASH.forward(q, k, v, spans, False, 0.125)
        expected, expected_lse = PLAIN.forward(q.double(), k.double(), v.double(), spans, False, 0.125)
        assert relative(out, expected) < 1e-2
        assert (lse - expected_lse).abs().max() < 1e-2

    def test_packed_parts_do_not_wait_for_the_device(self):
        segments = [
            PackedSegment(0, 60),
            PackedSegment(60, 30, 0, 60),
            PackedSegment(90, 50, 0, 60),
            PackedSegment(140, 20),
        ]
        layout = PackedLayout(segments)
        flat = random_qkv(160, 160, heads=14, dim=64, value_dim=64, dtype=torch.bfloat16, device="cuda")
        qkv = [heads_first(x).unsqueeze(0).requires_grad_() for x in flat]
        layout.attend(0, *qkv, Scoring(0.125)).sum().backward()  # the first call makes everything that is made once
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = layout.attend(0, *qkv, Scoring(0.125))
            upstream = torch.ones_like(out)
            gradients = torch.autograd.grad(out, qkv, upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wide = [x.detach().double().requires_grad_() for x in qkv]
        expected = masked_attention(*wide, segments, Scoring(0.125))
        assert relative(out, expected) < 1e-2
        for a, b in zip(gradients, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
            assert relative(a, b) < 2e-2
