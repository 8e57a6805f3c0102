"""Terminal output: plain stable lines for a file, live output for a terminal of 100 columns, summary and picture."""

import io
import json
import logging
import pdb
import re
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from verl.tracking.console import Console
from verl.tracking.files import append_rows, read_metrics
from verl.tracking.run_folder import RunFolder
from verl.tracking.summary import Result, Summary, git_revision, versions
from verl.tracking.timeline import Spans
from verl.tracking.tracker import Tracker

pytestmark = pytest.mark.seed("F9")

STEP = {
    "critic/score/mean": 0.3125,
    "response_length/mean": 12.04,
    "actor/entropy": 1.2,
    "perf/throughput": 1234.4,
    "perf/time_per_step": 4.07,
}
REWARD = Result("reward", "held-out reward, sampled", 0.152, 0.5)
METRICS = {
    "critic/score/mean": ("reward", "{:.3f}"),
    "response_length/mean": ("length", "{:.1f}"),
    "actor/entropy": ("entropy", "{:.3f}"),
}
LONG_KEY = "actor_rollout_ref.rollout.gpu_memory_utilization"


def run(terminal: bool, steps: bool = True, tmp_path=None) -> str:
    out = io.StringIO()
    rich = RichConsole(file=out, force_terminal=terminal, width=100 if terminal else None)
    with Console(steps=steps, rich_console=rich) as console:
        console.header(
            {"model": "m", "parameters": 134515008, "notices": [f"{LONG_KEY} has no effect here: " + "x " * 80]}
        )
        console.begin(0, 2, METRICS)
        spans = Spans(on_enter=console.phase)
        console.validation(0, {"val/reward": 0.1, "val-core/gcd/reward/mean@4": 0.2, "val-aux/gcd/reward/std@4": 0.2})
        for step in (1, 2):
            with spans("gen"):
                pass
            console.step(step, STEP)
            logging.getLogger("verl.something").warning("careful now")
        console.final(summary())
    return out.getvalue()


def summary(**changes):
    figures = {
        "results": (REWARD, Result("greedy", "greedy", None, None), Result("x", "", 1.0, 2.0)), "steps": 2, "seconds": 200.0,
        "num_tokens": 5000, "tokens_per_s": 25.0, "device": "cpu", "phase_seconds": {"gen": 120.0},
    }  # fmt: skip
    return Summary(**{**figures, **changes})


def test_plain_lines():
    lines = run(terminal=False).splitlines()
    assert "\x1b" not in "".join(lines)
    assert "parameters: 134,515,008" in lines
    assert any(line.startswith(f"notice: {LONG_KEY}") for line in lines)
    assert "validation step=0 reward=0.100 gcd/reward/mean@4=0.200" in lines
    step = next(line for line in lines if line.startswith("step=1/2"))
    assert step.startswith("step=1/2 reward=0.312 length=12.0 entropy=1.200 tokens_per_s=1234 seconds=4.1 left=")
    assert "WARNING: careful now" in lines
    assert "held-out reward, sampled: 0.152 -> 0.500" in lines
    assert "2 steps in 3 min 20 s, 25 tokens/s on cpu" in lines
    assert not any("greedy" in line for line in lines)


