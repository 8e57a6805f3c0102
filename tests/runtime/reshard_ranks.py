"""`python -m tests.runtime.reshard_ranks jobs.json`: training runs as in several_runs.py, watched during weight syncs.
A job's "fault" injects an error into a weight sync.

Each rank writes its observations of a run to wire-RANK.json in the run's folder: {"plan": ..., "updates": [...]}.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.ranks import scorers_of, take_port
from verl.config import load_config
from verl.engines.base import TrainedEngine
from verl.errors import VerlError
from verl.parallel.traffic import Traffic
from verl.reshard import transport, update
from verl.roles.rollout import RolloutWorker
from verl.rollout.native.engine import NativeRollout
from verl.rollout.rollout_model import Replica
from verl.run.host import train
from verl.runtime.weight_sync import RankWeightSync

RANK = int(os.environ.get("RANK", "0"))
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
NORM = "model.norm.weight"


class Watched(update.PlannedUpdate):
    """An update that records the bytes it sent, by its own count and by TRAFFIC."""

    sent: list = []
    goes_on = False

    def __call__(self):
        Watched.goes_on = True
        traffic, before = transport.TRAFFIC, self.transport.num_sent_bytes
        transport.TRAFFIC = Traffic()
        try:
            super().__call__()
        finally:
            Watched.goes_on = False
            exchanged = transport.TRAFFIC.take()
            transport.TRAFFIC = traffic
            row = {"sent": self.transport.num_sent_bytes - before, "traffic": exchanged.num_bytes}
            self.sent.append({**row, "seconds": exchanged.seconds, "peak": self.transport.peak_staging_bytes})


def is_time(rank=1):
    """On one rank, in the second update: the one after the first step."""
    return RANK == rank and len(Watched.sent) == 1 and Watched.goes_on


FAULTS = {}


def fault_of(owner, name):
    """Makes `call(original, *arguments)` the fault of its name, which stands for a method of `owner`."""

    def as_fault(call):
        FAULTS[call.__name__] = owner, name, call
        return call

    return as_fault


def stand_in(patch, owner, name, call):
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: call(original, *args, **kwargs))


@fault_of(transport.PeerToPeer, "check_held")
def flips_a_bit(check_held, self, target):
    """One bit of what arrived is another."""
    if is_time():
        came = next(move for move in reversed(self._verified) if not move.is_kept)
        self._at(target, came, is_source=False).view(torch.int64)[(0,) * len(came.slice)] ^= 1
    check_held(self, target)


@fault_of(transport.PeerToPeer, "_place")
def loses_half_a_bucket(place, self, move):
    """The second half of what rank 0 writes for the engine goes elsewhere."""
    view, moves = place(self, move), list(self._places)
    is_lost = is_time(0) and moves.index(move) >= len(moves) // 2
    return torch.empty_like(view) if is_lost else view


@fault_of(transport.PeerToPeer, "check_held")
def swaps_two(check_held, self, target):
    """The engine takes k_proj for v_proj and the other way round."""
    if is_time():
        k, v = target[K_PROJ], target[K_PROJ.replace("k_proj", "v_proj")]
        was = k.clone()
        k.copy_(v)
        v.copy_(was)
    check_held(self, target)


@fault_of(transport.PeerToPeer, "_put")
def dies_in_an_update(put, self, moves, held, target):
    """The process that has the engine is killed when it has written a part of the new weights."""
    put(self, moves, held, target)
    if is_time():
        os.kill(os.getpid(), signal.SIGKILL)


@fault_of(NativeRollout, "publish")
def keeps_its_version(publish, self, version):
    """The engine takes the new weights for the old ones."""
    publish(self, version - 1 if RANK == 1 and version == 1 else version)


@fault_of(RolloutWorker, "set_weights")
def generates_with_others(set_weights, self, version, weights=None):
    """The update is verified, and then the engine multiplies a norm."""
    set_weights(self, version, weights)
    if RANK == 1 and version == 1:
        with torch.no_grad():
            self.replica.parts()[NORM].mul_(1.5)


@fault_of(Replica, "parts")
def loses_a_tensor(parts, self):
    """The engine has no k_proj any more."""
    return {name: part for name, part in parts(self).items() if not (is_time() and name == K_PROJ)}


@fault_of(TrainedEngine, "weight_layout")
def hands_on_too_little(layout_of, engine):
    """The trained model does not know its last norm."""
    layout = layout_of(engine)
    del layout.shapes[NORM]
    return layout


def watch(patch, fault):
    Watched.sent.clear()
    instances = []
    stand_in(patch, RankWeightSync, "connect", lambda connect, *args: instances.append(args[0]) or connect(*args))
    patch.setattr(update, "PlannedUpdate", Watched)
    if fault is not None:
        stand_in(patch, *FAULTS[fault])
    return instances


def main(file):
    for number, job in enumerate(json.loads(Path(file).read_text())):
        take_port(f"{file}.port{number}")
        error = ""
        with scorers_of(job), pytest.MonkeyPatch.context() as patch:
            watched = watch(patch, job.get("fault"))
            try:
                train(load_config(job["overrides"]))
            except VerlError as raised:
                error = f"{type(raised).__name__}: {raised}"
                if not job.get("fault"):
                    raise
        plan = watched[0].update.plan if watched and watched[0].update is not None else None
        sent = None if plan is None else plan.sent_bytes.get(RANK, 0)
        folder = next(o for o in job["overrides"] if o.startswith("trainer.default_local_dir=")).split("=", 1)[1]
        wire = {"plan": sent, "updates": Watched.sent, "error": error}
        Path(folder, f"wire-{RANK}.json").write_text(json.dumps(wire))


if __name__ == "__main__":
    main(sys.argv[1])
