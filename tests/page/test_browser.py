"""Pages in a browser: contents, live updates, the keyboard, hostile text, runs of every kind. See tests/page/browsing.py."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.page.browsing import assert_accessible, open_browser, watched_tab
from tests.page.folders import PLAN, add_step, append, live_run, make_run, sample, write_samples
from tests.page.runs import KINDS, train_kind
from tests.page.test_server import HOLDER
from verl.page.launch import start_page
from verl.planner import Cluster, Dataflow, Lengths, Workload, known_shape, search
from verl.planner.simulate import Conditions, simulate
from verl.tracking.pictures import thumbnail, with_stored_images

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
pytest.importorskip("sse_starlette", reason="the extra `page` is not installed")

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>\u202ereversed\u2066 </pre>"
    + "A" * 1_000_000
)


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", steps=3)
    rows = [sample(8 + i, k, step=3, score=float(i == k)) for i in range(3) for k in range(3)]
    rows[1].update(finish_reason="length")
    rows[3] = {**sample(9, 0, step=3, score=1.0), "score": 0.0}  # the same answer as the next one
    rows[2]["train_log_probs"] = [rows[2]["log_probs"][0] - 2.5, *rows[2]["log_probs"][1:]]
    rows.append(sample(12, 0, step=3, response=HOSTILE, prompt_ids=[], response_ids=[]))
    pictures = with_stored_images({"images": [thumbnail(Image.new("RGB", (900, 600)))]}, folder / "samples/images")
    rows[4]["images"] = [*pictures["images"], "no file"]
    write_samples(folder, "train", 3, rows)
    (folder / "plan.json").write_text(json.dumps({"best": PLAN, "runner_up": PLAN}))
    (folder / "notes.md").write_text("Higher learning rate #base\n" + "a" * 500)
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
    with watched_tab(browser, server) as opened:
        yield opened


PAGES = (
    "",
    "/plan",
    "/train/3",
    "/train/3/u/8",
    "/train/3/s/1",
    "/train/3/s/4",
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
    assert_accessible(tab)


@pytest.mark.parametrize("width", [420, 1280, 1920])
def test_no_page_scrolls_sideways(tab, width):
    tab.set_viewport_size({"width": width, "height": 900})
    for path in ("/", "/compare", *(f"/run/run{path}" for path in PAGES)):
        tab.goto(tab.base + path)
        tab.wait_for_timeout(150)
        if width == 420 or not path.startswith("/run"):
            assert_accessible(tab)
        root = "document.documentElement"
        assert tab.evaluate(f"{root}.scrollWidth <= {root}.clientWidth"), (path, width)


def test_labels_of_an_axis_are_exact(tab):
    tab.goto(f"{tab.base}/run/run")
    labels = tab.evaluate("[[2.25, 2.5, 2.75], [0, 0.0005], [1200, 1400]].map(verlCharts.labels)")
    assert labels == [["2.25", "2.5", "2.75"], ["0", "5.0e-4"], ["1200", "1400"]]


def test_notes_are_written_and_a_run_is_stopped_in_forms(tab, tmp_path, browser):
    """Their forms open above the page; only a run in progress has the second one."""
    folder = make_run(tmp_path / "noted")
    page = start_page(folder, "127.0.0.1", 0)
    try:
        with watched_tab(browser, page) as notes_page:
            notes_page.goto(f"{notes_page.base}/run/noted")
            assert notes_page.locator("[data-dialog='stop-form']").count() == 0
            notes_page.click("text=Add notes")
            notes_page.keyboard.type("begun at noon #first")
            assert_accessible(notes_page)
            notes_page.click("#notes-form >> text=Save")
            notes_page.wait_for_selector(".notes:has-text('begun at noon')")
            assert (folder / "notes.md").read_text() == "begun at noon #first\n"
            with subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE) as holder:
                holder.stdout.readline()
                notes_page.reload()
                notes_page.click("[data-dialog='stop-form']")
                notes_page.click("#stop-form >> text=Stop the run")
                assert holder.wait(30) == -signal.SIGTERM
    finally:
        page.close()


def test_the_badge_is_there_while_the_heartbeat_lives(tab, run_folder):
    tab.goto(f"{tab.base}/run/run")
    tab.wait_for_timeout(800)
    assert tab.locator(".live").is_hidden()
    with live_run(run_folder):
        tab.reload()
        tab.wait_for_selector(".live:not([hidden])")
    tab.wait_for_selector(".live", state="hidden")


def test_charts_are_smoothed_grouped_and_saved(tab):
    tab.goto(f"{tab.base}/run/run/metrics")
    groups = tab.locator(".chart-group > summary").all_inner_texts()
    assert groups == sorted(groups)
    assert "actor" in groups
    tab.fill("[data-smooth]", "0.9")
    tab.check("[data-log]")
    with tab.expect_download() as download:
        tab.get_by_role("button", name="CSV").first.click()
    assert Path(download.value.path()).read_text().splitlines()[:2] == ['"step","actor/grad_norm"', "1,1"]
    with tab.expect_download() as download:
        tab.get_by_role("button", name="PNG").first.click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_axes_show_small_changes_as_small_and_one_step_as_one_step(browser, tmp_path, monkeypatch):
    """Shares from 0 to 1, amounts from 0, other values at least a tenth of their size; bars and single points in the middle."""
    folder = make_run(tmp_path / "run", steps=1)
    values = {"response/distinct_ratio": 0.993, "perf/cpu_memory_used_gb": 3.0, "actor/entropy": 0.693145}
    append(folder / "metrics.jsonl", {"step": 1, "time": 1_700_000_003.0, **values})
    monkeypatch.setenv("VERL_PAGE_CACHE", str(tmp_path / "cache"))
    page = start_page(folder, "127.0.0.1", 0)
    try:
        with watched_tab(browser, page) as tab:
            tab.set_viewport_size({"width": 1280, "height": 3000})
            tab.goto(f"{tab.base}/run/run")
            tab.wait_for_selector(".chart.wide canvas")
            plots = tab.evaluate(
                """uPlot.sync("verl-steps").plots.map(({ root, axes, scales: { x, y } }) => [
                    root.closest(".chart").dataset.title, x.min, x.max, y.min, y.max, axes[1]._size,
                    Math.max(...axes[1]._values.map((v) => v.length))])"""
            )
    finally:
        page.close()
    axes = {title: axis for title, *axis in plots}
    assert axes["Different responses"][2:4] == [0, 1.03]
    assert axes["Memory"][2:4] == [0, pytest.approx(3.18)]
    assert axes["Entropy"][3] - axes["Entropy"][2] == pytest.approx(0.0693145)
    for title in ("Different responses", "Seconds of a step by phase"):
        assert axes[title][:2] == [0.5, 1.5], title
    for title, axis in axes.items():
        assert axis[4] >= 7 * axis[5], f"{title}: a label of {axis[5]} characters in {axis[4]} pixels"


def test_a_step_arrives_by_itself(tab, run_folder):
    tab.goto(f"{tab.base}/run/run")
    tab.wait_for_timeout(800)
    for _ in range(5):
        step = (run_folder / "metrics.jsonl").read_text().count("\n") + 1
        add_step(run_folder, step, samples=False)
        # a function that waits in the page would be refused by the content security policy
        playwright.expect(tab.locator(".state b").first).to_have_text(str(step), timeout=20_000)
        playwright.expect(tab.locator(".chart .keys").first).to_contain_text(f"step {step}", timeout=20_000)
        tab.wait_for_timeout(600)


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


def three_clicks(tab, question):
    """From the run to the first sample that answers a question; what its page says."""
    tab.goto(f"{tab.base}/run/run")
    tab.click(".tabs a:has-text('Samples')")
    tab.click(f"nav[aria-label='Common questions'] a:has-text('{question}')")
    tab.click("a.item >> nth=0")
    tab.wait_for_url("**/s/*")
    return tab.inner_text("main")


def test_a_cut_response_is_three_clicks_away(tab):
    assert "ended by\nlength" in three_clicks(tab, "cut at the length limit")


def test_a_wrong_reward_is_three_clicks_away(tab):
    text = three_clicks(tab, "same answer, different score")
    assert "ground truth\n7" in text
    assert "The answer is 7" in text
    assert "score\n0\n" in text


def test_a_large_difference_is_three_clicks_away(tab):
    three_clicks(tab, "largest sampler/trainer difference")
    assert "h7" in tab.get_attribute("#tokens .k >> nth=0", "class")
    assert "token 1 of 6" in tab.inner_text("#token-info")
    log_prob = sample(8, 2, step=3)["log_probs"][0]
    gap = math.exp(log_prob - 2.5) - math.exp(log_prob)
    assert f"trainer − sampler p −{-gap:.4g}" in tab.inner_text("#token-info")
    tab.focus("#tokens")
    tab.keyboard.press("End")
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


pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
pytest.importorskip("sse_starlette", reason="the extra `page` is not installed")


def links(tab, pattern):
    """The addresses on the open page with a path that fits."""
    hrefs = tab.eval_on_selector_all("a[href]", "all => all.map(a => a.getAttribute('href'))")
    return [href for href in dict.fromkeys(hrefs) if re.fullmatch(pattern, href)]


def pages_of(tab):
    """The pages of the run, and of each split one step, group and sample, found by following links."""
    tab.goto(f"{tab.base}/run/run")
    yield "/run/run"
    steps = links(tab, r"/run/run/[\w-]+/\d+")
    yield from (
        "/run/run/metrics",
        "/run/run/config",
        "/run/run/log",
        "/run/run/samples",
        "/run/run/samples?q=a&sort=gap",
    )
    for step in {step.split("/")[3]: step for step in reversed(steps)}.values():
        tab.goto(tab.base + step)
        yield step
        tab.goto(tab.base + step)
        groups, samples = links(tab, rf"{step}/u/.+"), links(tab, rf"{step}/s/\d+")
        yield from (*groups[:1], *samples[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_of_a_kind(kind, browser, tiny_llama, tmp_path, monkeypatch):
    folder = train_kind(kind, tmp_path, tiny_llama)
    shape = known_shape("Qwen2.5-0.5B")
    work = Workload(num_prompts=8, samples=4, prompt_mean=64, response=Lengths.of(mean=32, longest=64))
    plan = search(Dataflow.ppo(shape, None, shape), Cluster.of("h100_sxm", 2), work)[0]
    simulate(plan, Conditions(steps=2)).write_plan(folder)
    monkeypatch.setenv("VERL_PAGE_CACHE", str(tmp_path / "cache"))
    page = start_page(folder, "127.0.0.1", 0)
    try:
        with watched_tab(browser, page) as tab:
            tab.goto(f"{tab.base}/run/run/samples")
            for _ in range(100):
                if "Still reading" not in tab.content():
                    break
                tab.wait_for_timeout(200)
                tab.reload()
            opened = set()
            for path in pages_of(tab):
                answer = tab.goto(tab.base + path)
                assert answer.status == 200, path
                tab.wait_for_timeout(150)
                for scheme in ("light", "dark"):
                    tab.emulate_media(color_scheme=scheme)
                    assert_accessible(tab)
                opened.add(re.sub(r"\d.*", "", path.partition("?")[0].removeprefix("/run/run")))
                look(tab, kind, path)
            assert {"/train/", "", "/metrics", "/config", "/log", "/samples"} <= opened
    finally:
        page.close()


def look(tab, kind, path):
    """Check the contents of the page at `path` in a run of that kind."""
    text = tab.inner_text("main")
    if re.fullmatch(r"/run/run/train/\d+", path):
        assert "Plan against measured" in text
    logged = "val" if kind == "rm" else "train"  # a reward model shows its scores of held-out rows
    if re.fullmatch(rf"/run/run/{logged}/\d+", path):
        assert {"sft": "Rows", "dpo": "Pairs", "rm": "Pairs"}.get(kind, "Groups") in text
    if "/train/" in path and "/s/" in path:
        assert ("Conversation" in text) == (kind == "agent")
        if kind == "agent":
            assert tab.locator("details.turn summary:has-text('assistant')").count() > 0
            assert tab.locator("#tokens .masked").count() > 0, "what tools said does not train"
    if f"/{logged}/" in path and "/u/" in path and kind in ("dpo", "rm"):
        assert "margin" in text
