"""`python -m tests.controller.reshard_ranks jobs.json`: training runs like those of several_runs.py, watched while new weights
travel, and with something going wrong on the way where a job's "fault" says so.

Each rank writes what it saw of a run to the file wire-RANK.json in the run's folder: {"plan": ..., "updates": [...]}.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.controller.ranks import take_port
from verl.config import load_config
from verl.controller import host
from verl.errors import VerlError
from verl.parallel.traffic import Traffic
from verl.reshard import transport, update
from verl.rollout.replica import Replica
from verl.trainer.run import train

RANK = int(os.environ.get("RANK", "0"))
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"


class Watched(update.PlannedUpdate):
    """An update that notes what it sent, by the count of messages and by TRAFFIC."""

    seen: list = []

    def __call__(self):
        traffic, wire = transport.TRAFFIC, Wire()
        transport.TRAFFIC = Traffic()
        dist.batch_isend_irecv = wire
        try:
            super().__call__()
        finally:
            exchanged = transport.TRAFFIC.take()
            transport.TRAFFIC, dist.batch_isend_irecv = traffic, wire.send
            row = {"sent": wire.num_bytes, "traffic": exchanged.num_bytes, "seconds": exchanged.seconds}
            self.seen.append({**row, "peak": self.transport.peak_staging_bytes})


class Wire:
    """Counts the bytes that leave this rank, besides digests."""

    def __init__(self):
        self.num_bytes, self.send = 0, dist.batch_isend_irecv

    def __call__(self, ops):
        self.num_bytes += sum(op.tensor.nbytes for op in ops if op.op is dist.isend and op.tensor.dtype != torch.uint8)
        return self.send(ops)


def flips_a_bit(patch):
    """In the second update, one bit of what rank 1 got is another."""
    finish, updates = transport.PeerToPeer._finish, Watched.seen

    def faulty(self, flight, wanted):
        finish(self, flight, wanted)
        if RANK == 1 and len(updates) == 1 and flight.receives:
            move, _ = flight.receives[-1]
            self._at(wanted, move, is_source=False).view(torch.int64)[(0,) * len(move.box)] ^= 1

    patch.setattr(transport.PeerToPeer, "_finish", faulty)


def loses_a_tensor(patch):
    """In the second update, the engine of rank 1 has no k_proj any more."""
    parts = Replica.parts

    def faulty(self):
        lost = RANK == 1 and len(Watched.seen) == 1
        return {name: part for name, part in parts(self).items() if not (lost and name == K_PROJ)}

    patch.setattr(Replica, "parts", faulty)


def hands_on_too_little(patch):
    """The trained model does not know its last norm."""
    facts = update._model_facts

    def faulty(engine):
        found = facts(engine)
        del found["shapes"][NORM]
        return found

    patch.setattr(update, "_model_facts", faulty)


def watch(patch, fault):
    Watched.seen.clear()
    hosts = []
    planned = host.Host._plan

    def plan(self):
        hosts.append(self)
        return planned(self)

    patch.setattr(host.Host, "_plan", plan)
    patch.setattr(update, "PlannedUpdate", Watched)
    if fault is not None:
        {f.__name__: f for f in (flips_a_bit, loses_a_tensor, hands_on_too_little)}[fault](patch)
    return hosts


def main(file):
    for number, job in enumerate(json.loads(Path(file).read_text())):
        take_port(f"{file}.port{number}")
        error = ""
        with pytest.MonkeyPatch.context() as patch:
            hosts = watch(patch, job.get("fault"))
            try:
                train(load_config(job["overrides"]))
            except VerlError as found:
                error = f"{type(found).__name__}: {found}"
                if not job.get("fault"):
                    raise
        plan = hosts[0].update.plan if hosts and hosts[0].update is not None else None
        sent = None if plan is None else plan.sent_bytes.get(RANK, 0)
        folder = next(o for o in job["overrides"] if o.startswith("trainer.default_local_dir=")).split("=", 1)[1]
        found = {"plan": sent, "updates": Watched.seen, "error": error}
        Path(folder, f"wire-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
