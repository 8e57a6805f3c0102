"""The reader of model folders: each attack by its cause, and folders with random damage. tokenizer.json is looked at before a
library reads it, and its tokens against the model's embedding."""

import json
import logging
import os
import random
import shutil
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import ModernBertDecoderConfig

from tests.models import damaged_folders, damaged_tokenizers
from tests.models.test_load import edit_json as edit
from verl.config import ModelConfig
from verl.data.prompts import encode_text
from verl.errors import DataError, ModelError
from verl.models import folder as folder_module
from verl.models import tokenizer as tokenizer_files
from verl.models.folder import check_tensors, fetch, locate, read_config, read_headers
from verl.models.load import empty_model, load_causal_lm, load_model, load_model_config, load_tokenizer
from verl.models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return damaged_folders.good_folder(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture(scope="module")
def expected(good):
    return damaged_folders.log_probs(good)


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def rope(kind, **settings):
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **settings}
    }


def edit_tensors(folder, **changes):
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("file", ["evil.bin", "../outside.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_names_only_safetensors_files_inside_the_folder(folder, file):
    index = damaged_folders.shard(folder)
    edit(folder / "model.safetensors.index.json", weight_map=dict.fromkeys(index["weight_map"], file))
    with pytest.raises(ModelError, match="weights are safetensors files inside the folder, and nothing else is loaded"):
        load_causal_lm(folder)


def test_a_pickle_in_the_index_is_not_opened(folder, tmp_path):
    damaged_folders.KINDS["index: a pickle"][0](random.Random(0), folder)
    with pytest.raises(ModelError, match=r"names 'evil\.bin'"):
        load_causal_lm(folder)
    assert not (tmp_path / "unpickled").exists()


def test_an_index_and_its_files_agree(folder, expected):
    index = damaged_folders.shard(folder)
    assert torch.equal(damaged_folders.log_probs(folder), expected)
    edit(
        folder / "model.safetensors.index.json",
        weight_map={**index["weight_map"], "ghost": "model-00001-of-00002.safetensors"},
    )
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors in .* differ in ghost"):
        load_causal_lm(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors is missing"):
        load_causal_lm(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it is at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than any model has"),
        ({"num_hidden_layers": 9999}, "num_hidden_layers=9999, and its weights are 20 tensors"),
        ({"hidden_size": 10**15}, "hidden_size=1000000000000000, and its weights"),
        ({"num_key_value_heads": 10**7}, "num_key_value_heads=10000000, and its weights"),
        ({"num_attention_heads": 10**7}, r"could not be read: .*'validate_architecture': ValueError: The hidden size"),
        ({"num_hidden_layers": "2"}, r"num_hidden_layers is text \('2'\); it is a whole number"),
        ({"vocab_size": 1.5}, r"vocab_size is a fraction \(1\.5\)"),
        ({"hidden_size": True}, "hidden_size is a truth value"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is not a list"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\), which verl does not train"),
        ({"transformers_weights": "x.safetensors"}, "names a weight file"),
        ({"rms_norm_eps": "small"}, "could not be (read|loaded)"),
        ({"hidden_act": "import os"}, "could not be (read|loaded)"),
        ({"num_attention_heads": 0}, "could not be (read|loaded)"),
        (rope("yarn", factor=-1.0), r"rope_parameters\.factor is -1\.0; it is a number above 0"),
        (rope("linear", factor=float("inf")), r"rope_parameters\.factor is inf"),
        (rope("yarn", factor=2.0, attention_factor=0), r"rope_parameters\.attention_factor is 0;"),
        (
            rope("yarn", factor=2.0, beta_fast=1, beta_slow=32),
            r"rope_parameters\.beta_slow is 32; it is below beta_fast, ",
        ),
        (rope("longrope", short_factor=[1.0, -2.0]), r"rope_parameters\.short_factor is -2\.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, r"rope_scaling\.factor is 0;"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": -5.0}}},
            r"rope_parameters\.full_attention\.rope_theta is -5",
        ),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor is 1\.5; it is a number from 0 to 1"),
    ],
)
def test_entries_of_config_json(folder, change, words):
    edit(folder / "config.json", **change)
    for load in (load_causal_lm, lambda path: empty_model(ModelConfig(path=str(path)), "lm", torch.float32, False)):
        with pytest.raises(ModelError, match=words) as error:
            load(folder)
        assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("text", "words"), [("[1]", "holds a list"), ("{", "read as JSON"), ("[" * 99999, "read as JSON")]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_json_file_that_is_cut_short_or_no_object(folder, file, text, words):
    (folder / file).write_text(text)
    with pytest.raises(ModelError, match=f"{file} .*{words}"):
        load_causal_lm(folder)


