"""A layer over a few tokens at a time: the same outputs and gradients in float64, and less memory between the passes."""

import contextlib

import pytest
import torch

from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine
from tests.models.reference import make_columns, random_rows, widen_norms
from verl.engines.api import MicroBatching
from verl.models import forward
from verl.models.attention import Scoring
from verl.models.chunked_mlp import chunked_feed_forward
from verl.models.decoder.backward import TrainingPass
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm
from verl.models.packed import PackedLayout, PackedSegment, masked_attention
from verl.models.packing import pack_rows
from verl.models.tiny import make_tiny_model

OUTPUTS = ("log_probs", "entropy")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": make_tiny_model(root / "qwen3", "qwen3", hidden_size=32, intermediate_size=96, head_dim=8),
        "gemma2": make_tiny_model(root / "gemma2", "gemma2", hidden_size=32, intermediate_size=96, head_dim=8),
    }


@contextlib.contextmanager
def saved_bytes():
    """Counts the bytes that autograd keeps for the backward, each storage once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def outputs_and_gradients(module, chunk_tokens, checkpointing=False):
    columns = make_columns(*random_rows(0, [3, 1, 2]))
    packed = pack_rows(columns, chunk_tokens=chunk_tokens)
    module.zero_grad()
    with chunked_feed_forward(module, chunk_tokens), saved_bytes() as storages:
        out = packed_outputs(module, packed, OUTPUTS, 1.3)
        held = sum(storages.values())
        weights = torch.linspace(-1, 1, out["log_probs"].numel(), dtype=out["log_probs"].dtype).view(packed.shape)
        (out["log_probs"] * weights + 0.1 * out["entropy"]).sum().backward()
    return out, {name: p.grad.clone() for name, p in module.named_parameters()}, held


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_modules_in_chunks(folders, family, checkpointing):
    module = load_causal_lm(folders[family], dtype=torch.float64)
    widen_norms(module)
    module.train()
    if checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    unchunked, gradients, held = outputs_and_gradients(module, None)
    for size in (1, 5, 10_000):
        ours, chunked, less = outputs_and_gradients(module, size)
        for name in OUTPUTS:
            torch.testing.assert_close(ours[name], unchunked[name], rtol=1e-12, atol=1e-12)
        for name, expected in gradients.items():
            torch.testing.assert_close(chunked[name], expected, rtol=1e-9, atol=1e-11)
        if not checkpointing:
            assert less < (0.8 * held if size == 5 else 1.01 * held)
    assert not any("forward" in vars(layer.mlp) for layer in module.get_decoder().layers), "modules are as they were"


def test_fused_decoder_passes_in_chunks(folders, monkeypatch):
    """Without the modules' own forward: the activations of the feed-forward are not kept."""
    module = load_causal_lm(folders["qwen3"], dtype=torch.float32)
    saved = []
    with_saved = TrainingPass._with_saved

    def watched(*args):
        out, tensors = with_saved(*args)
        saved.append(tensors)
        return out, tensors

    monkeypatch.setattr(TrainingPass, "_with_saved", watched)
    unchunked, gradients, _ = outputs_and_gradients(module, None)
    assert saved
    assert all(tensors.feed.gate_up is not None for tensors in saved)
    saved.clear()
    packed = pack_rows(make_columns(*random_rows(0, [3, 1, 2])), chunk_tokens=5)
    module.zero_grad()
    out = packed_outputs(module, packed, OUTPUTS, 1.3)
    weights = torch.linspace(-1, 1, out["log_probs"].numel()).view(packed.shape)
    (out["log_probs"] * weights + 0.1 * out["entropy"]).sum().backward()
    assert saved
    assert all(tensors.feed.gate_up is None for tensors in saved)
    for name in OUTPUTS:
        torch.testing.assert_close(out[name], unchunked[name], rtol=1e-5, atol=1e-6)
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_an_engine_of_a_gpu_computes_chunks_with_the_samplers_layers(folders, monkeypatch):
    monkeypatch.setattr(forward, "_FUSED_DEVICES", ())
    monkeypatch.setattr(forward, "_STRAIGHT_DEVICES", ("cpu",))
    steps, saved, calls = [], [], []
    three = {"use_3d_hybrid": True, "enable_chunked_attention": True, "chunk_size": 3}
    model = {"enable_gradient_checkpointing": False}
    engines = [make_engine(folders["qwen3"], model=model, engine=engine) for engine in ({}, three)]
    mlp = type(engines[0].module.get_decoder().layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda *args: calls.append(args))
    for engine in engines:
        with saved_bytes() as storages:
            metrics = engine.train_batch(make_batch(0, (3, 2)), policy_loss, OUTPUTS, MicroBatching(max_rows=8))
        steps.append([metrics[name].value for name in ("loss", "grad_norm")])
        saved.append(sum(storages.values()))
    assert not calls
    assert steps[1] == pytest.approx(steps[0], rel=1e-5)
    assert saved[1] < 0.8 * saved[0]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 3.0), (4, None), (4, 3.0), (9, None)])
def test_attention_in_chunks_of_queries(window, softcap):
    segments = [PackedSegment(0, 6), PackedSegment(6, 7, 0, 6), PackedSegment(13, 1, 0, 6), PackedSegment(14, 9)]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 23, 8), (1, 2, 23, 8), (1, 2, 23, 8)]
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    d_out = torch.randn(1, 23, 4, 8, generator=generator, dtype=torch.float64)
    unchunked = masked_attention(*qkv, segments, Scoring(0.3, window, softcap))
    expected = torch.autograd.grad(unchunked, qkv, d_out)
    for size in (1, 2, 5, 100):
        ours = masked_attention(*qkv, segments, Scoring(0.3, window, softcap), size)
        torch.testing.assert_close(ours, unchunked, rtol=1e-12, atol=1e-12)
        for gradient, reference in zip(torch.autograd.grad(ours, qkv, d_out), expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-10, atol=1e-12)


def test_capped_scores_of_a_chunk_are_all_that_is_held():
    """Scores need memory for each pair of tokens; in chunks they are made again in the backward."""
    length = 128
    qkv = [torch.randn(1, 2, length, 8).requires_grad_() for _ in range(3)]
    held = {}
    for size in (None, 16):
        with saved_bytes() as storages:
            masked_attention(*qkv, [PackedSegment(0, length)], Scoring(0.3, None, 5.0), size)
        held[size] = sum(storages.values())
    assert held[None] > 4 * 2 * length * length
    assert held[16] < 0.2 * held[None]


def test_the_layout_knows_its_chunks():
    assert pack_rows(make_columns([[1, 2]], [[3, 4]]), chunk_tokens=7).layout.chunk_tokens == 7
    assert PackedLayout([PackedSegment(0, 1)]).chunk_tokens is None


def test_a_forward_that_somebody_has_put_there_is_there_again(folders):
    module = load_causal_lm(folders["qwen3"])
    ours, untouched = (layer.mlp for layer in module.get_decoder().layers[:2])
    ours.forward = hooked = type(ours).forward.__get__(ours)
    with chunked_feed_forward(module, 2):
        assert ours.forward is not hooked
    assert ours.forward is hooked
    assert "forward" not in vars(untouched)
