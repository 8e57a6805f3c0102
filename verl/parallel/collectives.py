"""Rendezvous of a run's processes and exchange of small results, with a deadline on every wait.

comm = Collectives.start(peer_of_environment(), timeout_s=600, start_timeout_s=300)
with comm.doing("actor.update"):
    parts = comm.all_gather(to_bytes(mine))     # in rank order
comm.close()

Each rank writes its call to the rendezvous store (RankStatus), and its stack when the call takes long. When a wait fails, the
error names the rank that is missing or behind, its call, since when, and its stack.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from verl.config import full_key
from verl.errors import ConfigError, DeadlineError, WorkerLostError, first_line
from verl.parallel.rank_status import RankStatus
from verl.parallel.stack_dump import Reporter, calls
from verl.parallel.traffic import TRAFFIC

log = logging.getLogger(__name__)

_POLL_S = 0.5
_CALL, _STACK = "call", "stack"  # topics of RankStatus
_LOOPBACK = ("127.0.0.1", "localhost")
_SLOW = 0.6  # after this fraction of a deadline a rank reports its stack


@dataclass(frozen=True)
class Peer:
    """This process among the processes of the run."""

    rank: int
    world_size: int
    address: str  # of the rendezvous; rank 0 (or the launcher) serves it
    port: int
    local_rank: int = 0  # among the processes of this node


def peer_of_environment(environment: Mapping[str, str] | None = None) -> Peer | None:
    """The Peer in RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK, as set by a launcher such as torchrun; None when
    this process was not started by one. Raises ConfigError when only a part is there or a value makes no sense."""
    env = os.environ if environment is None else environment
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not env.get(n)]
    if missing:
        raise ConfigError(
            f"The environment has a part of what a launcher sets, but not {', '.join(missing)}. Start the ranks with "
            "torchrun, or unset RANK and WORLD_SIZE for a single process."
        )
    try:
        rank, size, port = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["MASTER_PORT"])
        local = int(env.get("LOCAL_RANK", "0"))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}.") from error
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is not one of the {size} ranks that WORLD_SIZE announces.")
    return Peer(rank, size, env["MASTER_ADDR"], port, local)


# above the ports that Ray gives its workers, below the ports that Linux gives to outgoing connections: the caller
# binds the port a moment later, and in between neither may take it
_PORTS = range(20000, 32768)


def free_port() -> int:
    """A port that no process listens on now. Raises ConfigError when a hundred ports are taken."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(
        f"No free port was found between {_PORTS.start} and {_PORTS.stop}. List the processes that hold them: ss -ltnp."
    )


