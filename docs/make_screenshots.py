"""The pictures of docs/page.md: `python docs/make_screenshots.py RUN OTHER [MORE ...]` (playwright, pillow, chromium).

They show the step of RUN whose groups differ most, its first group, and of that the sample with the best score; the answers
to common questions in three clicks (wrong rewards are looked for in OTHER); the plan of OTHER (`verl plan --beside OTHER`); and
RUN compared with OTHER.
MORE are runs of other kinds, of which a step is shown, or the conversation of an agent.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from verl.page.launch import address_of, listen, new_token
from verl.page.pages import Site
from verl.page.server import serve_page

OUT = Path(__file__).resolve().parent / "images"


def main(folders: list[Path]) -> None:
    """Write the pictures of the runs in `folders`."""
    OUT.mkdir(exist_ok=True)
    site = Site(folders)
    for view in site.views.values():
        view.index.update()
    keys = list(site.views)
    site.close()
    listening, token = listen(), new_token()
    threading.Thread(target=serve_page, args=(folders, listening, token), daemon=True).start()
    address = address_of(listening, token)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 860})
        tab.goto(address)
        for name in _views(tab, address.partition("/?")[0], keys):
            tab.wait_for_timeout(800)
            picture = Image.open(io.BytesIO(tab.screenshot()))
            # median cut, the default, loses the colours of thin lines
            few = picture.convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(OUT / f"page-{name}.png", optimize=True)


def _views(tab: Any, base: str, keys: list[str]) -> Iterator[str]:
    """Opens one view after the other; yields the name of each."""
    run, other = (f"{base}/run/{key}" for key in keys[:2])
    yield "runs"
    tab.goto(run)
    step = _best_step(tab.inner_text(".steps tbody"))
    yield "run"
    tab.goto(f"{run}/train/{step}")
    yield "step"
    _open_next(tab, "u")
    yield "group"
    _open_next(tab, "s")
    tab.keyboard.press("t")
    yield "sample"
    for name, question in (("cut", "cut at"), ("reward", "same answer"), ("difference", "sampler/trainer")):
        tab.goto(other if name == "reward" else run)
        tab.click(".tabs a:has-text('Samples')")
        tab.click(f"nav[aria-label='Common questions'] a:has-text('{question}')")
        if name == "difference":
            tab.click("a.item >> nth=0")
            tab.wait_for_url("**/s/*")
        yield f"found-{name}"
    for name in ("metrics", "config", "log", "plan"):
        tab.goto(f"{other}/{name}")
        yield name
    tab.goto(f"{base}/compare?a={keys[0]}&b={keys[1]}")
    yield "compare"
    for key in keys[2:]:
        tab.goto(f"{base}/run/{key}")
        tab.click(".steps tbody a >> nth=0")
        if tab.locator("text=validation after step").count():  # where the rows of training are not kept
            tab.click("text=validation after step")
        if tab.locator("h2:has-text('Groups')").count():  # of agents: a conversation
            _open_next(tab, "u")
            _open_next(tab, "s")
        yield f"of-{key}"
    tab.emulate_media(color_scheme="dark")
    tab.goto(run)
    yield "dark"
    tab.set_viewport_size({"width": 420, "height": 860})
    tab.goto(f"{run}/train/{step}")
    yield "narrow"


def _open_next(tab: Any, kind: str) -> None:
    """Opens the first item of a list, by keys: a unit of samples (u) or a sample (s)."""
    tab.keyboard.press("j")
    tab.keyboard.press("Enter")
    tab.wait_for_url(f"**/{kind}/*")


def _best_step(table: str) -> str:
    rows = [re.split(r"\t", row) for row in table.splitlines() if row.strip()]
    return max((row for row in rows if len(row) > 4), key=lambda row: float(row[3].replace("–", "0")))[0].strip()


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
