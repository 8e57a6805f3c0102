"""Adapters against the peft library: the same outputs, gradients and files."""

import json

import pytest
import torch

from tests.engines.test_contract import make_batch, policy_loss
from tests.engines.tiny import make_engine
from verl.config import ModelConfig
from verl.engines.api import MicroBatching, gather_adapters, whole
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.models.lora import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoRALinear,
    LoRASpec,
    adapters_off,
    add_adapters,
    lora_layers,
    own_names,
)  # fmt: skip
from verl.models.tiny import make_tiny_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

ALL = MicroBatching(max_tokens=10**6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", hidden_size=32, intermediate_size=48, head_dim=8)


@pytest.fixture
def plain(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def engine(folder, *, head="lm", dtype="float32", trainable=True, **model):
    model = {"lora_rank": 4, "lora_alpha": 8, **model}
    return make_engine(folder, head=head, dtype=dtype, trainable=trainable, model=model)


def train(trained, steps=2):
    for seed in range(steps):
        trained.train_batch(make_batch(seed), policy_loss, ("log_probs", "entropy"), ALL)
    return trained


def write_adapter(state, path):
    path.mkdir()
    tensors = {name: whole(t).clone().contiguous() for name, t in state.adapter.tensors.items()}
    safetensors_torch.save_file(tensors, path / WEIGHTS_FILE)
    (path / CONFIG_FILE).write_text(json.dumps(state.adapter.config))


@pytest.mark.parametrize(
    ("targets", "exclude"),
    [
        ("all-linear", None),
        (["q_proj", "v_proj"], None),
        (r".*\.(gate|up)_proj", None),
        ("all-linear", ["down_proj"]),
        (["q_proj", "layers.1.mlp.up_proj"], r".*layers\.0.*"),
    ],
)
def test_the_same_layers_are_chosen_as_by_peft(plain, folder, targets, exclude):
    spec = LoRASpec.of(ModelConfig(path="x", lora_rank=2, target_modules=targets, exclude_modules=exclude))
    ours = add_adapters(plain, spec, torch.float32)
    config = peft.LoraConfig(r=2, target_modules=targets, exclude_modules=exclude)
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config)
    adapted = {n.removeprefix("base_model.model.") for n, m in theirs.named_modules() if hasattr(m, "lora_A")}
    assert set(ours) == adapted


def test_names_of_megatron_choose_layers(plain):
    spec = LoRASpec(2, 4.0, ("linear_proj", "linear_fc1", "linear_q"), exclude=("linear_fc1_up",))
    chosen = add_adapters(plain, spec, torch.float32)
    assert {name.rpartition(".")[2] for name in chosen} == {"o_proj", "gate_proj", "q_proj"}


def test_only_adapters_train_and_the_start_is_the_base(plain, folder):
    ids = torch.arange(1, 9).unsqueeze(0)
    before = plain(ids).logits
    add_adapters(plain, LoRASpec(4, 8, "all-linear"), torch.float32)
    assert {n.rpartition(".")[2] for n, p in plain.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert torch.equal(plain(ids).logits, before)


KINDS = {"LoRA": {}, "rsLoRA": {"use_rslora": True}, "DoRA": {"use_dora": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_peft(plain, folder, tmp_path, kind):
    """Two trained steps here, read by peft there: the same logits, and the same gradients of the adapters."""
    trained = train(engine(folder, **KINDS[kind]))
    write_adapter(trained.state(), tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).eval()
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    add_adapters(ours, trained.spec, torch.float32)
    layers = lora_layers(ours)
    for name, layer in lora_layers(trained.module).items():
        layers[name].load_state_dict(layer.state_dict())
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    mine, reference = ours(ids).logits, theirs(ids).logits
    assert torch.allclose(mine, reference, atol=1e-5)
    assert not torch.allclose(mine, transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits, atol=1e-3)
    mine.square().sum().backward()
    reference.square().sum().backward()
    grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    for name, layer in layers.items():
        for part in ("lora_A", "lora_B", *(["lora_magnitude_vector"] if kind == "DoRA" else [])):
            expected = grads[f"base_model.model.{name}.{part}.default.weight"]
            assert torch.allclose(getattr(layer, part).grad, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_the_adapted_one(plain, folder, kind):
    trained = train(engine(folder, **KINDS[kind]))
    tensors = {name: whole(t) for name, t in trained.state().model.items()}
    weights = dict(trained.gather_weights())
    assert tensors.keys() == weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(tensors, strict=False)
    merged = engine(folder, lora_rank=0, trainable=False)
    merged.module.load_state_dict(weights, strict=False)
    batch = make_batch(5)
    a, b = (e.forward(batch, ("log_probs",), ALL)["log_probs"] for e in (trained, merged))
    assert torch.allclose(a, b, atol=1e-4)


def test_gathered_adapters_make_the_trained_model_of_the_base(plain, folder):
    trained = train(engine(folder))
    adapters, base = own_names(dict(gather_adapters(trained))), dict(plain.named_parameters())
    layers = {name.rpartition(".")[0] for name in adapters}
    assert adapters.keys() == {f"{layer}.{part}" for layer in layers for part in ("lora_A", "lora_B")}
    for name, tensor in trained.gather_weights():
        layer = name.removesuffix(".weight")
        update = 2 * adapters[f"{layer}.lora_B"] @ adapters[f"{layer}.lora_A"] if layer in layers else 0
        assert torch.allclose(tensor, base[name] + update, atol=1e-7), name


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_base(folder, kind):
    trained, base = train(engine(folder, **KINDS[kind])), engine(folder, lora_rank=0, trainable=False)
    batch = make_batch(5)
    with trained.reference():
        inside = trained.forward(batch, ("log_probs",), ALL)["log_probs"]
    expected = base.forward(batch, ("log_probs",), ALL)["log_probs"]
    assert torch.allclose(inside, expected, atol=1e-5)
    assert not torch.allclose(trained.forward(batch, ("log_probs",), ALL)["log_probs"], expected, atol=1e-3)
    with pytest.raises(ConfigError, match="no adapters"), base.reference():
        pass


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "token_value"])
def test_state_goes_on_bit_for_bit(folder, dtype, head):
    def loss(outputs, batch, totals):
        return sum(v.square().sum() for v in outputs.values()) / totals.num_tokens, {}

    def step(trained, seed):
        trained.train_batch(make_batch(seed), loss, ("values",) if head == "token_value" else ("log_probs",), ALL)

    one, two = engine(folder, head=head, dtype=dtype), engine(folder, head=head, dtype=dtype)
    with torch.no_grad():
        if head == "token_value":
            one.module.score.weight.fill_(0.1)
    step(one, 0)
    one.end_step()
    state = one.state()
    two.load_state(state)
    step(one, 1)
    step(two, 1)
    a, b = one.state().adapter.tensors, two.state().adapter.tensors
    assert a.keys() == b.keys()
    assert ("base_model.model.score.weight" in a) == (head == "token_value")
    assert all(torch.equal(whole(a[n]), whole(b[n])) for n in a)


@pytest.mark.usefixtures("bf16_path")
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_starts_at_the_base(folder, kind):
    """The lengths of rows of DoRA are not rounded, so that their ratio starts at 1."""
    adapted, base = (engine(folder, dtype="bfloat16", **k) for k in (KINDS[kind], {"lora_rank": 0}))
    adapted_base = adapted.forward(make_batch(5), ("log_probs",), ALL)["log_probs"]
    with adapted.reference():
        inside = adapted.forward(make_batch(5), ("log_probs",), ALL)["log_probs"]
    assert torch.allclose(adapted_base, inside, atol=0.05)
    train(adapted)
    weights = dict(adapted.gather_weights())
    assert weights.keys() == dict(base.gather_weights()).keys()


def test_whole_modules_train_in_addition(folder, tmp_path):
    """peft reads the files with equal logits, and they continue here bit for bit."""
    untied = make_tiny_model(tmp_path / "untied", "qwen3", tie_word_embeddings=False)
    names = {"modules_to_save": ["lm_head", "layers.1.mlp"]}
    trained = train(engine(untied, **names))
    state = trained.state()
    changed = {n.removeprefix("base_model.model.") for n in state.adapter.tensors}
    assert {"lm_head.weight", "model.layers.1.mlp.up_proj.weight"} <= changed
    assert not any("layers.1.mlp.up_proj.lora" in name for name in changed)
    assert state.adapter.config["task_type"] == "CAUSAL_LM"
    write_adapter(state, tmp_path / "adapter")
    module = transformers.AutoModelForCausalLM.from_pretrained(untied)
    theirs = peft.PeftModel.from_pretrained(module, tmp_path / "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(untied).eval()
    merged.load_state_dict({name: whole(t) for name, t in state.model.items()})
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(merged(ids).logits, theirs(ids).logits, atol=1e-5)
    again = engine(untied, lora_adapter_path=str(tmp_path / "adapter"), **names)
    a, b = (e.forward(make_batch(5), ("log_probs",), ALL)["log_probs"] for e in (trained, again))
    assert torch.equal(a, b)
    with pytest.raises(ConfigError, match="model.modules_to_save trains too"), trained.reference():
        pass
    with pytest.raises(ConfigError, match="lm_head shares its weight with model.embed_tokens.weight"):
        engine(folder, modules_to_save=["lm_head"])


def test_states_with_and_without_adapters_do_not_mix(folder):
    adapted, whole_model = engine(folder), engine(folder, lora_rank=0)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        adapted.load_state(whole_model.state())
    with pytest.raises(CheckpointError, match="does not fit this model"):
        whole_model.load_state(adapted.state())


def test_training_starts_from_adapters_of_a_folder(folder, tmp_path):
    trained = train(engine(folder))
    write_adapter(trained.state(), tmp_path / "adapter")
    again = engine(folder, lora_adapter_path=str(tmp_path / "adapter"))
    batch = make_batch(5)
    a, b = (e.forward(batch, ("log_probs",), ALL)["log_probs"] for e in (trained, again))
    assert torch.equal(a, b)
    with pytest.raises(ModelError, match="rank 4"):
        engine(folder, lora_rank=8, lora_adapter_path=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="trained with use_dora=False; set model.use_dora"):
        engine(folder, use_dora=True, lora_adapter_path=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="do not fit"):
        engine(folder, target_modules=["q_proj"], lora_adapter_path=str(tmp_path / "adapter"))
    with pytest.raises(ModelError, match="holds no adapters"):
        engine(folder, lora_adapter_path=str(tmp_path))


DAMAGED_ADAPTERS = {
    "other kind": (
        lambda config, tensors: config.update(peft_type="IA3"),
        "of a kind that verl has not: peft_type='IA3'",
    ),
    "scales of layers": (lambda config, tensors: config.update(alpha_pattern={"q_proj": 64}), "alpha_pattern=.*q_proj"),
    "biases": (lambda config, tensors: config.update(bias=["\x1b[31m"]), r"bias=\['\\x1b\[31m'\]"),
    "rank": (lambda config, tensors: config.update(r="4"), "have rank '4' and alpha"),
    "NaN": (lambda config, tensors: next(iter(tensors.values())).fill_(float("nan")), "has NaN or infinite values"),
    "layers": (
        lambda config, tensors: config.update(layers_to_transform=[0]),
        "have layer 1, which layers_to_transform",
    ),
    "integers": (
        lambda config, tensors: tensors.update({n: t.char() for n, t in tensors.items()}),
        "of type torch.int8",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_ADAPTERS)
def test_adapters_that_would_compute_something_else_are_refused(folder, tmp_path, damage):
    from safetensors.torch import load_file, save_file

    adapter = tmp_path / "adapter"
    write_adapter(engine(folder).state(), adapter)
    config, tensors = json.loads((adapter / CONFIG_FILE).read_text()), load_file(adapter / WEIGHTS_FILE)
    change, sentence = DAMAGED_ADAPTERS[damage]
    change(config, tensors)
    (adapter / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, adapter / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=sentence):
        engine(folder, lora_adapter_path=str(adapter))


def test_a_frozen_model_has_the_adapters_of_a_folder(folder, tmp_path):
    """`verl eval` and validation-only runs compute with the trained policy, not with its base."""
    trained = train(engine(folder))
    write_adapter(trained.state(), tmp_path / "adapter")
    frozen = engine(folder, trainable=False, lora_adapter_path=str(tmp_path / "adapter"))
    base = engine(folder, trainable=False)
    a, b, c = (e.forward(make_batch(5), ("log_probs",), ALL)["log_probs"] for e in (trained, frozen, base))
    assert torch.allclose(a, b, atol=1e-5)
    assert not torch.allclose(a, c, atol=1e-3)
    assert dict(frozen.gather_weights()).keys() == dict(base.gather_weights()).keys()


def test_names_that_choose_nothing_are_refused(plain):
    with pytest.raises(ConfigError, match="empty"):
        LoRASpec.of(ModelConfig(path="x", lora_rank=4, target_modules=[]))


def test_adapters_come_back_on_after_an_error(plain):
    add_adapters(plain, LoRASpec(4, 8, ("q_proj",)), torch.float32)
    with pytest.raises(RuntimeError), adapters_off(plain):
        raise RuntimeError
    assert all(layer.active for layer in lora_layers(plain).values())
    assert isinstance(plain.model.layers[0].self_attn.q_proj, LoRALinear)


def test_auto_classes_of_peft_open_the_adapters_of_a_reward_model(folder, tmp_path):
    trained = engine(folder, head="sequence_score", modules_to_save=["score"])
    write_adapter(trained.state(), tmp_path / "adapter")
    opened = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1).eval()
    assert torch.equal(opened.base_model.model.score.modules_to_save.default.weight, trained.module.score.weight)
    for head, task in (("token_value", "TOKEN_CLS"), ("lm", "CAUSAL_LM")):
        assert engine(folder, head=head).state().adapter.config["task_type"] == task
