"""A group has the methods of its worker; calls go over the ranks, futures are waited for."""

import pytest

from tests.parallel.batches import make_batch, rows_of
from verl.data_proto.proto import DataProto
from verl.parallel.mesh import Mesh
from verl.parallel.register import Dispatch, register
from verl.runtime.worker_group import WorkerGroup


class Doubler:
    @register(dispatch_mode=Dispatch.ND_COMPUTE_PROTO, blocking=False, objects=())
    def double(self, batch):
        assert not batch.non_tensor_batch
        return DataProto.from_dict({"row": batch.batch["row"], "twice": batch.batch["row"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, number, batch=None):
        return number + (len(batch) if batch is not None else 0)

    def private(self):
        """Not declared, so not on the group."""


class Later:
    def __init__(self, make):
        self.make = make

    def ready(self):
        return True

    def get(self):
        return self.make()


def loop_runner(workers):
    def run(group, method, plan, blocking):
        def make():
            results = {i: getattr(workers[i], method)(*plan.calls[i][0], **plan.calls[i][1]) for i in plan.ranks()}
            return plan.collect([results[i] for i in plan.answering])

        return make() if blocking else Later(make)

    return run


@pytest.fixture
def group():
    return WorkerGroup("doubler", Doubler, Mesh.of(4, tensor_parallel=2), loop_runner([Doubler() for _ in range(4)]))


def test_calls(group):
    result = group.double(make_batch(5))
    assert rows_of(result.get()) == [0, 1, 2, 3, 4]
    assert result.get().batch["twice"].tolist() == [0, 2, 4, 6, 8]
    assert group.add(3) == [3, 3, 3, 3]
    assert group.world_size == 4


def test_arguments_that_are_futures_are_waited_for(group):
    assert group.add(1, batch=group.double(make_batch(5))) == [6, 6, 6, 6]


def test_a_method_that_is_not_declared(group):
    with pytest.raises(AttributeError, match="doubler has no method 'private'.*@register"):
        group.private()
