"""Tool servers of the Model Context Protocol, started or connected to once per process and used by all its episodes.

The file that `mcp.mcp_servers_config_path` names has the format of other clients:

    {"mcpServers": {"clock": {"command": "python", "args": ["clock.py"], "env": {}},
                    "web":   {"url": "https://example.org/mcp", "auth_token": "..."}}}
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TextIO, TypeVar, cast

from verl.errors import ConfigError, MissingExtraError
from verl.foreign_text import clean
from verl.parallel.child_processes import python_command
from verl.regular_files import read_user_text, require_regular
from verl.tracking.logs import adopt_loggers

T = TypeVar("T")
log = logging.getLogger(__name__)

START_S = 60.0  # that a server may take until it has listed its tools
MAX_LINES = 50  # of a server's stderr, in the log
_LINE_BYTES = 4096
_LIBRARIES = ("mcp", "client", "asyncio", "anyio", "httpx2", "httpcore2", "httpx", "httpcore")  # names of loggers


class ToolServer:
    """One server and its `tools`, objects with name, description and inputSchema. Raises ConfigError when it does not start."""

    def __init__(self, name: str, settings: Mapping[str, object]):
        self.name, self.settings = name, settings
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=f"mcp-{name}", daemon=True).start()
        self._connection: tuple[Any, asyncio.Event] | None = None  # a client, and what ends its task
        self._lock = asyncio.Lock()
        self._num_lines = 0
        try:
            self.tools: list[dict[str, Any]] = self._run(self._list()).result(START_S)
        except concurrent.futures.TimeoutError:
            raise ConfigError(f"The MCP server {name!r} did not list its tools within {START_S:g} s.") from None
        except Exception as error:  # of the server's or the client's
            raise ConfigError(f"The MCP server {name!r} could not be used: {_why(error)}.") from error

    async def call(self, tool: str, arguments: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """The result as the protocol has it: {"content": [...], "isError": bool}. Callable on any event loop. A server that has
        ended is started again."""
        return await asyncio.wrap_future(self._run(self._call(tool, dict(arguments), timeout_s)))

    def _run(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _list(self) -> list[dict[str, Any]]:
        (client, _), cursor = await self._connected(), None
        tools: list[dict[str, object]] = []
        while True:
            page = (await client.list_tools(cursor=cursor)).model_dump(by_alias=True, mode="json")
            tools += page["tools"]
            if not (cursor := page.get("nextCursor")):
                return tools

    async def _call(self, tool: str, arguments: dict[str, object], timeout_s: float) -> dict[str, Any]:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        client, ended = await self._connected()
        try:
            result = await client.call_tool(tool, arguments, read_timeout_seconds=timeout_s)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:  # not asked again, since it may have acted already
                log.warning("The MCP server %r has ended; its next call starts it again.", self.name)
                self._connection = None
                ended.set()
            raise
        return cast("dict[str, Any]", result.model_dump(by_alias=True, mode="json"))

    async def _connected(self) -> tuple[Any, asyncio.Event]:
        async with self._lock:
            connection = self._connection
            if connection is None:
                ready: asyncio.Future[tuple[object, asyncio.Event]] = asyncio.get_running_loop().create_future()
                self._task = asyncio.ensure_future(self._serve(ready))
                connection = self._connection = await ready
            return connection

    async def _serve(self, ready: asyncio.Future[tuple[object, asyncio.Event]]) -> None:
        """Hold the connection until it ends: the task that opened it must close it."""
        from mcp import Client

        ended = asyncio.Event()
        try:
            with self._stderr() as stderr:
                async with Client(_transport(self.settings, stderr)) as client:
                    ready.set_result((client, ended))
                    await ended.wait()
        except Exception as error:  # noqa: BLE001 - handed to the one who waits
            if not ready.done():
                ready.set_exception(error)

    @contextlib.contextmanager
    def _stderr(self) -> Iterator[TextIO]:
        """A file for the server's stderr; its lines are logged."""
        read, write = os.pipe()
        threading.Thread(target=self._log_lines, args=(read,), name=f"mcp-{self.name}-stderr", daemon=True).start()
        with os.fdopen(write, "w") as file:
            yield file

    def _log_lines(self, pipe: int) -> None:
        with os.fdopen(pipe, "rb") as lines:
            while line := lines.readline(_LINE_BYTES):
                self._num_lines += 1
                if self._num_lines <= MAX_LINES:
                    rest = "; its further lines are left out" if self._num_lines == MAX_LINES else ""
                    log.info("The MCP server %r writes: %s%s", self.name, clean(line.decode(errors="replace")), rest)


def load_servers(path: str) -> dict[str, ToolServer]:
    """The servers of a file, running; made once for a file as it is. Raises ConfigError; MissingExtraError without `mcp`."""
    file = require_regular(path, "The file mcp_servers_config_path", fix="Name a JSON file of MCP servers.")
    return _load_servers(str(file), file.stat().st_mtime_ns)


@functools.cache
def _load_servers(path: str, _modified: int) -> dict[str, ToolServer]:
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise MissingExtraError("A tool of type mcp", "mcp", "mcp") from None
    try:
        rows = json.loads(read_user_text(path, "The file mcp_servers_config_path"))["mcpServers"]
        rows = {str(name): dict(settings) for name, settings in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} must be JSON with an object 'mcpServers' of servers by name: {error!r}.") from error
    adopt_loggers(*_LIBRARIES)
    for name, settings in rows.items():
        if not (settings.get("url") or settings.get("command")):
            raise ConfigError(f"{path}: the server {name!r} has neither url nor command.")
    return {name: ToolServer(name, settings) for name, settings in rows.items()}


def _transport(settings: Mapping[str, Any], stderr: TextIO) -> Any:
    """The transport of a client. A command and all that it has started end with this process, however that ends."""
    if settings.get("url"):
        headers = dict(settings.get("headers") or {})
        if token := settings.get("auth_token"):
            headers["Authorization"] = f"Bearer {token}"
        url = str(settings["url"])
        if settings.get("transport") == "sse" or url.rstrip("/").endswith("/sse"):
            from mcp.client.sse import sse_client

            return sse_client(url, headers=headers)
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        return streamable_http_client(url, http_client=httpx2.AsyncClient(headers=headers))
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    command, *guard = python_command("verl.rewards.sandbox.reaper", str(os.getpid()))
    parameters = StdioServerParameters(
        command=command,
        args=[*guard, str(settings["command"]), *map(str, settings.get("args") or [])],
        env={name: str(value) for name, value in (settings.get("env") or {}).items()},
        cwd=settings.get("cwd"),
        encoding_error_handler="replace",  # else one wrong byte ends the reader, and calls wait for their time limit
    )
    return stdio_client(parameters, errlog=stderr)


def _why(error: BaseException) -> str:
    """The first cause in a group of errors."""
    while causes := getattr(error, "exceptions", None):
        error = causes[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")
