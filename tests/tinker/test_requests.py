"""Any sequence of requests leaves the service answering and the other tenant unharmed. More: benchmarks/fuzz.py service."""

import asyncio
import json
import math
import random
import sqlite3
import time
from dataclasses import replace

import httpx
import pytest
import zstandard

pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker.proto import tinker_public_pb2 as wire  # noqa: E402

from tests.tinker.data import datum  # noqa: E402
from tests.tinker.requests import KEYS, Caller, lives, make_service  # noqa: E402
from tests.tinker.test_tenants import PROTOBUF, rows, sample  # noqa: E402
from verl.tinker import app, checkpoints, codec, computer, model_routes, routes  # noqa: E402
from verl.tinker.journal import RequestJournal, trouble  # noqa: E402
from verl.tinker.records import RefusedRequest  # noqa: E402
from verl.tinker.recovery import recover  # noqa: E402
from verl.tinker.tenants import Tenants  # noqa: E402


@pytest.mark.parametrize("seed", [0, 1])
def test_any_sequence_of_requests(bench, tmp_path, seed):
    outcomes = list(lives(bench, random.Random(seed), 100, tmp_path))
    assert {"2xx", "4xx"} == {what for _, what in outcomes}


@pytest.mark.slow
def test_two_thousand_hostile_requests_disturb_no_other_tenant(bench, tmp_path):
    outcomes = list(lives(bench, random.Random(60), 2000, tmp_path))
    assert len(outcomes) == 2000


def in_process(bench, folder, act):
    """The result of `act(service, ada, bob)` on a service without a socket, after what its folder has."""

    async def run():
        service = make_service(bench, folder)
        served = app.application(service)
        transport = httpx.ASGITransport(served, raise_app_exceptions=False)
        await recover(service, served.state.handlers)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await act(service, *[await Caller(service, http, name).open() for name in ("ada", "bob")])
        finally:
            await asyncio.to_thread(service.close)

    return asyncio.run(run())


@pytest.mark.parametrize("route", ["asample", "optim_step", "save_weights"])
def test_a_number_beyond_64_bits_is_refused_and_stops_nobody(bench, tmp_path, route):
    async def act(service, ada, bob):
        body = {"model_id": ada.model, **({"adam_params": {}} if route == "optim_step" else {})}
        body = sample(sampling_session_id=ada.sampler) if route == "asample" else body
        answer = await ada.post(route, {**body, "seq_id": 1 << 63})
        assert (answer.status_code, "64 bits" in answer.text) == (400, True)
        await bob.step()
        await ada.step()

    in_process(bench, tmp_path, act)


def test_a_statement_that_cannot_be_written_is_dropped(tmp_path, caplog):
    journal = RequestJournal(tmp_path, "base")
    with pytest.raises(RefusedRequest, match="cannot be stored"):
        journal.session("s", 1 << 63)
    journal._pending.append(("INSERT OR REPLACE INTO sessions VALUES (?, ?)", ("a", 1 << 63)))
    journal.session("b", "bob")
    journal.flush()
    assert journal.sessions() == [("b", "bob")]
    assert "is dropped" in caplog.text
    journal.close()


def test_a_request_that_fails_in_a_batch_fails_alone(bench, tmp_path, around):
    def advanced(original, lane, tokens):
        if any(entry.request.max_tokens == 3 for entry in lane._requests.values()):
            raise RuntimeError
        return original(lane, tokens)

    around(bench, "advance", advanced)

    async def act(service, ada, bob):
        good = [await bob.post("asample", sample(sampling_session_id=bob.sampler, seq_id=n)) for n in range(4)]
        body = sample(sampling_session_id=ada.sampler, sampling_params={"max_tokens": 3})
        bad = await ada.post("asample", body)
        assert [type(await bob.result(answer)) for answer in good] == [httpx.Response] * 4
        assert "error" in await ada.result(bad)
        refused = [{"topk_prompt_logprobs": -1}, {"topk_sample_logprobs": -3}, {"prompt_logprobs_last_n": 3}]
        refused += [{"sampling_params": {"max_tokens": 1, "temperature": 1e38}}]
        for number, change in enumerate(refused, 5):
            answer = await ada.post("asample", sample(sampling_session_id=ada.sampler, seq_id=number, **change))
            assert answer.status_code == 400, answer.text

    in_process(bench, tmp_path, act)


