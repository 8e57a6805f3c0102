"""The server: the routes and uvicorn in this process, and the workers."""

import asyncio
import contextlib
import logging
import math
import socket
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from verl.parallel.connections import PatientProtocol
from verl.tinker.app import application
from verl.tinker.bases import BaseEntry, Bases
from verl.tinker.checkpoints import Checkpoints
from verl.tinker.imported import import_adapters
from verl.tinker.journal import RequestJournal
from verl.tinker.service import Service
from verl.tinker.tenants import Tenants

log = logging.getLogger(__name__)

_END_S = 2  # for requests that are answered when the server ends


def uvicorn_config(app: Starlette, certificate: tuple[str, str] | None = None) -> uvicorn.Config:
    """The settings of uvicorn, with TLS if there are files of a certificate and its key."""
    cert, key = certificate or (None, None)
    return uvicorn.Config(
        app, http=PatientProtocol, log_level="warning", access_log=False, timeout_graceful_shutdown=_END_S,
        ssl_certfile=cert, ssl_keyfile=key,
    )  # fmt: skip


class ServiceServer(uvicorn.Server):
    """uvicorn's server of a service. When it ends, clients that wait for a result get the answer to ask again; uvicorn would
    cancel their requests, with a traceback for each."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for future in self._service.futures.values():
            future.wake()
        await super().shutdown(sockets)


def serve_tinker(
    entries: Sequence[BaseEntry],
    listening: socket.socket,
    folder: Path,
    tenants: Tenants,
    say: Callable[[str], None],
    certificate: tuple[str, str] | None = None,
    most_bytes: float = math.inf,
    adapters: Path | None = None,
) -> None:
    """Serve the base models of `entries` on `listening` until the process is interrupted, with at most `most_bytes` of them in
    memory. `say` gets the address. `adapters` is a folder of adapters to import. `certificate`, files of a certificate and its
    key, turns TLS on. When a worker is lost, the service starts again under its clients, trainer.max_restarts times."""
    paths = [entry.config.actor_rollout_ref.model.path for entry in entries]

    async def run(bases: Bases, is_first: bool) -> Exception | None:
        checkpoints, journal = Checkpoints(folder, paths[0]), RequestJournal(folder, *paths)
        if adapters is not None:
            import_adapters(adapters, checkpoints, bases.bases)
        service = Service(bases, checkpoints, journal, tenants)
        server = ServiceServer(uvicorn_config(application(service), certificate), service)
        service.on_lost = lambda: setattr(server, "should_exit", True)
        host, port = listening.getsockname()[:2]
        if is_first:
            say(f"http{'s' if certificate else ''}://{f'[{host}]' if ':' in host else host}:{port}")
        await server.serve(sockets=[listening.dup()])  # it closes the copy
        with contextlib.suppress(sqlite3.Error):
            service.close()  # the application does so unless its start has failed
        return service.lost

    RequestJournal(folder, *paths).close()  # a folder that is in use is refused before the model is loaded
    max_restarts = entries[0].config.trainer.max_restarts
    for life in range(max_restarts + 1):
        with Bases.opened(entries, most_bytes) as bases:
            lost = asyncio.run(run(bases, life == 0))
        if lost is None:
            return
        if life == max_restarts:
            raise lost
        log.error("%s The service starts again, and continues under its clients.", lost, exc_info=lost)
