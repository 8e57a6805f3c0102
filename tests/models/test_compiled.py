"""The compiled kernels of a training step, each instruction set that this processor has, against torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.house.source import PACKAGE
from tests.models.reference import make_columns, random_rows
from tests.models.test_packed import relative
from tests.sanitizer import run_checked
from verl.errors import ConfigError
from verl.models.attention import Scoring
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.log_probs import token_log_probs
from verl.models.ops import compiled
from verl.models.ops.compiled_attention import CompiledPlan, compiled_attention, compiled_attention_backward
from verl.models.ops.pointwise import (
    Turns,
    inverse_rms,
    rms_norm_backward_,
    rotate_,
    scaled_norm,
    swiglu,
    swiglu_backward_,
)
from verl.models.packed import PackedLayout, PackedSegment, masked_attention
from verl.models.packing import pack_rows
from verl.parallel.compiled import INSTRUCTION_SETS

pytestmark = pytest.mark.skipif(compiled._library() is None, reason="verl was installed without a C compiler")

SETS = [name for name in ("avx512", "avx2") if compiled._library() and compiled._kernels(name)]
PAIRS = [name for name in INSTRUCTION_SETS if compiled._library() and compiled._bf16_kernels(name)]
FULL_BLOCKS = [71, 72, 73, 255, 256, 257, 600, 1]


@pytest.fixture(params=SETS, autouse=True, scope="module")
def instruction_set(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_CPU_ISA", request.param)
        yield request.param


@pytest.fixture(params=PAIRS or [pytest.param(None, marks=pytest.mark.skip("no matmuls of pairs of bfloat16 values"))])
def pairs(request, instruction_set, monkeypatch):
    """The kernels for bfloat16, of one instruction set; None for float32 ones."""
    if request.param is None:
        return None
    if instruction_set != "avx512":
        pytest.skip("tested with the first set")
    monkeypatch.setenv("VERL_CPU_ISA", request.param)
    monkeypatch.setenv("VERL_CPU_BF16", "native")  # even if it is slow
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def segments_of(groups):
    """Segments of (prompt length, lengths of the responses that share it)."""
    segments, start = [], 0
    for prompt, responses in groups:
        segments.append(PackedSegment(start, prompt))
        first = start + prompt
        for length in responses:
            segments.append(PackedSegment(first, length, start, prompt))
            first += length
        start = first
    return segments


def attention(segments, qkv, upstream, dtype, scale=None):
    """Output and gradients; in float64 by dense operations."""
    leaves = [x.to(dtype).requires_grad_() for x in qkv]
    scoring = Scoring(qkv[0].shape[-1] ** -0.5 if scale is None else scale)
    if dtype == torch.float64:
        out = masked_attention(*leaves, segments, scoring)
    else:
        out = PackedLayout(segments).attend(0, *leaves, scoring)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]


def inputs(segments, heads, kv_heads, head_dim, seed=0):
    generator, tokens = torch.Generator().manual_seed(seed), sum(s.length for s in segments)

    def normal(num):
        return torch.randn(1, tokens, num, head_dim, generator=generator).double().transpose(1, 2)

    return [normal(heads) * 2, normal(kv_heads) * 2, normal(kv_heads)], normal(heads).transpose(1, 2)


def assert_close(actual, exact, upstream, tolerance):
    for ours, theirs in zip(actual, exact, strict=True):
        size = max(theirs.norm(), upstream.norm())  # gradients of queries that see one token are zero
        assert (ours - theirs).norm() < tolerance * size


def assert_same_as_float64(segments, heads, kv_heads, head_dim, seed=0, scale=None):
    qkv, upstream = inputs(segments, heads, kv_heads, head_dim, seed)
    exact = attention(segments, qkv, upstream, torch.float64, scale)
    actual = attention(segments, qkv, upstream, torch.float32, scale)
    assert compiled.usable(actual[0])
    assert_close(actual, exact, upstream, 5e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.lists(st.integers(1, 90), max_size=3)), min_size=1, max_size=4),
    st.sampled_from([(9, 3, 64), (4, 1, 24), (2, 2, 128), (6, 2, 6), (3, 3, 80)]),
    st.integers(0, 10**6),
)
def test_ragged_rows_and_shared_prompts_equal_dense_attention_in_float64(groups, shape, seed):
    assert_same_as_float64(segments_of(groups), *shape, seed=seed, scale=0.2)


@pytest.mark.parametrize("head_dim", [64, 40])
def test_rows_at_the_ends_of_blocks_equal_dense_attention_in_float64(head_dim):
    assert_same_as_float64(segments_of([(n, []) for n in FULL_BLOCKS]), 2, 1, head_dim)
    assert_same_as_float64(segments_of([(257, [72, 300, 1])]), 2, 1, head_dim)


@pytest.mark.parametrize("head_dim", [64, 40, 6])
def test_bfloat16_attention_is_near_float64_and_has_the_same_bits_for_any_number_of_threads(head_dim, threads, pairs):
    segments = segments_of([(257, [72, 300, 1]), (71, []), (1, [1, 2]), (64, [63, 63])])
    qkv, upstream = inputs(segments, 4, 2, head_dim)
    qkv, upstream = [x.bfloat16().double() for x in qkv], upstream.bfloat16().double()
    exact = attention(segments, qkv, upstream, torch.float64)
    runs = []
    for count in (1, 3):
        threads(count)
        runs.append(attention(segments, qkv, upstream, torch.bfloat16))
    assert_close(runs[0], exact, upstream, 5e-3)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_prefix_of_a_prefix_and_a_prefix_over_segments():
    segments = [PackedSegment(0, 40), PackedSegment(40, 30, 0, 40), PackedSegment(70, 20, 40, 30)]
    segments += [PackedSegment(90, 25, 30, 60), PackedSegment(115, 7)]
    plan = CompiledPlan(segments)
    assert plan.groups.tolist() == [0, 4, 5]
    assert_same_as_float64(segments, 4, 2, 16)


def test_empty_segments_and_large_scores():
    segments = [PackedSegment(0, 0), PackedSegment(0, 9), PackedSegment(9, 0, 0, 9)]
    qkv, upstream = inputs(segments, 2, 1, 8)
    large = [qkv[0] * 100, qkv[1], qkv[2]]  # weights of one and zero
    exact = attention([segments[1]], large, upstream, torch.float64)
    actual = attention(segments, large, upstream, torch.float32)
    assert_close(actual, exact, upstream, 1e-4)


def test_attention_has_the_same_bits_for_any_number_of_threads(threads):
    segments = segments_of([(300, []), (80, [40, 90]), (90, []), (260, [])])
    qkv, upstream = inputs(segments, 9, 3, 64)
    runs = []
    for count in (1, 2, 3, 2):
        threads(count)
        runs.append(attention(segments, qkv, upstream, torch.float32))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def test_gradients_that_are_broadcast_or_strided_are_read():
    segments = segments_of([(30, [12])])
    qkv, _ = inputs(segments, 4, 2, 32)
    ones = torch.ones(1, 42, 4, 32)
    expected = attention(segments, qkv, ones, torch.float32)
    actual = attention(segments, qkv, torch.ones(()).expand(1, 42, 4, 32), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_gradients_may_be_written_in_a_narrower_dtype():
    segments = segments_of([(30, [12])])
    qkv, upstream = inputs(segments, 4, 2, 32)
    _, *expected = attention(segments, qkv, upstream, torch.float32)
    q, k, v = (x.float() for x in qkv)
    plan, out, d_out = CompiledPlan(segments), torch.empty_like(q), upstream.float().transpose(1, 2)
    lse = compiled_attention(plan, q, k, v, out, 32**-0.5)
    into = [torch.empty(x.shape, dtype=torch.bfloat16) for x in (q, k, v)]
    compiled_attention_backward(plan, d_out, q, k, v, out, lse, 32**-0.5, into)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(into, expected, strict=True))


def test_other_dtypes_and_processors_are_left_to_torch(monkeypatch):
    assert not compiled.usable(torch.zeros(2, dtype=torch.bfloat16))
    assert not compiled.usable(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    monkeypatch.setenv("VERL_CPU_ISA", "none")
    assert not compiled.usable(torch.zeros(2))
    monkeypatch.setenv("VERL_CPU_ISA", "avx10")
    with pytest.raises(ConfigError, match="VERL_CPU_ISA=avx10"):
        compiled.usable(torch.zeros(2))


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 7, 1), (300, 1031, 70), (13, 9001, 33), (25, 600, 5000)])
def test_products_of_bfloat16_equal_float64_for_any_number_of_threads(rows, depth, columns, threads, pairs):
    a, b = torch.randn(rows, depth).bfloat16(), torch.randn(depth, columns).bfloat16()
    bias, exact, runs = torch.randn(columns).bfloat16(), a.double() @ b.double(), []
    for count, x, y in ((1, a, b), (2, a, b.t().contiguous().t()), (3, a.t().contiguous().t(), b)):
        threads(count)
        total = compiled.add_product(torch.ones(rows, columns), x, y, overwrite=False)
        runs.append([total, compiled.multiply(x, y), compiled.multiply(x, y, bias)])
    for actual, expected in zip(runs[0], (exact + 1, exact, exact + bias.double()), strict=True):
        assert relative(actual.double(), expected) < (1e-6 if actual.dtype == torch.float32 else 4e-3)
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


def pointwise(dtype, tokens, features):
    """Results of all operations on rows, from the same values in `dtype`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    weight = normal(features)
    x, d_y, d_x = normal(tokens, features), normal(tokens, features), normal(tokens, features)
    scale = inverse_rms(x, 1e-5)
    d_weight = rms_norm_backward_(d_x, d_y.clone(), x, weight, scale)
    gate_up, d_out = 4 * normal(tokens, 2 * features), normal(tokens, features)
    activated = swiglu(gate_up)
    again = swiglu_backward_(d_out, gate_up)
    turns, heads = Turns(normal(tokens, 2 * features), normal(tokens, 2 * features)), normal(tokens, 5, 2 * features)
    turned = heads.clone()
    rotate_(turned[:, :4], turns.cos, turns.turn, False)
    rotate_(turned[:, 1:], turns.cos, turns.turn_back, False)
    return [scaled_norm(x, weight, scale), d_x, d_weight, activated, again, gate_up, turned]


