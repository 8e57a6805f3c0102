"""The hand-written decoder passes against the modules they replace: one row at a time, dense attention, autograd."""

import copy
import json
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.memory import kept_bytes
from tests.models.reference import make_columns, random_rows, reference_outputs, relative, widen_norms
from verl.config import OptimConfig
from verl.models import forward
from verl.models.decoder.weights import DenseDecoder
from verl.models.forward import fused_decoder, hidden_states, packed_outputs, recompute_of, straight_decoder
from verl.models.grad_buffers import GradientBuffers
from verl.models.load import load_causal_lm, load_model
from verl.models.lora import LoRASpec, adapters_off, add_adapters, lora_layers
from verl.models.memory import WEIGHT, ParallelLayout, activation_bytes_of_layer
from verl.models.optim import MasterOptimizer
from verl.models.packing import pack_rows
from verl.models.shapes import ModelShape
from verl.models.tiny import make_tiny_model


@pytest.fixture(autouse=True, scope="module")
def fused_decoder_in_float64():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "_FUSED_DTYPES", {torch.float32, torch.bfloat16, torch.float64})
        yield


OUTPUTS = ("log_probs", "entropy")
# with 4 times as many keys and inner elements as the smallest tiny model
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

# family and config of each model that the passes are held to
MODELS = {
    "llama": ("llama", {}),
    "llama-biases-untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-scaled-rotary": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 64}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "phi3": ("phi3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-unnormed": ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 2, "num_experts_per_tok": 1}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 5}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4_moe": ("glm4_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-groups": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_interleave": False,
         "norm_topk_prob": False, "routed_scaling_factor": 2.5},
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    folders = {}

    def get(name):
        if name not in folders:
            family, overrides = MODELS[name]
            folders[name] = make_tiny_model(tmp_path_factory.mktemp("dense") / name, family, **overrides)
        return folders[name]

    return get


@pytest.fixture
def pair(folder_of):
    """name -> a float64 module that the passes take, and one of the same weights that is called as a module."""

    def get(name, load=load_causal_lm, dtype=torch.float64):
        torch.manual_seed(1)
        module = load(folder_of(name), dtype=dtype)
        with torch.no_grad():  # norms and biases start at constants that would hide a mistake
            for p in module.parameters():
                if p.dim() == 1:
                    p.add_(torch.randn_like(p) * 0.1)
        other = copy.deepcopy(module)
        assert DenseDecoder.of(module) is not None
        return module, widen_norms(other) if dtype == torch.float64 else other

    return get


def columns_of(seed, group_sizes, **longest):
    return make_columns(*random_rows(seed, group_sizes, **longest), pad_prompt=1, pad_response=2)


def weighted(outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return sum((v * torch.randn(v.shape, generator=generator, dtype=torch.float64)).sum() for v in outputs.values())


def gradients_of(module):
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    largest = max(gradient.norm() for gradient in theirs.values())
    for name, gradient in theirs.items():
        # if a gradient is 0 but for rounding (a query that sees one token), the largest one is the measure
        error = (ours[name] - gradient).norm() / torch.maximum(gradient.norm(), 1e-4 * largest)
        assert error < tolerance, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [True, False])
def test_equals_the_module_in_float64(pair, name, share):
    module, other = pair(name)
    columns = columns_of(3, [3, 1, 2])
    ours = packed_outputs(module, pack_rows(columns, share_prompts=share), OUTPUTS, 1.3)
    theirs = {k: v for k, v in reference_outputs(other, columns, 1.3).items() if k in OUTPUTS}
    for output in OUTPUTS:
        assert relative(ours[output], theirs[output]) < 1e-11, output
    weighted(ours).backward()
    weighted(theirs).backward()
    assert_same_gradients(gradients_of(module), gradients_of(other))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    rows=st.integers(1, 5),
    shuffle=st.integers(0, 100),
)
def test_split_order_and_sharing_change_nothing(shared_pair, seed, sizes, rows, shuffle):
    """Rows in another order, cut into micro-batches that are summed in buffers, against all rows at once."""
    module, other = shared_pair
    columns = columns_of(seed, sizes)
    weights = torch.randn(columns["responses"].shape, dtype=torch.float64)

    def run(model, part, **options):
        values = packed_outputs(model, pack_rows(part), ("log_probs",), **options)["log_probs"]
        (values * part["weights"]).sum().backward()

    columns["weights"] = weights
    other.zero_grad()
    run(other, columns)
    module.zero_grad()
    buffers = GradientBuffers({p: p for p in module.parameters()})
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(shuffle))
    for members in order.split(rows):
        run(module, {k: v[members] for k, v in columns.items()}, gradients=buffers, chunk_tokens=3)
    assert_same_gradients(gradients_of(module), gradients_of(other))


