import pytest
import torch

from verl.protocol import DataProto, DataProtoFuture


class Later:
    def __init__(self, first, count, log):
        self.value = DataProto.from_dict({"x": torch.arange(first, first + count)})
        self.log = log

    def ready(self):
        return bool(self.log)

    def get(self):
        self.log.append(len(self.value))
        return self.value


def test_batches_under_way_are_joined_and_cut_without_waiting():
    log = []
    future = DataProtoFuture.concat([Later(0, 2, log), Later(2, 4, log)])
    first, second, third = future.chunk(3)
    assert log == []
    assert not second.ready()
    assert second.get().batch["x"].tolist() == [2, 3]
    assert log == [2, 4]
    assert second.ready()
    again = DataProtoFuture.concat([third, first])
    assert again.get().batch["x"].tolist() == [4, 5, 0, 1]


def test_parts_are_equal():
    with pytest.raises((AssertionError, ValueError), match="equal"):
        DataProtoFuture.concat([Later(0, 3, [])]).chunk(2)[0].get()