def numbered(model, seq_id=1, **more):
    return json.dumps({"model_id": model, "seq_id": seq_id, **more}).encode()


def packed(model, damage):
    content = zstandard.compress(rows(model, 1, [datum(seed, 500) for seed in range(100)]), level=1)
    return damage(content)


REFUSED_EARLY = {  # route, body of a model, headers, status
    "value": ("optim_step", lambda m: numbered(m, adam_params={"learning_rate": math.nan}), {}, 400),
    "route": ("create_custom_loss", lambda m: numbered(m, path="a"), {}, 404),
    "path": ("training_runs/M/checkpoints/weights/a/odd", numbered, {}, 404),
    "cut": ("optim_step", lambda m: numbered(m, adam_params={"beta1": 0.9})[:-9], {}, 400),
    "text": ("optim_step", lambda m: numbered(m)[:-1] + b', "a": "\xff"}', {}, 400),
    "deep": ("optim_step", lambda m: numbered(m)[:-1] + b', "a": ' + b"[" * 9999, {}, 400),
    "protobuf": ("forward_backward", lambda m: rows(m, 1)[:-5], {}, 400),
    "cut zstd": ("forward_backward", lambda m: packed(m, lambda c: c[: len(c) // 2]), {"content-encoding": "zstd"}, 400),
    "bad zstd": ("forward_backward", lambda m: packed(m, lambda c: c[:-9] + b"x" * 9), {"content-encoding": "zstd"}, 400),
    "large": ("forward_backward", lambda m: rows(m, 1, [datum(0, 500)] * 20), {}, 413),
    "bomb": ("forward_backward", lambda m: zstandard.compress(rows(m, 1) + bytes(1 << 20)), {"content-encoding": "zstd"}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_EARLY)
def test_a_request_refused_before_it_is_queued_uses_its_number(bench, tmp_path, name, monkeypatch):
    route, body, headers, status = REFUSED_EARLY[name]
    if name in ("large", "bomb"):
        for module in (app, codec):
            monkeypatch.setattr(module, "MAX_BYTES", 100_000)

    async def act(service, ada, bob):
        answer = await ada.post(route, body(ada.model), **headers)
        assert answer.status_code == status, answer.text
        stolen = await bob.post(route, body(ada.model).replace(b'"seq_id": 1', b'"seq_id": 2'), **headers)
        assert stolen.status_code in (status, 404)
        ada.seq_id = 2
        await ada.step()

    in_process(bench, tmp_path, act)


def test_a_request_that_never_comes_is_named_and_its_number_used(bench, tmp_path, monkeypatch):
    """After a kill too. What waited fails, so no half of a batch trains; a late request is refused."""
    monkeypatch.setattr(routes, "POLL_S", 0.02)

    async def act(service, ada, bob):
        waiting = [
            await ada.post("forward_backward", rows(ada.model, 2, [datum(0, 5)])),
            await ada.post("optim_step", numbered(ada.model, 4, adam_params={})),
        ]
        polled = await ada.poll(waiting[0])
        assert (polled.status_code, "Request 1 of" in polled.json()["queue_state_reason"]) == (408, True)
        assert (await ada.post("optim_step", numbered(ada.model, 1 << 40, adam_params={}))).status_code == 400
        monkeypatch.setattr(routes, "HOLE_S", 0)
        for answer in waiting:
            assert "Request 1 of this model never came" in (await ada.result(answer))["error"]
        late = await ada.post("forward_backward", rows(ada.model, 1, [datum(0, 5)]))
        assert (late.status_code, "came too late" in late.text) == (400, True)
        service.journal.flush()
        return ada

    async def goes_on(service, other, _):
        order = service.models[ada.model].order
        assert (order.next_seq, order.missing) == (5, "")
        ada.service, ada.http, ada.seq_id = service, other.http, 5
        await ada.step()

    ada = in_process(bench, tmp_path, act)
    in_process(bench, tmp_path, goes_on)


def test_a_request_whose_body_is_on_its_way_is_waited_for(bench, tmp_path, monkeypatch):
    """A slow body is no hole, and one that is cut uses no number: the SDK sends it again."""
    monkeypatch.setattr(routes, "POLL_S", 0.02)
    monkeypatch.setattr(routes, "HOLE_S", 0)

    async def act(service, ada, bob):
        content = rows(ada.model, 1, [datum(0, 5)])
        assert await ada.lose("forward_backward", content) == 499
        body = numbered(ada.model, 2, adam_params={})

        async def slowly():
            yield content[:20]
            states.append(await ada.post("optim_step", body))
            states.append((await ada.poll(states[0])).json())
            yield content[20:]

        states = []
        headers = {"x-api-key": KEYS["ada"], "content-type": PROTOBUF}
        answer = await ada.http.post("/api/v1/forward_backward", content=slowly(), headers=headers)
        assert states[1]["type"] == "try_again"
        await ada.result(answer)
        assert "metrics" in await ada.result(states[0])

    in_process(bench, tmp_path, act)


@pytest.mark.parametrize("place", ["forget", "save_state", "answer"])
def test_a_fault_behind_a_request_stops_no_other(bench, tmp_path, monkeypatch, place):
    """In the clean-up after a failed pass, in a state on the disk, and in the form of an answer."""

    def fails(*_, **__):
        raise AssertionError

    async def act(service, ada, bob):
        with monkeypatch.context() as patch:
            body = {"model_id": ada.model, "seq_id": 1, "adam_params": {}}
            if place == "forget":
                patch.setattr(service.models[ada.model].run, "discard", fails)
            elif place == "answer":
                patch.setattr(model_routes, "training_result", fails)
                await ada.result(await ada.post("forward_backward", rows(ada.model, 1, [datum(0, 5)])))
                body["seq_id"] = 2
            else:
                patch.setattr(computer, "STATE_S", 0)
                patch.setattr(computer, "STATE_SHARE", 0)
                patch.setattr(service.checkpoints, "save_state", fails)
            await ada.result(await ada.post("optim_step", body))
        await bob.step()
        assert service.lost is None
        ada.seq_id = body["seq_id"] + 1
        await ada.step()

    in_process(bench, tmp_path, act)


def test_a_sample_without_end_holds_up_nobody(bench, tmp_path, around):
    """Another tenant trains, and samples with other rules, while the turns of a request lead nowhere."""
    endless, open_lanes = asyncio.Event(), set()

    def advanced(advance, lane, tokens):
        open_lanes.add(id(lane))
        is_long = any(entry.request.max_tokens == 50 for entry in lane._requests.values())
        return [] if is_long and not endless.is_set() else advance(lane, tokens)

    around(bench, "advance", advanced)

    async def act(service, ada, bob):
        body = sample(
            sampling_session_id=ada.sampler, num_samples=64, sampling_params={"max_tokens": 50, "temperature": 0.5}
        )
        long = await ada.post("asample", body)
        await bob.step()
        assert service.futures[long.json()["request_id"]].answer is None
        assert len(open_lanes) == 2
        endless.set()
        await ada.result(long)
        assert not service.bases.bench().samplers[0]._lanes
        assert not any(used.rows for used in service.computers[0]._used.values())

    in_process(bench, tmp_path, act)


def test_requests_beyond_the_room_of_a_tenant_wait_and_small_ones_pass(bench, tmp_path, around, monkeypatch):
    turns = []

    def advanced(advance, lane, tokens):
        turns.append(sorted(entry.request.max_tokens for entry in lane._requests.values()))
        return advance(lane, 1)

    around(bench, "advance", advanced)
    monkeypatch.setattr(computer, "SLICE_TOKENS", 20)
    monkeypatch.setattr(computer, "_MOST_TOKENS", 60)

    async def act(service, ada, bob):
        limits = [50, 51, 9, 8]
        sent = [
            await ada.post(
                "asample", sample(sampling_session_id=ada.sampler, seq_id=n, sampling_params={"max_tokens": limit})
            )
            for n, limit in enumerate(limits)
        ]
        assert all([isinstance(await ada.result(answer), httpx.Response) for answer in sent])

    in_process(bench, tmp_path, act)
    assert not any({50, 51} <= set(turn) for turn in turns)
    assert any(51 in turn for turn in turns)


@pytest.mark.parametrize("shape", [[0, 5], [0, 3], [4, 0]])
def test_an_empty_sparse_matrix_is_refused_and_uses_its_number(bench, tmp_path, shape):
    async def act(service, ada, bob):
        message = wire.ForwardBackwardRequest.FromString(rows(ada.model, 1, [datum(0, 4)]))
        message.data[0].loss_fn_inputs["weights"].sparse_csr.SetInParent()
        message.data[0].loss_fn_inputs["weights"].shape[:] = shape
        answer = await ada.post("forward_backward", message.SerializeToString())
        assert (answer.status_code, "sparse matrix" in answer.text) == (400, True)
        ada.seq_id = 2
        await ada.step()

    in_process(bench, tmp_path, act)


def test_a_check_that_fails_by_a_fault_uses_its_number(bench, tmp_path, monkeypatch):
    async def act(service, ada, bob):
        with monkeypatch.context() as patch:
            patch.setattr(model_routes, "_adam_step", lambda values: 1 / 0)
            answer = await ada.post("optim_step", {"model_id": ada.model, "seq_id": 1, "adam_params": {}})
        assert answer.status_code == 500
        ada.seq_id = 2
        await ada.step()

    in_process(bench, tmp_path, act)


@pytest.mark.parametrize("text", ["", "{", '{"tenant": "bob"}'])
def test_an_unreadable_file_of_a_tenant_is_left_out_and_named(bench, tmp_path, text, caplog):
    async def act(service, ada, bob):
        for caller in (ada, bob):
            body = {"model_id": caller.model, "path": "a", "seq_id": 1, "ttl_seconds": 3600}
            await caller.result(await caller.post("save_weights", body))
            caller.seq_id = 2
        model = service.checkpoints.run_folder(ada.model)
        for name in ("model.json", "weights/a/expires", "weights/a/state.json"):
            (model / name).write_text(text)
        service.checkpoints._facts.pop(ada.model)  # as after a restart
        service.sessions[ada.session].last_sign -= 1e6
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service, "finish", lambda session: 1 / 0)
            patch.setattr(checkpoints.time, "time", lambda now=time.time: now() + 3601)
            service.sweep()
        for route in ("training_runs", "checkpoints"):
            for caller, num in ((ada, 0), (bob, 1)):
                listed = await caller.post(route, b"", "GET")
                assert len(listed.json()[route]) == (num if route == "training_runs" else 0), (route, caller.name)
        body = {"model_id": bob.model, "path": "b", "seq_id": 2}
        assert "path" in await bob.result(await bob.post("save_weights", body))
        assert (model / "weights/a").is_dir()

    in_process(bench, tmp_path, act)
    assert "regular clean-up has failed" in caplog.text
    assert "weights/a/expires" in caplog.text


def test_a_damaged_checkpoint_is_named_to_its_owner_and_can_be_deleted(bench, tmp_path):
    async def act(service, ada, bob):
        saved = await ada.result(await ada.post("save_weights", {"model_id": ada.model, "path": "a", "seq_id": 1}))
        file = service.checkpoints.run_folder(ada.model) / "weights/a/state.json"
        text = file.read_text()
        file.write_text("{")
        assert (await ada.post("checkpoints", b"", "GET")).json()["checkpoints"] == []
        file.write_text(text.replace('"rank": 2', '"rank": 3'))
        body = {"model_id": ada.model, "seq_id": 2, "path": saved["path"], "optimizer": True}
        assert "state.json does not have the content" in (await ada.post("load_weights", body)).text
        assert "There is no" in (await bob.post("weights_info", {"tinker_path": saved["path"]})).text
        route = f"training_runs/{ada.model}/checkpoints/weights/a"
        assert (await ada.post(route, b"", "DELETE")).status_code == 204

    in_process(bench, tmp_path, act)


def test_the_replaced_checkpoint_counts_as_free(bench, tmp_path):
    async def act(service, ada, bob):
        model = service.models[ada.model]
        for seq_id, (name, overwrite, fits) in enumerate([("a", True, True), ("a", True, True), ("b", True, False)], 1):
            body = {"model_id": ada.model, "path": name, "seq_id": seq_id, "overwrite": overwrite}
            answer = await ada.result(await ada.post("save_weights", body))
            assert ("path" in answer) == fits, answer
            max_bytes = 3 * service.bases.bench().training.adapters[ada.model].weights.num_bytes()
            model.tenant = replace(model.tenant, limits=replace(model.tenant.limits, bytes=max_bytes))

    in_process(bench, tmp_path, act)


def test_sessions_have_a_limit(bench, tmp_path):
    async def act(service, ada, bob):
        for digest, tenant in list(service.tenants._keys.items()):
            service.tenants._keys[digest] = replace(tenant, limits=replace(tenant.limits, sessions=1))
        answer = await ada.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})
        assert (answer.status_code, "1 sessions" in answer.text) == (400, True)

    in_process(bench, tmp_path, act)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://elsewhere.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "https://elsewhere.example", "x-api-key": "any"}, 200),  # no browser sends it without asking first
    ],
)
def test_a_page_of_another_site_cannot_post(bench, tmp_path, headers, status):
    async def act(service, ada, bob):
        service.tenants = Tenants()
        body = b'{"tags": [], "user_metadata": null, "sdk_version": "0"}'
        sent = {"content-type": "text/plain", **headers}
        assert (await ada.http.post("/api/v1/create_session", content=body, headers=sent)).status_code == status

    in_process(bench, tmp_path, act)


