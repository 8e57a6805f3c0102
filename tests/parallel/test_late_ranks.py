"""A rank that waits for long in a call names the ranks that have not come, long before the deadline of the call."""

import time

import pytest
import torch.distributed as dist

from tests.processes import wait_until
from verl.parallel.collectives import Collectives, Peer

SLOW_S = 0.2


@pytest.fixture
def ranks():
    store = dist.HashStore()
    ranks = [Collectives(Peer(rank, 2, "", 0), store, None, 3600.0, SLOW_S) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def waits(record):
    return record.name == "verl.parallel.collectives" and "has not come" in record.getMessage()


def test_a_rank_that_has_not_come_is_named_once(ranks, caplog):
    for rank in ranks:
        with rank.doing("actor.update: results"):
            pass
    with ranks[0].doing("agreeing whether to stop"):
        wait_until(lambda: any(map(waits, caplog.records)))
        time.sleep(2 * SLOW_S)  # it reports again and again
    (record,) = [record for record in caplog.records if waits(record) and "Rank 0" in record.getMessage()]
    assert "Rank 0 is in agreeing whether to stop for" in record.getMessage()
    assert "rank 1 has not come (last seen in actor.update: results, " in record.getMessage()


def test_a_call_that_takes_long_on_all_ranks_names_none(ranks, caplog):
    with ranks[0].doing("actor.update"), ranks[1].doing("actor.update"):
        for reader in ranks:
            wait_until(lambda: reader._status.rows("stack"))
    assert not [record for record in caplog.records if waits(record)]
