"""Damaged GGUF files: `verl convert` refuses them with a sentence and leaves nothing, or converts them."""

import random
import shutil
import struct

import numpy as np
import torch

from tests.damage import deadline, flip
from verl.errors import VerlError
from verl.models.convert import convert_gguf
from verl.models.gguf_header import read_gguf_header
from verl.models.load import load_causal_lm
from verl.models.tiny import make_tiny_model

NUMBERS = [0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]
SMALL = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
HEADER = 24  # bytes of magic, version and counts


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
    tokens[3:7] = ["a", "b", "ab", "abb"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "ab b"])  # of a list with one text, transformers 5.17 takes the characters
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


def good_file(folder):
    module = load_causal_lm(make_tiny_model(folder / "tiny", **SMALL))
    write_gguf(folder / "good.gguf", module)
    return folder / "good.gguf"


def data_start(data):
    """Offset of the first byte of the tensors' data, by the first float32 of the file's last part; about."""
    return data.rindex(b"output_norm.weight") + 64


def cut_in_header(rng, data):
    return data[: rng.choice([4, 8, 16, 23, 24, 60, rng.randrange(data_start(data))])]


def cut_in_data(rng, data):
    return data[: rng.randrange(data_start(data), len(data))]


def bit_of_header(rng, data):
    return flip(rng, data, data_start(data))


def bytes_of_header(rng, data):
    place = rng.randrange(data_start(data))
    return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place + 8 :]


def number_of_header(rng, data):
    code = rng.choice("IQ")
    place = rng.choice([4, 8, 16, rng.randrange(HEADER, data_start(data))])
    number = rng.choice(NUMBERS) % (1 << 8 * struct.calcsize(f"<{code}"))
    return data[:place] + struct.pack(f"<{code}", number) + data[place + struct.calcsize(f"<{code}") :]


def value_of_a_key(rng, data):
    """The number behind one of the keys of the model."""
    keys = [
        b"block_count",
        b"embedding_length",
        b"head_count",
        b"vocab_size",
        b"feed_forward_length",
        b"context_length",
    ]
    place = data.index(rng.choice(keys))
    place = data.index(b"\x04\0\0\0", place) + 4  # uint32
    return data[:place] + struct.pack("<I", rng.choice(NUMBERS) % 2**32) + data[place + 4 :]


def key_renamed(rng, data):
    keys = [b"general.architecture", b"llama.block_count", b"llama.embedding_length", b"tokenizer.ggml.tokens",
            b"tokenizer.ggml.model", b"llama.attention.head_count", b"tokenizer.ggml.merges", b"llama.rope",
            b"token_embd.weight", b"output_norm.weight", b"blk.0.attn_q.weight"]  # fmt: skip
    key = rng.choice(keys)
    return data.replace(key, key[:-1] + b"_", 1)


def only_keys(rng, data):
    """Architecture and few others, and no tensors (M04-llama)."""
    values = {"general.architecture": rng.choice(["llama", "qwen2", "gpt2", "t5", "mamba", "x", ""])}
    texts = [_text(key) + struct.pack("<I", 8) + _text(value) for key, value in values.items()]
    if rng.random() < 0.5:
        texts.append(_text("llama.block_count") + struct.pack("<II", 4, rng.choice(NUMBERS) % 2**32))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(texts)) + b"".join(texts) + b"\0" * rng.randrange(64)


def deep_lists(rng, data):
    depth = rng.choice([2, 3, 2000, 100_000])
    inner = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _text("a") + struct.pack("<I", 9) + inner


def garbage(rng, data):
    return rng.choice([b"", b"GGUF", b"GGUF" + rng.randbytes(200), rng.randbytes(100), b"GGUF\0\0\0\x03" + data[8:]])


def nothing(rng, data):
    return data


def _text(value):
    return struct.pack("<Q", len(value)) + value.encode()


# kind of damage -> right outcomes
KINDS = {
    cut_in_header: {"refused"},
    cut_in_data: {"refused"},
    bit_of_header: {"refused", "converted"},
    bytes_of_header: {"refused", "converted"},
    number_of_header: {"refused", "converted"},
    value_of_a_key: {"refused", "converted"},
    key_renamed: {"refused", "converted"},
    only_keys: {"refused"},
    deep_lists: {"refused"},
    garbage: {"refused"},
    nothing: {"converted"},
}


def outcome(rng, data, folder):
    """(kind of damage, outcome) of the file `data`; AssertionError for what must not be."""
    kind = rng.choice(list(KINDS))
    file, out = folder / "damaged.gguf", folder / "out"
    file.write_bytes(kind(rng, data))
    try:
        with deadline(20):
            convert_gguf(file, out, dtype="float32")
        result = "converted"
        elements = sum(p.numel() for p in load_elements(out).values())
        assert elements <= 2 * read_gguf_header(file).num_elements, "a model whose tensors the file does not have"
    except VerlError as error:
        text, result = str(error), "refused"
        assert text.isprintable(), text
        assert len(text) < 1000, text
        assert "damaged.gguf" in text, text
        assert not out.exists(), kind.__name__
    shutil.rmtree(out, ignore_errors=True)
    assert result in KINDS[kind], kind.__name__
    assert sorted(p.name for p in folder.iterdir()) == ["damaged.gguf"], "a refused file leaves something"
    return kind.__name__, result


def load_elements(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def cases(rng: random.Random, count, folder):
    """`outcome` of `count` files."""
    torch.manual_seed(0)
    for name in ("good", "work"):
        (folder / name).mkdir()
    data = good_file(folder / "good").read_bytes()
    for _ in range(count):
        yield outcome(rng, data, folder / "work")