def head(dtype, tokens, features):
    """Log-probs and their gradients, from the same values in `dtype`; one token of the vocabulary has almost no probability."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, features, generator=generator)
    weight = 0.2 * torch.randn(50, features, generator=generator)
    hidden[:, 0], weight[3, 0] = 1.0, -300.0
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    targets = torch.randint(0, 3, (tokens,), generator=generator)
    log_probs = token_log_probs(*leaves, targets, 0.7, chunk_tokens=400).log_probs
    upstream = torch.linspace(-1, 1, tokens, dtype=log_probs.dtype)
    return [log_probs.detach(), *torch.autograd.grad(log_probs, leaves, upstream)]


@pytest.mark.parametrize("pairs", [None, *PAIRS], indirect=True)
@pytest.mark.parametrize(("tokens", "features"), [(1, 3), (33, 50), (700, 96)])
def test_operations_on_rows_equal_float64_for_any_number_of_threads(threads, tokens, features, pairs):
    dtype = torch.bfloat16 if pairs else torch.float32
    exact = [*pointwise(torch.float64, tokens, features), *head(torch.float64, tokens, features)]
    runs = []
    for count in (1, 2, 3):
        threads(count)
        runs.append([*pointwise(dtype, tokens, features), *head(dtype, tokens, features)])
    for i, ours in enumerate(runs[0]):
        assert relative(ours.double(), exact[i]) < (1e-6 if dtype == torch.float32 else 1e-2), i
        assert all(torch.equal(ours, other[i]) for other in runs), i


def test_a_model_computes_what_it_computes_with_torch(tiny_folder, monkeypatch):
    columns = make_columns(*random_rows(3, [4, 1, 3], longest_prompt=60, longest_response=70))
    module = load_causal_lm(tiny_folder("qwen3"), dtype=torch.float32).train()
    runs = []
    for name in (None, "none"):
        if name:
            monkeypatch.setenv("VERL_CPU_ISA", name)
        module.zero_grad()
        log_probs = packed_outputs(module, pack_rows(columns), ("log_probs",))["log_probs"]
        log_probs.sum().backward()
        runs.append([log_probs.detach(), *(p.grad.clone() for p in module.parameters())])
    for ours, theirs in zip(*runs, strict=True):
        assert relative(ours, theirs) < 1e-5
    assert not torch.equal(runs[0][0], runs[1][0]), "the compiled kernels were not used"


_RUN_CHECKED = """
import ctypes, sys, pytest
from verl.models.ops import compiled
assert hasattr(ctypes.CDLL(None), "__asan_init")
checked = compiled._declare(ctypes.CDLL(sys.argv[1]))
compiled._library = lambda: checked
sys.exit(pytest.main(["-vv", "-p", "no:cacheprovider", "-k", "ends_of or operations_on or prefix or products", sys.argv[2]]))
"""


@pytest.mark.slow
def test_under_the_address_sanitizer(tmp_path):
    assert run_checked(PACKAGE / "csrc/kernels.c", tmp_path, _RUN_CHECKED, __file__).count("PASSED") >= 6
