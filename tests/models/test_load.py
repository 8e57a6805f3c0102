"""Refusals of model loading, their messages, and the checks of a loaded model."""

import contextlib
import functools
import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.reference import dense_attention
from tests.run import families
from verl.config import ModelConfig
from verl.errors import ConfigError, ModelError
from verl.models import check, quiet
from verl.models.attention import ATTENTION_NAME
from verl.models.check import choose_forward, largest_difference, packed_problem, require_dtype
from verl.models.load import (
    empty_model,
    load_causal_lm,
    load_external,
    load_model,
    load_model_config,
    load_tokenizer,
    num_parameters,
)
from verl.models.tiny import make_tiny_model
from verl.models.tokenizer import check_vocabulary, eos_token_ids


@pytest.fixture
def copy_of(tiny_folder, tmp_path):
    def copy(family="llama"):
        return shutil.copytree(tiny_folder(family), tmp_path / family)

    return copy


def edit_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_loads_quietly_with_a_line_that_counts_parameters(tiny_folder, caplog, capfd):
    folder = tiny_folder("llama")
    capfd.readouterr()
    with caplog.at_level(logging.INFO, logger="verl"):
        module = load_causal_lm(folder, dtype=torch.bfloat16, gradient_checkpointing=True)
    assert module.config._attn_implementation == ATTENTION_NAME
    assert next(module.parameters()).dtype == torch.bfloat16
    assert module.is_gradient_checkpointing
    assert "0.1 million parameters, bfloat16" in caplog.text
    assert capfd.readouterr().err == ""
    assert num_parameters(module) == sum(t.numel() for t in module.state_dict().values()) - 264 * 64  # tied head


def test_a_missing_folder_is_named_with_its_neighbours(copy_of):
    folder = copy_of()
    with pytest.raises(ModelError, match="lama does not exist; did you mean 'llama'"):
        load_causal_lm(folder.parent / "lama")


def test_a_hub_name_that_is_not_cached(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        load_causal_lm("nobody/no-such-model")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (
            lambda folder: edit_json(folder / "config.json", intermediate_size=96),
            "other shapes than its config.json says",
        ),
        (lambda folder: edit_json(folder / "config.json", model_type="no_such_thing"), "no_such_thing"),
        (
            lambda folder: edit_json(folder / "config.json", vocab_size=100),
            "could not be loaded from .*: Padding_idx must",
        ),
        (
            lambda folder: edit_json(
                folder / "config.json", model_type="t5", architectures=["T5ForConditionalGeneration"]
            ),
            "is an encoder-decoder model; give a causal",
        ),
    ],
    ids=["no config", "tensors of another size", "unknown architecture", "few embeddings", "encoder and decoder"],
)
def test_a_damaged_folder(copy_of, damage, words):
    folder = copy_of()
    damage(folder)
    with pytest.raises(ModelError, match=words) as error:
        load_causal_lm(folder)
    assert "HF_HUB_OFFLINE" not in str(error.value)


@pytest.mark.parametrize("other", [None, "pytorch_model.bin", "model.gguf"])
def test_a_folder_without_weights(copy_of, other):
    folder = copy_of()
    (folder / "model.safetensors").unlink()
    if other:
        (folder / other).touch()
    with pytest.raises(ModelError, match=f"no weights.*{other or 'download'}"):
        load_causal_lm(folder)


def test_missing_tensors(copy_of):
    folder = copy_of()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors.*layers\.1\.mlp\.up_proj"):
        load_causal_lm(folder)


