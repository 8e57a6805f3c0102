"""A worker of users, in a module that its processes import in half of the time that a test file takes."""

import os
import signal
import time

import torch

from verl.data_proto.proto import DataProto
from verl.single_controller.base import Dispatch, Execute, Worker, register
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn


class Adder(Worker):
    def __init__(self, amount):
        self.amount = amount
        self._register_dispatch_collect_info("model", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] + self.amount})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def add_by_mesh(self, batch, more):
        return DataProto.from_dict({"x": batch.batch["x"] + more, "rank": torch.full((len(batch),), self.rank)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def place(self):
        return self.rank, self.world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank, how):
        if self.rank == rank and how == "raise":
            raise ValueError("no such luck")
        if self.rank == rank and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == rank and how == "hang":
            time.sleep(60)
