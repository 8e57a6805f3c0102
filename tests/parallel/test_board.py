"""What ranks write for one another's errors, with a store that answers and with one that does not."""

import threading
import time

import torch.distributed as dist

from verl.parallel import rank_status as board
from verl.parallel.rank_status import Board


def test_ranks_read_what_the_others_wrote():
    store = dist.HashStore()
    boards = [Board(store, rank, 3) for rank in range(3)]
    boards[0].post("doing", {"call": "actor.update"})
    boards[0].post("doing", {"call": "publish"}, wait=True)
    boards[1].post("stack", {"stack": "there"}, wait=True)
    assert boards[2].rows("doing") == {0: {"call": "publish"}}
    assert boards[2].rows("stack") == {1: {"stack": "there"}}
    assert boards[0].rows("doing") == {}
    for one in boards:
        one.close()


class Silent:
    """As a store whose machine is gone from the network."""

    def __init__(self):
        self.asked, self.over = threading.Event(), threading.Event()

    def set(self, *_):
        self.asked.set()
        self.over.wait(20)

    check = set_timeout = set


def test_a_silent_store_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(board, "LIMIT_S", 0.1)
    store = Silent()
    mine = Board(store, 0, 2)
    began = time.monotonic()
    mine.post("doing", {})
    assert store.asked.wait(10)
    mine.post("doing", {"failure": "it hangs"}, wait=True)
    assert mine.rows("doing") == {}
    assert time.monotonic() - began < 10
    store.over.set()
    mine.close()


def test_a_store_that_is_gone_counts_as_empty():
    class Gone:
        def set(self, *_):
            raise dist.DistNetworkError("Connection reset")

        set_timeout = set

    mine = Board(Gone(), 0, 2)
    mine.post("doing", {}, wait=True)
    assert mine.rows("doing") == {}
    mine.close()