def test_end_of_sequence_tokens_are_tokens(folder):
    edit(folder / "generation_config.json", eos_token_id=["</s>"])
    with pytest.raises(ModelError, match=r"eos_token_id is \['</s>'\]; it is a token id or a list of them"):
        load_model_config(folder, False, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(folder, value):
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    weight[3, 2] = value
    edit_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": weight})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has 1 NaN or infinite values of 512"):
        load_causal_lm(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.2.mlp.up_proj.weight", torch.ones(32, 16), "1 tensors that LlamaForCausalLM has not"),
        (
            "model.layers.1.mlp.up_proj.weight",
            torch.ones(32, 16).to(torch.int8),
            r"up_proj\.weight in model\.safetensors is I8",
        ),
        ("model.layers.1.mlp.up_proj.scale", torch.ones(1).to(torch.int8), "quantized or damaged"),
        (
            "model.layers.1.mlp.up_proj.weight",
            torch.ones(16, 32),
            r"is \[16, 32\] in model\.safetensors and \[32, 16\]",
        ),
    ],
)
def test_tensors_that_the_model_has_not(folder, name, tensor, words):
    edit_tensors(folder, **{name: tensor})
    with pytest.raises(ModelError, match=words):
        load_causal_lm(folder)


def test_heads_of_other_roles_are_no_extra_tensors(folder):
    edit_tensors(folder, **{"v_head.weight": torch.ones(1, 16), "v_head.bias": torch.ones(1)})
    load_causal_lm(folder)
    assert load_model(folder, "token_value").score.weight.eq(1).all()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("kind", ["fifo", "dangling", "loop", "folder"])
def test_what_is_not_a_regular_file_is_named(folder, file, kind):
    (folder / file).unlink()
    make = {
        "fifo": lambda f: os.mkfifo(f),
        "dangling": lambda f: f.symlink_to("nowhere"),
        "loop": lambda f: f.symlink_to(f.name),
        "folder": lambda f: f.mkdir(),
    }
    make[kind](folder / file)
    words = {"fifo": "is a pipe", "dangling": "is a link to nowhere, which does not exist", "loop": "is a link to itself",
             "folder": "is a folder"}[kind]  # fmt: skip
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ModelError, match=words) as error:
            load(folder)
        assert file in str(error.value)


def test_a_file_that_may_not_be_read_is_named_to_root_too(folder, monkeypatch):
    monkeypatch.setattr("verl.models.folder.os.access", lambda file, mode: not str(file).endswith("tokenizer.json"))
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read: permission denied"):
        load_tokenizer(folder)


def test_a_folder_that_is_something_else(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("link", "is a link to .*gone, which does not exist"), ("pipe", "is a pipe; give the folder")):
        with pytest.raises(ModelError, match=words):
            locate(tmp_path / name)
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        locate(tmp_path / ("x" * 300))


def test_a_hub_name_in_the_cache(good, expected, tmp_path, monkeypatch):
    """Its snapshot has links to files outside it, as the cache lays them out."""
    repository, commit = tmp_path / "models--someone--tiny", "0" * 40
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    for file in good.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert torch.equal(damaged_folders.log_probs("someone/tiny"), expected)
    (repository / "blobs/model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"model\.safetensors is a link to .*blobs/model\.safetensors, which does not exist"
    ):
        load_causal_lm("someone/tiny")


