"""Requests of a client that is no friend of the service: malformed, repeated, out of order, cut, in any sequence.

The service runs in this process, without a socket. `cases` is the section "service" of benchmarks/fuzz.py.
"""

import asyncio
import hashlib
import json
import math

import httpx
import zstandard
from tinker.proto import tinker_public_pb2 as wire

from tests.tinker.data import datum
from tests.tinker.served import only
from tests.tinker.test_tenants import PROTOBUF, rows, sample
from verl.tinker import routes
from verl.tinker.app import application
from verl.tinker.checkpoints import Checkpoints
from verl.tinker.codec import request_number
from verl.tinker.journal import RequestJournal
from verl.tinker.service import Service
from verl.tinker.tenants import Tenant, TenantLimits, Tenants

UNSERVED = ("auth/token", "create_custom_loss", "models/M/odd")
KEYS = {"ada": "tml-ada", "bob": "tml-bob", "eve": "tml-eve"}
INTEGERS = (-1, 0, 1, 2, 7, 100, 101, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 10**40)
ODD = (None, True, 1.5, math.nan, math.inf, 1e38, 1e-40, "", "x", "\0", "../..", "a" * 5000, [], {}, [[]], "\ud800")


def make_service(bench, folder):
    """A service with three tenants. Made on the event loop."""
    limits = TenantLimits(models=8, samplers=64, sessions=64)
    tenants = {hashlib.sha256(key.encode()).hexdigest(): Tenant(name, limits=limits) for name, key in KEYS.items()}
    path = str(bench.engine._trained.base)
    return Service(
        only(bench, [path, "base"]), Checkpoints(folder, path), RequestJournal(folder, path), Tenants(tenants)
    )


