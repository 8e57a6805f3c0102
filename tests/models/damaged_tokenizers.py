"""Damaged tokenizer.json: an error of verl within seconds, or a tokenizer with an embedding for each token."""

import copy
import json
import shutil

from tests.damage import deadline, parent_of, places
from verl.data.prompts import encode_text, render_chat
from verl.errors import VerlError
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model

NUM_EMBEDDINGS = 264
TEXTS = ("", "a", "Ümläut ☃ 😀", "<|im_start|>user\nx<|im_end|>", "\x00\ufffd\u202e", "x " * 200)
VALUES = [0, -1, 3, 263, 264, 10**4, 2**31, 2**32, 2**63, 10**30, 1.5, float("nan"), True, None, "2", "", "x" * 100_000]
VALUES += [[], [3], {}, {"a": 1}, ["x", "y"], [["a", "b"]], {"type": "Sequence"}, "\x1b[31m"]
RULES = [
    {"type": "Prepend", "prepend": "x" * 20_000_000},
    {"type": "Prepend", "prepend": "\u2581"},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
    {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Lowercase"},
    {"type": "NoSuch"},
]
MODELS = [
    {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"},
    {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "<unk>", "continuing_subword_prefix": "##",
     "max_input_chars_per_word": 100},
    {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]], "byte_fallback": False},
    {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": True},
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", float("nan")], ["b", 10**400]], "byte_fallback": False},
    {"type": "BPE", "vocab": {"a": 0, "ab": 1}, "merges": [["a", "b"], ["a", "c"]]},
    {"type": "BPE", "vocab": {}, "merges": []},
    {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"], "unk_token": "u", "fuse_unk": True, "byte_fallback": True},
]  # fmt: skip


def some_value(rng, content):
    path = rng.choice([p for p in places(content, limit=40) if p and "vocab" not in p] + [("model", "vocab")])
    parent, last = parent_of(content, path), path[-1]
    if rng.random() < 0.2 and isinstance(parent, dict):
        del parent[last]
    else:
        parent[last] = copy.deepcopy(rng.choice(VALUES))


def id_of_a_token(rng, content):
    vocab = content["model"]["vocab"]
    vocab[rng.choice(sorted(vocab))] = rng.choice(VALUES)


def ids_swapped(rng, content):
    vocab = content["model"]["vocab"]
    one, other = rng.sample(sorted(vocab), 2)
    vocab[one], vocab[other] = vocab[other], vocab[rng.choice([one, other])]


def id_of_an_added_token(rng, content):
    rng.choice(content["added_tokens"])["id"] = rng.choice(VALUES)


def many_added_tokens(rng, content):
    token, count = content["added_tokens"][0], rng.choice([10, 1000, 300_000])
    start = rng.choice([259, 300])
    content["added_tokens"] += [{**token, "id": start + i, "content": f"<t{i}>"} for i in range(count)]


def rules(rng, content):
    content[rng.choice(["normalizer", "pre_tokenizer", "post_processor", "decoder"])] = rng.choice(RULES)


def another_model(rng, content):
    content["model"] = copy.deepcopy(rng.choice(MODELS))


def vocabulary_longer(rng, content):
    vocab = content["model"]["vocab"]
    for number in range(len(vocab), rng.choice([260, 270, 5000])):
        vocab[f"word{number}"] = number


def nothing(rng, content):
    pass


KINDS = (
    some_value, some_value, id_of_a_token, ids_swapped, id_of_an_added_token, many_added_tokens, rules, another_model,
    vocabulary_longer, nothing,
)  # fmt: skip


def check_sentence(error):
    text = str(error)
    assert text.isprintable(), text
    assert len(text) < 1500, text


def outcome(rng, good, folder):
    """(kind of damage, outcome) of a copy of `good` at `folder`; AssertionError for what must not be."""
    kind = rng.choice(KINDS)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    kind(rng, content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with deadline(20):
        try:
            tokenizer = load_tokenizer(folder)
        except VerlError as error:
            check_sentence(error)
            assert kind is not nothing
            return kind.__name__, "refused"
        result = "loaded"
        for text in TEXTS:
            try:
                ids = encode_text(tokenizer, text, "row 0")
                ids += encode_text(
                    tokenizer, render_chat(tokenizer, [{"role": "user", "content": text}], "row 0"), "row 0"
                )
            except VerlError as error:
                check_sentence(error)
                assert kind is not nothing
                result = "row refused"
            else:
                assert all(type(token) is int and 0 <= token < NUM_EMBEDDINGS for token in ids), (kind, ids)
    return kind.__name__, result


def cases(rng, count, folder):
    """`outcome` of `count` tokenizers."""
    good = make_tiny_model(folder / "good")
    for _ in range(count):
        yield outcome(rng, good, folder / "model")