def test_a_vision_language_model_is_named_as_what_it_is(tmp_path):
    config = transformers.Ovis2Config(architectures=["Ovis2ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"\(Ovis2ForConditionalGeneration\) is a vision-language model of no supported"
    ):
        load_causal_lm(tmp_path)
    with pytest.raises(ModelError, match="or a text model"):
        load_model_config(tmp_path, False, None)


def test_attention_that_computes_something_else_takes_no_packed_batch(tiny_folder, monkeypatch):
    module = load_causal_lm(tiny_folder("llama"))

    def with_a_sink(*args, **kwargs):
        out, weights = dense_attention(*args, **kwargs)
        return out * 0.9, weights

    monkeypatch.setitem(
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, ATTENTION_NAME, with_a_sink
    )
    with torch.no_grad():
        assert "do not go through the attention interface" in packed_problem(module)


@torch.no_grad()
def test_logits_that_are_changed_afterwards(tiny_folder, monkeypatch):
    module = load_causal_lm(tiny_folder("gemma2"))
    module.config.final_logit_softcapping = 0.5
    assert not packed_problem(module)  # the family caps its logits too
    monkeypatch.setattr("verl.models.forward.head_transform", lambda config: {"softcap": None, "logit_scale": 1.0})
    assert "differs from its own attention" in packed_problem(module)
    choose_forward(module)
    assert module.forward_kind == "logits"


@torch.no_grad()
def test_what_bfloat16_rounds_is_no_difference(tiny_folder, monkeypatch):
    """After fine-tuning on one task, log-probs of a model's own forward in bfloat16 were off by a tenth."""
    module, decoder = load_causal_lm(tiny_folder("llama"), dtype=torch.bfloat16), transformers.LlamaModel.forward

    @functools.wraps(decoder)
    def steep(self, *args, **kwargs):
        """Equal inputs give equal states, and inputs that differ by rounding others."""
        output = decoder(self, *args, **kwargs)
        states = output.last_hidden_state
        output.last_hidden_state = states + states.std() * torch.sin(1e4 * states)
        return output

    monkeypatch.setattr(transformers.LlamaModel, "forward", steep)
    assert not packed_problem(module)
    rounded, nothing = check._rounded_embeddings, contextlib.nullcontext()
    with monkeypatch.context() as patch:  # one rounding may hardly move a steep distribution
        patch.setattr(check, "_rounded_embeddings", lambda model, seed: rounded(model, seed) if seed == 5 else nothing)
        assert not packed_problem(module)
    monkeypatch.setattr("verl.models.forward.head_transform", lambda config: {"softcap": None, "logit_scale": 30.0})
    assert "differs from its own attention" in packed_problem(module)


@pytest.mark.parametrize("size", [2, 7])
def test_a_vocabulary_of_few_tokens(tmp_path, size):
    module = load_causal_lm(make_tiny_model(tmp_path, vocab_size=size, pad_token_id=0, eos_token_id=0, bos_token_id=0))
    assert not packed_problem(module)


def test_the_check_leaves_the_model_as_it_was_and_settings_to_their_reader(tiny_folder, monkeypatch):
    module = load_causal_lm(tiny_folder("gemma3_text")).train()
    choose_forward(module)
    assert module.training
    monkeypatch.setenv("VERL_CPU_ISA", "avx10")
    with pytest.raises(ConfigError, match="VERL_CPU_ISA=avx10 was asked for"):
        choose_forward(load_causal_lm(tiny_folder("llama")))
    assert module.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize("family", ["granite", "cohere", "phi3", "olmo2", "smollm3", "qwen3_moe", "mixtral", "gpt2"])
def test_further_families_pass_the_check(tmp_path, family):
    """Their attention, positions and logit scales are as the packed path assumes."""
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1, "initializer_range": 0.1,
    }  # fmt: skip
    extra = {
        "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
        "cohere": {"logit_scale": 0.25},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
        "mixtral": {"num_local_experts": 4},
    }
    config = transformers.AutoConfig.for_model(family, **settings, **extra.get(family, {}))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path).forward_kind == "packed"


def test_override_config(tiny_folder, caplog):
    module = load_causal_lm(tiny_folder("llama"), override_config={"rms_norm_eps": 0.1})
    assert module.config.rms_norm_eps == 0.1
    with pytest.raises(ModelError, match="rms_norm_ep=0.1: LlamaConfig has no such field; did you mean 'rms_norm_eps'"):
        load_causal_lm(tiny_folder("llama"), override_config={"rms_norm_ep": 0.1})
    with caplog.at_level(logging.INFO, logger="verl"):
        load_causal_lm(
            tiny_folder("llama"), override_config={"embd_pdrop": 0.0}
        )  # as scripts for several families set it
    assert "embd_pdrop=0.0 has no effect" in caplog.text