def test_adapters_are_not_a_model(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/"}')
    with pytest.raises(ModelError, match="holds LoRA adapters"):
        read_config(fetch(folder, weights=True))


def test_a_model_that_is_larger_than_the_memory(folder, monkeypatch):
    skeleton = empty_model(ModelConfig(path=str(folder)), "lm", torch.float32, False)
    check_tensors(folder, read_headers(folder), skeleton, 4)
    monkeypatch.setattr("verl.models.folder.available_memory", lambda: 10_000)
    with pytest.raises(ModelError, match=r"takes 0\.0 GB of memory in this dtype, and 0\.0 GB are free"):
        check_tensors(folder, read_headers(folder), skeleton, 4)


@pytest.mark.parametrize("kind", sorted(damaged_folders.KINDS))
def test_every_kind_of_damage(good, expected, tmp_path, kind):
    for seed in range(2):
        damaged_folders.outcome(random.Random(seed), good, tmp_path / "model", expected, kind)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@given(row=st.integers(0, 31), column=st.integers(0, 7), change=st.sampled_from([0.0, 1e-6, 1.0]))
@settings(max_examples=20, deadline=None)
def test_tied_names_have_one_tensor(good, tmp_path_factory, row, column, change):
    """A tensor that a model has under two names is accepted if both are equal; else none is dropped in silence."""
    copied = shutil.copytree(good, tmp_path_factory.mktemp("tied") / "model")
    edit(copied / "config.json", tie_word_embeddings=True)
    embedding = load_file(copied / "model.safetensors")[EMBEDDING]
    head = embedding.clone()
    head[row, column] += change
    edit_tensors(copied, **{HEAD: head})
    if torch.equal(head, embedding):
        load_causal_lm(copied)
        return
    with pytest.raises(ModelError, match=rf"different tensors {HEAD} and {EMBEDDING}, and config.json says tie_word"):
        load_causal_lm(copied)
    module = load_model(copied, override_config={"tie_word_embeddings": False})
    assert torch.equal(module.lm_head.weight, head)
    assert torch.equal(module.model.embed_tokens.weight, embedding)
    assert module.config.tie_word_embeddings is False


ACTING = {"is_encoder_decoder": True, "pruned_heads": {"0": [1]}, "scale_depth": 1.4}


@pytest.mark.parametrize("name", folder_module._ACTING)
def test_an_entry_that_the_family_leaves_out_is_refused_unless_it_changes_nothing(folder, name):
    off_values = folder_module._ACTING[name]
    may_be_null = name != "is_encoder_decoder"  # a boolean of every family in some releases of transformers
    for off in (None, *off_values) if may_be_null else off_values:
        edit(folder / "config.json", **{name: off})
        load_model_config(folder, False, None)
    edit(folder / "config.json", **{name: ACTING.get(name, 2)})
    with pytest.raises(ModelError, match=f"{name}=.* has no effect on this model, since LlamaConfig has no such entry"):
        load_model_config(folder, False, None)
    load_model_config(folder, False, {name: off})


def test_entries_that_the_family_reads(tmp_path):
    make_tiny_model(tmp_path, "mistral", sliding_window=4)
    assert load_model_config(tmp_path, False, None).sliding_window == 4
    edit(tmp_path / "config.json", is_encoder_decoder=True)
    with pytest.raises(ModelError, match="is_encoder_decoder=True has no effect"):
        load_model_config(tmp_path, False, None)


def test_an_entry_that_the_family_derives_is_no_foreign_entry(tmp_path):
    ModernBertDecoderConfig(local_attention=16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 8
    assert load_model_config(tmp_path, False, None).sliding_window == 8


@pytest.mark.parametrize("entries", [{"hidden_size": "64"}, {"eos_token_id": "258"}])
def test_faults_of_config_json_are_not_laid_on_the_tokenizer(folder, entries):
    edit(folder / "config.json", **entries)
    with pytest.raises(ModelError, match=rf"config\.json: {next(iter(entries))}"):
        load_tokenizer(str(folder))


@pytest.fixture
def tokenizer_folder(tmp_path):
    return make_tiny_model(tmp_path / "model")


def edited(tokenizer_folder, change, name="tokenizer.json"):
    content = json.loads((tokenizer_folder / name).read_text())
    change(content)
    (tokenizer_folder / name).write_text(json.dumps(content))
    return tokenizer_folder


def vocabulary_id(value):
    def change(content):
        content["model"]["vocab"]["a"] = value

    return change


def added_id(value):
    def change(content):
        content["added_tokens"][0]["id"] = value

    return change


@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, 100_000, -1, 65.5, None, True, "65"])
@pytest.mark.parametrize("change", [vocabulary_id, added_id])
def test_ids_that_are_none_are_refused_before_loading(tokenizer_folder, change, value):
    """2**31 took 9 GB of memory in 46 seconds."""
    with pytest.raises(
        ModelError, match=r"tokenizer\.json gives token .* the id .*; ids of its 256 \+ 3 tokens are whole"
    ):
        load_tokenizer(edited(tokenizer_folder, change(value)))


