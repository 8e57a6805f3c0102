"""The pages in a browser: Debian's Chromium, driven by Playwright.

apt-get install chromium; pip install playwright; AXE_CORE may name axe.min.js of the npm package axe-core.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.page.folders import add_step, append, make_run, sample, write_samples
from verl.page.launch import start_page

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
pytest.importorskip("sse_starlette", reason="the extra `page` is not installed")

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
AXE = Path(os.environ.get("AXE_CORE", "node_modules/axe-core/axe.min.js"))
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>\u202ereversed\u2066 </pre>"
    + "A" * 1_000_000
)


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        pytest.skip("chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", steps=3)
    rows = [sample(8 + i, k, step=3, score=float(i == k)) for i in range(3) for k in range(3)]
    rows[1].update(finish_reason="length")
    rows[2]["train_log_probs"] = [rows[2]["log_probs"][0] - 2.5, *rows[2]["log_probs"][1:]]
    rows.append(sample(12, 0, step=3, response=HOSTILE, prompt_ids=[], response_ids=[]))
    write_samples(folder, "train", 3, rows)
    write_samples(folder, "val", 3, [sample(90, 0, step=3)])
    append(folder / "events.jsonl", {"time": 1.0, "event": "restarted", "cause": "SIGKILL", "step": 2, "phase": "gen"})
    return folder


@pytest.fixture(scope="module")
def server(run_folder, tmp_path_factory):
    os.environ["VERL_PAGE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    page = start_page(run_folder, "127.0.0.1", 0)
    yield page
    page.close()
    del os.environ["VERL_PAGE_CACHE"]


@pytest.fixture
def tab(browser, server):
    """A tab that has the cookie. At the end: no error on the console, and no request to another host."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    problems, hosts = [], set()
    tab = context.new_page()
    tab.set_default_timeout(30_000)
    tab.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: hosts.add(re.match(r"\w+:/*([^/]*)", request.url).group(1)))
    tab.base = server.address.partition("/?")[0]
    tab.goto(server.address)
    yield tab
    context.close()
    assert problems == []
    assert hosts <= {f"127.0.0.1:{server.port}"}


PAGES = (
    "",
    "/train/3",
    "/train/3/u/8",
    "/train/3/s/1",
    "/train/3/s/9",
    "/val/3",
    "/samples?q=answer",
    "/metrics",
    "/config",
    "/log",
)


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_and_are_accessible(tab, path, scheme):
    tab.emulate_media(color_scheme=scheme)
    tab.goto(f"{tab.base}/run/run{path}")
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.hacked") is None
    if not AXE.is_file():
        pytest.skip("axe-core is not there: npm install axe-core, or AXE_CORE=path/to/axe.min.js")
    tab.evaluate(AXE.read_text(encoding="utf-8"))
    found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        (v["id"], [node["html"][:160] for node in v["nodes"][:3]])
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    assert not serious, json.dumps(serious, indent=1)


def test_a_step_arrives_by_itself(tab, run_folder):
    tab.goto(f"{tab.base}/run/run")
    tab.wait_for_selector(".live:not([hidden])", state="attached")
    tab.wait_for_timeout(800)
    before = (run_folder / "metrics.jsonl").read_text().count("\n")
    add_step(run_folder, before + 1, samples=False)
    # a function that waits would be refused by the content security policy
    step = playwright.expect(tab.locator(".state b").first)
    step.to_have_text(str(before + 1), timeout=20_000)
    playwright.expect(tab.locator(".chart .keys").first).to_contain_text(f"step {before + 1}", timeout=20_000)


def test_the_keyboard_leads_from_a_curve_to_a_token(tab):
    tab.goto(f"{tab.base}/run/run")
    tab.wait_for_selector(".chart canvas")
    tab.keyboard.press("c")
    assert "chart" in tab.evaluate("document.activeElement.className")
    tab.keyboard.press("Home")
    for _ in range(2):
        tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/train/3")
    tab.keyboard.press("j")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/u/*")
    tab.keyboard.press("j")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/s/*")
    tab.keyboard.press("t")
    tab.keyboard.press("ArrowRight")
    assert "token 2 of 6" in tab.inner_text("#token-info")
    tab.keyboard.press("u")
    tab.wait_for_url("**/u/*")


def test_a_large_difference_is_three_clicks_away(tab):
    tab.goto(f"{tab.base}/run/run")
    tab.click("a.item:has-text('3') >> nth=0")
    tab.wait_for_url("**/train/*")
    tab.goto(f"{tab.base}/run/run/train/3?sort=gap")
    tab.click(".groups .item >> nth=0")
    tab.wait_for_url("**/u/8")
    tab.click(".card:has-text('Δ 2.5') a.item")
    tab.click(".modes button:has-text('trainer − sampler')")
    assert "h7" in tab.get_attribute("#tokens .k >> nth=0", "class")
    tab.focus("#tokens")
    tab.keyboard.press("x")
    assert "token 1 of 6" in tab.inner_text("#token-info")


def test_hostile_text_is_text(tab):
    tab.goto(f"{tab.base}/run/run/train/3/s/9")
    assert tab.evaluate("window.hacked") is None
    text = tab.inner_text(".tokens-section pre")
    assert text.startswith("<script>window.hacked")
    assert "U+202E" in text
    assert "more characters" in text
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