def test_override_of_a_field_of_the_language_model(tmp_path):
    transformers.Qwen2_5_VLConfig(text_config={"max_position_embeddings": 64}).save_pretrained(tmp_path)
    config = load_model_config(tmp_path, False, {"max_position_embeddings": 128})
    assert config.text_config.max_position_embeddings == 128
    with pytest.raises(ModelError, match="Qwen2_5_VLConfig has no such field"):
        load_model_config(tmp_path, False, {"max_positions": 128})


@pytest.mark.seed("B8", "G3")
@pytest.mark.parametrize("head", ["lm", "token_value"])
@pytest.mark.parametrize(
    ("attention", "kind", "runs"),
    [
        ("verl", "packed", "verl"),
        ("flash_attention_2", "packed", "verl"),
        ("sdpa", "padded", "sdpa"),
        ("eager", "padded", "eager"),
    ],
)
def test_the_attention_of_a_model_is_chosen(tiny_folder, head, attention, kind, runs):
    chosen = load_model(tiny_folder("llama"), head, override_config={"attn_implementation": attention})
    assert chosen.forward_kind == kind
    assert chosen.config._attn_implementation == runs
    if head == "lm":
        plain = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), attn_implementation="eager").eval()
        assert largest_difference(chosen, plain) < 1e-5


def test_flash_attention_of_a_padded_model(tiny_folder, caplog, monkeypatch):
    """A model without packed batches has the requested attention, if it is installed."""
    module = load_causal_lm(tiny_folder("llama"))
    with caplog.at_level(logging.INFO, logger="verl"):
        assert check.own_attention(module, "flash_attention_2") == "sdpa"
    assert "flash_attention_2 is not installed" in caplog.text
    monkeypatch.setattr(check, "is_flash_attn_2_available", lambda: True)
    assert check.own_attention(module, "flash_attention_2") == "flash_attention_2"


def test_an_unknown_attention_is_named(tiny_folder):
    with pytest.raises(ModelError, match=r"attn_implementation=flash is unknown. There are verl and flash_attention_2"):
        load_causal_lm(tiny_folder("llama"), override_config={"attn_implementation": "flash"})


def test_folders_that_are_no_model_folders(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "global_step_2/actor/huggingface")
    with pytest.raises(ModelError, match=f"global_step_2 has no config.json; it holds checkpoints: give {folder}"):
        load_causal_lm(tmp_path / "global_step_2")
    with pytest.raises(ModelError, match=r"model.safetensors is a file; give the folder of a model\."):
        load_causal_lm(folder / "model.safetensors")


def test_dropout_is_off(tmp_path):
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)
    assert config.resid_pdrop > 0
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    module = load_causal_lm(tmp_path)
    assert all(part.p == 0 for part in module.modules() if isinstance(part, torch.nn.Dropout))


def test_value_model_starts_at_zero_and_finds_its_saved_head(tiny_folder, tmp_path):
    module = load_model(tiny_folder("llama"), "token_value", dtype=torch.bfloat16)
    assert module.score.weight.dtype == torch.float32
    assert not module.score.weight.any()
    with torch.no_grad():
        module.score.weight.normal_()
        module.score.bias.fill_(0.5)
    tensors = {name: p.detach().clone() for name, p in module.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    module.config.save_pretrained(tmp_path)
    again = load_model(tmp_path, "token_value")
    assert torch.equal(again.score.weight, module.score.weight)
    assert again.score.bias.item() == 0.5
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)  # opens elsewhere too
    assert torch.equal(theirs.score.weight.float(), module.score.weight.to(theirs.score.weight.dtype).float())


def test_routers_have_the_dtype_of_the_model(tmp_path, monkeypatch):
    """transformers 5.24 keeps the routers of some mixtures in float32."""
    family = transformers.DeepseekV3PreTrainedModel
    monkeypatch.setattr(family, "_keep_in_fp32_modules_strict", {"e_score_correction_bias", "gate.weight"})
    folder = make_tiny_model(tmp_path, "deepseek_v3")
    for loaded in (
        load_causal_lm(folder, dtype=torch.bfloat16),
        empty_model(ModelConfig(path=str(folder)), "lm", torch.bfloat16, False),
    ):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_a_classifier_with_two_labels_is_no_value_model(tiny_folder, tmp_path):
    config = transformers.AutoConfig.from_pretrained(tiny_folder("llama"), num_labels=2)
    transformers.AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"score\.weight of shape \[2, 64\]"):
        load_model(tmp_path, "token_value")


