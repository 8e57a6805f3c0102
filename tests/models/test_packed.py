"""Packed, prefix-shared forward and backward against one row at a time through dense attention."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.models.reference import make_columns, random_rows, reference_outputs, relative, widen_norms
from tests.slow import each_value
from verl.models.attention import Scoring
from verl.models.forward import packed_outputs
from verl.models.load import load_causal_lm, load_model
from verl.models.packed import PackedLayout, PackedSegment, choose_kernel, masked_attention
from verl.models.packing import pack_rows
from verl.models.tiny import TINY_FAMILIES

PACKED = [family for family in TINY_FAMILIES if family != "bloom"]
_FLOAT32_ROUTERS = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
)  # they choose experts in float32, whatever the model is

OUTPUTS = ("log_probs", "entropy", "sum_pi_squared")


def gradients(module, outputs, weights):
    """Gradients of a fixed random combination of all outputs, by name."""
    module.zero_grad()
    sum((outputs[name] * weights[name]).sum() for name in weights).backward()  # mean logits have none
    return {name: p.grad.clone() for name, p in module.named_parameters()}


def assert_same_as_reference(module, columns, *, share, tolerance, attention="reference_dense", temperature=1.3):
    weights = {n: torch.randn(columns["responses"].shape, dtype=torch.float64) for n in OUTPUTS}
    weights = {n: w.to(next(module.parameters()).dtype) for n, w in weights.items()}
    packed = pack_rows(columns, share_prompts=share)
    ours = packed_outputs(module, packed, OUTPUTS, temperature)
    our_gradients = gradients(module, ours, weights)
    theirs = reference_outputs(module, columns, temperature, attention)
    their_gradients = gradients(module, theirs, weights)
    for name in OUTPUTS:
        assert relative(ours[name], theirs[name]) < tolerance, name
    largest = max(gradient.norm() for gradient in their_gradients.values())
    for name, gradient in our_gradients.items():
        theirs = their_gradients[name]
        # if every query has one key, queries have no gradient, and ours is rounding
        assert (gradient - theirs).norm() < 10 * tolerance * (theirs.norm() or largest), name


@pytest.fixture(scope="session")
def module_of(tiny_folder):
    modules = {}

    def get(family, dtype=torch.float64):
        if (family, dtype) not in modules:
            torch.manual_seed(1)
            module = load_causal_lm(tiny_folder(family), dtype=dtype)
            with torch.no_grad():  # norms and biases start at constants that would hide a mistake
                for name, p in module.named_parameters():
                    if p.dim() == 1:
                        p.add_(torch.randn_like(p) * 0.1)
            modules[family, dtype] = widen_norms(module) if dtype == torch.float64 else module
        return modules[family, dtype]

    return get


@pytest.mark.parametrize(("family", "share"), each_value(PACKED, [True, False]))
def test_outputs_and_gradients_equal_dense_rows_in_float64(module_of, family, share):
    prompts, responses = random_rows(3, [4, 1, 3], longest_prompt=20, longest_response=24)
    columns = make_columns(prompts, responses, pad_prompt=2, pad_response=3)
    tolerance = 1e-7 if family in _FLOAT32_ROUTERS else 1e-10
    assert_same_as_reference(module_of(family), columns, share=share, tolerance=tolerance)


@pytest.mark.parametrize("family", PACKED)
def test_outputs_and_gradients_equal_hugging_face_eager_in_float32(module_of, family):
    prompts, responses = random_rows(4, [3, 2], longest_prompt=20, longest_response=20)
    columns = make_columns(prompts, responses)
    module = module_of(family, torch.float32)
    assert_same_as_reference(module, columns, share=True, tolerance=1e-5, attention="eager")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 10**6))
@example(sizes=[1], seed=226)  # two tokens
def test_any_lengths_and_group_sizes(module_of, sizes, seed):
    prompts, responses = random_rows(seed, sizes)
    assert_same_as_reference(module_of("qwen3"), make_columns(prompts, responses), share=True, tolerance=1e-10)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 10**6))
def test_any_lengths_with_window_and_cap(module_of, sizes, seed):
    prompts, responses = random_rows(seed, sizes, longest_prompt=24, longest_response=24)
    assert_same_as_reference(module_of("gemma2"), make_columns(prompts, responses), share=True, tolerance=1e-10)


def test_masked_tokens_and_rows_change_nothing_else(module_of):
    """Holes are inputs that no position predicts; rows without a trained token are left out of the pass."""
    module = module_of("llama")
    prompts, responses = random_rows(5, [3, 2], longest_response=9)
    columns = make_columns(prompts, responses)
    full = packed_outputs(module, pack_rows(columns), ("log_probs",))["log_probs"]
    holes = dict(columns, response_mask=columns["response_mask"].clone())
    holes["response_mask"][:, 1] = False
    holes["response_mask"][4] = False
    packed = pack_rows(holes)
    assert packed.num_tokens < pack_rows(columns).num_tokens
    log_probs = packed_outputs(module, packed, ("log_probs",))["log_probs"]
    assert torch.allclose(log_probs, full * holes["response_mask"], atol=1e-12, rtol=0)


def test_values_belong_to_the_state_before_each_token(tiny_folder):
    module = widen_norms(load_model(tiny_folder("llama"), "token_value", dtype=torch.float64))
    with torch.no_grad():
        module.score.weight.normal_()
        module.score.bias.fill_(0.7)
    prompts, responses = random_rows(6, [2, 3])
    columns = make_columns(prompts, responses)
    values = packed_outputs(module, pack_rows(columns), ("values",))["values"]
    decoder = module.get_decoder()
    decoder.set_attn_implementation("reference_dense")
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        hidden = decoder(input_ids=torch.tensor([prompt + response]), use_cache=False).last_hidden_state[0]
        expected = (hidden @ module.score.weight[0] + 0.7)[len(prompt) - 1 : -1]
        assert torch.allclose(values[row, : len(response)], expected, atol=1e-12)
        assert not values[row, len(response) :].any()


def test_nothing_to_train_needs_no_forward(module_of):
    columns = make_columns([[1, 2], [3]], [[4], [5, 6]])
    columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    out = packed_outputs(module_of("llama"), pack_rows(columns), ("log_probs", "entropy"))
    assert not out["log_probs"].any()
    assert out["entropy"].shape == (2, 2)


def test_gradient_checkpointing_changes_nothing(tiny_folder):
    prompts, responses = random_rows(7, [3, 1])
    packed = pack_rows(make_columns(prompts, responses))
    runs = []
    for checkpointing in (False, True):
        module = load_causal_lm(tiny_folder("qwen2"), gradient_checkpointing=checkpointing).train()
        out = packed_outputs(module, packed, OUTPUTS)
        runs.append(gradients(module, out, {n: torch.ones_like(out[n]) for n in out}))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def attention_case(dtype, *, value_dim=8, seed=0):
    """A prompt of 6 with responses of 3, 3 and 5 tokens, then lone rows of 4, 4 and 1."""
    segments = [PackedSegment(0, 6), PackedSegment(6, 3, 0, 6), PackedSegment(9, 3, 0, 6), PackedSegment(12, 5, 0, 6)]
    segments += [PackedSegment(17, 4), PackedSegment(21, 4), PackedSegment(25, 1)]
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads, dim):
        return torch.randn(1, 26, heads, dim, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2)

    q, k, v = tensor(4, 8), tensor(2, 8), tensor(2, value_dim)
    return PackedLayout(segments), [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_flash_parts_equal_masked_segments(dtype, tolerance, value_dim):
    layout, qkv = attention_case(dtype, value_dim=value_dim)
    assert choose_kernel(qkv[0], Scoring(0.3)) == "flash_cpu"
    flash = layout.attend(0, *qkv, Scoring(0.3))
    masked = masked_attention(*qkv, layout.segments, Scoring(0.3))
    upstream = torch.randn_like(flash)
    assert relative(flash, masked) < tolerance
    theirs = torch.autograd.grad(masked, qkv, upstream)
    for ours, other in zip(torch.autograd.grad(flash, qkv, upstream), theirs, strict=True):
        assert relative(ours, other) < tolerance


def test_equal_segments_are_computed_in_one_call():
    layout, _ = attention_case(torch.float32)
    assert [(r.start, r.count, r.length) for r in layout.causal_runs] == [
        (0, 1, 6), (6, 2, 3), (12, 1, 5), (17, 2, 4), (25, 1, 1),
    ]  # fmt: skip
    assert [(r.start, r.length, r.prefix_length) for r in layout.prefix_runs] == [(6, 11, 6)]


def test_a_window_as_long_as_every_row_is_no_window():
    layout, qkv = attention_case(torch.float64)
    plain = layout.attend(0, *qkv, Scoring(0.3))
    assert torch.equal(layout.attend(0, *qkv, Scoring(0.3, 11)), plain)
    assert not torch.allclose(layout.attend(0, *qkv, Scoring(0.3, 10)), plain)
