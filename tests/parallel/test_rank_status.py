"""Per-rank status, with a store that answers and with a store that does not."""

import threading

import torch.distributed as dist

from verl.parallel import rank_status
from verl.parallel.rank_status import RankStatus


def test_ranks_read_what_the_others_wrote():
    store = dist.HashStore()
    statuses = [RankStatus(store, rank, 3) for rank in range(3)]
    statuses[0].post("doing", {"call": "actor.update"})
    statuses[0].post("doing", {"call": "publish"}, wait=True)
    statuses[1].post("stack", {"stack": "there"}, wait=True)
    assert statuses[2].rows("doing") == {0: {"call": "publish"}}
    assert statuses[2].rows("stack") == {1: {"stack": "there"}}
    assert statuses[0].rows("doing") == {}
    for one in statuses:
        one.close()


class Silent:
    """As a store whose node is gone from the network."""

    def __init__(self):
        self.is_asked, self.over, self.was_left = threading.Event(), threading.Event(), True

    def set(self, *_):
        self.is_asked.set()
        self.was_left &= self.over.wait(120)

    check = set_timeout = set


def test_a_silent_store_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(rank_status, "LIMIT_S", 0.1)
    store = Silent()
    mine = RankStatus(store, 0, 2)
    mine.post("doing", {})
    assert store.is_asked.wait(120)
    mine.post("doing", {"failure": "it hangs"}, wait=True)
    assert mine.rows("doing") == {}
    assert store.was_left
    store.over.set()
    mine.close()


def test_a_store_that_is_gone_counts_as_empty():
    class Gone:
        def set(self, *_):
            raise dist.DistNetworkError("Connection reset")

        set_timeout = set

    mine = RankStatus(Gone(), 0, 2)
    mine.post("doing", {}, wait=True)
    assert mine.rows("doing") == {}
    mine.close()