@pytest.fixture(scope="session")
def shared_pair(folder_of):
    module = load_causal_lm(folder_of("qwen3"), dtype=torch.float64)
    return module, widen_norms(copy.deepcopy(module))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_checkpointing_changes_no_bit(pair, name):
    module, _ = pair(name)
    packed = pack_rows(columns_of(5, [2, 2]))
    runs = {recompute: gradients_with(module, packed, recompute) for recompute in ("none", "selective", "full")}
    for gradients in runs.values():
        assert all(torch.equal(runs["none"][name], gradient) for name, gradient in gradients.items())


def gradients_with(module, packed, recompute):
    """Gradients by name, if the backward computes again what `recompute` says."""
    if recompute != "none":
        module.recompute = recompute
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.train()
    module.zero_grad()
    assert DenseDecoder.of(module, adapters=True) is not None
    assert recompute_of(module) == recompute
    weighted(packed_outputs(module, packed, OUTPUTS)).backward()
    return {name: gradient.clone() for name, gradient in gradients_of(module).items()}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_adapters_with_selective_checkpointing(pair, name):
    module, _ = pair(name)
    add_adapters(module, LoRASpec(3, 6.0, "all-linear"), torch.float64)
    for layer in lora_layers(module).values():
        layer.lora_B.data.normal_()
    packed = pack_rows(columns_of(5, [2, 2]))
    runs = [gradients_with(module, packed, recompute) for recompute in ("none", "selective")]
    assert all(torch.equal(runs[0][name], gradient) for name, gradient in runs[1].items())


# 3 of 6 experts: rows in all, and routing that counts
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
PLANNED = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 96},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 48},
    "glm4_moe": {
        **{name: size for name, size in EXPERTS.items() if name != "num_experts"},
        **{"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    },
}


@pytest.mark.parametrize("family", PLANNED)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_memory_of_a_layer_is_as_planned(tmp_path, family, recompute):
    """On a CPU a layer without checkpointing keeps as much as with the selective form, and rotated heads if they are normed."""
    num_bytes, planned = kept_and_planned(tmp_path, family, recompute)
    assert num_bytes == pytest.approx(planned, rel=0.02)


def kept_and_planned(tmp_path, family, recompute):
    """Bytes of a token and layer that a forward leaves for its backward, against the closed forms of verl.models.memory."""
    packed, sizes = pack_rows(columns_of(5, [3, 3], longest_prompt=60, longest_response=60)), {}
    # routing is as wide in every dtype
    dtype = torch.bfloat16 if PLANNED[family] else torch.float32
    for num_layers in (2, 4):
        sized = {**SHAPE, **PLANNED[family], "num_hidden_layers": num_layers}
        folder = make_tiny_model(tmp_path / str(num_layers), family, **sized)
        module = load_causal_lm(folder, dtype=dtype, gradient_checkpointing=recompute != "none").train()
        module.recompute = recompute
        hidden_states(module, packed)  # it allocates the buffers that stay
        sizes[num_layers] = kept_bytes(lambda module=module: hidden_states(module, packed))
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    planned = activation_bytes_of_layer(shape, ParallelLayout(recompute=recompute), 0) * dtype.itemsize / WEIGHT
    return (sizes[4] - sizes[2]) / 2 / packed.num_tokens, planned


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_value_model(pair, name):
    module, other = pair(name, partial(load_model, head="token_value"))
    with torch.no_grad():
        module.score.weight.normal_()
        other.score.weight.copy_(module.score.weight)
    packed = pack_rows(columns_of(6, [3, 1]))
    assert DenseDecoder.of(other) is None
    for model, options in ((module, {"gradients": GradientBuffers({p: p for p in module.parameters()})}), (other, {})):
        weighted(packed_outputs(model, packed, ("values",), **options)).backward()
    assert_same_gradients(gradients_of(module), gradients_of(other))


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(lambda n: "embed" in n, id="embeddings"),
        pytest.param(lambda n: "layers.0" in n or "embed" in n, id="embeddings and lower layer"),
        pytest.param(lambda n: "k_proj" in n or "norm" in n, id="part of a joined projection"),
        pytest.param(lambda n: "layers" in n, id="all layers"),
    ],
)
@pytest.mark.parametrize("buffers", [True, False])
def test_frozen_parameters_get_no_gradient(pair, frozen, buffers):
    module, other = pair("qwen3")
    for model in (module, other):
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen(name))
    packed = pack_rows(columns_of(7, [2, 3]))
    options = {"gradients": GradientBuffers({p: p for p in module.parameters() if p.requires_grad})} if buffers else {}
    weighted(packed_outputs(module, packed, OUTPUTS, **options)).backward()
    weighted(packed_outputs(other, packed, OUTPUTS)).backward()
    assert_same_gradients(gradients_of(module), gradients_of(other))
    assert all(p.grad is None for n, p in module.named_parameters() if frozen(n))


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj", "down_proj")])
@pytest.mark.parametrize("buffers", [True, False])
def test_adapters(pair, targets, buffers):
    """Low-rank products inside the joined projections, in chunks too; without them, the base model."""
    module, other = pair("llama-biases-untied")
    for model in (module, other):
        add_adapters(model, LoRASpec(3, 6.0, targets), torch.float64)
        generator = torch.Generator().manual_seed(0)
        for layer in lora_layers(model).values():
            layer.lora_B.data.normal_(generator=generator)
    assert fused_decoder(module, torch.device("cpu")) or straight_decoder(module, torch.device("cpu"))
    trained = {p: p for p in module.parameters() if p.requires_grad}
    options = {"gradients": GradientBuffers(trained)} if buffers else {}
    for chunk in (None, 4):
        packed = pack_rows(columns_of(7, [2, 3]), chunk_tokens=chunk)
        ours, theirs = packed_outputs(module, packed, OUTPUTS, **options), packed_outputs(other, packed, OUTPUTS)
        assert relative(ours["log_probs"], theirs["log_probs"]) < 1e-11
        weighted(ours).backward()
        weighted(theirs).backward()
    assert_same_gradients(gradients_of(module), gradients_of(other))
    with torch.no_grad(), adapters_off(module), adapters_off(other):
        ours, theirs = (packed_outputs(model, packed, OUTPUTS)["log_probs"] for model in (module, other))
    assert relative(ours, theirs) < 1e-11


