"""A browser for tests: Debian's Chromium, driven by Playwright; and axe-core, a judge of accessibility.

apt-get install chromium; pip install playwright axe-core-python. AXE_CORE may name another axe.min.js.
"""

import importlib.util
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-headless-shell") or "/usr/bin/chromium"


@contextmanager
def open_browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip("chromium is not installed: apt-get install chromium, or chromium-headless-shell")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched_tab(browser, page):
    """A tab that has the cookie of a verl.page.launch.Page. At the end: no error on the console, and no request to another
    host."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    problems, hosts = [], set()
    tab = context.new_page()
    tab.set_default_timeout(30_000)
    tab.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    # blob: and data: are values of the tab itself; it saves them as files
    tab.on("request", lambda request: hosts.add(re.match(r"(?:(?:blob|data):.*|\w+:/*([^/]*))", request.url).group(1)))
    tab.base = page.address.partition("/?")[0]
    tab.goto(page.address)
    yield tab
    context.close()
    assert problems == []
    assert hosts - {None} <= {f"127.0.0.1:{page.port}"}


def axe_core():
    """The text of axe.min.js; None if it is not installed."""
    package = importlib.util.find_spec("axe_core_python")
    path = os.environ.get("AXE_CORE") or (package and Path(package.origin).parent / "axe.min.js")
    return Path(path).read_text(encoding="utf-8") if path and Path(path).is_file() else None


def assert_accessible(tab):
    """No serious violation on the open page; skips the rest of the test if axe-core is not installed."""
    axe = axe_core()
    if axe is None:
        pytest.skip("axe-core is not there: pip install axe-core-python, or AXE_CORE=path/to/axe.min.js")
    tab.evaluate(axe)
    report = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        (v["id"], [node["html"][:160] for node in v["nodes"][:3]])
        for v in report["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    assert not serious, f"{tab.url}\n{json.dumps(serious, indent=1)}"