def test_what_is_read_is_answered_while_the_disk_is_full(bench, tmp_path):
    async def act(service, ada, bob):
        service.journal._file.execute("PRAGMA query_only = 1")
        created = await ada.post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})
        assert created.status_code == 503
        for route in ("status", "healthz", "metrics", "training_runs"):
            assert (await ada.post(route, b"", "GET")).status_code == 200, route
        for route, body in (("get_info", {"model_id": ada.model}), ("session_heartbeat", {"session_id": ada.session})):
            assert (await ada.post(route, body)).status_code == 200, route
        service.journal._file.execute("PRAGMA query_only = 0")

    in_process(bench, tmp_path, act)


def test_the_cause_of_trouble_with_the_journal_is_named():
    causes = {"database is locked": "Another program", "database or disk is full": "disk does not take"}
    for text, words in causes.items():
        assert words in trouble(sqlite3.OperationalError(text))
    assert "is at fault" in trouble(sqlite3.DatabaseError("database disk image is malformed"))


@pytest.mark.parametrize("damage", ["missing", "garbage", "flip", "none"])
def test_a_journal_that_is_damaged_is_named_at_the_start(tmp_path, damage, caplog):
    (tmp_path / "models/m").mkdir(parents=True)
    journal = RequestJournal(tmp_path, "base")
    for number in range(5):
        journal.session(f"s{number}", "ada")
        journal.flush()
    (tmp_path / "copy/models/m").mkdir(parents=True)
    (tmp_path / "copy/models/m/model.json").write_text("{}")
    for file in tmp_path.glob("journal.sqlite*"):  # as a kill leaves it
        content = file.read_bytes()
        if file.name.endswith("-wal"):
            place = len(content) // 2
            content = {
                "garbage": b"x" * 5000, "flip": content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :],
            }.get(damage, content)  # fmt: skip
        if damage != "missing":
            (tmp_path / "copy" / file.name).write_bytes(content)
    journal.close()
    caplog.clear()
    copied = RequestJournal(tmp_path / "copy", "base")
    words = {"missing": "is missing, though", "garbage": "-wal is damaged", "flip": "-wal is damaged"}.get(damage)
    assert (words in caplog.text) if words else not caplog.text
    assert damage != "none" or len(copied.sessions()) == 5
    copied.close()


def test_a_model_with_another_owner_than_was_saved_is_left_out(tmp_path):
    facts = {"base_model": "base", "rank": 2, "parts": ["head"], "tenant": "ada", "created": 1.0, "user_metadata": None}
    checkpoints.Checkpoints(tmp_path, "base").register("m", facts)
    file = tmp_path / "models/m/model.json"
    assert checkpoints.Checkpoints(tmp_path, "base").models() == ["m"]
    file.write_text(file.read_text().replace('"ada"', '"bob"'))
    assert checkpoints.Checkpoints(tmp_path, "base").models() == []
