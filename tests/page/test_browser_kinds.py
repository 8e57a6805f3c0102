"""The pages of runs of every kind in a browser: no error on the console, nothing from elsewhere, accessible."""

import re

import pytest

from tests.page.browsing import assert_accessible, open_browser, watched_tab
from tests.page.runs import KINDS, train_kind
from verl.page.launch import start_page
from verl.planner import Cluster, Dataflow, Lengths, Workload, known_shape, search
from verl.planner.simulate import Conditions, simulate

pytestmark = pytest.mark.slow
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="the extra `page` is not installed")
pytest.importorskip("sse_starlette", reason="the extra `page` is not installed")


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


def links(tab, pattern):
    """The addresses on the open page whose path fits."""
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
