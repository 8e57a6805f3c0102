"""A service in this process on a tiny model, and the official SDK as its client."""

import asyncio
import random
import threading
from contextlib import contextmanager, nullcontext

import tinker

from tests.processes import wait_until
from verl.page.launch import listen
from verl.tinker.app import application
from verl.tinker.bases import BaseModel, Bases
from verl.tinker.checkpoints import Checkpoints
from verl.tinker.journal import RequestJournal
from verl.tinker.server import ServiceServer, uvicorn_config
from verl.tinker.service import Service
from verl.tinker.worker import Bench, BenchWorker


class Served:
    """A running service: its address, its state, and a client of the SDK."""

    def __init__(self, url, server, service, faults):
        self.url, self.server, self.service, self.faults, self._clients = url, server, service, faults, []

    def client(self, key="tml-test"):
        self._clients.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self._clients[-1]

    def end(self):
        """Let the server end, as a signal does."""
        self.server.should_exit = True

    def close(self):
        """End the sessions of the clients: the SDK would call, and warn, until the process ends."""
        for client in self._clients:
            for holder in filter(None, (client._session_holder, client._rest_holder)):
                holder.close()

    def trainer(self, rank=4, seed=1, **settings):
        name = self.service.bases.names[0]
        return self.client().create_lora_training_client(base_model=name, rank=rank, seed=seed, **settings).result()

    def tensors(self, trainer):
        """The weights of a training client's model."""
        return self.service.bases.bench().training.adapters[trainer.model_id].weights.tensors


def base_of(bench, names, training=None, *samplers, **settings):
    """A base model that is `bench` in this process, unless other workers are named."""
    training = training or BenchWorker(bench)
    workers = Bench(training, samplers or (training,), training.facts(), bench.tokenizer, is_apart=bool(samplers))
    return BaseModel(names[0], list(names), workers.facts, bench.tokenizer, lambda: nullcontext(workers), **settings)


def only(bench, names, *apart):
    """The base models of a service that has one."""
    bases = Bases([base_of(bench, names, *apart)])
    bases.num_samplers = len(apart[1:])
    return bases


class Faults:
    """Answers a share of the requests with an error, before or after they reached the service."""

    def __init__(self, app):
        self.app, self.share, self.count = app, 0.0, 0
        self._random = random.Random(0)

    async def __call__(self, scope, receive, send):
        path = scope.get("path", "")
        retried = path.endswith(("forward_backward", "optim_step", "asample", "retrieve_future"))
        if not retried or self._random.random() >= self.share:
            return await self.app(scope, receive, send)
        self.count += 1
        if self._random.random() < 0.5:  # the service does it, and its answer is lost
            await self.app(scope, receive, self._drop)
        from starlette.responses import JSONResponse

        status = self._random.choice([408, 429, 500])
        headers = {"retry-after-ms": "10"}
        await JSONResponse({"detail": "injected"}, status, headers=headers)(scope, receive, send)

    async def _drop(self, message):
        pass


@contextmanager
def running(bench, folder, tenants=None, certificate=None, apart=(), bases=None):
    """A service of `bench` on a free port of this machine, with TLS where there are files of a certificate and its key. The
    workers `apart` compute in its place, or `bases` are served."""
    path = str(bench.engine._trained.base)
    listening, ready, box = listen(), threading.Event(), {}

    async def serve():
        held = bases or only(bench, [path, "base"], *apart)
        journal = RequestJournal(folder, *(base.path for base in held.bases))
        service = Service(held, Checkpoints(folder, path), journal, tenants)
        faults = Faults(application(service))
        server = ServiceServer(uvicorn_config(faults, certificate), service)
        scheme = "http" if certificate is None else "https"
        box["served"] = Served(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", server, service, faults)
        ready.set()
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(120)
        wait_until(lambda: box["served"].server.started)
        yield box["served"]
    finally:
        if "served" in box:
            box["served"].close()
            box["served"].end()
        thread.join(120)
