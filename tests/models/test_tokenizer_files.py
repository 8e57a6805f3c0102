"""tokenizer.json is looked at before a library reads it, and its tokens against the model's embedding."""

import json
import logging
import random
from collections import Counter

import pytest

from tests.models import damaged_tokenizers
from verl.data.prompts import encode_text
from verl.errors import DataError, ModelError
from verl.models import tokenizer as tokenizer_files
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model")


def edited(folder, change, name="tokenizer.json"):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return folder


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
def test_ids_that_are_none_are_refused_before_loading(folder, change, value):
    """2**31 took 9 GB of memory in 46 seconds."""
    with pytest.raises(
        ModelError, match=r"tokenizer\.json gives token .* the id .*; ids of its 256 \+ 3 tokens are whole"
    ):
        load_tokenizer(edited(folder, change(value)))


def test_more_added_tokens_than_any_tokenizer_has(folder, monkeypatch, caplog):
    assert tokenizer_files._MAX_ADDED == 262_144
    monkeypatch.setattr(tokenizer_files, "_MAX_ADDED", 2_000)
    token = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][0]
    more = [{**token, "id": 259 + i, "content": f"<t{i}>"} for i in range(3_000)]
    edited(folder, lambda content: content["added_tokens"].extend(more))
    with pytest.raises(ModelError, match="has 3,003 added tokens; at most 2,000 are read"):
        load_tokenizer(folder)
    monkeypatch.setattr(tokenizer_files, "_MANY_ADDED", 2)
    edited(folder, lambda content: content.update(added_tokens=content["added_tokens"][:3]))
    with caplog.at_level(logging.WARNING, logger="verl"):
        load_tokenizer(folder)
    assert "has 3 added tokens; loading it takes up to a minute" in caplog.text


def test_rules_longer_than_any_model_has(folder):
    edited(folder, lambda content: content.update(normalizer={"type": "Prepend", "prepend": "x" * 20_000_000}))
    with pytest.raises(ModelError, match="has a normalizer of more than 4,194,304 characters"):
        load_tokenizer(folder)


def test_errors_of_the_library_are_sentences(folder):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"}
    tokenizer = load_tokenizer(edited(folder, lambda content: content.update(model=model)))
    with pytest.raises(DataError, match=r"row 3: the tokenizer cannot read the text \(Exception: WordLevel error"):
        encode_text(tokenizer, "what is not in it", "row 3")
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}  # the library panics
    with pytest.raises(ModelError, match="No tokenizer could be loaded from"):
        load_tokenizer(edited(folder, lambda content: content.update(normalizer=charsmap)))


def test_tokens_beyond_the_embedding(folder, caplog):
    edited(folder, lambda content: content.update(vocab_size=258), "config.json")
    with pytest.raises(
        ModelError, match=r"ends a text with '<\|im_end\|>' \(id 258\), and the model has 258 embeddings"
    ):
        load_tokenizer(folder)
    edited(folder, lambda content: content.update(vocab_size=264), "config.json")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 300}, "unk_token": "a"}
    with caplog.at_level(logging.WARNING, logger="verl"):
        tokenizer = load_tokenizer(edited(folder, lambda content: content.update(model=model)))
    assert "have no embedding in the model, the first 'b' (id 300 of 264)" in caplog.text
    with pytest.raises(
        DataError, match=r"row 0: the text has the token 'b' of id 300, and the model has 264 embeddings"
    ):
        encode_text(tokenizer, "b", "row 0")


def test_the_embedding_is_the_models_and_not_the_tokenizer_folders(folder, tmp_path):
    from verl.config import ModelConfig

    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    assert load_tokenizer(ModelConfig(path=str(other), tokenizer_path=str(folder))).num_embeddings == 300
    assert load_tokenizer(ModelConfig(path="/nowhere", tokenizer_path=str(folder))).num_embeddings is None


def test_damaged_tokenizers(tmp_path):
    outcomes = Counter(damaged_tokenizers.cases(random.Random(0), 30, tmp_path))
    assert len({what for _, what in outcomes}) > 1, outcomes
