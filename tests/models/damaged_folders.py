"""Damaged model folders, and a check that loading handles each of them correctly.

Correct is a readable error of verl, or loading as if nothing had happened ("same": equal log-probs).
Only an entry or a value that stays valid may load as another model ("changed"). Nothing is ever unpickled.
"""

import json
import pickle
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.damage import cut, deadline, flip, of_files, put_no_file
from verl.config import ModelConfig
from verl.errors import VerlError
from verl.models.load import load_causal_lm, load_tokenizer
from verl.models.tiny import make_tiny_model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
VALUES = [0, -1, 3, 10**9, 10**30, 1.5, float("nan"), True, None, "2", "", "\x1b[31mred", [], [3], {}, {"a": 1}, ["x"]]
SAME_OR_REFUSED = {"refused", "same"}
ANY = {"refused", "same", "changed"}


def good_folder(folder, family="llama"):
    """A model of about 10,000 parameters."""
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_tiny_model(folder, family, max_position_embeddings=64, **small)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


def json_edit(name, change):
    def damage(rng, folder):
        content = json.loads((folder / name).read_text())
        content = change(rng, content)
        (folder / name).write_text(json.dumps(content))

    return damage


def bytes_edit(name, change):
    return of_files(change, lambda rng, folder: folder / name)


def tensors_edit(change):
    def damage(rng, folder):
        tensors = change(rng, load_file(folder / WEIGHTS))
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def set_value(rng, content):
    return {**content, rng.choice(sorted(content)): rng.choice(VALUES)}


def drop_key(rng, content):
    gone = rng.choice(sorted(content))
    return {key: value for key, value in content.items() if key != gone}


def set_count(rng, content):
    counts = [key for key, value in content.items() if type(value) is int and not key.endswith("token_id")]
    return {**content, rng.choice(counts): rng.choice([0, -3, "2", "two", 10**9, 10**25, 1.5, [4], True])}


def flip_header(rng, data):
    return flip(rng, data, 8 + int.from_bytes(data[:8], "little"))


