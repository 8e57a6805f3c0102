import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.data_proto.merge import object_array, same_value
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def make(num_rows=6, **meta):
    return DataProto.from_dict(
        tensors={"ids": torch.arange(num_rows * 2).view(num_rows, 2), "score": torch.arange(num_rows) / 2},
        non_tensors={"uid": [f"u{i}" for i in range(num_rows)], "info": [{"n": [i, i]} for i in range(num_rows)]},
        meta_info=meta,
    )


def assert_same(a, b):
    assert len(a) == len(b)
    assert set(a._tensors()) == set(b._tensors())
    for name, tensor in a._tensors().items():
        assert torch.equal(tensor, b.batch[name]), name
    assert same_value(a.non_tensor_batch, b.non_tensor_batch)
    assert same_value(a.meta_info, b.meta_info)


def uids(batch):
    return [int(u[1:]) for u in batch.non_tensor_batch["uid"]]


few = settings(max_examples=20, deadline=None)
sizes = st.integers(1, 9)


class TestMaking:
    def test_object_columns_of_equal_lists_stay_one_per_row(self):
        batch = DataProto.from_dict({}, {"ids": [[1, 2], [3, 4]]})
        assert batch.batch is None
        assert batch.non_tensor_batch["ids"].shape == (2,)
        assert batch.non_tensor_batch["ids"][1] == [3, 4]

    def test_from_single_dict_sorts_columns(self):
        batch = DataProto.from_single_dict({"a": torch.zeros(2), "b": np.array(["x", "y"], dtype=object)}, {"k": 1})
        assert set(batch.batch.keys()) == {"a"}
        assert list(batch.non_tensor_batch) == ["b"]
        assert batch.meta_info == {"k": 1}
        with pytest.raises(ValueError, match="'c' is a list"):
            DataProto.from_single_dict({"c": [1, 2]})

    @pytest.mark.parametrize(
        ("tensors", "objects", "words"),
        [
            ({"a": torch.zeros(2), "b": torch.zeros(3)}, {}, "same batch size"),
            ({"a": torch.zeros(2)}, {"b": ["x"]}, "'b' has shape .* 2 rows"),
            ({}, {"a": ["x"], "b": ["x", "y"]}, "'b' has shape"),
        ],
    )
    def test_rows_must_agree(self, tensors, objects, words):
        with pytest.raises(ValueError, match=words):
            DataProto.from_dict(tensors, objects)

    def test_empty(self):
        assert len(DataProto()) == 0

    def test_tensordict_round_trip(self):
        batch = make(3, step=4)
        again = DataProto.from_tensordict(batch.to_tensordict())
        assert_same(batch, again)

    def test_info_names_every_column(self, caplog):
        batch = make(2, step=1)
        for name in ("ids", "score", "uid", "info", "step"):
            assert name in batch.get_data_info()
        with caplog.at_level("INFO"):
            batch.print_size("here")
        assert "here: Size of tensors" in caplog.text