class Collectives:
    """Exchange of results between the ranks of a run, separate from the engines' own collectives."""

    def __init__(self, peer: Peer, store: dist.Store, group: dist.ProcessGroup, timeout_s: float, slow_s: float):
        self.rank = peer.rank
        self.world_size = peer.world_size
        self.local_rank = peer.local_rank
        self.timeout_s = timeout_s
        self._status = RankStatus(store, peer.rank, peer.world_size)
        self._group = group
        self._number = 0
        self._call = "starting"
        self._named = 0  # the newest call with named late ranks
        self._reporter = Reporter(slow_s, self._report)

    @classmethod
    def start(
        cls, peer: Peer, *, device_type: str = "cpu", timeout_s: float, start_timeout_s: float, call_timeout_s: float
    ) -> Collectives:
        """Meet the other ranks and make the default process group (gloo, and on CUDA also NCCL).

        `timeout_s` bounds a collective of an engine, `call_timeout_s` the wait for other ranks between calls, and
        `start_timeout_s` the meeting. Raises ConfigError when the port is taken, DeadlineError naming the ranks that did
        not come.
        """
        store = _meet(peer, start_timeout_s)
        backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("verl", store),
                rank=peer.rank,
                world_size=peer.world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=call_timeout_s))
        except RuntimeError as error:
            raise WorkerLostError(
                f"Rank {peer.rank} could not connect to the other ranks ({first_line(error)}). Look at the first rank "
                "that failed, and check that the nodes reach each other (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
            ) from error
        assert group is not None
        return cls(peer, store, group, call_timeout_s, _SLOW * min(timeout_s, call_timeout_s))

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payload of every rank, in rank order. Raises WorkerLostError or DeadlineError."""
        with self._naming("results"), TRAFFIC.exchanging(len(payload)):
            sizes = torch.zeros(self.world_size, dtype=torch.int64)
            dist.all_gather(list(sizes.split(1)), torch.tensor([len(payload)]), group=self._group)
            width = int(sizes.max())
            if width == 0:
                return [b""] * self.world_size
            mine = torch.zeros(width, dtype=torch.uint8)
            if payload:
                mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            rows = torch.empty(self.world_size, width, dtype=torch.uint8)
            dist.all_gather(list(rows.unbind()), mine, group=self._group)
        return [rows[r, : int(sizes[r])].numpy().tobytes() for r in range(self.world_size)]

    def broadcast(self, payload: bytes | None, source: int) -> bytes:
        """Send the payload of rank `source` to all."""
        with self._naming(f"a message of rank {source}"), TRAFFIC.exchanging(len(payload or b"")):
            size = torch.tensor([len(payload) if payload is not None else 0])
            dist.broadcast(size, source, group=self._group)
            data = torch.zeros(int(size), dtype=torch.uint8)
            if payload:
                data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            if len(data):
                dist.broadcast(data, source, group=self._group)
        return data.numpy().tobytes()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        with self._naming("the other ranks"):
            number = torch.tensor([int(flag)])
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return bool(number)

    def barrier(self, what: str) -> None:
        """Wait until every rank is here; `what` names the awaited event in the error."""
        with self.doing(what):
            self.any(False)

    @contextlib.contextmanager
    def doing(self, call: str) -> Iterator[None]:
        """Report `call` as this rank's status; a communication failure inside becomes an error that names the rank at fault."""
        self._number += 1
        self._call = call
        self._post(call, "")
        try:
            with self._naming("the other ranks"), calls(call):
                yield
        except BaseException as error:
            self._post(call, f"{type(error).__name__}: {first_line(error)}")
            raise

    def close(self) -> None:
        """Leave the process group; does not wait for other ranks."""
        self._reporter.close()
        self._status.close()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # without its peers a group may not say goodbye
                dist.destroy_process_group()

    def _post(self, call: str, failure: str) -> None:
        row = {"number": self._number, "call": call, "time": time.time(), "failure": failure}
        self._status.post(_CALL, row, wait=bool(failure))

    def _report(self, stack: str) -> None:
        """This rank has been in a call for long: its stack for the other ranks, and once the ranks that it may wait for."""
        number = self._number
        self._status.post(_STACK, {"number": number, "stack": stack})
        if self._named < number:
            self._named = number
            rows = self._rows()
            late = {r: row for r, row in rows.items() if int(str(row["number"])) < number}
            names = _seen(late, "has not come", with_stacks=True) or (
                "" if rows else "the rendezvous, which rank 0 may serve, is silent"
            )
            if names:
                log.warning(
                    "Rank %d is in %s: %s. It continues when they come; look at their logs.", self.rank, stack, names
                )

    def _rows(self) -> dict[int, dict[str, object]]:
        """The last rows of the other ranks; empty when the store is gone."""
        rows, stacks = self._status.rows(_CALL), self._status.rows(_STACK)
        for rank, row in rows.items():
            if rank in stacks and stacks[rank]["number"] == row["number"]:  # else of a call that has ended since
                row["stack"] = stacks[rank]["stack"]
        return rows

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not is_communication_failure(error):
                raise
            elapsed_s = time.monotonic() - started
            raise self._explained(error, what, elapsed_s) from error

    def _explained(self, error: BaseException, what: str, elapsed_s: float) -> DeadlineError | WorkerLostError:
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        time.sleep(_POLL_S)  # a rank that raises writes its reason while its connections are being closed
        rows = self._rows()
        place = f"Rank {self.rank} waited {elapsed_s:.0f} s for {what} in {self._call}"
        blamed = self._blame(rows, timed_out)
        if timed_out:
            return DeadlineError(f"{place}, and gave up. {blamed}")
        return WorkerLostError(f"{place}, and the connection broke. {blamed}")

    def _blame(self, rows: dict[int, dict[str, object]], timed_out: bool) -> str:
        late = (DeadlineError.__name__, WorkerLostError.__name__)  # of ranks that failed because another rank did
        failed = {r: row for r, row in rows.items() if row["failure"] and not str(row["failure"]).startswith(late)}
        if failed:
            rank, row = next(iter(failed.items()))
            return f"Rank {rank} failed in {row['call']}: {row['failure']}"
        behind = {r: row for r, row in rows.items() if int(str(row["number"])) < self._number} or {
            r: row for r, row in rows.items() if not row["failure"]
        }
        if not rows:
            return "The rendezvous is gone or silent too: look at the log of rank 0 or of the launcher, and at the network."
        state = "hangs or is slow" if timed_out else "has ended or cannot be reached"
        names = _seen(behind, state, with_stacks=timed_out)
        fix = f"Look at its log; raise trainer.call_timeout_s or {full_key('nccl_timeout')} if it is only slow."
        return f"{names or 'No rank is behind'}. {fix}"


