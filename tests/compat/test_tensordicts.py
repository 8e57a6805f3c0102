"""verl.utils.tensordict_utils: columns, jagged tensors and objects, cut and joined."""

import pytest
import torch

from verl.utils import tensordict_utils as tu


def batch():
    rows = [torch.tensor([1]), torch.tensor([2, 3]), torch.tensor([4, 5, 6]), torch.tensor([7])]
    return tu.get_tensordict(
        {
            "score": torch.tensor([0.0, 1.0, 2.0, 3.0]),
            "ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
            "uid": ["a", "b", "c", "c"],
        },
        {"temperature": 0.7},
    )


def rows(td, key="ids"):
    return [row.tolist() for row in td[key].unbind()]


def test_columns():
    td = batch()
    assert len(td) == 4
    assert tu.get(td, "uid") == ["a", "b", "c", "c"]
    assert tu.get_non_tensor_data(td, "temperature", default=None) == 0.7
    assert tu.get(td, "score") is td["score"]
    assert tu.get(td, "nothing", default=3) == 3
    assert tu.unwrap_non_tensor_data(td.get("temperature")) == 0.7
    assert tu.unwrap_non_tensor_data(5) == 5
    with pytest.raises(ValueError, match="same batch size"):
        tu.get_tensordict({"a": torch.zeros(2), "b": [1]})


def test_assigned_and_taken():
    td = batch()
    assert tu.assign_non_tensor(td, source=["w", "x", "y", "z"], step=4) is td
    tu.assign_non_tensor_data(td, "names", ["of", "all"])
    assert (tu.get(td, "source"), tu.get(td, "step"), tu.get(td, "names")) == (["w", "x", "y", "z"], 4, ["of", "all"])
    assert tu.pop(td, "step") == 4
    assert tu.pop(td, "step", "none") == "none"
    with pytest.raises(ValueError, match="2 objects for 4 rows"):
        tu.assign_non_tensor_stack(td, "bad", [1, 2])
    assert rows(td) == [[1], [2, 3], [4, 5, 6], [7]]
    assert set(tu.get_keys(td, ["ids"]).keys()) == {"ids"}


def test_chunks_and_back():
    parts = tu.chunk_tensordict(batch(), 2)
    assert [rows(part) for part in parts] == [[[1], [2, 3]], [[4, 5, 6], [7]]]
    assert [tu.get(part, "uid") for part in parts] == [["a", "b"], ["c", "c"]]
    joined = tu.concat_tensordict(parts)
    assert rows(joined) == rows(batch())
    assert tu.get(joined, "uid") == tu.get(batch(), "uid")
    assert tu.get(joined, "temperature") == 0.7
    assert torch.equal(joined["score"], batch()["score"])
    with pytest.raises(ValueError, match="4 rows do not divide into 3"):
        tu.chunk_tensordict(batch(), 3)


def test_concat_of_what_does_not_fit():
    one, other = tu.chunk_tensordict(batch(), 2)
    tu.assign_non_tensor_data(other, "temperature", 1.0)
    with pytest.raises(ValueError, match="'temperature'"):
        tu.concat_tensordict([one, other])
    other.pop("temperature")
    with pytest.raises(ValueError, match="Part 1 and part 0 differ"):
        tu.concat_tensordict([one, other])


def test_rows_by_number():
    selected = tu.index_select_tensor_dict(batch(), [2, 0])
    assert rows(selected) == [[4, 5, 6], [1]]
    assert tu.get(selected, "uid") == ["c", "a"]
    assert selected["score"].tolist() == [2, 0]


def test_union():
    td = batch()
    other = tu.get_tensordict({"reward": torch.ones(4), "uid": ["a", "b", "c", "c"]})
    assert tu.union_tensor_dict(td, other) is td
    assert td["reward"].tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="'score' and its values differ"):
        tu.union_tensor_dict(td, tu.get_tensordict({"score": torch.ones(4)}))
    with pytest.raises(ValueError, match="4 and 1 rows"):
        tu.union_tensor_dict(td, tu.get_tensordict({"x": torch.ones(1)}))


def test_mini_batches():
    plain = [tu.get(part, "uid") for part in tu.make_iterator(batch(), 2, epochs=2)]
    assert plain == [["a", "b"], ["c", "c"]] * 2
    drawn = [
        [part["score"].tolist() for part in tu.make_iterator(batch(), 2, 3, seed, {"shuffle": True})]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(sorted(sum(drawn[0][i : i + 2], [])) == [0, 1, 2, 3] for i in (0, 2, 4))
    with pytest.raises(ValueError, match="mini-batches of 3"):
        next(tu.make_iterator(batch(), 3, 1))


def test_rows_are_taken_away_and_columns_become_contiguous():
    assert tu.get(tu.unpad(batch(), 1), "uid") == ["a", "b", "c"]
    turned = tu.contiguous(tu.get_tensordict({"x": torch.arange(4).view(2, 2).T, "uid": ["a", "b"]}))
    assert turned["x"].is_contiguous()
    assert turned["x"].tolist() == [[0, 2], [1, 3]]