def test_more_added_tokens_than_any_tokenizer_has(tokenizer_folder, monkeypatch, caplog):
    assert tokenizer_files._MAX_ADDED == 262_144
    monkeypatch.setattr(tokenizer_files, "_MAX_ADDED", 2_000)
    token = json.loads((tokenizer_folder / "tokenizer.json").read_text())["added_tokens"][0]
    more = [{**token, "id": 259 + i, "content": f"<t{i}>"} for i in range(3_000)]
    edited(tokenizer_folder, lambda content: content["added_tokens"].extend(more))
    with pytest.raises(ModelError, match="has 3,003 added tokens; at most 2,000 are read"):
        load_tokenizer(tokenizer_folder)
    monkeypatch.setattr(tokenizer_files, "_MANY_ADDED", 2)
    edited(tokenizer_folder, lambda content: content.update(added_tokens=content["added_tokens"][:3]))
    with caplog.at_level(logging.WARNING, logger="verl"):
        load_tokenizer(tokenizer_folder)
    assert "has 3 added tokens; loading it takes up to a minute" in caplog.text


def test_rules_longer_than_any_model_has(tokenizer_folder):
    edited(
        tokenizer_folder, lambda content: content.update(normalizer={"type": "Prepend", "prepend": "x" * 20_000_000})
    )
    with pytest.raises(ModelError, match="has a normalizer of more than 4,194,304 characters"):
        load_tokenizer(tokenizer_folder)


def test_errors_of_the_library_are_sentences(tokenizer_folder):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"}
    tokenizer = load_tokenizer(edited(tokenizer_folder, lambda content: content.update(model=model)))
    with pytest.raises(DataError, match=r"row 3: the tokenizer cannot read the text \(Exception: WordLevel error"):
        encode_text(tokenizer, "what is not in it", "row 3")
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # the library panics
    with pytest.raises(ModelError, match="No tokenizer could be loaded from"):
        load_tokenizer(edited(tokenizer_folder, lambda content: content.update(normalizer=charsmap)))


def test_tokens_beyond_the_embedding(tokenizer_folder, caplog):
    edited(tokenizer_folder, lambda content: content.update(vocab_size=258), "config.json")
    with pytest.raises(
        ModelError, match=r"ends a text with '<\|im_end\|>' \(id 258\), and the model has 258 embeddings"
    ):
        load_tokenizer(tokenizer_folder)
    edited(tokenizer_folder, lambda content: content.update(vocab_size=264), "config.json")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 300}, "unk_token": "a"}
    with caplog.at_level(logging.WARNING, logger="verl"):
        tokenizer = load_tokenizer(edited(tokenizer_folder, lambda content: content.update(model=model)))
    assert "have no embedding in the model, the first 'b' (id 300 of 264)" in caplog.text
    with pytest.raises(
        DataError, match=r"row 0: the text has the token 'b' of id 300, and the model has 264 embeddings"
    ):
        encode_text(tokenizer, "b", "row 0")


def test_the_embedding_is_the_models_and_not_the_tokenizer_folders(tokenizer_folder, tmp_path):
    from verl.config import ModelConfig

    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    assert load_tokenizer(ModelConfig(path=str(other), tokenizer_path=str(tokenizer_folder))).num_embeddings == 300
    assert load_tokenizer(ModelConfig(path="/nowhere", tokenizer_path=str(tokenizer_folder))).num_embeddings is None


def test_damaged_tokenizers(tmp_path):
    outcomes = Counter(damaged_tokenizers.cases(random.Random(0), 30, tmp_path))
    assert len({what for _, what in outcomes}) > 1, outcomes