def test_a_validation_repeats_no_value():
    """The greedy reward of a greedy validation, and the mean reward of the only data source, are the reward."""
    out = io.StringIO()
    with Console(rich_console=RichConsole(file=out)) as console:
        console.validation(0, {"val/reward": 0.9, "val/greedy": 0.9, "val-core/data/reward/mean@1": 0.9})
        console.validation(0, {"val/reward": 0.8, "val/greedy": 0.9, "val-core/data/reward/mean@2": 0.8 + 1e-12})
        console.validation(0, {"val/reward": 0.8, "val-core/data/acc/mean@1": 0.8})
        console.validation(0, {"val/reward": 0.8, "val-core/data/acc/mean@1": 0.7})
        console.validation(0, {"val/reward": 0.5, "val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 0.5})
    greedy, sampled, same, other, sources = out.getvalue().splitlines()
    assert greedy == "validation step=0 reward=0.900"
    assert sampled == "validation step=0 reward=0.800 greedy=0.900"
    assert same == "validation step=0 reward=0.800"
    assert other == "validation step=0 reward=0.800 data/acc/mean@1=0.700"
    assert sources == "validation step=0 reward=0.500 a/reward/mean@1=0.500 b/reward/mean@1=0.500"


def test_terminal():
    text = run(terminal=True)
    for part in ("verl", "validation before training", "gcd/reward/mean@4", "careful now", "Result", "+0.348"):
        assert part in text


@pytest.mark.parametrize(("num_sources", "rest"), [(1, ""), (20, "  and 19 more")])
def test_a_validation_is_one_line_of_a_terminal(num_sources, rest):
    out = io.StringIO()
    core = {f"val-core/source_{i:02d}/reward/mean@4": 0.25 for i in range(num_sources)}
    with Console(rich_console=RichConsole(file=out, force_terminal=True, no_color=True, width=100)) as console:
        console.validation(8, {"val/reward": 0.1, "val/greedy": 0.2, **core})
    (line,) = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()
    assert line.startswith("validation after step 8  reward 0.100  greedy 0.200  source_00/reward/mean@4 0.250")
    assert line.rstrip().endswith(rest)
    assert len(line) <= 100


def test_the_bar_counts_the_seconds_of_a_phase_and_the_time_left(monkeypatch):
    """A first step without an expectation has no time left; a validation counts down the time of the steps."""
    now = [100.0]
    monkeypatch.setattr("verl.tracking.console.time.monotonic", lambda: now[0])
    for step_s, first in ((None, "4.0 s"), (60.0, "4.0 s · 3 min 50 s left")):
        now[0] = 100.0
        with Console(rich_console=RichConsole(file=io.StringIO(), force_terminal=True, width=100)) as console:
            console.begin(0, 4, METRICS, step_s)
            now[0] += 6.0
            console.phase("gen")
            now[0] += 4.0
            assert console._clock() == first
            now[0] += 50.0
            console.step(1, STEP)
            console.phase("testing")
            now[0] += 30.0
            assert console._clock() == "30 s · 2 min 30 s left"


FOREIGN = st.text(st.characters(categories=None, exclude_categories=()), max_size=40)


@settings(max_examples=60, deadline=None)
@given(text=FOREIGN, terminal=st.booleans())
@example(text="\x1b]0;title\x07\x9b2J\u202e\rstep=9/9", terminal=True)
@example(text="[/bold] [red]\n2026-01-01 00:00:00,000 ERROR 7 verl: forged\nerror: forged", terminal=False)
def test_foreign_text_adds_no_lines_and_no_escapes(text, terminal):
    """In facts, notices, phases and names of metrics, as of data sources."""
    out, core = io.StringIO(), f"val-core/{text}/mean@4"
    rich = RichConsole(file=out, force_terminal=terminal, no_color=True, width=200 if terminal else None)
    with Console(rich_console=rich) as console:
        console.header({"model": text, "notices": [text]})
        console.begin(0, 2, METRICS)
        console.phase(text)
        console.validation(1, {core: 0.5})
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())  # rich's own styles
    assert not [c for c in printed if not c.isprintable() and c not in "\n\r\t"]
    if not terminal:
        lines = printed.split("\n")
        assert "\x1b" not in out.getvalue()
        assert len([line for line in lines if line.startswith(("model:", "notice:", "validation"))]) == 3
    assert "title\x07" not in printed


def test_names_of_metrics_are_clean_in_the_file(tmp_path):
    with RunFolder(tmp_path) as folder, Tracker(folder, [], "p", "e", {}) as tracker:
        tracker.log({"val-core/\x1b[31m\ud800\nforged/mean@4": 0.5}, 1)
        (row,) = read_metrics(folder.metrics)
    assert row["val-core/\\x1b[31m\\ud800 forged/mean@4"] == 0.5


def test_a_program_of_another_kind():
    """The line of a step, validation and the closing table show the metrics of the program."""
    out = io.StringIO()
    metrics = {"train/loss": ("loss", "{:.4f}"), "train/grad_norm": ("grad", "{:.2f}"), "train/lr": ("lr", "{:.2g}")}
    with Console(rich_console=RichConsole(file=out)) as console:
        console.begin(0, 1, metrics)
        console.step(1, {"train/loss": 2.5, "train/lr": 2e-5, "perf/throughput": 900.0, "critic/score/mean": 1.0})
        console.validation(1, {"val/loss": 2.25, "val/token_accuracy": 0.5})
        console.validation(1, {"train/loss": 2.0})
        measures = (2.5, 2.25), (2.5, None), (None, 2.25)
        console.final(summary(results=[Result("loss", "held-out loss", *values) for values in measures]))
    assert out.getvalue().splitlines() == [
        "step=1/1 loss=2.5000 lr=2e-05 tokens_per_s=900 left=0 s",
        "validation step=1 loss=2.250 token_accuracy=0.500",
        "held-out loss: 2.500 -> 2.250",
        "held-out loss: 2.500 before training, not validated after it",
        "held-out loss: 2.250",
        "2 steps in 3 min 20 s, 25 tokens/s on cpu",
    ]


def test_steps_can_be_left_out():
    assert "step=1/2" not in run(terminal=False, steps=False)


def test_log_level_of_the_environment(monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "ERROR")
    assert "careful now" not in run(terminal=False)
    monkeypatch.setenv("LOG_LEVEL", "no such level")
    assert "careful now" in run(terminal=False)


def test_summary_of_a_run(tmp_path):
    with RunFolder(tmp_path) as folder, Tracker(folder, [], "p", "e", {}) as tracker:
        for step, seconds in ((1, 4.0), (2, 2.0), (3, 3.0)):
            append_rows(folder.metrics, [{"step": step, "timing_s/step": seconds, "timing_s/gen": seconds / 2}])
        written = Summary.of_run(
            results=[Result("reward", "reward", 0.1, float("nan"))], steps=3, seconds=9.0,
            num_tokens=900, device="cpu", metrics_file=folder.metrics,
        )  # fmt: skip
        tracker.finish(written)
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert (saved["steps"], saved["tokens_per_s"], saved["median_step_s"]) == (3, 100.0, 3.0)
    assert (saved["phase_seconds"], saved["median_phase_s"]) == ({"gen": 4.5}, {"gen": 1.5})
    assert (saved["reward_before"], saved["reward_after"]) == (0.1, None)
    assert set(saved["versions"]) == {"python", "torch", "transformers", "verl"}
    assert saved["git_revision"] == git_revision()
    assert versions()["torch"]


def test_summary_of_a_run_without_steps(tmp_path):
    written = Summary.of_run(
        results=(), steps=0, seconds=0.0,
        num_tokens=0, device="cpu", metrics_file=tmp_path / "none.jsonl",
    )  # fmt: skip
    assert written.tokens_per_s is None
    assert written.median_step_s is None


def test_the_bar_leaves_the_terminal_to_a_debugger(monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", lambda: None)
    with Console(rich_console=RichConsole(file=io.StringIO(), force_terminal=True, width=100)) as console:
        console.begin(0, 3, METRICS)
        for debugger in (lambda: pdb.Pdb(stdout=io.StringIO()), breakpoint):
            assert console._progress.live.is_started
            debugger()
            assert not console._progress.live.is_started
            console.step(1, STEP)
