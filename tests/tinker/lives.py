"""A service in a process of its own that is killed and started again, under a client that notices nothing.

One process loads the model once. It forks a life of the service whenever the last one has died, so a life begins at once.
"""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.forked import fork_instead
from verl.page.launch import listen

MOMENTS = ("before", "after")  # the journal's commit
KEYS = ("tml-test", "tml-ada", "tml-bob")
DEADLY = 30  # a token: computing it ends the process


class Lives:
    """The address of the service, and `kills`, the number of lives that ended."""

    def __init__(self, url, process):
        self.url, self.kills, self.pid = url, 0, 0
        self._process, self._born = process, threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self):
        for line in self._process.stdout:
            word, number = line.split()
            if word == "born":
                self.pid = int(number)
                self._born.set()
            else:
                self.kills += 1

    def wait(self):
        assert self._born.wait(120), self._process.poll()

    def kill(self):
        """End the present life at once."""
        with suppress(ProcessLookupError):  # it has ended itself
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def lives(model, folder, deaths=(), most_deaths=1000, *further):
    """A service of `model`, named base, and of `further` models, named by their folders, in `folder`, for the tenants of
    KEYS. `deaths` has, for each life that ends itself, the commit of the journal at which it does, and one of MOMENTS. A
    request is given up after `most_deaths`: kills from outside are not its fault."""
    listening = listen()
    plan = ",".join(f"{number}{moment}" for number, moment in deaths)
    models = ",".join(map(str, [model, *further]))
    arguments = [models, folder, listening.fileno(), plan, most_deaths]
    command = [sys.executable, "-m", "tests.tinker.lives", *map(str, arguments)]
    process = fork_instead(subprocess.Popen)(
        command, env=os.environ, pass_fds=(listening.fileno(),), stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    running = Lives(f"http://127.0.0.1:{listening.getsockname()[1]}", process)
    try:
        running.wait()
        yield running
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(120)
        listening.close()


def main():
    """Fork lives until killed, and report births and deaths."""
    _, models, folder, descriptor, plan, most_deaths = sys.argv
    import socket

    import torch

    from verl.cli.serve import serving_config
    from verl.tinker import computer, in_work
    from verl.tinker.workbench import Workbench

    class MortalWorkbench(Workbench):
        def forward_backward(self, adapter, request):
            die_of(token for datum in request.data for token in datum.tokens)
            return super().forward_backward(adapter, request)

        def advance(self, lane, tokens):
            die_of(token for request in lane._requests.values() for token in request.request.tokens)
            return super().advance(lane, tokens)

    torch.set_num_threads(1)
    computer.STATE_S = computer.STATE_SHARE = 0.05
    in_work.MOST_DEATHS = int(most_deaths)
    settings = ["actor_rollout_ref.actor.fsdp_config.dtype=float32"]
    benches = {path: MortalWorkbench(serving_config(path, settings, rank=8)) for path in models.split(",")}
    listening = socket.socket(fileno=int(descriptor))
    deaths = [entry for entry in plan.split(",") if entry]
    while True:
        death = deaths.pop(0) if deaths else ""
        child = os.fork()
        if not child:
            live(benches, Path(folder), listening, death)
        print("born", child, flush=True)
        os.waitpid(child, 0)
        print("died", child, flush=True)


def die_of(tokens):
    if DEADLY in tokens:
        os.kill(os.getpid(), signal.SIGKILL)


def live(benches, folder, listening, death):
    """One life that ends itself at the commit `death` of its journal."""
    import asyncio

    import uvicorn

    from tests.tinker.served import base_of
    from verl.tinker.app import application
    from verl.tinker.bases import Bases
    from verl.tinker.checkpoints import Checkpoints
    from verl.tinker.journal import RequestJournal
    from verl.tinker.service import Service
    from verl.tinker.tenants import Tenant, Tenants

    tenants = {hashlib.sha256(key.encode()).hexdigest(): Tenant(key) for key in KEYS}
    names = {path: [path, "base" if number == 0 else Path(path).name] for number, path in enumerate(benches)}

    class Mortal(RequestJournal):
        count = 0

        def flush(self):
            self.count += bool(self._pending)
            ends = death and self.count == int(death.rstrip("abefort"))
            if ends and death.endswith("before"):
                os.kill(os.getpid(), signal.SIGKILL)
            super().flush()
            if ends:
                os.kill(os.getpid(), signal.SIGKILL)

    async def serve():
        held = Bases([base_of(bench, names[path]) for path, bench in benches.items()])
        checkpoints = Checkpoints(folder, held.bases[0].path)
        service = Service(held, checkpoints, Mortal(folder, *benches), Tenants(tenants))
        await uvicorn.Server(uvicorn.Config(application(service), log_level="error")).serve(sockets=[listening])

    asyncio.run(serve())
    os._exit(0)
