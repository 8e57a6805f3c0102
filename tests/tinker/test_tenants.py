"""Tenants of one service: nothing of one exists for another, limits, turns, and requests that are malformed or hostile."""

import json
import shutil
import socket
import ssl
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.commands import ran

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

import zstandard  # noqa: E402
from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as wire  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402

from tests.tinker.data import datum  # noqa: E402
from tests.tinker.served import running  # noqa: E402
from verl.tinker.queues import SLICE_TOKENS, TURN_TOKENS, Lanes, QueuedJob, SampleLane  # noqa: E402

PROTOBUF = "application/x-protobuf"


def post(served, route, body, key="tml-ada", media="application/json", method="POST", **headers):
    content = json.dumps(body) if isinstance(body, dict) else body
    named = {"content-type": media, "x-api-key": key, **headers}
    return httpx.request(method, f"{served.url}/api/v1/{route}", content=content, headers=named, timeout=120)


def session(served, key):
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    return post(served, "create_session", body, key).json()["session_id"]


def model_of(served, key, rank=4, number=0):
    """A model, and the session that it belongs to."""
    owner = session(served, key)
    body = {
        "session_id": owner,
        "model_seq_id": number,
        "base_model": served.service.bases.names[0],
        "lora_config": {"rank": rank},
    }
    answer = post(served, "create_model", body, key)
    assert answer.status_code == 200, answer.text
    assert result(served, answer, key)["model_id"] == f"{owner}:train:{number}"
    return f"{owner}:train:{number}", owner


def result(served, answer, key="tml-ada"):
    body = {"request_id": answer.json()["request_id"]}
    return post(served, "retrieve_future", body, key).json()


