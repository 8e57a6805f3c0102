"""Values that go over the wire come back equal, in separate memory."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.batches import make_batch
from verl.data_proto.media import StoredTensors
from verl.data_proto.merge import same_value
from verl.data_proto.metrics import Metric
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.parallel.serialize import StoredBuffers, decode, encode, from_bytes, record, to_bytes

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(value=values)
def test_plain_values(value):
    back = from_bytes(to_bytes(value))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not(number):
    back = from_bytes(to_bytes({"x": [number]}))["x"][0]
    assert back == number or (math.isnan(back) and math.isnan(number))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.float16]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype, shape):
    value = torch.arange(math.prod(shape), dtype=torch.float32).view(shape).to(dtype)
    back = from_bytes(to_bytes(value))
    assert back.dtype == dtype
    assert torch.equal(back, value)
    assert from_bytes(to_bytes(torch.arange(6).view(2, 3).t())).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_batch_with_everything():
    batch = make_batch(3, step=7, bounds=(1, 2))
    batch.non_tensor_batch["mixed"] = np.array([None, [1, 2], {"a": float("nan")}], dtype=object)
    batch.non_tensor_batch["number"] = np.array([1.5, 2.5, 3.5])
    document, buffers = encode(batch)
    back = decode(document, buffers)
    assert same_value(back.meta_info, batch.meta_info)
    for name, column in batch.non_tensor_batch.items():
        assert same_value(back.non_tensor_batch[name], column), name
    for name in batch.batch.keys():
        assert torch.equal(back.batch[name], batch.batch[name])
    back.batch["row"] += 1
    assert batch.batch["row"].tolist() == [0, 1, 2], "the copy has its own memory"


def test_rows_that_are_in_a_store_travel_as_numbers(monkeypatch):
    monkeypatch.setattr("verl.parallel.serialize._STORED_BYTES", 1)
    tensors = {"wide": torch.randn(4, 3), "mask": torch.rand(4, 3) > 0.5, "half": torch.ones(4).bfloat16()}
    packed = {name: encode(DataProto.from_dict(tensors)) for name in "ab"}
    store = {name: [document, *buffers] for name, (document, buffers) in packed.items()}
    answers = [decode(head, StoredBuffers(buffers, name)) for name, (head, *buffers) in store.items()]
    rows = DataProto.concat(answers).select_idxs([6, 1, 1, 3, 4])
    document, sent = encode(rows, StoredBuffers())
    assert {name for name in sent if isinstance(name, str)} == {"a", "b"}
    stored = [b if isinstance(b, np.ndarray) else StoredTensors(b, store.get, dict) for b in sent]
    received, expected = decode(document, stored), DataProto.concat([DataProto.from_dict(tensors)] * 2)
    for name, column in expected.select_idxs([6, 1, 1, 3, 4]).batch.items():
        assert type(received.batch[name]) is torch.Tensor
        assert torch.equal(received.batch[name], column)
        assert torch.equal(from_bytes(to_bytes(rows)).batch[name], column)


def test_batches_without_rows_or_tensors():
    empty = from_bytes(to_bytes(make_batch(3).slice(0, 0)))
    assert len(empty) == 0
    assert empty.batch["prompt_mask"].shape == (0, 8)
    assert len(from_bytes(to_bytes(DataProto.from_dict(None, {"uid": ["a", "b"]})))) == 2


def test_metrics_keep_their_observations():
    metric = Metric.mean(torch.tensor(2.0), weight=3).merge(Metric.mean(float("nan"), weight=0))
    back = from_bytes(to_bytes({"m": metric}))["m"]
    assert back.value == metric.value == 2.0
    assert back.reduction == "mean"


def test_records():
    params = SamplingParams(n=3, stop=("a",))
    assert from_bytes(to_bytes([params])) == [params]


@dataclass
class Unknown:
    x: int


def test_what_cannot_travel_is_named():
    batch = make_batch(2)
    batch.non_tensor_batch["note"] = np.array([1, Unknown(1)], dtype=object)
    with pytest.raises(TypeError, match=r"batch, column\.note\[1\].*Unknown"):
        to_bytes({"batch": batch})
    record(Unknown)
    assert from_bytes(to_bytes(Unknown(4))) == Unknown(4)


def test_one_element_of_a_wider_tensor():
    """Its stride is not 1, though torch calls it contiguous."""
    column = torch.arange(6.0).view(1, 6)[:, ::3][:, :1]
    column = torch.as_strided(column, (1,), (4,))
    assert torch.equal(from_bytes(to_bytes(column)), column)
