"""Samples are the same bits however many are generated at once, or the engine says that they need not be."""

import copy
import random

import pytest
import torch

from tests.rollout.conftest import make_prompts
from tests.slow import each_value, slow
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError
from verl.rollout.native.torch import batch_invariance as invariance
from verl.rollout.native.torch import partial_attention
from verl.rollout.native.torch import prepacked_linear as products

LENGTHS = [3, 20, 7, 33, 12, 20, 28, 5] * 4
SLOTS = (32, 7, 1)
DTYPES = [torch.float32, torch.bfloat16]


def bits(engine, n, temperature=1.0):
    # few samples each of many prompts: 32 slots hold other neighbours than 7, and rows end at other times
    params = SamplingParams(n=n, max_new_tokens=12, temperature=temperature, seed=5)
    done = engine.generate(make_prompts(LENGTHS), params, step=3)
    return [(c.token_ids, c.log_probs) for c in done]


def engines(make_engine, load, family, dtype, **config):
    module = copy.deepcopy(load(family)).to(dtype)
    settings = {"max_num_batched_tokens": 48, **config}
    return [make_engine("native", module=module, max_num_seqs=slots, **settings) for slots in SLOTS]


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "n", "prepack"), each_value(["llama", "gemma"], [1, 2], [True, False]))
def test_bits_do_not_depend_on_the_slots_or_the_engine_says_so(family, n, prepack, dtype, load, make_engine):
    built = engines(make_engine, load, family, dtype, prepack_weights=prepack)
    holds = {engine.invariance().holds for engine in built}
    assert len(holds) == 1, "says one thing for all numbers of slots"
    if True in holds:
        first, *others = [bits(engine, n) for engine in built]
        assert all(other == first for other in others)
    else:
        assert built[0].invariance().why


@pytest.mark.usefixtures("torch_computes")
@pytest.mark.parametrize("family", ["llama", slow("qwen2"), slow("qwen3")])
@pytest.mark.parametrize(
    ("n", "dtype"),
    [(1, DTYPES[0]), (2, DTYPES[1]), slow(1, DTYPES[1]), slow(2, DTYPES[0]), *(slow(n, torch.float64) for n in (1, 2))],
)
def test_a_plain_decoder_can_be_required_to_be_invariant(family, n, dtype, load, make_engine):
    built = engines(make_engine, load, family, dtype, batch_invariant="require")
    assert all(engine.invariance().holds for engine in built)
    temperature = 1.0 if n > 1 else 0.0
    first, *others = [bits(engine, n, temperature) for engine in built]
    assert all(other == first for other in others)


@pytest.mark.usefixtures("torch_computes")
@pytest.mark.parametrize(
    ("family", "why"), [("gemma2", "own modules"), ("mistral", "sliding window"), ("llama", "of another CPU")]
)
def test_what_is_not_proven_is_said_and_refused_where_it_is_required(family, why, load, make_engine, monkeypatch):
    if family == "llama":
        monkeypatch.setattr(invariance, "_obstacle", lambda *_: "threads of another CPU")
    examined = make_engine("native", family).invariance()
    assert not examined.holds
    assert why in str(examined)
    with pytest.raises(ConfigError, match=f"batch_invariant=require cannot be kept: .*{why}"):
        make_engine("native", family, batch_invariant="require")


@pytest.mark.usefixtures("torch_computes")
def test_off_and_costly_are_not_invariant(make_engine, monkeypatch):
    assert not make_engine("native", batch_invariant="off").invariance().holds
    monkeypatch.setattr(invariance, "tiles_of", lambda *_: (64, 128))
    costly = make_engine("native").invariance()
    assert not costly.holds
    assert "longer" in costly.why
    assert make_engine("native", batch_invariant="require").invariance().holds


