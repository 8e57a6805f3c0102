"""New weights through a folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.errors import ModelError
from verl.reshard.weight_files import read_folder, write_folder


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(60, 20, generator=generator)
    return {"a": large[:, :7], "b": torch.tensor(3), "large": large, "narrow": large[0].bfloat16(), "none": large[:0]}


@pytest.fixture
def description(tmp_path):
    return json.loads(json.dumps(write_folder(tmp_path, 1, weights().items(), 3000)))


def test_what_is_read_is_what_was_written(description):
    tensors = dict(read_folder(description))
    assert list(tensors) == list(weights())
    for name, tensor in weights().items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


def test_loaders_find_their_way(description):
    place = Path(description["folder"])
    index = json.loads((place / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in place.glob("*.safetensors")]
    assert len(sizes) == 3, "the largest tensor has a file of its own"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights().values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(place / file)[name], weights()[name])


def test_a_version_takes_the_place_of_the_last(tmp_path, description):
    (tmp_path / "version-mine").mkdir()
    write_folder(tmp_path, 2, weights(1).items(), 3000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-mine"]
    with pytest.raises(ModelError, match=r"a cannot be read from .*version-1"):
        next(read_folder(description))
    (tmp_path / "version-2").rename(tmp_path / "version-1")
    with pytest.raises(ModelError, match="does not match its digest"):
        next(read_folder(description))


@pytest.mark.parametrize("fault", ["dropped", "changed", "swapped", "cut short"])
def test_files_that_are_not_what_was_written(description, fault):
    file = Path(description["folder"]) / "model-00000.safetensors"
    tensors = load_file(file)
    a = tensors["a"]
    if fault == "dropped":
        del tensors["a"]
    elif fault == "changed":
        a.view(torch.int32)[3, 3] ^= 1
    elif fault == "swapped":
        tensors["a"] = a.flip(0).contiguous()
    save_file(tensors, file)
    if fault == "cut short":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="^a (cannot be read from|in) .* must not be used"):
        list(read_folder(description))


def test_a_failure_leaves_what_was_there(tmp_path, description):
    def broken():
        yield "a", torch.zeros(3)
        raise OSError("no space")

    with pytest.raises(ModelError, match="Version 2 of the weights could not be written to .*no space"):
        write_folder(tmp_path, 2, broken(), 3000)
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]
    assert dict(read_folder(description))