class TestRows:
    def test_int_gives_an_item(self):
        item = make()[-1]
        assert item.non_tensor_batch["uid"] == "u5"
        assert item.batch["ids"].tolist() == [10, 11]
        with pytest.raises(IndexError, match="Row 6"):
            make()[6]
        with pytest.raises(TypeError, match="str"):
            make()["ids"]

    @pytest.mark.parametrize(
        ("index", "expected"),
        [
            ([2, 0, 2], [2, 0, 2]),
            (np.array([1, 5]), [1, 5]),
            (torch.tensor([3]), [3]),
            ([True, False, False, True, False, False], [0, 3]),
            (np.arange(6) > 3, [4, 5]),
            ([], []),
            (slice(1, 5, 2), [1, 3]),
            (slice(None, None, -1), [5, 4, 3, 2, 1, 0]),
        ],
    )
    def test_rows_are_chosen_in_both_kinds_of_columns(self, index, expected):
        chosen = make()[index]
        assert uids(chosen) == expected
        assert chosen.batch["ids"][:, 0].tolist() == [2 * i for i in expected]

    def test_mask_of_wrong_length(self):
        with pytest.raises(ValueError, match="mask of 2"):
            make().select_idxs([True, False])

    def test_meta_info_of_parts_is_their_own(self):
        batch = make(4, step=1)
        batch[:2].meta_info["step"] = 2
        assert batch.meta_info == {"step": 1}

    def test_a_slice_of_all_rows_gets_no_later_columns(self):
        batch = make(4)
        part = batch.slice()
        batch.batch["later"] = torch.zeros(4)
        part.batch["ids"][0] = 7
        assert set(part.batch.keys()) == {"ids", "score"}
        assert batch.batch["ids"][0].tolist() == [7, 7]

    def test_reorder_in_place(self):
        batch = make(4)
        assert batch.reorder(torch.tensor([3, 1, 0, 2])) is None
        assert uids(batch) == [3, 1, 0, 2]
        with pytest.raises(ValueError, match="permutation"):
            batch.reorder([0, 0, 1, 2])

    @given(sizes, st.randoms())
    @few
    def test_reorder_and_its_inverse(self, num_rows, random):
        order = list(range(num_rows))
        random.shuffle(order)
        batch = make(num_rows)
        batch.reorder(order)
        batch.reorder(np.argsort(order))
        assert_same(batch, make(num_rows))

    @given(sizes, st.integers(1, 4))
    @few
    def test_repeat_laws(self, num_rows, times):
        batch = make(num_rows)
        rows = list(range(num_rows))
        assert uids(batch.repeat(times, interleave=True)) == [i for i in rows for _ in range(times)]
        assert uids(batch.repeat(times, interleave=False)) == rows * times
        assert_same(batch.repeat(times), batch.sample_level_repeat([times] * num_rows))
        assert_same(batch.repeat(times, interleave=False), DataProto.concat([batch] * times))

    def test_sample_level_repeat(self):
        assert uids(make(3).sample_level_repeat(torch.tensor([0, 3, 1]))) == [1, 1, 1, 2]
        with pytest.raises(ValueError, match="one number for each of 3 rows"):
            make(3).sample_level_repeat([1])

    def test_unfold_column_chunks(self):
        batch = DataProto.from_dict(
            {"pairs": torch.arange(8).view(2, 4), "x": torch.tensor([5, 6])}, {"uid": ["a", "b"]}
        )
        cut = batch.unfold_column_chunks(2, split_keys=["pairs"])
        assert cut.batch["pairs"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert cut.batch["x"].tolist() == [5, 5, 6, 6]
        assert list(cut.non_tensor_batch["uid"]) == ["a", "a", "b", "b"]
        with pytest.raises(ValueError, match="'pairs'.*does not divide into 3"):
            batch.unfold_column_chunks(3, ["pairs"])


class TestColumns:
    def test_select_shares_and_deepcopies(self):
        batch = make(2, step=1)
        some = batch.select(["ids"], ["uid"], [])
        assert set(some.batch.keys()) == {"ids"}
        assert list(some.non_tensor_batch) == ["uid"]
        assert some.meta_info == {}
        assert some.batch["ids"].data_ptr() == batch.batch["ids"].data_ptr()
        copied = batch.select(deepcopy=True)
        copied.batch["ids"][0] = 99
        copied.non_tensor_batch["info"][0]["n"] = "changed"
        assert_same(batch, make(2, step=1))

    def test_pop(self):
        batch = make(2, step=1)
        taken = batch.pop(["ids"], ["uid"], ["step"])
        assert set(taken.batch.keys()) == {"ids"}
        assert taken.meta_info == {"step": 1}
        assert set(batch.batch.keys()) == {"score"}
        assert list(batch.non_tensor_batch) == ["info"]
        with pytest.raises(ValueError, match="no object column 'nope'"):
            batch.pop(["score"], ["nope"])
        assert "score" in batch.batch.keys()  # nothing was taken by the call that failed

    def test_rename(self):
        batch = make(2)
        assert batch.rename("ids", "tokens") is batch
        assert set(batch.batch.keys()) == {"tokens", "score"}
        batch.rename(["tokens", "score"], ["score", "tokens"])
        assert batch.batch["score"].shape == (2, 2)
        with pytest.raises(ValueError, match="1 columns .* 2 names"):
            batch.rename(["score"], ["a", "b"])

    def test_union_adds_in_place_and_refuses_a_clash(self):
        batch, other = make(2, step=1), DataProto.from_dict({"new": torch.ones(2)}, {"uid": ["u0", "u1"]}, {"lr": 0.1})
        assert batch.union(other) is batch
        assert "new" in batch.batch.keys()
        assert batch.meta_info == {"step": 1, "lr": 0.1}
        with pytest.raises(ValueError, match="tensor column 'ids'"):
            batch.union(DataProto.from_dict({"ids": torch.zeros(2, 2)}))
        with pytest.raises(ValueError, match="object column 'uid'"):
            batch.union(DataProto.from_dict({}, {"uid": ["u0", "other"]}))
        with pytest.raises(ValueError, match="meta_info key 'step'"):
            batch.union(DataProto(meta_info={"step": 2}))
        with pytest.raises(ValueError, match="row by row"):
            batch.union(make(3))

    def test_union_treats_nan_as_equal_to_nan(self):
        nan = float("nan")
        a = {"x": object_array([nan, {"k": [nan, 1]}]), "y": np.array([nan, 1.0])}
        b = {"x": object_array([float("nan"), {"k": [float("nan"), 1]}]), "y": np.array([nan, 1.0])}
        assert union_numpy_dict(a, b) is a
        with pytest.raises(ValueError, match="'y'"):
            union_numpy_dict(a, {"y": np.array([nan, 2.0])})

    def test_union_tensor_dict(self):
        first, second = make(2).batch.select("ids"), make(2).batch
        assert set(union_tensor_dict(first, second).keys()) == {"ids", "score"}

    def test_to_is_in_place(self):
        batch = make(2)
        assert batch.to("cpu") is batch
        assert DataProto().to("cpu").batch is None


class TestParts:
    @given(st.integers(1, 4), st.integers(1, 4))
    @few
    def test_concat_undoes_chunk(self, chunks, rows_each):
        batch = make(chunks * rows_each, step=3)
        parts = batch.chunk(chunks)
        assert [len(p) for p in parts] == [rows_each] * chunks
        assert_same(DataProto.concat(parts), batch)

    @given(sizes, st.integers(1, 5))
    @few
    def test_concat_undoes_split(self, num_rows, size):
        parts = make(num_rows).split(size)
        assert all(len(p) == size for p in parts[:-1])
        assert 1 <= len(parts[-1]) <= size
        assert_same(DataProto.concat(parts), make(num_rows))

    def test_uneven_chunk_is_a_sentence(self):
        with pytest.raises(ValueError, match="only support equal chunk: 6 rows do not divide into 4"):
            make(6).chunk(4)

    def test_auto_padding_allows_uneven_chunks(self, monkeypatch):
        batch = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
        assert [p.batch["x"].tolist() for p in batch.chunk(3)] == [[0, 1], [2, 3], [4]]
        plain = make(5)
        assert not plain.is_padding_enabled()
        monkeypatch.setenv("VERL_AUTO_PADDING", "1")
        assert plain.is_padding_enabled()
        monkeypatch.delenv("VERL_AUTO_PADDING")
        DataProtoConfig.auto_padding = True
        try:
            assert plain.is_padding_enabled()
        finally:
            DataProtoConfig.auto_padding = False

    def test_padding_in_place(self):
        batch = make(3)
        batch.padding(2, "first")
        assert uids(batch) == [0, 1, 2, 0, 0]
        batch.padding(1)
        assert uids(batch) == [0, 1, 2, 0, 0, 0]
        with pytest.raises(ValueError, match="'middle'"):
            batch.padding(1, "middle")

    @given(sizes, st.integers(1, 13))
    @few
    def test_unpad_undoes_pad(self, num_rows, divisor):
        batch = make(num_rows, step=1)
        padded, pad_size = pad_dataproto_to_divisor(batch, divisor)
        assert len(padded) % divisor == 0
        assert 0 <= pad_size < divisor
        assert uids(padded) == [i % num_rows for i in range(num_rows + pad_size)]
        assert_same(unpad_dataproto(padded, pad_size), batch)

    def test_an_empty_batch_cannot_be_padded(self):
        with pytest.raises(ValueError, match="no row to repeat"):
            pad_dataproto_to_divisor(DataProto(), 2)

    def test_concat_merges_metrics_and_checks_the_rest(self):
        parts = [make(1, step=1, metrics={"a": 1}), make(1, step=1, metrics=[{"a": 2, "b": 3}])]
        assert DataProto.concat(parts).meta_info == {"step": 1, "metrics": {"a": [1, 2], "b": [3]}}
        timed = [make(1, timing={"generate_sequences": seconds}) for seconds in (0.5, 0.25)]
        assert DataProto.concat([*timed, make(1)]).meta_info == {"timing": {"generate_sequences": 0.75}}
        with pytest.raises(ValueError, match="meta_info key 'step'"):
            DataProto.concat([make(1, step=1), make(1, step=2)])
        with pytest.raises(ValueError, match="empty"):
            DataProto.concat([])

    def test_concat_names_the_odd_column(self):
        with pytest.raises(ValueError, match="'score'"):
            DataProto.concat([make(2), make(2).select(["ids"])])
        with pytest.raises(ValueError, match="'uid'"):
            DataProto.concat([make(2), make(2).select(None, ["info"])])
        with pytest.raises(ValueError, match="tensors"):
            DataProto.concat([make(2), DataProto.from_dict({}, {"uid": ["a"], "info": [{}]})])

    def test_fold_and_unfold(self):
        folded = fold_batch_dim(make(6), 3)
        assert folded.batch["ids"].shape == (3, 2, 2)
        assert folded.non_tensor_batch["uid"].shape == (3, 2)
        assert_same(unfold_batch_dim(folded), make(6))
        with pytest.raises(ValueError, match="do not fold"):
            fold_batch_dim(make(5), 3)

    def test_collate_undoes_taking_rows(self):
        batch = make(4, step=1)
        assert_same(collate_fn([batch[i] for i in range(4)]), batch)


class TestIterator:
    def test_passes_cover_all_rows_in_order(self):
        parts = list(make(6, step=1).make_iterator(2, epochs=2))
        assert [uids(p) for p in parts] == [[0, 1], [2, 3], [4, 5]] * 2
        assert parts[0].meta_info == {"step": 1}

    def test_shuffled_order_is_a_function_of_the_seed(self):
        def order(seed):
            return [i for p in make(6).make_iterator(3, 2, seed, {"shuffle": True}) for i in uids(p)]

        assert order(7) == order(7) != order(8)
        assert sorted(order(7)[:6]) == sorted(order(7)[6:]) == list(range(6))
        assert order(7)[:6] != order(7)[6:]

    def test_errors_come_at_once(self):
        with pytest.raises(ValueError, match="do not divide"):
            make(5).make_iterator(2, 1)
        with pytest.raises(ValueError, match="num_workers"):
            make(4).make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})
