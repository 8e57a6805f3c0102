"""Home, steps, log, overlaid curves and the live state of runs, without a browser."""

import json
import time

import pytest

from tests.page.folders import add_step, append, live_run, make_run
from verl.page import panels
from verl.page.pages import Site
from verl.page.steps import gantt
from verl.page.tables import log_context, number, polyline, read_log


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Three runs: two of GRPO, one of fine-tuning."""
    folders = [make_run(tmp_path / name, steps=2) for name in ("one", "other", "tuned")]
    (folders[2] / "config.yaml").write_text("sft: {}\nmodel:\n  path: org/Small-1B  # given\n")
    append(folders[2] / "metrics.jsonl", {"step": 3, "time": 1_700_000_009.0, "train/loss": 0.25})
    monkeypatch.setenv("VERL_PAGE_CACHE", str(tmp_path / "cache"))
    opened = Site(folders)
    yield opened
    opened.close()


def test_home_has_kind_model_start_and_duration(site):
    html = site.page("/")
    rows = {key: html.partition(f'id="run-{key}"')[2].partition("</tr>")[0] for key in site.views}
    assert ">grpo<" in rows["one"]
    assert ">sft<" in rows["tuned"]
    assert ">Small-1B<" in rows["tuned"]
    assert 'data-value="4.0">4.0 s<' in rows["one"]  # two steps of two seconds
    assert "<polyline points=" in rows["one"]


@pytest.mark.parametrize(
    ("values", "points"), [([], ""), ([3.0], "0.0,19.0"), ([0.0, 1.0, 0.5], "0.0,19.0 50.0,1.0 100.0,10.0")]
)
def test_a_sparkline_lies_between_its_extremes(values, points):
    assert polyline(values) == points


@pytest.mark.parametrize(
    ("value", "text"),
    [(3593.9, "3,594"), (-3593.9, "−3,594"), (93.94, "93.9"), (0.00123456, "0.00123"), (3.0, "3"), (2.5e7, "2.5e+07"),
     (None, "–")],
)  # fmt: skip
def test_a_number_is_written_as_people_do(value, text):
    assert number(value, 3) == text


def test_a_sparkline_of_many_values_ends_with_the_newest():
    assert polyline([0.0] * 999 + [1.0]).split()[-1] == "100.0,1.0"


def test_columns_of_steps_follow_the_kind(site):
    assert "groups without signal" in site.page("/run/one")
    tuned = site.page("/run/tuned")
    assert "groups without signal" not in tuned
    assert ">0.25<" in tuned


class TestLog:
    @pytest.fixture
    def run(self, site):
        run = site.views["one"].run
        (run.folder / "logs").mkdir()
        for rank, lines in {
            0: ["2026-01-02 03:04:05,100 INFO 7 verl.run: begins", "2026-01-02 03:04:07,100 ERROR 7 verl.run: broke",
                "    line 2"],
            1: ["2026-01-02 03:04:06,100 WARNING 8 verl.run: slow"],
        }.items():  # fmt: skip
            (run.folder / "logs" / f"rank_{rank}.log").write_text("\n".join(lines) + "\n")
        return run

    @pytest.mark.parametrize(
        ("query", "levels"),
        [({}, ["INFO", "WARNING", "ERROR"]), ({"rank": "rank_1"}, ["WARNING"]), ({"level": "ERROR"}, ["ERROR"]),
         ({"q": "BEGINS"}, ["INFO"]), ({"q": "line 2"}, ["ERROR"]), ({"rank": "../one"}, [])],
    )  # fmt: skip
    def test_records_of_all_ranks_in_order(self, run, query, levels):
        assert [record.level for record in log_context(run, query)["records"]] == levels

    def test_a_record_has_any_number_of_lines(self, tmp_path):
        file, lines = (
            tmp_path / "rank_0.log",
            ["Begins", *"x" * 500_000],
        )  # a copy of it for each line would take minutes
        file.write_text("2026-11-28 10:00:00,000 INFO 1 verl: " + "\n".join(lines))
        assert [record.text.count("\n") for record in read_log(file)] == [500_000]

    def test_its_page_follows_a_live_run(self, site, run):
        assert "every 2s" not in site.page("/run/one/log")
        with live_run(run.folder):
            assert "every 2s" in site.page("/run/one/log")


def test_a_run_is_live_while_its_heartbeat_is_young(site):
    run = site.views["one"].run
    (run.folder / "config.yaml").write_text("algorithm: {}\ntrainer:\n  hang_timeout_s: 60.0\n")
    assert not run.is_live
    with live_run(run.folder) as heartbeat:
        assert run.is_live
        beat = json.loads((run.folder / "heartbeat.json").read_text())
        (run.folder / "heartbeat.json").write_text(json.dumps({**beat, "since": time.time() - 61}))
        assert run.is_running
        assert not run.is_live
        heartbeat.begin_step(3)
        assert run.is_live
    assert not run.is_live


@pytest.mark.parametrize(
    ("query", "runs"),
    [({}, ["one", "other", "tuned"]), ({"a": "one", "b": "tuned"}, ["one", "tuned"]),
     ({"runs": "tuned,one,nothing"}, ["tuned", "one"])],
)  # fmt: skip
def test_curves_of_several_runs_lie_over_each_other(site, query, runs):
    context = panels.compare_context(site.views, query)
    assert context["overlaid"] == runs
    (norms,) = [panel for panel in context["charts"]["panels"] if panel["title"] == "Gradient norm"]
    assert [series["run"] for series in norms["series"]] == list(range(len(runs)))


def test_all_metrics_are_grouped_by_prefix(site):
    charts = panels.charts_json(panels.all_metrics(site.view("one").run))["panels"]
    assert {panel["title"]: panel["group"] for panel in charts}["actor/grad_norm"] == "actor"


def test_the_timeline_has_bars_of_measured_spans_only(site):
    run = site.view("one").run
    bars = gantt(run.spans_of(1), run.timeline[0])
    assert list(bars["rows"]) == ["gen", "reward", "update_actor"]
    assert bars["roles"] == {"rollout": 1.0}  # seconds; when they were is not known
    assert site.page("/run/one/train/1").count('<rect class="ph') == 3


def test_a_new_step_is_on_the_page_of_its_run(site):
    add_step(site.views["one"].run.folder, 3)
    site.views["one"].run.refresh(at_most_every_s=0)
    assert "step <b>3</b>" in site.page("/run/one")
