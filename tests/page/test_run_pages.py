"""Home, steps, log, overlaid curves and the live state of runs, without a browser."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from tests.page.folders import add_step, append, live_run, make_run
from verl import page
from verl.page import panels
from verl.page.pages import Site
from verl.page.steps import PHASES, gantt
from verl.page.tables import final_context, log_context, mean_and_spread, number, polyline, read_log
from verl.programs.ppo_program import PPOProgram
from verl.programs.preference import PreferenceOptimization


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Three runs: two of GRPO, one of fine-tuning."""
    folders = [make_run(tmp_path / name, steps=2) for name in ("one", "other", "tuned")]
    (folders[2] / "config.yaml").write_text("sft:\n  loss: nll\nmodel:\n  path: org/Small-1B  # given\n")
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
    (site.views["tuned"].run.folder / "config.yaml").write_text(
        "model: {path: runs/sft/global_step_8/model/huggingface}\n"
    )
    assert site.views["tuned"].run.model == "sft/global_step_8"
    assert 'data-value="4.0">4.0 s<' in rows["one"]  # two steps of two seconds
    assert "<polyline points=" in rows["one"]


def test_a_folder_whose_name_is_not_utf_8_is_one_run_of_many(site, tmp_path):
    odd = tmp_path / os.fsdecode(b"runs\xff\xfe")
    (tmp_path / "one").rename(odd)
    opened = Site([odd, tmp_path / "other"])
    assert list(opened.views) == ["runs", "other"]
    assert "run-runs" in opened.page("/")
    assert "samples" in opened.page("/run/runs")
    opened.close()


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
        run.refresh()
        return run

    @pytest.mark.parametrize(
        ("query", "levels"),
        [({}, ["INFO", "INFO", "INFO", "WARNING", "ERROR"]), ({"rank": "rank_1"}, ["WARNING"]), ({"level": "ERROR"}, ["ERROR"]),
         ({"q": "BEGINS"}, ["INFO"]), ({"q": "line 2"}, ["ERROR"]), ({"rank": "../one"}, [])],
    )  # fmt: skip
    def test_records_of_all_ranks_in_order(self, run, query, levels):
        assert [record.level for record in log_context(run, query)["records"]] == levels

    def test_each_step_has_a_line(self, run):
        records = log_context(run, {"rank": "steps"})["records"]
        assert [r.text for r in records] == [f"step {n} of 10 · reward 0.5 · length 6 · tokens/s 99" for n in (1, 2)]

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


def test_compared_runs_have_links_and_the_given_keys_first(site):
    html = site.page("/compare", {"a": "one", "b": "tuned"})
    assert '<h1><a href="/run/one">one</a> and <a href="/run/tuned">tuned</a></h1>' in html
    first, second = html.split("<summary>Config")[1:]
    assert "3 given keys differ" in first
    assert "algorithm.<wbr>adv_<wbr>estimator" in first
    assert "model.<wbr>path" in first  # of the run of another kind
    assert "1 other keys differ" in second
    assert "sft.<wbr>loss" in second
    same = site.page("/compare", {"a": "one", "b": "other"})
    assert "Both runs were given the same keys" in same
    assert "other keys" not in same


def test_final_metrics_of_groups_are_columns(site):
    runs = [view.run for view in site.views.values()]
    for run, rate, reward in zip(runs, ("1e-5", "1e-5", "2e-5"), (0.25, 0.75, 1.0), strict=True):
        (run.folder / "config.yaml").write_text(f"algorithm:\n  adv_estimator: grpo\nlr: {rate}  # given\n")
        append(run.folder / "metrics.jsonl", {"step": 3, "time": 1_700_000_009.0, "critic/score/mean": reward})
        run.refresh(0)
    alone = final_context(runs, "nothing")
    assert alone["groupings"] == ["lr"]
    assert [row["settings"] for row in alone["finals"]] == [[("lr", "1e-5")]] * 2 + [[("lr", "2e-5")]]
    grouped = final_context(runs, "lr")
    at = list(grouped["final_columns"]).index("critic/score/mean")
    assert [(row["name"], row["runs"], mean_and_spread(row["cells"][at])) for row in grouped["finals"]] == [
        ("1e-5", ["one", "other"], "0.5 ± 0.35"),
        ("2e-5", ["tuned"], "1"),
    ]
    assert "0.5 ± 0.35" in site.page("/compare", {"by": "lr"})


@pytest.mark.parametrize(
    ("loss", "kind"), [("sigmoid", "dpo"), ("ipo", "ipo"), ("[sigmoid, sft]", "dpo, sft"), ("kto", "kto")]
)
def test_a_preference_run_has_the_name_of_its_algorithm(site, loss, kind):
    (site.views["tuned"].run.folder / "config.yaml").write_text(f"preference:\n  loss: {loss}\n")
    site.views["tuned"].run.refresh(0)
    assert site.views["tuned"].run.program == kind