def rows(model, seq_id, data=None, loss="cross_entropy"):
    content = types.ForwardBackwardInput(data=data or [datum(seq_id)], loss_fn=loss)
    request = types.ForwardBackwardRequest(forward_backward_input=content, model_id=model, seq_id=seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_nothing_of_a_tenant_exists_for_another(shared):
    model, owner = model_of(shared, "tml-ada")
    trained = post(shared, "forward_backward", rows(model, 1), media=PROTOBUF)
    path = result(shared, post(shared, "save_weights", {"model_id": model, "path": "a", "seq_id": 2}))["path"]
    sampling = {"session_id": owner, "sampling_session_seq_id": 0, "model_path": path}
    sampler = post(shared, "create_sampling_session", sampling).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    requests = [
        ("POST", "forward_backward", rows(model, 3), PROTOBUF),
        ("POST", "optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}, None),
        ("POST", "save_weights", {"model_id": model, "seq_id": 3}, None),
        ("POST", "save_weights_for_sampler", {"model_id": model, "seq_id": 3}, None),
        ("POST", "load_weights", {"model_id": model, "seq_id": 3, "path": path, "optimizer": False}, None),
        ("POST", "get_info", {"model_id": model}, None),
        ("POST", "retrieve_future", {"request_id": trained.json()["request_id"]}, None),
        ("POST", "weights_info", {"tinker_path": path}, None),
        ("POST", "asample", sample, None),
        ("GET", f"samplers/{sampler}", b"", None),
        ("GET", f"training_runs/{model}", b"", None),
        ("GET", f"training_runs/{model}/checkpoints", b"", None),
        ("PUT", f"training_runs/{model}/checkpoints/weights/a/ttl", {"ttl_seconds": 3600}, None),
        ("DELETE", f"training_runs/{model}/checkpoints/weights/a", b"", None),
    ]
    before = len(shared.service.futures)
    for method, route, body, media in requests:
        answer = post(shared, route, body, "tml-bob", media or "application/json", method)
        assert answer.status_code == 404, (route, answer.text)
        assert "There is no" in answer.json()["detail"]
    mine = session(shared, "tml-bob")
    stolen = [{**sampling, "session_id": mine}, {**sampling, "session_id": owner}]
    assert [post(shared, "create_sampling_session", body, "tml-bob").status_code for body in stolen] == [404, 410]
    assert post(shared, f"sessions/{owner}/finish", {}, "tml-bob").status_code == 204
    assert owner in shared.service.sessions
    assert len(shared.service.futures) == before
    for key, count in (("tml-ada", 1), ("tml-bob", 0), ("tml-ops", 1)):
        for route, name in (("training_runs", "training_runs"), ("checkpoints", "checkpoints")):
            answer = post(shared, route, b"", key, method="GET").json()
            assert len([row for row in answer[name] if model in json.dumps(row)]) == count
    assert post(shared, "get_info", {"model_id": model}, "tml-ops").status_code == 200
    assert post(shared, "asample", sample).status_code == 200


def test_limits_of_a_tenant_are_sentences(shared):
    model, owner = model_of(shared, "tml-bob")
    create = {"session_id": owner, "base_model": shared.service.bases.names[0]}
    refusals = [
        (
            post(shared, "create_model", {**create, "model_seq_id": 7, "lora_config": {"rank": 5}}, "tml-bob"),
            400,
            "rank of 4",
        ),
        (
            post(shared, "forward_backward", rows(model, 2, [datum(0, length=60)] * 4), "tml-bob", PROTOBUF),
            400,
            "may have 200",
        ),
    ]
    second = post(shared, "create_model", {**create, "model_seq_id": 8, "lora_config": {"rank": 2}}, "tml-bob")
    assert second.status_code == 200
    third = post(shared, "create_model", {**create, "model_seq_id": 9, "lora_config": {"rank": 2}}, "tml-bob")
    waiting = post(shared, "forward_backward", rows(model, 4, [datum(0, length=60)] * 2), "tml-bob", PROTOBUF)
    assert waiting.status_code == 200  # request 3 has not come, so this one waits
    busy = post(shared, "forward_backward", rows(model, 5, [datum(0, length=60)] * 2), "tml-bob", PROTOBUF)
    assert busy.headers["retry-after"]
    refusals += [(third, 400, "2 models"), (busy, 429, "wait already")]
    for answer, status, sentence in refusals:
        assert answer.status_code == status, answer.text
        assert sentence in answer.json()["detail"]
    first = post(shared, "forward_backward", rows(model, 1), "tml-bob", PROTOBUF)  # the next in order is never refused
    assert "error" not in first.json()


def test_a_small_tenant_waits_for_two_slices_at_most():
    lanes = Lanes()
    for number in range(200):
        lanes.put("large", QueuedJob(None, number, "large", SLICE_TOKENS))
    taken = [lanes.take()[0] for _ in range(20)]
    for number in range(2):
        lanes.put("small", QueuedJob(None, number, "small", 100))
    taken = [lanes.take()[0] for _ in range(4)]
    assert taken.index("small") <= 2
    assert taken.count("small") == 2


def test_a_step_waits_for_two_turns_of_a_long_sample_at_most():
    """256 samples of 900 tokens take a step of 256 tokens each; the step of a small tenant is two requests."""
    lanes, lane = Lanes(), SampleLane(None, "params", 1024)
    lanes.put(lane, QueuedJob(None, "long", "large", 256 * 900))
    turns, computed = 0, []
    for number in range(60):
        if number in (20, 40):
            for part in range(2):
                lanes.put("model", QueuedJob(None, part, "small", 300))
        taken, jobs = lanes.take()
        if taken is lane:
            turns += 1
            lanes.charge("large", TURN_TOKENS)
            lanes.put(lane, jobs[0], first=True)
        else:
            computed.append(number)
    assert turns == 56
    assert max(computed[0] - 20, computed[1] - 20, computed[2] - 40, computed[3] - 40) <= 4


def test_many_small_samples_leave_a_long_one_the_share_of_a_tenant():
    lanes, (short, long) = Lanes(), (SampleLane(None, "params", longest) for longest in (256, 1024))
    lanes.put(long, QueuedJob(None, "long", "large", 256 * 900))
    turns, idle = {short: 0, long: 0}, [f"small {number}" for number in range(49)]
    for _ in range(200):
        for name in idle:  # each has its next request by the end of a turn
            lanes.put(short, QueuedJob(None, "short", name, 34))
        taken, jobs = lanes.take()
        turns[taken] += 1
        idle = [job.tenant for job in jobs if taken is short]
        for job in jobs:
            lanes.charge(job.tenant, TURN_TOKENS if taken is long else 44)
        if taken is long:
            lanes.put(long, jobs[0], first=True)
    assert abs(turns[long] * TURN_TOKENS - turns[short] * 44) <= 2 * TURN_TOKENS


def test_tenants_get_equal_shares_of_tokens():
    lanes, used = Lanes(), {"long": 0, "short": 0}
    for number in range(400):
        lanes.put("long", QueuedJob(None, number, "long", SLICE_TOKENS))
        for _ in range(8):
            lanes.put("short", QueuedJob(None, number, "short", SLICE_TOKENS // 8))
    for _ in range(900):
        tenant, (job,) = lanes.take()
        used[tenant] += job.cost
    assert abs(used["long"] - used["short"]) <= 2 * SLICE_TOKENS


def sample(**changes):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
    return {"sampling_session_id": "S", "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}, **changes}


def chunk(**fields):
    return {"chunks": [{"type": "encoded_text", **fields}]}


def protobuf(change):
    def build(model, seq_id):
        message = wire.ForwardBackwardRequest.FromString(rows(model, seq_id, [datum(0, length=8)]))
        change(message)
        return message.SerializeToString()

    return build


def weights_of(message):
    return message.data[0].loss_fn_inputs["weights"]


def step(**changes):
    return lambda model, seq_id: {"model_id": model, "seq_id": seq_id, "adam_params": {}, **changes}


HOSTILE = {  # route, body with M for the model and S for the sampler, headers
    "no json": ("optim_step", b"{", {}),
    "no object": ("optim_step", b"[]", {}),
    "deep json": ("asample", b"[" * 200_000, {}),
    "deep object": ("asample", b'{"a":' * 100_000, {}),
    "huge number": ("optim_step", b'{"model_id": "M", "adam_params": {}, "seq_id": ' + b"9" * 10_000 + b"}", {}),
    "no utf-8": ("get_info", b'{"model_id": "\xff\xfe"}', {}),
    "nul in a name": ("get_info", {"model_id": "a\0b"}, {}),
    "no seq_id": ("optim_step", step(seq_id=None), {}),
    "seq_id 0": ("optim_step", step(seq_id=0), {}),
    "negative seq_id": ("optim_step", step(seq_id=-5), {}),
    "rate": ("optim_step", step(adam_params={"learning_rate": -1}), {}),
    "rate nan": ("optim_step", b'{"model_id": "M", "seq_id": 2, "adam_params": {"learning_rate": NaN}}', {}),
    "betas": ("optim_step", step(adam_params={"beta1": 1.0}), {}),
    "clip": ("optim_step", b'{"model_id": "M", "seq_id": 2, "adam_params": {"grad_clip_norm": Infinity}}', {}),
    "path up": ("save_weights", step(path="../../etc"), {}),
    "path slash": ("save_weights", step(path="a/b"), {}),
    "path long": ("save_weights", step(path="a" * 5000), {}),
    "path hidden": ("save_weights_for_sampler", step(path=".x"), {}),
    "ttl": ("save_weights", step(ttl_seconds=1), {}),
    "inflight": ("save_weights_for_sampler", step(kind="inflight"), {}),
    "address": ("weights_info", {"tinker_path": "tinker://../../x"}, {}),
    "state as checkpoint": ("weights_info", {"tinker_path": "tinker://M/states/0"}, {}),
    "address of a file": ("load_weights", {"path": "file:///etc/passwd", "optimizer": True, "model_id": "M", "seq_id": 2}, {}),
    "protobuf": ("forward_backward", b"\xff" * 100, {}),
    "no rows": ("forward_backward", protobuf(lambda m: m.ClearField("data")), {}),
    "loss": ("forward_backward", protobuf(lambda m: setattr(m, "loss_fn", "gspo")), {}),
    "tokens": ("forward_backward", protobuf(lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"abc")), {}),
    "shape": ("forward_backward", protobuf(lambda m: weights_of(m).shape.extend([1 << 40] * 3)), {}),
    "nan": ("forward_backward", protobuf(lambda m: setattr(weights_of(m), "dense", b"\0\0\xc0\x7f" * 8)), {}),
    "bomb": ("forward_backward", zstandard.compress(bytes(65 << 20)), {"content-encoding": "zstd"}),
    "no zstd": ("forward_backward", b"abc", {"content-encoding": "zstd"}),
    "gzip": ("forward_backward", b"abc", {"content-encoding": "gzip"}),
    "brotli": ("forward_backward", b"abc", {"content-encoding": "br"}),
    "empty prompt": ("asample", sample(prompt=chunk(tokens=[])), {}),
    "token": ("asample", sample(prompt=chunk(tokens=[1 << 40])), {}),
    "max_tokens": ("asample", sample(sampling_params={"max_tokens": 1 << 30}), {}),
    "num_samples": ("asample", sample(num_samples=1 << 30), {}),
    "top": ("asample", sample(topk_prompt_logprobs=1 << 20), {}),
    "temperature": ("asample", sample(sampling_params={"max_tokens": 2, "temperature": -1}), {}),
    "image": ("asample", sample(prompt={"chunks": [{"type": "image", "data": "", "format": "png"}]}), {}),
    "negative sample": ("asample", sample(seq_id=-1), {}),
    "rank": ("create_model", {"session_id": "X", "model_seq_id": 1, "base_model": "b", "lora_config": {"rank": 1 << 40}}, {}),
}  # fmt: skip


def memory(field):
    """VmRSS or VmHWM of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(field))


def test_hostile_requests_are_answered_with_a_sentence_and_train_nothing(shared):
    """Nor do the sizes that they name take memory: the largest body has 64 MiB."""
    assert len(HOSTILE) >= 40
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS from here on
    before_mib = memory("VmRSS")
    model, owner = model_of(shared, "tml-ada")
    adapters = shared.service.bases.bench().training.adapters
    adapter = adapters[model]
    before = {key: value.clone() for key, value in adapter.weights.tensors.items()}
    base = {"session_id": owner, "sampling_session_seq_id": 0, "base_model": shared.service.bases.names[0]}
    sampler = post(shared, "create_sampling_session", base).json()["sampling_session_id"]
    for seq_id, (name, (route, body, headers)) in enumerate(HOSTILE.items(), 1):
        content = body(model, seq_id) if callable(body) else body
        if isinstance(content, dict):
            content = json.dumps(content).replace('"S"', f'"{sampler}"').replace('"X"', f'"{owner}"').encode()
        content = content.replace(b'"M"', f'"{model}"'.encode()).replace(b"//M/", f"//{model}/".encode())
        content = content.replace(b'"seq_id": 2', f'"seq_id": {seq_id}'.encode())
        media = PROTOBUF if route == "forward_backward" else "application/json"
        answer = post(shared, route, content, media=media, **headers)
        assert 400 <= answer.status_code < 500, (name, answer.status_code, answer.text)
        assert answer.json()["detail"].endswith("."), (name, answer.text)
        assert "Traceback" not in answer.text
    assert memory("VmHWM") - before_mib < 256
    assert adapter is adapters[model]
    assert not adapter.gradients
    assert all((before[key] == value).all() for key, value in adapter.weights.tensors.items())
    assert httpx.get(f"{shared.url}/api/v1/healthz").json() == {"status": "ok"}
    assert post(shared, "client/config", {}, "tml-wrong").status_code == 401
    unknown = ("nowhere", "training_runs/..%2f..%2fetc", "sessions/none", "audit", "asample")
    answers = [post(shared, route, b"", method="GET") for route in unknown]
    assert [answer.status_code for answer in answers] == [404] * 5
    assert all(answer.json()["detail"] for answer in answers)


def test_a_tenant_sees_its_own_queues_and_models(shared):
    model, _ = model_of(shared, "tml-ada")
    waits = post(shared, "forward_backward", rows(model, 2, [datum(0, length=9)]), media=PROTOBUF)
    assert waits.status_code == 200  # until request 1 comes
    status = {key: post(shared, "status", b"", key, method="GET").json() for key in ("tml-ada", "tml-bob", "tml-ops")}
    assert status["tml-ada"]["tenants"]["ada"]["waiting_tokens"] >= 9
    (row,) = [row for row in status["tml-ada"]["models"] if row["model_id"] == model]
    assert row.items() >= {"tenant": "ada", "rank": 4, "num_steps": 0, "waiting_requests": 1}.items()
    assert status["tml-ada"]["tenants"]["ada"]["training_s"] > 0
    assert "'ada'" not in str(status["tml-bob"])
    assert {"ada", "bob"} >= set(status["tml-ops"]["tenants"]) >= {"ada"}
    answer = httpx.get(f"{shared.url}/api/v1/metrics", headers={"authorization": "Bearer tml-ada"})
    assert 'verl_tinker_waiting_requests{tenant="ada"}' in answer.text
    assert httpx.get(f"{shared.url}/api/v1/metrics").status_code == 401
    post(shared, "forward_backward", rows(model, 1), media=PROTOBUF)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here, which makes the certificate")
def test_a_self_signed_certificate_protects_requests(bench, tmp_path):
    files = tuple(str(tmp_path / name) for name in ("cert.pem", "key.pem"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
    names = ["-subj", "/CN=verl", "-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    ran(*command, *names)
    with running(bench, tmp_path / "served", certificate=files) as served:
        trusting = ssl.create_default_context(cafile=files[0])
        url = f"{served.url}/api/v1/healthz"
        assert httpx.get(url, verify=trusting).json() == {"status": "ok"}
        with pytest.raises(httpx.ConnectError, match="(?i)certificate"):
            httpx.get(url)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"))


def address(served):
    host, _, port = served.url.removeprefix("http://").partition(":")
    return host, int(port)


def test_slow_and_endless_bodies_do_no_harm(shared):
    """Fifty connections with heads that never end, and a body of 1 GB, while a client trains."""
    slow = [socket.create_connection(address(shared)) for _ in range(50)]
    for number, connection in enumerate(slow):
        connection.sendall(b"POST /api/v1/asample HTTP/1.1\r\nhost: a\r\n" if number % 2 else b"POST")
    endless = socket.create_connection(address(shared))
    endless.sendall(
        b"POST /api/v1/asample HTTP/1.1\r\nhost: a\r\nx-api-key: tml-ada\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    sent, part = [0], b"100000\r\n" + bytes(1 << 20) + b"\r\n"

    def send():
        try:
            while sent[0] < 1 << 30:
                endless.sendall(part)
                sent[0] += 1 << 20
        except OSError:
            pass

    thread = threading.Thread(target=send)
    thread.start()
    model, _ = model_of(shared, "tml-ada")
    answer = post(shared, "forward_backward", rows(model, 1), media=PROTOBUF)
    assert answer.status_code == 200
    announced = socket.create_connection(address(shared))
    announced.sendall(
        b"POST /api/v1/asample HTTP/1.1\r\nhost: a\r\nx-api-key: tml-ada\r\ncontent-length: 1073741824\r\n\r\n"
    )
    assert announced.recv(1000).startswith(b"HTTP/1.1 413")
    announced.close()
    thread.join(120)
    assert sent[0] < 100 << 20, "the server read on behind its limit"
    until = time.monotonic() + 60
    for connection in slow:
        connection.settimeout(max(0.01, until - time.monotonic()))
        assert connection.recv(1000) == b"", "the connection is still open"
        connection.close()
    endless.close()


def page(served, key=""):
    return httpx.get(served.url, auth=("any", key) if key else None)


def test_the_page_shows_each_tenant_its_own(shared):
    models = {key: model_of(shared, key)[0] for key in ("tml-ada", "tml-ops")}
    for key in ("tml-ada", "tml-bob", "tml-ops"):
        listed = [model in page(shared, key).text for model in models.values()]
        assert listed == [key != "tml-bob", key == "tml-ops"], key
    refused = page(shared)
    assert refused.status_code == page(shared, "tml-wrong").status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic ")
    answer = page(shared, "tml-bob")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert ">ada<" not in answer.text
    assert "<script>" not in answer.text
    for asset in ("page.css", "vendor/htmx-4.0.1.min.js"):
        assert f"/static/{asset}" in answer.text
        assert httpx.get(f"{shared.url}/static/{asset}").status_code == 200
    assert httpx.get(f"{shared.url}/static/../pages.py").status_code == 404


def test_without_keys_only_names_of_this_machine_are_answered(served):
    assert httpx.get(served.url).status_code == 200
    for path in ("/", "/api/v1/status"):
        answer = httpx.get(served.url + path, headers={"host": "elsewhere.example"})
        assert answer.status_code == 421
        assert "Host" in answer.json()["detail"]
