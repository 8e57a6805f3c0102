import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from verl.data_proto.merge import object_array, same_value
from verl.protocol import (
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_infinity=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(json_values, min_size=1, max_size=5), st.dictionaries(st.text(max_size=4), json_values, max_size=3))
@settings(max_examples=25, deadline=None)
def test_what_is_saved_comes_back(tmp_path_factory, objects, meta):
    path = tmp_path_factory.mktemp("proto") / "batch.safetensors"
    num_rows = len(objects)
    batch = DataProto.from_dict(
        {
            "ids": torch.arange(num_rows * 3).view(num_rows, 3),
            "half": torch.rand(num_rows, 2).to(torch.bfloat16),
            "mask": torch.arange(num_rows) % 2 == 0,
        },
        {"any": objects, "numbers": np.arange(num_rows, dtype=np.int32), "words": np.array(["ab"] * num_rows)},
        meta,
    )
    batch.save_to_disk(path)
    again = DataProto.load_from_disk(path)
    assert set(again.batch.keys()) == set(batch.batch.keys())
    for name in batch.batch.keys():
        assert again.batch[name].dtype == batch.batch[name].dtype
        assert torch.equal(again.batch[name], batch.batch[name])
    assert same_value(again.non_tensor_batch, batch.non_tensor_batch)
    assert again.non_tensor_batch["numbers"].dtype == np.int32
    assert same_value(again.meta_info, batch.meta_info)


def test_columns_that_share_memory_and_numpy_values_are_saved(tmp_path):
    values = torch.arange(12).view(3, 4)
    batch = DataProto.from_dict(
        {"whole": values, "left": values[:, :2]}, {"x": [np.int64(1), np.float32(0.5), np.arange(2)]}
    )
    batch.save_to_disk(tmp_path / "b")
    again = DataProto.load_from_disk(tmp_path / "b")
    assert torch.equal(again.batch["left"], values[:, :2])
    assert list(again.non_tensor_batch["x"]) == [1, 0.5, [0, 1]]


def test_a_batch_without_tensors_is_saved(tmp_path):
    DataProto.from_dict({}, {"uid": ["a"]}).save_to_disk(tmp_path / "b")
    again = DataProto.load_from_disk(tmp_path / "b")
    assert again.batch is None
    assert list(again.non_tensor_batch["uid"]) == ["a"]


@pytest.mark.parametrize(
    ("objects", "meta", "words"),
    [
        ({"blob": [b"raw"]}, {}, r"column 'blob'\[0\] holds a bytes"),
        ({"info": [{"a": {1: 2}}]}, {}, r"column 'info'\[0\].a has the key 1"),
        ({}, {"model": object()}, r"meta_info.model holds a object"),
    ],
)
def test_what_json_cannot_hold_is_named_and_nothing_is_written(tmp_path, objects, meta, words):
    batch = DataProto.from_dict({"x": torch.zeros(1)}, objects, meta)
    with pytest.raises(ValueError, match=words):
        batch.save_to_disk(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "b"
    DataProto.from_dict({"x": torch.zeros(1)}).save_to_disk(path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("verl.regular_files.os.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        DataProto.from_dict({"x": torch.ones(1)}).save_to_disk(path)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"x" * 100])
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "b").write_bytes(content)
    with pytest.raises(ValueError, match="not a batch saved by save_to_disk"):
        DataProto.load_from_disk(tmp_path / "b")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3),
        torch.rand(2, 3).to(torch.bfloat16),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.rand(4, 3).t(),
    ],
    ids=["int64", "bfloat16", "0-d", "empty", "bool", "strided"],
)
def test_single_tensor_round_trip(tensor):
    name, shape, data = serialize_single_tensor(tensor)
    again = deserialize_single_tensor((name, shape, bytes(data)))
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)


def test_damaged_records_are_refused():
    with pytest.raises(ValueError, match="3 bytes cannot be a float32"):
        deserialize_single_tensor(("float32", (1,), b"abc"))
    with pytest.raises(ValueError, match="not a torch dtype"):
        deserialize_single_tensor(("load", (1,), b"abc"))


def test_tensordict_round_trip_with_nested_column():
    nested = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(5)], layout=torch.jagged)
    batch = TensorDict({"a": torch.rand(2, 3), "n": nested}, batch_size=[2])
    again = deserialize_tensordict(serialize_tensordict(batch))
    assert again.batch_size == batch.batch_size
    assert torch.equal(again["a"], batch["a"])
    assert [t.tolist() for t in again["n"].unbind()] == [[0, 1], [0, 1, 2, 3, 4]]


def test_object_array_keeps_lists_apart():
    assert object_array([[1], [2]]).shape == (2,)