def test_tokenizer_of_a_model_section(tiny_folder, tmp_path):
    folder = tiny_folder("llama")
    assert load_tokenizer(folder).pad_token_id == 256
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    message = [{"role": "user", "content": "hi"}]
    for text in (str(template), template.read_text()):
        section = ModelConfig(path="/nowhere", tokenizer_path=str(folder), custom_chat_template=text)
        assert load_tokenizer(section).apply_chat_template(message, tokenize=False) == "hi!"
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(ModelConfig(path=str(folder), custom_chat_template=str(tmp_path / "none.jinja")))
    template.write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ModelError, match="cannot be read: .utf-8"):
        load_tokenizer(ModelConfig(path=str(folder), custom_chat_template=str(template)))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m['text'] }}{% endfor %}", "leaves out the content of a message"),
        ("{% for m in messages %}{{ m['content'] }}", "is not a Jinja template: .*endfor.*line 1"),
    ],
)
def test_a_wrong_chat_template_is_named_by_its_key(template, words, tiny_folder, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    for value, source in ((template, "model.custom_chat_template"), (str(file), f"model.custom_chat_template={file}")):
        with pytest.raises(ModelError, match=f"{source} {words}"):
            load_tokenizer(ModelConfig(path=str(tiny_folder("llama")), custom_chat_template=value))


def test_tokenizer_without_pad_token_pads_with_its_end(copy_of):
    folder = copy_of()
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(folder).pad_token_id == 258
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="neither a pad nor an end-of-sequence"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer(copy_of):
    folder = copy_of()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="has no tokenizer .*; copy .*tokenizer_path"):
        load_tokenizer(folder)


def test_end_of_sequence_ids_of_every_source(tmp_path):
    folder = make_tiny_model(tmp_path)
    module, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    assert eos_token_ids(module, tokenizer) == (258,)
    module.generation_config.eos_token_id = [3, 258]
    module.config.eos_token_id = 7
    assert eos_token_ids(module, tokenizer) == (3, 7, 258)


def test_external_library_is_imported(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    load_external(None)
    load_external(str(file))
    assert (tmp_path / "ran").exists()


def test_python_without_docstrings_is_named(tiny_folder, monkeypatch):
    """transformers' decorators fail on a class without its docstring; its config.json has no fault."""
    folder = tiny_folder("llama")
    monkeypatch.setattr(quiet, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", lambda *_, **__: None.docstring)
    with pytest.raises(ModelError, match="Python runs without docstrings") as error:
        load_causal_lm(folder)
    assert "config.json" not in str(error.value)


class Tokenizer(list):
    eos_token_id = None


def test_token_ids_outside_of_the_vocabulary(tiny_folder, caplog):
    module = load_causal_lm(tiny_folder("llama"))
    module.generation_config.eos_token_id = [258, 9999]
    assert eos_token_ids(module, Tokenizer()) == (258,)
    assert "eos_token_id 9999 can end no response: the model has the token ids 0 to 263" in caplog.text
    with pytest.raises(ConfigError, match="stop_token_ids: 264 is no token id"):
        check_vocabulary(264, Tokenizer([""] * 259), [1, 264])


@pytest.mark.parametrize(("size", "is_noticed"), [(264, False), (280, False), (600, True)])
def test_a_model_with_many_token_ids_that_have_no_text_is_noticed(size, is_noticed):
    """Vocabularies padded to round sizes are not."""
    assert ("57% of the ids have no text" in check_vocabulary(size, Tokenizer([""] * 259), [])) == is_noticed


def test_dropout_of_config_json_is_named(tmp_path, caplog):
    folder = make_tiny_model(tmp_path, attention_dropout=0.5)
    with caplog.at_level(logging.INFO, logger="verl"):
        load_causal_lm(folder)
    assert "Dropout is off, whatever config.json says (attention_dropout=0.5)" in caplog.text


def test_positions_of_roberta_suffice_for_the_check_of_a_dtype(tmp_path):
    """Its positions begin after the padding id, here 257 of 300."""
    families.build("roberta", tmp_path)
    module = load_causal_lm(tmp_path)
    require_dtype(module.to(torch.bfloat16))