class Caller:
    """A tenant with a session, a model and a sampler of the base model. `seq_id` and `sample_seq` are its next numbers."""

    def __init__(self, service, http, name):
        self.service, self.http, self.name = service, http, name
        self.seq_id, self.sample_seq = 1, 0

    async def open_session(self):
        answer = await self.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})
        return answer.json()["session_id"]

    async def open(self):
        self.session = await self.open_session()
        named = {"session_id": self.session, "base_model": self.service.bases.names[0]}
        created = await self.post("create_model", {**named, "model_seq_id": 0, "lora_config": {"rank": 2, "seed": 1}})
        self.model = (await self.result(created))["model_id"]
        answer = await self.post("create_sampling_session", {**named, "sampling_session_seq_id": 0})
        self.sampler = answer.json()["sampling_session_id"]
        return self

    async def post(self, route, body, method="POST", **headers):
        media = PROTOBUF if route == "forward_backward" else "application/json"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"x-api-key": KEYS[self.name], "content-type": media, **headers}
        path = route if route.startswith("/") else f"/api/v1/{route}"
        return await self.http.request(method, path, content=content, headers=named)

    async def poll(self, answer):
        return await self.post("retrieve_future", {"request_id": answer.json()["request_id"]})

    async def lose(self, route, body):
        """A request whose connection ends inside the body: the status that no client reads."""
        messages, sent = [{"type": "http.request", "body": body[: len(body) // 2], "more_body": True}], []

        async def receive():
            return messages.pop(0) if messages else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"x-api-key", KEYS[self.name].encode())]
        scope = {"type": "http", "method": "POST", "path": f"/api/v1/{route}", "headers": headers, "query_string": b""}
        await self.http._transport.app({**scope, "http_version": "1.1", "scheme": "http"}, receive, send)
        return sent[0]["status"]

    async def result(self, answer):
        assert answer.status_code == 200, answer.text
        while (polled := await self.poll(answer)).status_code == 408:
            pass
        assert polled.status_code == 200, polled.text
        return polled if polled.headers["content-type"] == PROTOBUF else polled.json()

    async def step(self):
        """A correct training step and a correct sample; returns their results, which depend on no other caller."""
        first, self.seq_id = self.seq_id, self.seq_id + 2
        passed = await self.result(
            await self.post("forward_backward", rows(self.model, first, [datum(first, length=5)]))
        )
        stepped = await self.result(
            await self.post("optim_step", {"model_id": self.model, "seq_id": first + 1, "adam_params": {}})
        )
        number, self.sample_seq = self.sample_seq, self.sample_seq + 1
        body = sample(
            sampling_session_id=self.sampler, seq_id=number, sampling_params={"max_tokens": 2, "seed": number}
        )
        sampled = await self.result(await self.post("asample", body))
        assert "error" not in stepped, stepped
        assert isinstance(sampled, httpx.Response), sampled
        return passed.content, stepped["metrics"]["grad_norm"], sampled.content


def reads(rng, caller):
    """(method, route) of a request without a body."""
    run, text = (
        f"training_runs/{caller.model}",
        rng.choice(["weights/a", "sampler_weights/s", "..", "%2e%2e/x", "\u00e9/\u00e9"]),
    )
    checkpoint, number = f"{run}/checkpoints/{text}", rng.choice([*INTEGERS, "x", ""])
    return rng.choice(
        [
            ("GET", "/"), ("GET", "/v1/models"), ("GET", "healthz"), ("GET", "status"), ("GET", "metrics"),
            ("GET", "get_server_capabilities"), ("GET", f"sessions?limit={number}"), ("GET", f"sessions/{caller.session}"),
            ("GET", f"training_runs?offset={number}"), ("GET", run), ("GET", f"{run}/checkpoints"),
            ("GET", f"checkpoints?limit={number}&offset={number}"), ("GET", f"samplers/{caller.sampler}"),
            ("DELETE", checkpoint), ("POST", f"{checkpoint}/publish"), ("DELETE", f"{checkpoint}/publish"),
            ("GET", f"{checkpoint}/external_weights_urls"), ("GET", f"download/{number}/x/{caller.model}/weights/a/x"),
            ("POST", f"sessions/{rng.choice(ODD[6:8])}/finish"), ("PATCH", run),
        ]
    )  # fmt: skip


def bodies(rng, caller):
    """(route, body) of a correct request of every kind."""
    numbered = {"model_id": caller.model, "seq_id": caller.seq_id}
    completion = {"model": caller.service.bases.names[0], "max_tokens": 2}
    named = {"session_id": caller.session, "base_model": caller.service.bases.names[0]}
    return rng.choice(
        [
            ("optim_step", {**numbered, "adam_params": {"learning_rate": 1e-3}}),
            ("save_weights", {**numbered, "path": rng.choice(["a", "b"]), "overwrite": rng.random() < 0.5}),
            ("save_weights_for_sampler", {**numbered, "path": rng.choice([None, "s"]), "sampling_session_seq_id": 9}),
            ("load_weights", {**numbered, "path": f"tinker://{caller.model}/weights/a", "optimizer": True}),
            ("asample", sample(sampling_session_id=caller.sampler, seq_id=caller.sample_seq, num_samples=1,
                               topk_prompt_logprobs=0, topk_sample_logprobs=0, prompt_logprobs_last_n=None)),
            ("asample", sample(sampling_session_id=caller.sampler, seq_id=caller.sample_seq, num_samples=1,
                               target_prompt_logprobs={"data": [4, -1], "dtype": "int64", "shape": [1, 2]})),
            ("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}),
            ("create_model", {**named, "model_seq_id": 1, "lora_config": {"rank": 2, "seed": 1}}),
            ("create_sampling_session", {**named, "sampling_session_seq_id": 1}),
            ("get_info", {"model_id": caller.model}), ("weights_info", {"tinker_path": f"tinker://{caller.model}/weights/a"}),
            ("save_weights_external", {**numbered, "path": "e"}), ("client/config", {"sdk_version": "0"}),
            ("copy_weights", {"source_path": f"tinker://{caller.model}/weights/a", "session_id": None, "model_seq_id": None}),
            ("sessions/search", {"owner": {"type": "own"}, "limit": 3}),
            ("telemetry", {"events": [], "session_id": caller.session}),
            (f"training_runs/{caller.model}/checkpoints/weights/a/ttl", {"ttl_seconds": 3600}),
            ("/v1/chat/completions", {**completion, "messages": [{"role": "user", "content": "a"}]}),
            ("/v1/completions", {**completion, "prompt": "abc", "stop": "b"}),
            ("retrieve_future", {"request_id": "x"}), ("session_heartbeat", {"session_id": caller.session}),
        ]
    )  # fmt: skip


def edited(rng, body):
    """`body` with another value, without one, or with one more."""
    place = body = json.loads(json.dumps(body))
    while (inner := [v for v in place.values() if isinstance(v, dict) and v]) and rng.random() < 0.6:
        place = rng.choice(inner)
    name = rng.choice([*place, "extra"])
    if rng.random() < 0.15:
        place.pop(name, None)
    else:
        place[name] = rng.choice(INTEGERS if rng.random() < 0.6 else ODD)
    return body


def training_bytes(rng, caller):
    """A forward_backward request: correct, with a bad tensor, or with other bytes."""
    message = wire.ForwardBackwardRequest.FromString(rows(caller.model, caller.seq_id, [datum(rng.randrange(99), 4)]))
    kind = rng.choice(["good", "number", "sparse", "shape", "dtype", "bytes", "loss"])
    tensor = message.data[0].loss_fn_inputs[rng.choice(["target_tokens", "weights"])]
    if kind == "number":
        message.seq_id = rng.choice([n for n in INTEGERS if -(1 << 31) <= n < 1 << 31])
    elif kind == "sparse":
        tensor.sparse_csr.SetInParent()
        tensor.shape[:] = rng.choice([[0, 5], [0, 3], [4, 0], [4, 2], []])
        tensor.sparse_csr.crow_indices = bytes(rng.choice([0, 8, 40, 3]))
    elif kind == "shape":
        tensor.shape[:] = [rng.choice([-1, 0, 4, 1 << 62]) for _ in range(rng.randrange(4))]
    elif kind == "dtype":
        tensor.dtype = rng.choice([0, 1, 2, 77])
    elif kind == "loss":
        message.loss_fn = rng.choice(["ppo", "gspo", ""])
    content = message.SerializeToString()
    if kind == "bytes":
        place = rng.randrange(len(content))
        content = content[:place] + rng.randbytes(rng.randrange(3)) + content[place + rng.randrange(3) :]
    return content


async def hostile(rng, caller, sent):
    """One request, perhaps repeated from `sent`: (kind, outcome). Like the SDK, the caller takes the next number for each."""
    kind = rng.choice(
        [*["edited", "training"] * 2, "read", "repeated", "cut", "lost", "zstd", "unserved", "good", "ahead"]
    )
    headers, plain = {}, None
    if kind == "read":
        method, route = reads(rng, caller)
        answer = await caller.post(route, b"", method)
        assert answer.status_code not in (500, 503), (method, route, answer.text)
        return kind, f"{answer.status_code // 100}xx"
    if kind == "repeated" and sent:
        route, body = rng.choice(sent)
    elif kind in ("training", "zstd"):
        route, body = "forward_backward", training_bytes(rng, caller)
        if kind == "zstd":
            plain, body, headers = (
                body,
                zstandard.compress(body),
                {"content-encoding": rng.choice(["zstd", "gzip", ""])},
            )
            body = body[: rng.randrange(len(body))] if rng.random() < 0.5 else body
    else:
        caller.seq_id += rng.randrange(1, 4) if kind == "ahead" else 0  # what these numbers were for never comes
        route, body = bodies(rng, caller)
        if kind == "unserved":
            route, body = rng.choice(UNSERVED), {"model_id": caller.model, "seq_id": caller.seq_id}
        body = json.dumps(edited(rng, body) if kind == "edited" else body).encode()
        body = body[: rng.randrange(len(body))] if kind == "cut" else body
    caller.sample_seq += 1
    number = (request_number(plain or body) or ("", 0))[1]
    caller.seq_id = max(caller.seq_id, number if number < caller.seq_id + 1000 else 0) + 1
    if kind == "lost":  # the SDK repeats it, or gives it up
        assert await caller.lose(route, body) == 499
        if rng.random() < 0.5:
            return kind, "4xx"
    sent.append((route, body))
    answer = await caller.post(route, body, "PUT" if route.endswith("/ttl") else "POST", **headers)
    assert answer.status_code not in (500, 503), (kind, route, body[:400], answer.text)
    if answer.status_code >= 400:
        assert answer.json()["detail"].endswith("."), answer.text
    return kind, f"{answer.status_code // 100}xx"


async def recovered(caller):
    """Let the model take its next steps: at most one more request fails, as one before it never came."""
    for _ in range(2):
        body = {"model_id": caller.model, "seq_id": caller.seq_id, "adam_params": {}}
        answer = await caller.result(await caller.post("optim_step", body))  # takes the gradients that there are
        caller.seq_id += 1
        if "never came" not in str(answer):
            break
    assert "never came" not in str(answer), answer
    caller.sample_seq += 1000


async def life(rng, bench, folder, count, reference):
    """`count` hostile requests of ada in turn with steps of bob and eve; their results are `reference` (None: only of bob)."""
    service = make_service(bench, folder)
    transport = httpx.ASGITransport(application(service), raise_app_exceptions=False)
    before, (routes.POLL_S, routes.HOLE_S) = (routes.POLL_S, routes.HOLE_S), (0.02, 0.0)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            bob = await Caller(service, http, "bob").open()
            if reference is None:
                return [await bob.step() for _ in range(5)]
            eve = await Caller(service, http, "eve").open()
            ada, outcomes, sent = await Caller(service, http, "ada").open(), [], []
            for place in range(5):
                outcomes += [await hostile(rng, ada, sent) for _ in range(count // 5)]
                steps = await asyncio.gather(bob.step(), eve.step())
                assert steps == [reference[place]] * 2, (place, sent[-count // 5 :])
            service.sweep()
            await asyncio.wait_for(recovered(ada), 60)
            await asyncio.wait_for(ada.step(), 60)
            answer = await http.get("/api/v1/status", headers={"x-api-key": KEYS["bob"]})
            assert answer.status_code == 200
            assert not answer.json()["paused"]
            return outcomes
    finally:
        routes.POLL_S, routes.HOLE_S = before
        await asyncio.to_thread(service.close)


def cases(rng, count, folder):
    """(kind, outcome) of `count` requests, in lives of a service of 50."""
    from verl.cli.serve import serving_config
    from verl.models.tiny import make_tiny_model
    from verl.tinker.workbench import Workbench

    settings = ["actor_rollout_ref.actor.fsdp_config.dtype=float32"]
    config = serving_config(str(make_tiny_model(folder / "model", "llama")), settings, rank=8)
    yield from lives(Workbench(config), rng, count, folder)


def lives(bench, rng, count, folder):
    """The cases of a service with `bench`."""
    reference = asyncio.run(life(rng, bench, folder / "reference", 0, None))
    for number in range(max(1, count // 50)):
        yield from asyncio.run(life(rng, bench, folder / f"life_{number}", min(count, 50), reference))
