"""The pages as HTML, for the server or as files: paths, templates and their contexts (`Site.page(path, query)`).

/                                      the runs
/run/KEY                               a run; also /metrics, /samples, /config, /plan and /log below it
/run/KEY/SPLIT/STEP                    a step; below it /u/UNIT, the group or pair, and /s/LINE, a sample
/compare                               curves of several runs: runs; two of them in detail: a, b
"""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from verl.errors import ConfigError
from verl.foreign_text import clean, printable
from verl.page import panels, search, steps, tables
from verl.page.index import SampleIndex
from verl.page.plan import plan_context
from verl.page.reader import RunReader
from verl.page.text import breakable, collapsed, shown, visible, whole_number
from verl.tracking.files import SHOWN_BYTES
from verl.tracking.run_folder import RunFolder
from verl.tracking.timeline import duration

_UNSAFE = re.compile(r"[^\w.-]+")


class NotFound(Exception):
    """There is no such page; the message is a sentence."""


class View:
    """A run on the site: its records and the index of its samples; once it is `watched` a thread keeps that up to date."""

    def __init__(self, folder: Path, key: str, cache: Path | None = None):
        self.run = RunReader(folder, key)
        self.index = SampleIndex(folder, cache)
        self._requested = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self) -> None:
        """Index new samples in a separate thread."""
        self._requested.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"index-{self.run.key}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._requested.set()
        if self._thread is not None:
            self._thread.join(10)

    def _work(self) -> None:
        while not self._closed:
            self._requested.wait()
            self._requested.clear()
            try:
                if self.index.update(deadline=lambda: self._closed):
                    self.run.version += 1
            except Exception as error:  # noqa: BLE001 - the thread must live: the next change is indexed again
                self.run.index_problem = f"The index of samples could not be updated: {clean(error)}."


