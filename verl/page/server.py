"""The web server of the page: Starlette and uvicorn; with /metrics for Prometheus.

Safe by default: it listens at loopback, every request needs the random token (in a cookie, set by the first address) and a
Host of this machine, and the content security policy forbids anything that is not served here. Two addresses take a POST, of
the page's own forms: the notes of a run, and its stop.
"""

import asyncio
import hmac
import ipaddress
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode

from verl.errors import MissingExtraError
from verl.page.notes import MAX_BYTES as MAX_NOTES_BYTES
from verl.page.pages import NotFound, Site
from verl.page.reader import RunReader
from verl.tracking.files import write_atomically
from verl.tracking.lock import stop_holder
from verl.tracking.logs import adopt_loggers

_RELOAD_S = 2.0
_NAME = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(site: Site, labels: Mapping[str, str]) -> str:
    """verl_{metric}{run="..."} of the newest step that has it, for all runs; also verl_step, verl_total_steps, verl_running
    and verl_seconds_since_step."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for key, view in site.views.items():
        run = view.run
        run.refresh()
        written = run.times.get(run.step)
        facts = {
            "step": run.step, "total_steps": run.total_steps, "running": int(run.is_running),
            "seconds_since_step": None if written is None else max(time.time() - written, 0.0),
        }  # fmt: skip
        metrics = {name: series.last for name, series in run.metrics.items()}
        params = {"run": key, **labels}
        for name, value in {**metrics, **facts}.items():
            if value is not None:
                samples.setdefault(name, []).append((params, value))
    return gauges(samples)


def gauges(samples: Mapping[str, Iterable[tuple[Mapping[str, str], float]]]) -> str:
    """The text of verl_{name}{labels} value, for all (labels, value) of each name."""
    lines = []
    for name, values in sorted((f"verl_{_NAME.sub('_', name)}", values) for name, values in samples.items()):
        lines += [f"# TYPE {name} gauge\n", *(f"{name}{_labels(labels)} {value!r}\n" for labels, value in values)]
    return "".join(lines)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{_NAME.sub("_", n)}="{str(v).translate(_ESCAPES)}"' for n, v in labels.items()) + "}"


def reload_prometheus(port: int) -> bool:
    """Ask Prometheus on this machine to read its settings again; whether it did (it needs --web.enable-lifecycle)."""
    import httpx

    try:
        return httpx.post(f"http://127.0.0.1:{port}/-/reload", timeout=_RELOAD_S, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def write_scrape_config(file: Path, host: str, port: int, token: str) -> None:
    """Write a settings file of Prometheus that scrapes the page. Only the user can read it: it holds the token."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = (
        f"global:\n  scrape_interval: 10s\nscrape_configs:\n  - job_name: verl\n    authorization:\n"
        f"      credentials: {token}\n    static_configs:\n      - targets: ['{host}:{port}']\n"
    )
    file.touch(mode=0o600)
    write_atomically(file, text)
    file.chmod(0o600)


try:
    import uvicorn
    from sse_starlette import EventSourceResponse, ServerSentEvent
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from verl.parallel.connections import PatientProtocol
except ImportError as error:
    raise MissingExtraError("The page about runs", "page", error.name or "starlette") from error

STATIC = Path(__file__).parent / "static"
_FORM = re.compile(r"/run/[^/]+/(?:notes|stop)")
_POLL_S = 0.4  # between two looks at a run with an open page
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Next = Callable[[Request], Awaitable[Response]]


class Gate:
    """Lets requests of the user's through: the right Host, method and token."""

    def __init__(self, app: ASGIApp, token: str, host: str, port: int):
        self.app = app
        self.token = token
        self.cookie = f"verl_page_{port}"
        self.host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(Request(scope))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                extra = [
                    (n.lower().encode(), v.encode()) for n, v in HEADERS.items() if n.lower().encode() not in present
                ]
                caching = [] if b"cache-control" in present else [(b"cache-control", b"no-store")]
                message["headers"] = [*message["headers"], *extra, *caching]
            await send(message)

        await (refusal or self.app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not is_own_name(request.headers.get("host", ""), self.host):
            return PlainTextResponse("This address is not one of this page (Host).", 421)
        if request.method not in ("GET", "HEAD") and not (
            request.method == "POST" and _FORM.fullmatch(request.url.path)
        ):
            return PlainTextResponse("This address is only read.", 405, {"Allow": "GET, HEAD"})
        token = request.query_params.get("token")
        if token is not None and self._is_token(token):
            parameters = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            target = "/" + request.url.path.lstrip("/") + (f"?{urlencode(parameters)}" if parameters else "")
            response = RedirectResponse(target, 303)
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", max_age=30 * 86400)
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self.cookie, "")) or self._is_token(bearer):
            return None
        text = "Open the page with the address that the run or verl view has printed: its token is missing or old."
        return PlainTextResponse(text, 403)

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())


