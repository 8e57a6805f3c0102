"""Waits of small requests at the training service while one client is greedy.

    python -m benchmarks.service_load --model work/models/SmolLM2-135M-Instruct --seconds 120

Each client is a tenant. One of them asks for 256 samples of 900 tokens, again and again. The others sample 2 tokens after 32,
and pause. Seconds count from the request to its result. `--quiet` leaves the greedy client out.
"""

import argparse
import asyncio
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np

_PATIENCE_S = 600.0


class Client:
    """A tenant that samples from the base model. `waits` has the seconds of its requests."""

    def __init__(self, http: httpx.AsyncClient, key: str, model: str):
        self.http, self.key, self.model, self.waits = http, key, model, list[float]()
        self._number = 0

    async def _post(self, route: str, body: dict[str, object]) -> httpx.Response:
        return await self.http.post(f"/api/v1/{route}", json=body, headers={"x-api-key": self.key})

    async def open(self) -> None:
        opened = await self._post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})
        session = opened.json()["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": self.model}
        self._sampler = (await self._post("create_sampling_session", body)).json()["sampling_session_id"]

    async def sample(self, num_samples: int, max_tokens: int) -> None:
        """Wait for one request."""
        self._number += 1
        body = {
            "sampling_session_id": self._sampler, "seq_id": self._number, "num_samples": num_samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(100, 132))}]},
            "sampling_params": {"max_tokens": max_tokens, "stop": [], "temperature": 1.0, "seed": self._number},
        }  # fmt: skip
        began = time.perf_counter()
        answer = await self._post("asample", body)
        answer.raise_for_status()
        named = {"request_id": answer.json()["request_id"]}
        while (result := await self._post("retrieve_future", named)).status_code == 408:
            pass
        result.raise_for_status()
        assert not result.content.startswith(b'{"error"'), result.text
        self.waits.append(time.perf_counter() - began)

    async def repeat(self, until: float, pause_s: float, num_samples: int, max_tokens: int) -> None:
        while time.perf_counter() < until:
            await self.sample(num_samples, max_tokens)
            await asyncio.sleep(pause_s)


async def load(url: str, keys: Sequence[str], model: str, options: argparse.Namespace) -> list[Client]:
    """The clients after `seconds`; the first is greedy."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits) as http:
        clients = [Client(http, key, model) for key in keys]
        for client in clients:
            await client.open()
        await clients[1].sample(1, 2)  # the first request compiles and packs
        until, tasks = time.perf_counter() + options.seconds, []
        if not options.quiet:
            tasks.append(asyncio.create_task(clients[0].repeat(until, 0.0, options.samples, options.tokens)))
            await asyncio.sleep(1.0)
        small = [client.repeat(until, options.pause, 1, 2) for client in clients[1:]]
        await asyncio.gather(*small)
        for task in tasks:  # its last request may take long
            task.cancel()
        return clients


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two small requests of a client")
    parser.add_argument("--samples", type=int, default=256, help="of a greedy request")
    parser.add_argument("--tokens", type=int, default=900, help="of a greedy sample")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("settings", nargs="*", help="of verl serve tinker")
    options = parser.parse_args(argv)
    keys = [f"tml-{number}" for number in range(options.clients)]
    with tempfile.TemporaryDirectory() as folder:
        sums = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        lines = "".join(f"{key_sum} tenant=client-{number}\n" for number, key_sum in enumerate(sums))
        (Path(folder) / "keys").write_text(lines)
        command = [
            sys.executable, "-m", "verl", "serve", "tinker", f"model={options.model}", f"keys={folder}/keys",
            f"folder={folder}/service", *options.settings,
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert url, "the server has not started; its log says why"
            clients = asyncio.run(load(url, keys, options.model, options))
        finally:
            server.terminate()
            server.wait(120)
    waits = np.array([wait for client in clients[1:] for wait in client.waits])
    quantiles = dict(zip(("p50_s", "p95_s", "p99_s", "max_s"), np.quantile(waits, (0.5, 0.95, 0.99, 1.0)), strict=True))
    result = {"requests": len(waits), **{name: round(float(value), 3) for name, value in quantiles.items()}}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
