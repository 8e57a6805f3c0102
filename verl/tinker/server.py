"""The server: the workbench, the routes and uvicorn, in one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from verl.config import PPOConfig
from verl.tinker.app import application
from verl.tinker.checkpoints import Checkpoints
from verl.tinker.service import Service
from verl.tinker.workbench import Workbench

_END_S = 2  # for requests that wait for a result when the server ends


def serve_tinker(
    config: PPOConfig,
    listening: socket.socket,
    folder: Path,
    names: list[str],
    key_hashes: frozenset[str],
    say: Callable[[str], None],
) -> None:
    """Serve the model of `config` on `listening` until the process is interrupted. `names` are further names of the model;
    `say` gets the address."""
    path = config.actor_rollout_ref.model.path
    names = list(dict.fromkeys([path, Path(path).name, *names]))
    bench = Workbench(config)
    checkpoints = Checkpoints(folder, path, bench.engine.device)

    async def run() -> None:
        service = Service(bench, checkpoints, names)
        server = uvicorn.Server(uvicorn.Config(application(service, key_hashes), log_level="warning", access_log=False))
        host, port = listening.getsockname()[:2]
        say(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve(sockets=[listening])

    asyncio.run(run())