def test_the_config_opens_with_the_keys_that_were_given(site):
    assert 'id="only-given" checked' in site.page("/run/one/config")
    (site.views["other"].run.folder / "config.yaml").write_text("algorithm:\n  adv_estimator: grpo\n")
    assert 'id="only-given">' in site.page("/run/other/config")  # else the table would be empty


def test_the_page_of_a_run_has_one_time_of_a_step(site):
    html = site.page("/run/one")
    assert "A step takes 2.0 s (median, without validation and saving)" in html
    assert html.count("2.0 s") == 1


def test_every_phase_of_a_program_has_one_colour_in_chart_and_timeline():
    static = Path(page.__file__).parent / "static"
    (text,) = re.findall(r"PHASES = {(.*?)}", (static / "charts.js").read_text())
    colours = dict(re.findall(r"(\w+): (\d)", text))
    phases = {phase for kind in (PPOProgram, PreferenceOptimization) for phase, _ in kind.span_phases.values()}
    assert phases | {"validation", "saving", "other"} == set(colours)
    assert len(set(colours.values())) == len(colours)
    in_timeline = dict(re.findall(r"\.ph\.(\w+) { fill: var\(--s(\d)\)", (static / "page.css").read_text()))
    assert in_timeline == {phase: colour for phase, colour in colours.items() if phase != "other"}
    for kind in (PPOProgram, PreferenceOptimization):
        assert {span: phase for span, (phase, _) in kind.span_phases.items()}.items() <= PHASES.items()


def test_pairs_have_no_groups(site):
    site.views["tuned"].index.update()
    run, index = site.views["tuned"].run, site.views["tuned"].index
    (run.folder / "config.yaml").write_text("algorithm: {}\n")
    titles = {panel.title for panel in panels.panels(run, index)}
    (run.folder / "config.yaml").write_text("preference:\n  loss: ipo\n# changed\n")
    run._config = (-1.0, {})
    missing = titles - {panel.title for panel in panels.panels(run, index)}
    assert missing >= {"Groups of equal rewards", "Spread of rewards in a group"}


class TestCharts:
    @pytest.fixture
    def panel(self, site):
        """The panel of a title after rows of metrics were added; None without one."""

        def panel(title, **metrics):
            run = site.views["one"].run
            for step in (3, 4):
                row = {name.replace("__", "/"): value for name, value in metrics.items()}
                append(run.folder / "metrics.jsonl", {"step": step, "time": 1_700_000_009.0, **row})
            run.refresh(0)
            return next((p for p in panels.panels(run, site.views["one"].index) if p.title == title), None)

        return panel

    @pytest.mark.parametrize(("values", "labels"), [((0.0, 0.2), ["to the reference"]), ((0.0, 1e-12), None)])
    def test_a_kl_that_is_always_0_is_not_drawn(self, panel, values, labels):
        chart = panel("KL", actor__ppo_kl=values[0], actor__kl_loss=values[1])
        assert (chart and [line.label for line in chart.lines]) == labels

    def test_a_reward_of_0_is_drawn(self, panel):
        assert panel("Reward", critic__score__mean=0.0)

    def test_different_responses_are_a_share_in_one_chart(self, site, panel):
        titles = {"different responses (share)": {"response/distinct_ratio": ""}}
        (site.views["one"].run.folder / "curves.json").write_text(json.dumps(titles))
        chart = panel("Different responses", response__distinct_ratio=0.5, response__most_frequent_ratio=0.25)
        assert (chart.unit, len(chart.lines)) == ("share", 2)
        assert panel("Different responses (share)") is None

    @pytest.mark.parametrize(
        ("name", "unit"),
        [("response_length/clip_ratio", "share"), ("share/gen", "share"), ("train/rewards/accuracies", "share"),
         ("rollout_corr/ppl_ratio", ""), ("actor/pg_clipfrac_lower", "share"), ("actor/lr", "")],
    )  # fmt: skip
    def test_a_metric_that_is_a_share_has_that_unit(self, name, unit):
        assert panels._unit([name]) == unit

    def test_a_title_of_a_program_ends_with_its_unit(self):
        spec = panels._declared("response length (tokens)", {"response_length/mean": ""})
        assert (spec.title, spec.unit) == ("Response length", "tokens")
        assert panels._declared("token accuracy", {"train/token_accuracy": ""}).unit == "share"
        assert panels._declared("a\nb (", {"x": ""}).title == "A\nb ("

    def test_phases_of_a_long_run_add_up_to_its_longest_steps(self, site):
        run = site.views["one"].run
        run.timeline = [
            {"step": n, "seconds": 2.0 + (n == 777) * 5, "phases": {"rollout": 1.0, "saving": 1.0 + (n == 777) * 5}}
            for n in range(1, 5 * panels.MAX_POINTS)
        ]
        rollout, saving = panels._aligned(panels._phases(run))["series"]
        assert None not in rollout["values"] + saving["values"]
        assert max(map(sum, zip(rollout["values"], saving["values"], strict=True))) == 7.0


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
