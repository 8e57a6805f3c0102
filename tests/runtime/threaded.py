"""Ranks of a run as threads of this process."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

DEADLINE_S = 60


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
