"""Output of a run in a notebook: one display, updated in place."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.tracking.test_console import METRICS, STEP, summary
from verl.run.host import _console
from verl.tracking import console
from verl.tracking.console import Console
from verl.tracking.console_notebook import NotebookConsole


@pytest.fixture
def outputs(monkeypatch):
    """The displays of a notebook: of each, its contents one after the other."""
    displays = []

    def display(content, raw, display_id):
        assert raw
        assert display_id
        displays.append([content])
        return SimpleNamespace(update=lambda content, raw: displays[-1].append(content))

    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels have it
    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return displays


def run(*, steps=3, error=None):
    with NotebookConsole() as console:
        console.header({"model": "<b>m</b>", "notices": ["look here"]})
        console.begin(0, steps, METRICS)
        console.validation(0, {"val/reward": 0.1})
        for step in range(1, steps + 1):
            console.phase("gen")
            console.step(step, {**STEP, "critic/score/mean": step / 10})
            logging.getLogger("verl.something").info("step %d is over", step)
        logging.getLogger("verl.something").warning("careful now")
        if error:
            raise error
        console.validation(steps, {"val/reward": 0.4})
        console.final(summary())


def test_a_run_is_one_output_that_ends_with_curve_warnings_and_result(outputs, capsys):
    run()
    (contents,) = outputs
    html = contents[-1]["text/html"]
    assert "step 3 of 3 · finished" in html
    assert "reward: training 0.3, held-out 0.4 (axis 0.1 to 0.4)" in html
    assert html.count("<circle") == 2
    for text in ("WARNING: careful now", "notice: look here", "held-out reward, sampled: 0.152 -&gt; 0.500"):
        assert text in html
    assert "&lt;b&gt;m&lt;/b&gt;" in html
    assert "<b>m</b>" not in html
    assert "careful now" in contents[-1]["text/plain"]  # for what shows no HTML
    assert "\x1b" not in html
    assert capsys.readouterr().out == ""


def test_an_evaluation_has_no_steps(outputs):
    with NotebookConsole() as console:
        console.validation(None, {"val/reward": 0.25})
    html = outputs[0][-1]["text/html"]
    assert html.startswith("<div><b>verl</b> finished<br><pre")
    assert "reward=0.250" in html


def test_the_time_left_and_the_phase_are_named_meanwhile(outputs):
    run(steps=3)
    (contents,) = outputs
    assert any(
        "step 1 of 3 · gen · " in content["text/html"] and " left" in content["text/html"] for content in contents
    )


def test_a_long_run_shows_its_newest_lines_and_all_warnings(outputs):
    run(steps=300)
    html = outputs[0][-1]["text/html"]
    assert "step=299/300" in html
    assert "step=1/300" not in html
    assert "careful now" in html


def test_a_run_that_ends_early_says_so(outputs):
    with pytest.raises(KeyboardInterrupt):
        run(error=KeyboardInterrupt())
    assert "step 3 of 3 · stopped" in outputs[0][-1]["text/html"]


@pytest.mark.parametrize(("is_notebook", "kind"), [(True, NotebookConsole), (False, Console)])
def test_only_a_notebook_has_the_display(monkeypatch, is_notebook, kind):
    monkeypatch.setattr("verl.run.host.is_notebook", lambda: is_notebook)
    assert type(_console(SimpleNamespace(is_rank_zero=True))) is kind
    assert not console.is_notebook()  # in this process