def test_a_padding_token_that_stands_in_a_row_learns(pair):
    """Often it is the token that ends turns. transformers leaves out its gradient, also in rows without padding."""
    module, other = pair("llama-biases-untied")
    columns = columns_of(8, [2])
    columns["prompts"][:, -1] = module.get_decoder().padding_idx
    for model in (module, other):
        weighted(packed_outputs(model, pack_rows(columns), OUTPUTS)).backward()
    assert module.get_input_embeddings().weight.grad[module.get_decoder().padding_idx].any()
    assert_same_gradients(gradients_of(module), gradients_of(other))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3-one-kv-head", "qwen2_moe"])
def test_float32_is_close_to_the_module(pair, name):
    module, other = pair(name, dtype=torch.float32)
    widen_norms(other)
    packed = pack_rows(columns_of(9, [3, 2]))
    for model in (module, other):
        weighted(packed_outputs(model, packed, OUTPUTS)).backward()
    assert_same_gradients(gradients_of(module), gradients_of(other), 2e-5)


@pytest.mark.usefixtures("bf16_path")
def test_bfloat16_is_as_good_as_the_module(pair):
    """Both differ from float64 weights of the same values only by rounding; our error is at most about the module's."""
    ours, theirs, exact = bfloat16_results(pair)
    for name in exact:
        assert relative(ours[name], exact[name]) < 1.3 * relative(theirs[name], exact[name]) + 1e-3, name


def bfloat16_results(pair):
    """Gradients by name, and the log-probs as "out": ours, the module's, and in float64 from weights of the same values."""
    module, other = pair("qwen3", dtype=torch.bfloat16)
    exact = widen_norms(copy.deepcopy(module).double())
    for part in other.modules():  # a hook keeps the module on its own forward
        part.register_forward_pre_hook(lambda *_: None)
    assert DenseDecoder.of(other) is None
    packed = pack_rows(columns_of(9, [3, 2]))
    runs = []
    for model in (module, other, exact):
        out = packed_outputs(model, packed, OUTPUTS)
        weighted(out).backward()
        runs.append({**{n: g.double() for n, g in gradients_of(model).items()}, "out": out["log_probs"].double()})
    return runs


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_agree_to_the_bit(folder_of, dtype):
    runs = []
    for _ in range(2):
        module = load_causal_lm(folder_of("qwen3"), dtype=torch.float32)
        optimizer = MasterOptimizer(module, OptimConfig(lr=1e-3), dtype)
        for step in range(3):
            for seed in range(2):
                packed = pack_rows(columns_of(2 * step + seed, [2, 1]))
                weighted(packed_outputs(module, packed, OUTPUTS, gradients=optimizer.gradients)).backward()
            optimizer.step(1e-3)
        runs.append({n: m.detach().clone() for n, m in optimizer.masters.items()})
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_learn_the_same_with_and_without_buffers(folder_of, dtype):
    runs = []
    for direct in (True, False):
        module = load_causal_lm(folder_of("llama"), dtype=torch.float32)
        optimizer = MasterOptimizer(module, OptimConfig(lr=1e-3, optimizer="SGD", clip_grad=0.0), dtype)
        for seed in range(2):
            options = {"gradients": optimizer.gradients} if direct else {}
            weighted(packed_outputs(module, pack_rows(columns_of(seed, [2, 1])), OUTPUTS, **options)).backward()
        gradients = {n: m.grad.clone() for n, m in optimizer.masters.items()}
        assert all(p.grad is None for p in module.parameters()) or dtype == torch.float32
        optimizer.step(1e-3)
        assert all(m.grad is None for m in optimizer.masters.values())
        runs.append(gradients)
    assert_same_gradients(*runs, tolerance=1e-6 if dtype == torch.float32 else 5e-3)


def test_one_backward_a_forward(pair):
    module, _ = pair("llama")
    loss = weighted(packed_outputs(module, pack_rows(columns_of(1, [1])), OUTPUTS))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()
