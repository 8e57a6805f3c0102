"""Ranks of a run as threads of this process."""

import contextlib
import queue
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

DEADLINE_S = 60
THREAD = threading.local()  # `rank`


def on_ranks(size, work):
    """`work(comm)` of each rank, side by side; `comm` has the methods of Collectives. The first error is raised."""
    meeting, rows = threading.Barrier(size, timeout=DEADLINE_S), [None] * size

    def exchanged(rank, payload):
        rows[rank] = payload
        meeting.wait()
        everything = list(rows)
        meeting.wait()
        return everything

    def run(rank):
        THREAD.rank = rank
        try:
            return work(
                SimpleNamespace(
                    rank=rank,
                    world_size=size,
                    all_gather=lambda payload: exchanged(rank, payload),
                    any=lambda flag: any(exchanged(rank, flag)),
                    broadcast=lambda payload, source: exchanged(rank, payload)[source],
                    doing=lambda call: contextlib.nullcontext(),
                )
            )
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class Broadcasts:
    """`new_group` and `broadcast` of torch.distributed between these threads. What is broadcast arrives when it is waited for.
    `received` counts the bytes of each rank, by the rank that sent them."""

    def __init__(self):
        self.received, self._queues = Counter(), defaultdict(queue.Queue)

    def new_group(self, ranks, timeout=None):
        return tuple(ranks)

    def broadcast(self, values, source, *, group, async_op):
        rank = THREAD.rank
        assert async_op
        assert rank in group
        for other in group if rank == source else ():
            self._queues[group, other].put(values.clone())

        def wait():
            arrived = self._queues[group, rank].get(timeout=DEADLINE_S)
            if rank != source:
                values.copy_(arrived)
                self.received[source, rank] += values.nbytes

        return SimpleNamespace(wait=wait)
