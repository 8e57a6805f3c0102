"""Ranks that go wrong on purpose: `python -m tests.runtime.fault_ranks KIND`. Prints the error that a healthy rank gets."""

import os
import signal
import sys
import time

import psutil

from verl.errors import VerlError
from verl.parallel.collectives import Collectives, peer_of_environment


def main(kind):
    peer = peer_of_environment()
    limit_s = 4 if kind in ("hangs", "misses a rank") else 60
    try:
        comm = Collectives.start(peer, timeout_s=limit_s, start_timeout_s=limit_s + 2, call_timeout_s=limit_s)
        assert listening_at() <= {"127.0.0.1"}, listening_at()  # where the ranks meet
        with comm.doing("actor.update"):
            assert [p.decode() for p in comm.all_gather(f"hello {peer.rank}".encode() * (peer.rank + 1))] == [
                f"hello {r}" * (r + 1) for r in range(peer.world_size)
            ]
            assert comm.broadcast(b"from 1" if peer.rank == 1 else None, 1) == b"from 1"
            assert comm.all_gather(b"") == [b""] * peer.world_size
            assert comm.any(peer.rank == 1) is True
        if peer.rank == 1:
            with comm.doing("critic.update"):
                go_wrong(kind)
        with comm.doing("critic.update"):
            comm.all_gather(b"x")
        comm.close()
    except VerlError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(error.exit_code)


def listening_at():
    """The addresses of this process: the store of the rendezvous, and gloo."""
    process = psutil.Process()
    sockets = (getattr(process, "net_connections", None) or process.connections)("inet")
    return {connection.laddr.ip for connection in sockets if connection.status == psutil.CONN_LISTEN}


def go_wrong(kind):
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        time.sleep(60)
    if kind == "raises":
        raise ValueError("the loss is purple")


if __name__ == "__main__":
    main(sys.argv[1])