def is_own_name(host: str, name_of_page: str = "localhost") -> bool:
    """Whether a Host header has a name of this machine, or a number: a page elsewhere can point its own name here, and never a
    number. `name_of_page` is the address that the server listens at."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    if name in ("localhost", name_of_page, socket.gethostname().lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def make_app(
    site: Site, token: str, host: str = "127.0.0.1", port: int = 0, *, labels: dict[str, str] | None = None
) -> Gate:
    """The ASGI application of `site`."""

    async def page(request: Request) -> Response:
        try:
            # values of one name are joined by commas: no key of a run has one
            query = {name: ",".join(request.query_params.getlist(name)) for name in request.query_params}
            html = await run_in_threadpool(site.page, request.url.path, query)
        except NotFound as error:
            return HTMLResponse(site.message(str(error), request.url.path), 404)
        return HTMLResponse(html)

    async def metrics(request: Request) -> Response:
        text = await run_in_threadpool(exposition, site, labels or {})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def charts(request: Request) -> Response:
        from verl.page import panels

        try:
            view = site.view(request.path_params["key"])
        except NotFound as error:
            return JSONResponse({"error": str(error)}, 404)
        every = panels.all_metrics(view.run) if "all" in request.query_params else None
        listed = await run_in_threadpool(lambda: every if every is not None else panels.panels(view.run, view.index))
        return JSONResponse(panels.charts_json(listed, view.run.marks()))

    async def live(request: Request) -> Response:
        return EventSourceResponse(_changes(site, request), ping=15)

    site.form_token = hmac.new(token.encode(), b"form", "sha256").hexdigest()  # of the forms in its pages
    app = Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/metrics", metrics),
            Route("/live", live),
            Route("/charts/{key}", charts),
            Route("/run/{key}/{action}", _form(site), methods=["POST"]),
            Route("/{path:path}", page),
        ],
        exception_handlers={Exception: _failed(site)},
    )
    return Gate(app, token, host, port)


def _stop(run: RunReader) -> str:
    return "" if stop_holder(run.folder) else "No process of this machine runs in this folder, so nothing was stopped."


# the forms of a run, as functions of their fields; the result is "", or a sentence if nothing was done
_FORMS: dict[str, Callable[[RunReader, Mapping[str, str]], str]] = {
    "stop": lambda run, fields: _stop(run),
    "notes": lambda run, fields: run.notes.replace(fields.get("notes", ""), fields.get("digest", "")),
}


def _form(site: Site) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 4 * MAX_NOTES_BYTES:  # a byte takes up to three in a form
                return PlainTextResponse("Notes have at most 64 KiB. They were not saved.", 413)
        fields = {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}
        if not hmac.compare_digest(fields.get("form", "").encode(), site.form_token.encode()):
            return PlainTextResponse("This form is not of this page, or is old: load the page again.", 403)
        key = request.path_params["key"]
        try:
            act = _FORMS[request.path_params["action"]]
            problem = await run_in_threadpool(act, site.view(key).run, fields)
        except NotFound as error:
            return HTMLResponse(site.message(str(error)), 404)
        if problem:
            return HTMLResponse(site.message(problem), 409)
        return RedirectResponse(f"/run/{quote(key, safe='')}", 303)

    return handle


def _failed(site: Site) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        import logging

        logging.getLogger(__name__).error("The page %s failed.", request.url.path, exc_info=error)
        text = "This page could not be made; the reason is in the log of the page. The run is not affected."
        return HTMLResponse(site.message(text, request.url.path), 500)

    return handle


async def _changes(site: Site, request: Request) -> AsyncIterator[ServerSentEvent]:
    """The state of each run, its key and step; a comment then; and an event for each change of one."""
    last_sent: dict[str, tuple[int, str]] = {}
    is_first = True
    while not await request.is_disconnected():
        for key, view in site.views.items():
            version = await run_in_threadpool(view.run.refresh)
            status = await run_in_threadpool(_status, view.run)
            if last_sent.get(key) != (version, status):
                if key in last_sent:
                    view.watch()
                yield ServerSentEvent(
                    event="change" if key in last_sent else "state",
                    data=json.dumps(
                        {"run": key, "step": view.run.step, "live": view.run.is_live}, separators=(",", ":")
                    ),
                )
                last_sent[key] = (version, status)
        if is_first:
            yield ServerSentEvent(comment="watching")
            is_first = False
        await asyncio.sleep(_POLL_S)


def _status(run: RunReader) -> str:
    beat = run.beat
    return f"{run.status} {run.is_live} {beat.phase if beat else ''}"


def serve_page(
    folders: Sequence[Path], listening: socket.socket, token: str, labels: dict[str, str] | None = None
) -> None:
    """Serve the page about `folders` at a listening socket until the process is interrupted."""
    host, port = listening.getsockname()[:2]
    site = Site(folders)
    app = make_app(site, token, host, port, labels=labels)
    adopt_loggers("uvicorn", "starlette", "asyncio")
    config = uvicorn.Config(
        app, http=PatientProtocol, log_config=None, log_level="warning", access_log=False, lifespan="off",
        timeout_graceful_shutdown=1, server_header=False,
    )  # fmt: skip
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        site.close()
