"""Shared memory in /dev/shm, checked before Ray, NCCL and engines over several GPUs take parts of it.

The code of verl takes none: its own shared memory has no name (verl/parallel/segments.py).
"""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.errors import ConfigError
from verl.parallel.collectives import Collectives
from verl.parallel.memory import content_of
from verl.parallel.serialize import from_bytes, to_bytes

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
RAY_BYTES = 1 << 30  # batches of a step in Ray's object store; it moves batches that do not fit to the disk
NCCL_BYTES = 1 << 30  # of all GPUs of a machine; NCCL's documentation asks a container for as much
ENGINE_BYTES = 1 << 28  # the message queue between the workers of one vLLM engine: 10 messages of 24 MiB
_FIX = (
    "In a container start it with --shm-size=8g, or with the host's: -v /dev/shm:/dev/shm (Kubernetes: an emptyDir with "
    "medium: Memory)"
)

Card = tuple[str, int]  # of a process: the machine that it runs on, and the file system of its /dev/shm


def check_size(needs: Mapping[str, int]) -> None:
    """`needs` is user -> bytes on this machine. Raises ConfigError if nothing can be written. Warns of too little memory: the
    later error is a bus error or `unable to open shared memory object`."""
    if not needs:
        return
    users, num_bytes = " and ".join(needs), sum(needs.values())
    cause = f"{users} {'needs' if len(needs) == 1 else 'need'} shared memory"
    try:
        free = shutil.disk_usage(FOLDER).free
    except OSError as error:
        raise ConfigError(f"{cause}, and there is no {FOLDER} ({error.strerror}). {_FIX}.") from error
    if not os.access(FOLDER, os.W_OK):
        raise ConfigError(f"{cause}, and {FOLDER} cannot be written. Mount it with mode 1777.")
    if free < num_bytes:
        log.warning(
            "%s has %.0f MiB free, and %s may need %.0f: the run can fail later with a bus error or `unable to open shared "
            "memory object`. %s.",
            FOLDER, free / 2**20, users, num_bytes / 2**20, _FIX,
        )  # fmt: skip


def card() -> Card:
    """The Card of this process."""
    boot = content_of(Path("/proc/sys/kernel/random/boot_id")).strip()
    return boot, FOLDER.stat().st_dev if FOLDER.is_dir() else -1


def check_ranks(comm: Collectives, num_gpus_per_engine: int, on_gpu: bool) -> None:
    """A collective of all ranks: the first rank of each container checks its size, and rank 0 warns of ranks of one machine in
    containers that share none."""
    cards: list[Card] = [from_bytes(row) for row in comm.all_gather(to_bytes(card()))]
    here = [rank for rank, other in enumerate(cards) if other == cards[comm.rank]]
    if here[0] == comm.rank and on_gpu and len(here) > 1:
        engines = len(here) // num_gpus_per_engine if num_gpus_per_engine > 1 else 0
        check_size({"NCCL": NCCL_BYTES, **({"the rollout engine": engines * ENGINE_BYTES} if engines else {})})
    if comm.rank == 0 and (apart := ranks_apart(cards)):
        log.warning(
            "Ranks %s run on one machine, in containers with a /dev/shm of their own: they exchange data over the network. "
            "Start the containers with one shared memory: -v /dev/shm:/dev/shm, or --ipc=host.",
            " and ".join(map(str, apart)),
        )


def ranks_apart(cards: Sequence[Card]) -> list[int]:
    """A rank of each container on the first machine that has several; [] if none has."""
    machines: dict[str, dict[int, int]] = {}
    for rank, (machine, memory) in enumerate(cards):
        machines.setdefault(machine, {}).setdefault(memory, rank)
    return next((list(ranks.values()) for machine, ranks in machines.items() if machine and len(ranks) > 1), [])
