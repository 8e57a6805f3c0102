"""Clients that say nothing, send slowly or do not read, at a server with its own protocol of connections."""

import asyncio
import socket
import threading

import pytest

from tests.processes import wait_until

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra page")
connections = pytest.importorskip("verl.parallel.connections")


async def app(scope, receive, send):
    """POST answers its body, GET with `size` bytes once `event` is set."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message.get("more_body"):
            break
    if scope["method"] == "GET":
        while not EVENT.is_set():
            await asyncio.sleep(0.01)
        body = bytes(int(scope["query_string"] or 1))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    for start in range(0, len(body), 1 << 16):
        await send({"type": "http.response.body", "body": body[start : start + (1 << 16)], "more_body": True})
    await send({"type": "http.response.body"})


EVENT, LOOKS = threading.Event(), []


@pytest.fixture
def connect(monkeypatch, around):
    """A function that connects to the server; `connect.server` is the server."""
    monkeypatch.setattr(connections, "_LOOK_S", 0.1)
    around(connections.PatientProtocol, "_look", lambda look, *args: LOOKS.append(1) or look(*args))
    EVENT.clear()
    LOOKS.clear()
    config = uvicorn.Config(app, http=connections.PatientProtocol, lifespan="off", log_level="critical")
    server, listening = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0), backlog=128)
    opened = []

    def connect(text=""):
        opened.append(socket.create_connection(listening.getsockname(), timeout=30))
        opened[-1].sendall(text.replace("\n", "\r\n").encode())
        return opened[-1]

    connect.server = server
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    assert wait_until(lambda: server.started, 30)
    yield connect
    for one in opened:
        one.close()
    EVENT.set()
    server.should_exit = True
    thread.join(30)


POST = "POST / HTTP/1.1\nHost: a\nContent-Length: 6\n\n"


@pytest.mark.parametrize("text", ["", "GET / HT", POST, POST + "a", "GET /?20000000 HTTP/1.1\nHost: a\n\n" * 2])
def test_a_client_that_keeps_the_server_waiting_is_closed(connect, text):
    EVENT.set()
    connect(text)
    assert wait_until(lambda: LOOKS, 30)
    assert wait_until(lambda: not connect.server.server_state.connections, 30)


def test_a_client_that_waits_is_not_closed(connect):
    client = connect("GET / HTTP/1.1\nHost: a\n\n")
    assert wait_until(lambda: len(LOOKS) > 3, 30)
    EVENT.set()
    assert client.recv(12) == b"HTTP/1.1 200"


def test_a_slow_body_has_the_time_that_it_needs(connect, monkeypatch):
    monkeypatch.setattr(connections, "_LEAST_RATE", 1)
    client = connect(POST)
    for letter in b"abcdef":
        looks = len(LOOKS)
        client.sendall(bytes([letter]))
        assert wait_until(lambda: len(LOOKS) > looks, 30)  # noqa: B023
    assert client.recv(12) == b"HTTP/1.1 200"


def test_the_connection_that_waits_longest_makes_way(connect, monkeypatch):
    monkeypatch.setattr(connections, "_LOOK_S", 1000.0)
    monkeypatch.setattr(connections, "most_connections", lambda: 4)
    busy = connect("GET / HTTP/1.1\nHost: a\n\n")
    assert wait_until(lambda: connect.server.server_state.tasks, 30)
    silent = [connect() for _ in range(8)]
    assert [one.recv(1) for one in silent[:5]] == [b""] * 5
    EVENT.set()
    assert busy.recv(12) == connect("GET / HTTP/1.1\nHost: a\n\n").recv(12) == b"HTTP/1.1 200"
