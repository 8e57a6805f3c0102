"""Hugging Face folders as GGUF files: the same weights come back, and llama.cpp computes the same model (slow)."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl.checkpoint.export import export
from verl.errors import CheckpointError, ConfigError, ModelError
from verl.models.convert import convert_gguf
from verl.models.gguf_file import DTYPES, write_gguf
from verl.models.gguf_tokenizer import _scores, _split
from verl.models.load import load_causal_lm, load_tokenizer
from verl.models.tiny import make_tiny_model

gguf = pytest.importorskip("gguf")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}}),
    "mistral": ("mistral", {"sliding_window": 64, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # transformers' reader knows no other
    "gemma": ("gemma", {}),
}


def values(file):
    """Keys and tensors of a GGUF file."""
    reader = gguf.GGUFReader(file)
    return {n: f.contents() for n, f in reader.fields.items()}, {t.name: t for t in reader.tensors}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_weights_and_tokens_come_back(tmp_path, name):
    family, overrides = MODELS[name]
    folder = make_tiny_model(tmp_path / "model", family, **overrides)
    add_merges(folder)
    export(folder, tmp_path / "model.gguf", "float32", gguf=True)
    back = convert_gguf(tmp_path / "model.gguf", tmp_path / "back", "float32")
    expected, module = load_causal_lm(folder), load_causal_lm(back)
    for parameter, value in expected.named_parameters():
        assert torch.equal(module.get_parameter(parameter), value), parameter
    text = "the theme <|im_start|>user: 12 é<|im_end|>"
    tokenizer, again = load_tokenizer(folder), load_tokenizer(back)
    assert again.encode(text) == tokenizer.encode(text)
    assert again.chat_template == tokenizer.chat_template
    assert again.eos_token_id == tokenizer.eos_token_id


def add_merges(folder):
    """Two merges in place of two bytes, for the tokenizer of a tiny model: transformers' reader of GGUF needs some."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    *_, one, two = sorted(vocabulary, key=vocabulary.get)
    vocabulary |= {"th": vocabulary.pop(one), "the": vocabulary.pop(two)}
    tokenizer["model"]["merges"] = [["t", "h"], ["th", "e"]]
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_have_the_dtype_and_vectors_float32(tmp_path, tiny_llama, dtype):
    export(tiny_llama, tmp_path / "model.gguf", dtype, gguf=True)
    keys, tensors = values(tmp_path / "model.gguf")
    types = {len(t.shape): t.tensor_type.name for t in tensors.values()}
    assert types == {2: DTYPES[dtype][1], 1: "F32"}
    assert keys["general.file_type"] == gguf.LlamaFileType[DTYPES[dtype][2]]
    matrix = tensors["blk.0.ffn_up.weight"]
    stored = torch.from_numpy(gguf.dequantize(matrix.data, matrix.tensor_type).copy())
    expected = load_causal_lm(tiny_llama).get_parameter("model.layers.0.mlp.up_proj.weight")
    # half a unit of the scale: 1/127 of a block's largest value; 2^-8 is bfloat16's rounding
    bound = expected.abs().max() / 254 * 1.001 if dtype == "q8_0" else expected.abs() * 2.0**-8
    assert ((stored - expected).abs() <= bound).all()


def test_keys_of_positions(tmp_path):
    for name in ("llama3", "linear", "mistral"):
        family, overrides = MODELS[name]
        export(make_tiny_model(tmp_path / name, family, **overrides), tmp_path / f"{name}.gguf", gguf=True)
    keys, tensors = values(tmp_path / "llama3.gguf")
    assert keys["llama.context_length"] == 1024
    module = load_causal_lm(tmp_path / "llama3")
    divisors = torch.from_numpy(tensors["rope_freqs.weight"].data.copy())
    plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / divisors, module.model.rotary_emb.inv_freq, rtol=1e-6)
    assert values(tmp_path / "linear.gguf")[0]["llama.rope.scaling.factor"] == 2.0
    assert values(tmp_path / "mistral.gguf")[0]["llama.context_length"] == 64  # its window


def edit(folder, file, **changes):
    document = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**document, **changes}))