def _seen(rows: Mapping[int, Mapping[str, object]], state: str, *, with_stacks: bool = False) -> str:
    """The ranks of `rows`, each with `state` and its last sign of life."""
    return "; ".join(
        f"rank {rank} {state} (last seen in {row['call']}, {time.time() - float(str(row['time'])):.0f} s ago"
        f"{'; its stack: ' + str(row['stack']) if with_stacks and 'stack' in row else ''})"
        for rank, row in sorted(rows.items())
    )


def is_communication_failure(error: BaseException) -> bool:
    """Whether a RuntimeError comes from the process group (a dead or a late peer) rather than from a computation."""
    if isinstance(error, (dist.DistError, ConnectionError)):
        return True
    text = str(error)
    signs = (
        "Connection closed by peer",
        "Connection reset",
        "gloo",
        "NCCL",
        "Timed out waiting",
        "Socket",
        "Broken pipe",
    )
    return any(sign in text for sign in signs)


def _meet(peer: Peer, timeout_s: float) -> dist.Store:
    """The store of the rendezvous, after every rank has signed in."""
    serves = peer.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    started = time.monotonic()
    try:
        # the wait for other ranks is ours, so that the error can name them
        server = _store(peer, serves, timeout_s)
    except (RuntimeError, OSError) as error:
        raise _no_store(peer, error, serves, time.monotonic() - started) from error
    store = dist.PrefixStore(f"verl-status-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", server)
    missing = list(range(peer.world_size))
    try:
        store.set(f"here/{peer.rank}", socket.gethostname())
        while missing := [rank for rank in missing if not store.check([f"here/{rank}"])]:
            if time.monotonic() - started > timeout_s:
                break
            time.sleep(0.05)
    except RuntimeError:  # rank 0 serves the store; when it has given up waiting, the store is gone
        log.debug("The rendezvous at %s:%s ended while rank %s waited.", peer.address, peer.port, peer.rank)
    if missing:
        raise DeadlineError(
            f"Rank {peer.rank} waited {time.monotonic() - started:.0f} s at {peer.address}:{peer.port} for rank "
            f"{', '.join(map(str, missing))} of {peer.world_size}. Start all ranks, with the same MASTER_ADDR, MASTER_PORT "
            "and WORLD_SIZE."
        )
    return store


def _store(peer: Peer, serves: bool, timeout_s: float) -> dist.TCPStore:
    """The rendezvous store. If all ranks are on one node, neither it nor gloo listens to the network; torch's store would."""
    listener: socket.socket | None = None
    if (interface := _interface_towards(peer.address, peer.port)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if peer.address in _LOOPBACK:
        listener = socket.create_server((peer.address, peer.port), backlog=2048) if serves else None
    try:
        store = dist.TCPStore(
            peer.address,
            peer.port,
            None,
            serves,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.fileno(),
        )
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    if listener is not None:
        listener.detach()  # the store closes it
    return store


def _interface_towards(address: str, port: int) -> str | None:
    """The network interface on the way from this machine to `address`. Gloo by itself takes the interface of the host's name:
    on many systems that is the loopback."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # nothing is sent: the system only chooses an address
            source = probe.getsockname()[0]
    except OSError:
        return None
    names = (n for n, addrs in psutil.net_if_addrs().items() if any(a.address.split("%")[0] == source for a in addrs))
    return next(names, None)


def _no_store(peer: Peer, error: BaseException, serves: bool, elapsed_s: float) -> ConfigError | DeadlineError:
    place = f"{peer.address}:{peer.port}"
    if serves and (getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)):
        return ConfigError(
            f"Port {peer.port}, where the ranks should meet, is in use by another program on this machine. Choose a free "
            "one with MASTER_PORT (torchrun: --master-port)."
        )
    if serves:
        return ConfigError(
            f"Rank 0 cannot serve the rendezvous at {place} ({first_line(error)}). Set MASTER_ADDR to an address of this "
            "machine and MASTER_PORT to a free port."
        )
    return DeadlineError(
        f"Rank {peer.rank} found no rendezvous at {place} within {elapsed_s:.0f} s: rank 0 does not run there. Start it, or "
        "correct MASTER_ADDR and MASTER_PORT."
    )
