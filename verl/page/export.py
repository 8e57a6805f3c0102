"""The pages of runs as files, which a browser opens without a server."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl.errors import ConfigError
from verl.page.pages import Site, View, file_of, segment

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
    from urllib.parse import unquote

    return normpath(join(place.as_posix(), unquote(target)))