REFUSED = {
    "family": ("config.json", {"model_type": "bloom"}, "takes llama, mistral, qwen2, qwen3, gemma models, not 'bloom'"),
    "rope": ("config.json", {"rope_parameters": {"rope_type": "yarn"}}, "not 'yarn'"),
    "kind": ("tokenizer.json", {"model": {"type": "Unigram"}}, "one of type 'Unigram'"),
    "split": ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "has no name for the pre_tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(tmp_path, case):
    file, changes, sentence = REFUSED[case]
    folder = make_tiny_model(tmp_path / "model")
    edit(folder, file, **changes)
    with pytest.raises(ModelError, match=sentence):
        export(folder, tmp_path / "out.gguf", gguf=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_other_refusals(tmp_path, tiny_llama):
    with pytest.raises(ConfigError, match="not in 'q4_0'; did you mean 'q8_0'"):
        export(tiny_llama, tmp_path / "out.gguf", "q4_0", gguf=True)
    with pytest.raises(ModelError, match="head of a reward or value model"):
        write_gguf(tiny_llama, {"score.weight": torch.zeros(1, 64)}, tmp_path / "out.gguf", "float32")
    with pytest.raises(ModelError, match="no place for the tensor model.extra.weight"):
        write_gguf(tiny_llama, {"model.extra.weight": torch.zeros(1, 64)}, tmp_path / "out.gguf", "float32")
    (tmp_path / "there.gguf").touch()
    with pytest.raises(CheckpointError, match=r"there\.gguf exists"):
        export(tiny_llama, tmp_path / "there.gguf", gguf=True)


DIGITS = {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
]}  # fmt: skip
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    rule = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [rule, {"type": "ByteLevel", "use_regex": False}]}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(DIGITS, "smollm"), (split(QWEN2), "qwen2"), (split(QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")), "llama-bpe")],
)
def test_names_of_pre_tokenizers(rule, expected):
    assert _split(rule, Path("folder")) == expected


def test_sentencepiece_scores_order_merges():
    scores = _scores([["a", "b"], "c d", ["ab", "c"]], ["a", "ab", "cd", "abc"])
    assert scores == [-3.0, 0.0, -1.0, -2.0]


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def llama_cpp_model(file):
    """llama.cpp with the model in `file`, and keys and values in float32."""
    llama_cpp = pytest.importorskip("llama_cpp")
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    return llama_cpp.Llama(str(file), n_ctx=256, n_threads=1, logits_all=True, verbose=False, **cache)


def logits_of(llama, ids):
    """llama.cpp's logits [tokens, vocabulary]."""
    llama.reset()
    llama.eval(ids)
    return torch.from_numpy(llama.scores[: len(ids)].copy())


def sentencepiece_tokenizer():
    """A tokenizer as converted from SentencePiece: BPE that falls back to bytes, with a space before the text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"<pad>": 256, "<s>": 257, "</s>": 258}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("e", "m"), ("h", "e"), ("th", "em")]
    for token in (*"▁themaisn", *("".join(merge) for merge in merges)):
        vocabulary.setdefault(token, len(vocabulary))
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.ByteFallback()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<pad>", "<s>", "</s>")])
    return core


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_model(tmp_path, name):
    family, overrides = MODELS[name]
    folder = make_tiny_model(tmp_path / "model", family, **{"vocab_size": 512, **overrides})
    if family == "gemma":
        sentencepiece_tokenizer().save(str(folder / "tokenizer.json"))
    else:
        add_merges(folder)
    export(folder, tmp_path / "model.gguf", "float32", gguf=True)
    llama = llama_cpp_model(tmp_path / "model.gguf")
    ids = torch.randint(0, 250, (1, 60), generator=torch.Generator().manual_seed(0))  # within mistral's window
    with torch.no_grad():
        expected = plain_model(folder)(ids).logits[0]
    difference = (logits_of(llama, ids[0].tolist()) - expected).abs().max()
    tolerance = 2.0**-8 if family == "gemma" else 1e-3  # llama.cpp looks gelu up in a table of float16
    assert difference < tolerance * expected.std()
    for text in ("the theme, them and 12 é\n\n them", "then a  hat"):
        tokens = load_tokenizer(folder).encode(text, add_special_tokens=False)
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == tokens


SMOLLM2 = Path(os.environ.get("VERL_SMOLLM2", "work/models/SmolLM2-135M-Instruct"))


@pytest.mark.slow
@pytest.mark.skipif(not (SMOLLM2 / "config.json").exists(), reason="VERL_SMOLLM2 names no folder")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float16", 2.0**-6), ("q8_0", 0.2)])
def test_llama_cpp_continues_as_smollm2_does(tmp_path, dtype, tolerance):
    """The same greedy tokens in float32 and float16, and logits within `tolerance` standard deviations."""
    export(SMOLLM2, tmp_path / "model.gguf", dtype, gguf=True)
    llama, tokenizer, module = llama_cpp_model(tmp_path / "model.gguf"), load_tokenizer(SMOLLM2), plain_model(SMOLLM2)
    text = "<|im_start|>user\nName 3 rivers of Europe.<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert llama.tokenize(text.encode(), add_bos=False, special=True) == ids
    num_prompt, greedy = len(ids), list(ids)
    with torch.no_grad():
        for _ in range(24):
            greedy.append(int(module(torch.tensor([greedy])).logits[0, -1].argmax()))
        expected = module(torch.tensor([greedy])).logits[0]
    logits = logits_of(llama, greedy)
    assert (logits - expected).abs().max() < tolerance * expected.std()
    if dtype != "q8_0":
        assert logits.argmax(-1)[num_prompt - 1 : -1].tolist() == greedy[num_prompt:]