class _OtherKernels:
    """A matrix library whose sums depend on the number of rows, and with 8 to 11 of them on the place among them."""

    def __init__(self, multiply):
        self.multiply = multiply

    def __call__(self, x):
        rows, y = len(x), self.multiply(x)
        factor = torch.full((rows, 1), 1 + (rows.bit_length() if rows < 12 else 6) * 2e-7)
        if 8 <= rows < 12:
            factor[rows // 2 :] += 2e-7
        return (y * factor).to(y.dtype)


@pytest.fixture
def other_kernels(monkeypatch):
    """Products as by a library with several kernels; cached findings about the real library are cleared."""
    real = products._product
    monkeypatch.setattr(products, "_product", lambda *arguments: _OtherKernels(real(*arguments)))
    products._tiles.cache_clear()
    yield
    products._tiles.cache_clear()


@pytest.mark.usefixtures("other_kernels", "torch_computes")
@pytest.mark.parametrize("n", [1, slow(2)])
def test_tiles_mend_a_library_of_several_kernels(n, load, make_engine):
    assert products.tiles_of(torch.zeros(96, 64), False, True)[0] == 12
    holds = {}
    for mode in ("off", "require"):
        built = engines(make_engine, load, "llama", torch.float32, batch_invariant=mode)
        first, *others = [bits(engine, n) for engine in built]
        holds[mode] = all(other == first for other in others)
    assert holds == {"off": False, "require": True}


@pytest.mark.usefixtures("torch_computes")
@pytest.mark.parametrize("n", [1, slow(2)])
def test_attention_that_differs_in_blocks_is_computed_per_row(n, load, make_engine, monkeypatch):
    """A library whose batched products depend on their number, and whose flash attention on the number of prompts."""
    real_bmm, real_flash = torch.bmm, partial_attention._FLASH

    def bmm(a, b, *, out):
        return real_bmm(a, b, out=out).mul_(1 + len(a) * 1e-7)

    def flash(q, k, v, *arguments, **keywords):
        out, lse = real_flash(q, k, v, *arguments, **keywords)
        return out * (1 + len(q) * 1e-7), lse

    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(partial_attention, "_FLASH", flash)
    checks = (partial_attention.own_rows_alike, partial_attention.prompts_alike)
    for check in checks:
        check.cache_clear()
    try:
        built = engines(make_engine, load, "llama", torch.float32, batch_invariant="require")
        first, *others = [bits(engine, n) for engine in built]
        assert all(other == first for other in others)
    finally:
        for check in checks:
            check.cache_clear()


def test_tiles_cover_every_number_of_rows():
    torch.manual_seed(0)
    weight = torch.randn(40, 24)
    multiply = products.Tiled(lambda x: x @ weight.t(), (4, 12))
    for rows in (1, 4, 5, 12, 13, 29):
        x = torch.randn(rows + 1, 24)[1:]  # off a cache line
        assert torch.allclose(multiply(x), x @ weight.t(), atol=1e-5)
    assert [products.padded_rows((4, 12), rows) for rows in (1, 4, 5)] == [4, 4, 12]
    assert products.padding_cost((1,)) == 1.0
    assert products.padding_cost((64,)) > products.padding_cost(tuple(range(1, 65))) == 1.0


@pytest.mark.parametrize(
    ("width", "threads", "even"), [(1536, 2, True), (1536, 5, False), (100, 1, False), (128, 1, True)]
)
def test_shares_of_threads_end_where_vectors_end(width, threads, even):
    assert invariance._divides_evenly(width, 300, threads) is even


def test_neighbours_of_equal_length_are_a_block():
    from verl.rollout.native.torch.decode_attention import Members, equal_blocks

    lengths = [random.Random(1).choice([16, 32]) for _ in range(9)]
    blocks = equal_blocks(torch.tensor(lengths).numpy())
    assert [n for a, b, n in blocks for _ in range(a, b)] == lengths
    assert all(x[2] != y[2] for x, y in zip(blocks, blocks[1:], strict=False))
    slots, places = torch.tensor([0, 1, 1]).numpy(), torch.tensor([2, 0, 1]).numpy()
    members = Members(slots, torch.tensor([5, 5]).numpy(), torch.device("cpu"), places, 3)
    assert members.rows.tolist() == [[0, 0, 0], [1, 2, 0]]
    assert members.place_index.tolist() == [2, 3, 4]
    assert members.blocks == [(0, 2, 5)]