def garbage(rng, data):
    return rng.choice(
        [b"", b"[]", b"3", b'"text"', b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": 1', rng.randbytes(64)]
    )


def one_tensor(change):
    def edit(rng, tensors):
        name = rng.choice(sorted(tensors))
        return {**tensors, name: change(rng, tensors[name])}

    return edit


def poison(rng, tensor):
    flat = tensor.clone().reshape(-1)
    flat[rng.randrange(flat.numel())] = rng.choice([float("nan"), float("inf"), float("-inf")])
    return flat.view(tensor.shape)


def wrong_shape(rng, tensor):
    return rng.choice([tensor[:-1], tensor.unsqueeze(0), torch.cat([tensor, tensor])])


def to_integers(rng, tensor):
    return (tensor * 100).to(rng.choice([torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]))


def add_tensor(rng, tensors):
    last = sorted(tensors)[-1]
    names = ["model.extra.weight", "evil", "model.layers.7.mlp.up_proj.weight", last + ".scale", "\x1b[2J"]
    return {**tensors, rng.choice(names): torch.ones(3, dtype=rng.choice([torch.float32, torch.int8]))}


def lose_tensor(rng, tensors):
    gone = rng.choice(sorted(tensors))
    return {name: tensor for name, tensor in tensors.items() if name != gone}


def shard(folder):
    """The weights in two files with an index; returns the index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        part = {name: t for name, t in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def index_edit(change):
    def damage(rng, folder):
        index = shard(folder)
        (folder / INDEX).write_text(json.dumps(change(rng, folder, index)))

    return damage


def bomb_in_index(rng, folder, index):
    (folder / "evil.bin").write_bytes(pickle.dumps(Bomb(folder.parent / "unpickled")))
    return {**index, "weight_map": dict.fromkeys(index["weight_map"], "evil.bin")}


def file_outside(rng, folder, index):
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "outside.safetensors")
    outside = ["../outside.safetensors", str(folder.parent / "outside.safetensors"), "./../outside.safetensors"]
    moved = {n: rng.choice(outside) if "00001" in f else f for n, f in index["weight_map"].items()}
    return {**index, "weight_map": moved}


def wrong_map(rng, folder, index):
    files, names = sorted(set(index["weight_map"].values())), sorted(index["weight_map"])
    swapped = dict.fromkeys(names, files[0])
    choices = [[], {}, None, "x", {names[0]: 3}, {names[0]: [files[0]]}, {**index["weight_map"], "ghost": files[0]}]
    return {**index, "weight_map": rng.choice([*choices, swapped, dict.fromkeys(names, "no.safetensors")])}


def special_file(rng, folder):
    """Something that is not a regular file in the place of one."""
    file = folder / rng.choice(
        ["config.json", WEIGHTS, "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    )
    file.unlink()
    put_no_file(rng, file, ("nowhere", "loop", "pipe", "folder", "socket", "device"))


def weights_elsewhere(rng, folder):
    """config.json or an adapter that names other weights."""
    if rng.random() < 0.5:
        names = ["evil.bin", "../x.safetensors", "adapter_model.bin", WEIGHTS]
        json_edit("config.json", lambda _, c: {**c, "transformers_weights": rng.choice(names)})(rng, folder)
    else:
        (folder / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": "/etc", "peft_type": "LORA"})
        )


def quantized(rng, folder):
    methods = ["fp8", "mxfp4", "bitsandbytes", "gptq", "\x1b[31m", 3]
    change = {"quantization_config": {"quant_method": rng.choice(methods)}}
    json_edit("config.json", lambda _, content: {**content, **change})(rng, folder)


def foreign_type(rng, folder):
    names = [*sorted(transformers.CONFIG_MAPPING.keys()), "no-such", "../llama", ""]
    json_edit("config.json", lambda _, content: {**content, "model_type": rng.choice(names)})(rng, folder)


# kind of damage -> (what does it, the right outcomes)
KINDS = {
    "config: value": (json_edit("config.json", set_value), ANY),
    "config: count": (json_edit("config.json", set_count), ANY),
    "config: key lost": (json_edit("config.json", drop_key), ANY),
    "config: cut short": (bytes_edit("config.json", cut), {"refused"}),
    "config: bit": (bytes_edit("config.json", flip), ANY),
    "config: garbage": (bytes_edit("config.json", garbage), {"refused"}),
    "config: another family": (foreign_type, ANY),
    "config: quantized": (quantized, {"refused"}),
    "weights named elsewhere": (weights_elsewhere, {"refused"}),
    "weights: cut short": (bytes_edit(WEIGHTS, cut), {"refused"}),
    "weights: bit": (bytes_edit(WEIGHTS, flip), ANY),
    "weights: bit of the header": (bytes_edit(WEIGHTS, flip_header), ANY),
    "weights: garbage": (bytes_edit(WEIGHTS, garbage), {"refused"}),
    "weights: not finite": (tensors_edit(one_tensor(poison)), {"refused"}),
    "weights: shape": (tensors_edit(one_tensor(wrong_shape)), {"refused"}),
    "weights: integers": (tensors_edit(one_tensor(to_integers)), {"refused"}),
    "weights: tensor added": (tensors_edit(add_tensor), {"refused"}),
    "weights: tensor lost": (tensors_edit(lose_tensor), {"refused"}),
    "index: as it should be": (index_edit(lambda rng, folder, index: index), {"same"}),
    "index: a pickle": (index_edit(bomb_in_index), {"refused"}),
    "index: outside": (index_edit(file_outside), {"refused"}),
    "index: wrong map": (index_edit(wrong_map), {"refused"}),
    "generation_config: value": (json_edit("generation_config.json", set_value), SAME_OR_REFUSED),
    "generation_config: cut short": (bytes_edit("generation_config.json", cut), {"refused"}),
    "tokenizer: cut short": (bytes_edit("tokenizer.json", cut), {"refused"}),
    "tokenizer: value": (json_edit("tokenizer.json", set_value), SAME_OR_REFUSED),
    "tokenizer_config: value": (json_edit("tokenizer_config.json", set_value), SAME_OR_REFUSED),
    "not a regular file": (special_file, {"refused"}),
}


def log_probs(folder):
    """[4, vocabulary] of the model in `folder`, by its own forward."""
    module = load_causal_lm(folder)
    load_tokenizer(ModelConfig(path=str(folder)))
    with torch.no_grad():
        module.set_attn_implementation("eager")
        return module(input_ids=torch.tensor([[1, 5, 9, 2]]), use_cache=False).logits[0].log_softmax(-1)


def outcome(rng, good, folder: Path, expected, kind=None):
    """(kind of damage, outcome) of a copy of `good` at `folder`; AssertionError for an outcome that is not right."""
    kind = kind or rng.choice(sorted(KINDS))
    damage, right = KINDS[kind]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    damage(rng, folder)
    try:
        with deadline(30):
            actual = log_probs(folder)
        result = "same" if torch.equal(actual, expected) else "changed"
    except VerlError as error:
        text, result = str(error), "refused"
        assert text.isprintable(), (kind, text)
        assert len(text) < 1000 + 2 * len(str(folder)), (kind, text)
        assert text.rstrip().endswith((".", ")")), (kind, text)
    assert not (folder.parent / "unpickled").exists(), kind
    assert result in right, (kind, result)
    return kind, result


def cases(rng, count, folder):
    """(kind of damage, outcome) of `count` model folders."""
    good = good_folder(folder / "good")
    expected = log_probs(good)
    for _ in range(count):
        yield outcome(rng, good, folder / "model", expected)