class Site:
    """All pages about `folders`. `static`: pages are files, so links are relative and what needs a server is left out."""

    def __init__(self, folders: Sequence[Path], *, static: bool = False, cache: Path | None = None):
        self.static = static
        self.form_token = ""  # in the forms of a served page
        self.views: dict[str, View] = {}
        for folder in folders:
            key = self._key(folder)
            self.views[key] = View(folder, key, cache)
            if not static:
                self.views[key].run.max_bytes = SHOWN_BYTES
        self.env = Environment(loader=PackageLoader("verl.page"), autoescape=True, undefined=StrictUndefined,
                               trim_blocks=True, lstrip_blocks=True, finalize=visible)  # fmt: skip
        self.env.filters.update(
            shown=shown, collapsed=collapsed, duration=duration, number=tables.number, clock=tables.clock, data=_data,
            polyline=tables.polyline, breakable=breakable, plain=lambda text: clean(text, 80),
            mean_and_spread=tables.mean_and_spread,
            when=lambda t: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)),
        )  # fmt: skip

    def _key(self, folder: Path) -> str:
        base = _UNSAFE.sub("-", folder.resolve().name).strip("-.") or "run"
        key, number = base, 2
        while key in self.views:
            key, number = f"{base}-{number}", number + 1
        return key

    def close(self) -> None:
        """End the threads of the index."""
        for view in self.views.values():
            view.close()

    def page(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """The HTML of a page. Raises NotFound."""
        parts = [unquote(part) for part in path.strip("/").split("/") if part]
        query = query or {}
        if not parts:
            return self._home(path)
        if parts[0] == "compare" and len(parts) == 1:
            return self.render("compare.html", path, **panels.compare_context(self.views, query))
        if parts[0] != "run" or len(parts) < 2:
            raise NotFound("There is no such page.")
        view = self.view(parts[1])
        try:
            return self._of_run(view, parts[2:], path, query)
        finally:
            if not self.static:  # after the page: it would wait for the turns of the index
                view.watch()

    def view(self, key: str) -> View:
        """The run of that name, after reading its new records. Raises NotFound."""
        if key not in self.views:
            raise NotFound(f"There is no run {clean(key, 60)!r} on this page.")
        view = self.views[key]
        view.run.refresh()
        return view

    def _home(self, path: str) -> str:
        for view in self.views.values():
            view.run.refresh()
        return self.render("home.html", path, runs=[view.run for view in self.views.values()])

    def _of_run(self, view: View, rest: list[str], path: str, query: Mapping[str, str]) -> str:
        common = {"view": view, "run": view.run, "query": query}
        match rest:
            case []:
                charts = panels.charts_json(panels.panels(view.run, view.index), view.run.marks())
                return self.render(
                    "run.html", path, **common, charts=charts, **tables.run_context(view.run, view.index)
                )
            case ["metrics"]:
                charts = panels.charts_json(panels.all_metrics(view.run), view.run.marks())
                return self.render("metrics.html", path, **common, charts=charts)
            case ["config"]:
                return self.render("config.html", path, **common, keys=RunFolder(view.run.folder).read_keys())
            case ["plan"] if (plan := plan_context(view.run.folder)) is not None:
                return self.render("plan_page.html", path, **common, **plan)
            case ["log"]:
                return self.render("log.html", path, **common, **tables.log_context(view.run, query))
            case ["samples"]:
                return self.render("search.html", path, **common, **search.search_context(view.index, query))
            case [split, step, *inner] if (number := whole_number(step)) is not None:
                return self._of_step(view, split, number, inner, path, query)
        raise NotFound("There is no such page.")

    def _of_step(self, view: View, split: str, step: int, rest: list[str], path: str, query: Mapping[str, str]) -> str:
        at = steps.Place(view.run, view.index, split, step)
        match rest:
            case []:
                template, context = "step.html", steps.step_context(at, query)
            case ["u", unit]:
                template, context = "group.html", steps.group_context(at, unit, query)
            case ["s", line] if (number := whole_number(line)) is not None:
                template, context = "sample.html", steps.sample_context(at, number)
            case _:
                raise NotFound("There is no such page.")
        if context is None:
            raise NotFound(f"Step {step} of {clean(split, 40)} has no such {'sample' if rest else 'file of samples'}.")
        return self.render(template, path, view=view, run=view.run, query=query, at=at, **context)

    def message(self, text: str, path: str = "/") -> str:
        """A page with one sentence."""
        return self.render("message.html", path, text=printable(text))

    def render(self, template: str, path: str, **context: object) -> str:
        """The HTML of a template for the page at `path`."""
        depth = len([part for part in path.strip("/").split("/") if part])

        def link(target: str, **query: object) -> str:
            if not self.static:
                parameters = {name: value for name, value in query.items() if value not in (None, "")}
                return target + (f"?{urlencode(parameters)}" if parameters else "")
            return relative(target, max(depth - 1, 0))

        base = {"link": link, "static": self.static, "site": self, "views": self.views, "segment": segment}
        return self.env.get_template(template).render(**{"run": None, **base, **context})


def segment(text: object) -> str:
    """One part of a path."""
    return quote(str(text), safe="")


def file_of(path: str) -> str:
    """The file of a page in an export: /run/a/train/3 -> run/a/train/3.html."""
    if path.startswith("/static/"):
        return path.strip("/")
    return f"{path.strip('/') or 'index'}.html"


def relative(target: str, depth: int) -> str:
    return "../" * depth + quote(file_of(target))


def _data(value: object) -> Markup:
    """JSON inside a script element: no character can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


_STATIC = Path(__file__).parent / "static"


def export_pages(
    folders: Sequence[Path], out: Path, *, num_steps: int = 20, say: Callable[[str], None] = lambda _: None
) -> int:
    """Write the pages of `folders` to the new folder `out`: the runs, and the newest `num_steps` steps of each split with
    all groups and samples. Returns the number of pages. Raises ConfigError when `out` holds anything."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty. Give a new folder to --export.")
    site = Site(folders, static=True)
    count = 0
    try:
        for view in site.views.values():
            say(f"Reading the samples of {view.run.folder}.")
            view.index.update()
        shutil.copytree(_STATIC, out / "static")
        pages = list(_pages(site, num_steps))
        written = {file_of(path) for path in pages}
        for path in pages:
            target = out / file_of(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(without_dead_links(site.page(path), target.parent, out, written), encoding="utf-8")
            count += 1
    finally:
        site.close()
    return count


def _pages(site: Site, num_steps: int) -> Iterator[str]:
    yield "/"
    for key, view in site.views.items():
        base = f"/run/{segment(key)}"
        yield from (base, f"{base}/metrics", f"{base}/config", f"{base}/log")
        if view.run.has_plan:
            yield f"{base}/plan"
        files = view.index.files()
        for split in sorted({split for split, _ in files}):
            for step in sorted((s for name, s in files if name == split), reverse=True)[:num_steps]:
                yield from _of_step(view, f"{base}/{segment(split)}/{step}", split, step)


def _of_step(view: View, path: str, split: str, step: int) -> Iterator[str]:
    yield path
    rows = view.index.rows(
        "SELECT unit, line, count(*) OVER (PARTITION BY unit) AS num FROM samples JOIN files ON files.id = file "
        "WHERE split = ? AND step = ? ORDER BY line", split, step,
    )  # fmt: skip
    yield from dict.fromkeys(f"{path}/u/{segment(row['unit'])}" for row in rows if row["num"] > 1)
    yield from (f"{path}/s/{row['line']}" for row in rows)


_LINK = re.compile(r'<a\b([^>]*?) href="([^"]*)"([^>]*)>')


def without_dead_links(html: str, place: Path, out: Path, written: set[str]) -> str:
    """The page of a file in `place` without links to pages that are not `written`: such a link stays as text."""

    def keep(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if target.startswith("#"):
            return match.group(0)
        linked = Path(_normal(place.relative_to(out), target)).as_posix()
        return match.group(0) if linked in written else f"<a{before}{after}>"

    return _LINK.sub(keep, html)


def _normal(place: Path, target: str) -> str:
    from posixpath import join, normpath

    return normpath(join(place.as_posix(), unquote(target)))
