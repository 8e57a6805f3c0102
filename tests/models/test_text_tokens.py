"""Special tokens that count as text, and notices about tokens that a run would miss."""

import pytest

from verl.config import ModelConfig, load_config
from verl.errors import ModelError
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.models.tokenizer import hidden_tags
from verl.programs.ppo_data import tokenizer_notices


@pytest.fixture
def folder(tmp_path):
    path = make_tiny_model(tmp_path / "model", vocab_size=270)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>", "<s>", "</s>"], special_tokens=True)
    tokenizer.save_pretrained(path)
    return path


def notices(folder, *overrides):
    loaded = load_config([f"actor_rollout_ref.model.path={folder}", *overrides], check=False)
    return " ".join(tokenizer_notices(loaded.config, load_tokenizer(loaded.config.actor_rollout_ref.model)))


def test_tags_stay_in_the_text_of_a_response(folder):
    """Once, <think> tags that are special tokens vanished from solution_str."""
    plain = load_tokenizer(ModelConfig(path=str(folder)))
    ids = plain.encode("<think>a</think>b<|im_end|>")
    assert plain.decode(ids, skip_special_tokens=True) == "ab"
    assert hidden_tags(plain) == ["<think>", "</think>"]
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), text_tokens=["<think>", "</think>"]))
    assert tokenizer.encode("<think>a</think>b<|im_end|>") == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>b"
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["<think>a</think>b"]


def test_a_name_that_is_no_token_is_refused(folder):
    with pytest.raises(ModelError, match="model.text_tokens has '<thunk>'.*<think>"):
        load_tokenizer(ModelConfig(path=str(folder), text_tokens=["<thunk>"]))


def test_hidden_tags_are_noticed_once_they_are_hidden(folder):
    assert "<think>, </think> are special tokens" in notices(folder)
    setting = "actor_rollout_ref.model.text_tokens=['<think>','</think>']"
    assert not notices(folder, setting)


def test_a_model_without_a_token_that_ends_responses_is_noticed(folder):
    """Attack S11: no eos anywhere, or one outside of the vocabulary."""
    for eos in (None, 9999):
        path = make_tiny_model(folder.parent / f"eos{eos}", eos_token_id=eos)
        tokenizer = make_tokenizer()
        tokenizer.eos_token = None
        tokenizer.save_pretrained(path)
        assert "No token ends a response" in notices(path)
        assert not notices(path, "actor_rollout_ref.rollout.stop_token_ids=[258]")
