"""Time of a step by phase, the bottleneck of a run, and `verl show` on folders of live, stopped and finished runs."""

import json
import os
import threading

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.commands import python
from tests.json_lines import read_lines, write_lines
from verl.cli.main import main
from verl.cli.show import sparkline
from verl.errors import ConfigError
from verl.parallel.traffic import Traffic
from verl.tracking.bottleneck import find_bottleneck
from verl.tracking.files import append_rows
from verl.tracking.progress import read_progress
from verl.tracking.timeline import Spans, Timeline, duration, expected_step_s, summarise

pytestmark = pytest.mark.seed("D5", "F6")

SPAN_PHASES = {
    "gen": ("rollout", "rollout"),
    "rollout_wait": ("rollout", None),
    "reward": ("reward", None),
    "ref": ("training", "reference"),
    "update_actor": ("training", "actor"),
}


def span(name, seconds, parent=None):
    return {"name": name, "parent": parent, "seconds": seconds, "start": 0.0}


def test_phases_and_roles_of_a_step():
    summary = summarise(
        [
            span("gen", 5.0),
            span("inside", 2.0, "gen"),
            span("reward", 1.0),
            span("update_actor", 3.0),
            span("odd", 0.5),
        ],
        10.0,
        {"reward": 4.0},
        SPAN_PHASES,
    )
    assert summary["phases"] == {"rollout": 5.0, "reward": 1.0, "training": 3.0, "other": 1.0}
    assert summary["roles"]["rollout"] == {"busy_s": 5.0, "waiting_s": 5.0, "utilisation": 0.5}
    assert summary["roles"]["actor"]["utilisation"] == 0.3
    assert summary["roles"]["reward"]["busy_s"] == 4.0


@given(st.lists(st.tuples(st.sampled_from(["gen", "reward", "ref", "testing", "x"]), st.floats(0, 9)), max_size=8))
def test_phases_add_up_to_the_step(parts):
    total = sum(s for _, s in parts) + 1.0
    summary = summarise([span(name, s) for name, s in parts], total, {}, SPAN_PHASES)
    assert sum(summary["phases"].values()) == pytest.approx(total)
    assert all(0 <= r["utilisation"] <= 1 for r in summary["roles"].values())


def test_a_role_that_works_in_parallel_is_not_counted_twice():
    summary = summarise([span("rollout_wait", 1.0), span("update_actor", 4.0)], 5.0, {"rollout": 4.5}, SPAN_PHASES)
    assert summary["phases"]["rollout"] == 1.0
    assert summary["roles"]["rollout"]["utilisation"] == 0.9


def test_the_line_of_a_step(tmp_path):
    traffic = Traffic()
    timeline = Timeline(tmp_path / "timeline.jsonl", 7, traffic=traffic)
    spans = Spans(timeline=timeline)
    for step in (1, 2):
        with spans("gen"), spans("inside"):
            pass
        threads = [threading.Thread(target=timeline.busy, args=("reward", 0.25)) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        with traffic.exchanging(100):
            pass
        traffic.add(1.0, 23)
        spans.write(step)
    rows = read_lines(tmp_path / "timeline.jsonl")
    assert [(row["step"], row["of"]) for row in rows] == [(1, 7), (2, 7)]
    assert all(row["communication"]["bytes"] == 123 for row in rows)
    assert all(row["roles"]["reward"]["busy_s"] == 1.0 for row in rows)
    assert rows[1]["start"] == pytest.approx(rows[0]["start"] + rows[0]["seconds"], abs=0.01)


def rows_of(phases, roles=None, count=6, exchanged=0):
    seconds = sum(phases.values())
    row = {"of": 100, "start": 0.0, "seconds": seconds, "phases": phases,
           "roles": {n: {"busy_s": b} for n, b in (roles or {}).items()},
           "communication": {"seconds": 0.0, "bytes": exchanged}}  # fmt: skip
    return [{"step": i + 1, **row} for i in range(count)]


def metrics_of(count=6, **values):
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return [{"step": i + 1, "timing_s/step": 10.0, **named} for i in range(count)]


CONFIG = {
    "data": {"train_batch_size": 16, "max_response_length": 512},
    "actor_rollout_ref": {
        "model": {"enable_gradient_checkpointing": True},
        "rollout": {"n": 4, "max_num_seqs": 32},
        "actor": {"ppo_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False},
    },
    "reward": {"num_workers": 8},
    "trainer": {"test_freq": 2, "save_freq": 1, "n_gpus_per_node": 2},
}


@pytest.mark.parametrize(
    ("phases", "roles", "metrics", "name", "keys"),
    [
        (
            {"rollout": 8.0, "training": 2.0}, {}, {"rollout__max_running": 32, "rollout__num_decode_steps": 500,
             "rollout__num_generated_tokens": 4000, "response_length__clip_ratio": 0.5}, "rollout-bound",
            ["prefetch_num=1", "max_num_seqs", "partial_rollout=True", "are cut", "n_gpus_per_node"],
        ),
        (
            {"training": 9.0, "rollout": 0.5}, {}, {"timing_s__old_log_prob": 3.0, "timing_s__ref": 2.0}, "training-bound",
            ["ppo_mini_batch_size=16", "use_dynamic_bsz=True", "enable_gradient_checkpointing=False", "use_kl_loss=False"],
        ),
        ({"reward": 6.0, "training": 2.0}, {"reward": 5.5}, {}, "reward-bound", ["All 8 scorers", "reward.num_workers"]),
        ({"reward": 6.0, "training": 2.0}, {"reward": 1.0}, {}, "reward-bound", ["one slow call"]),
        ({"communication": 6.0, "training": 2.0}, {}, {}, "communication-bound", ["trainer.placement"]),
        ({"validation": 5.0, "training": 5.0}, {}, {}, "validation-bound", ["takes 50% of the time", "trainer.test_freq=20"]),
        ({"saving": 5.0, "training": 4.0}, {}, {}, "saving-bound", ["trainer.save_freq=11"]),
    ],
    ids=["rollout", "training", "reward busy", "reward tail", "communication", "validation", "saving"],
)  # fmt: skip
def test_what_bounds_a_run_and_what_to_change(phases, roles, metrics, name, keys):
    report = find_bottleneck(rows_of(phases, roles), metrics_of(**metrics), CONFIG)
    assert report.name == name
    assert sum(report.shares.values()) == pytest.approx(1.0)
    advice = " ".join(report.advice)
    for key in keys:
        assert key in advice, report.advice


def test_a_run_that_training_bounds_needs_no_devices_for_generation():
    report = find_bottleneck(rows_of({"training": 6.8, "rollout": 1.7, "other": 1.5}), metrics_of(), CONFIG)
    assert "for generation" not in " ".join(report.advice)


@pytest.mark.parametrize(
    ("phases", "metrics", "changes", "words"),
    [
        ({"rollout": 8.0, "training": 2.0}, {}, {"trainer": {"n_gpus_per_node": 1}}, "more devices"),
        ({"rollout": 8.0, "training": 2.0}, {}, {"trainer": {"n_gpus_per_node": 1}}, "take turns"),
        ({"communication": 6.0, "training": 2.0}, {}, {"trainer": {"n_gpus_per_node": 1}}, "the network"),
        ({"training": 9.0}, {"actor__reused_activations_ratio": 1.0}, {}, "Activations are computed twice"),
        (
            {"training": 9.0},
            {"timing_s__old_log_prob": 3.0},
            {"actor_rollout_ref": {"rollout": {"prefetch_num": 1}}},
            "bypass",
        ),
        *(
            ({"training": 9.0}, {"timing_s__old_log_prob": 3.0}, changes, "Old log-probs cost")
            for changes in (
                {"algorithm": {"rollout_correction": {"rollout_is": "token"}}},
                {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 16}}},
            )
        ),
    ],
    ids=[
        "one device",
        "one device, ahead",
        "one device, transfers",
        "activations of the sampler",
        "samples ahead",
        "importance weights",
        "one optimizer step already",
    ],
)
def test_advice_that_a_fact_makes_false_is_left_out(phases, metrics, changes, words):
    def advice(config, **more):
        return " ".join(find_bottleneck(rows_of(phases), metrics_of(**more), config).advice)

    cause = {name: value for name, value in metrics.items() if not name.startswith("actor")}
    assert words in advice(CONFIG, **cause)
    assert words not in advice(CONFIG | changes, **metrics)


@pytest.mark.parametrize(
    ("cut", "words"),
    [(0.95, "95% of the responses are cut at data.max_response_length=512"), (0.0, "Read some in samples/")],
)
def test_a_run_that_learns_nothing_is_told_so_first(cut, words):
    """No other advice says the contrary about the length."""
    silent = {f"critic__{name}": 0.0 for name in ("advantages__max", "advantages__min", "score__mean")}
    generation = {"rollout__max_running": 32, "rollout__num_decode_steps": 500, "rollout__num_generated_tokens": 4000}
    metrics = metrics_of(**silent, **generation, response_length__clip_ratio=cut)
    first, *further = find_bottleneck(rows_of({"rollout": 8.0, "training": 2.0}), metrics, CONFIG).advice
    assert first.startswith("Most steps learn nothing: all samples of a prompt have the same reward (mean 0).")
    assert words in first
    assert ("Lower data.max_response_length" in " ".join(further)) == (not cut)
    assert "are cut" not in " ".join(further)


@pytest.mark.parametrize(("scale", "is_slow"), [(1.0, True), (0.01, False)])
def test_scores_of_a_moment_have_no_slow_call(scale, is_slow):
    rows = rows_of({"reward": 6.0 * scale, "training": 2.0 * scale}, {"reward": 1.0 * scale})
    advice = find_bottleneck(rows, metrics_of(), CONFIG).advice
    assert ("one slow call" in " ".join(advice)) == is_slow


def test_samples_ahead_hide_the_wait_for_scores_on_one_device():
    config = CONFIG | {"trainer": {"n_gpus_per_node": 1}}
    advice = find_bottleneck(rows_of({"rollout": 5.0, "reward": 3.0, "training": 2.0}), metrics_of(), config).advice
    assert "saves at most 30% of a step, in which it waits for scores" in " ".join(advice)


def test_the_expected_seconds_of_a_step(tmp_path):
    assert expected_step_s(tmp_path) is None
    append_rows(tmp_path / "planned.jsonl", rows_of({"rollout": 3.0}))
    assert expected_step_s(tmp_path) == 3.0
    append_rows(tmp_path / "timeline.jsonl", rows_of({"rollout": 2.0}))
    assert expected_step_s(tmp_path) == 2.0


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"perf__all_gather_ms": 4.9}, ""),
        ({"perf__all_gather_ms": 7.24}, "An all-gather of parameters takes 7.2 ms"),
        ({"perf__memory_fragmentation": 0.19}, ""),
        ({"perf__memory_fragmentation": 0.31}, "31% of the GPU memory that PyTorch reserves is not allocated"),
        ({"rollout__kv_fragmentation": 0.4}, "Lower actor_rollout_ref.rollout.kv_cache_config.block_size (now 64)"),
        (
            {"timing_s__rollout_wait": 3.0, "training__rollout_queue__qsize": 2.0},
            "for 30% of a step, though the queue has 2",
        ),
    ],
)
def test_measurements_outside_the_phases(metrics, words):
    """All-gathers, fragments and the queue, each with what to change, whatever phase takes the time."""
    rollout = {"prefetch_num": 1, "kv_cache_config": {"block_size": 64}}
    config = {"actor_rollout_ref": {"rollout": rollout}}
    report = find_bottleneck(rows_of({"other": 10.0}), metrics_of(**metrics), config)
    assert words in " ".join(report.advice)
    assert bool(report.advice) == bool(words)


@pytest.mark.parametrize(("seconds", "words"), [(0.9, ""), (1.1, "takes 11% of the time; below 10% is usual")])
def test_exchange_of_more_than_a_tenth(seconds, words):
    rows = [{**row, "communication": {"seconds": seconds, "bytes": 1}} for row in rows_of({"other": 10.0})]
    advice = " ".join(find_bottleneck(rows, metrics_of(), CONFIG).advice)
    assert words in advice
    assert bool(advice) == bool(words)


def test_show_names_what_was_measured(run_folder, capsys):
    row = {"step": 6, "time": 2.0, "perf/all_gather_ms": 7.24, "training/rollout_queue/qsize": 2, "timing_s/step": 2.0}
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert main(["show", str(run_folder)]) == 0
    assert "all-gather of parameters 7.2 ms, batches in the queue 2" in capsys.readouterr().out


def test_show_names_the_groups_that_the_others_wait_for(run_folder, capsys):
    last = {"rollout/last_group/prompt": 37, "rollout/last_group/tokens": 1024, "rollout/last_group/ended_s": 8.0}
    rows = [
        {"step": n, "timing_s/step": 9.0, **last, "rollout/last_group/others_ended_s": 8.0 - n % 3} for n in (5, 6, 7)
    ]
    append_rows(run_folder / "metrics.jsonl", rows)
    assert main(["show", str(run_folder)]) == 0
    printed = capsys.readouterr().out
    assert "step 7: prompt 37 ended last, after 8 s; its longest response has 1,024 tokens" in printed
    assert "Nine tenths of the prompts had ended after 7 s and waited for 12% of the generation" in printed
    assert "step 5: " in printed
    assert "step 6: " not in printed
    assert "most groups wait" not in printed
    append_rows(run_folder / "metrics.jsonl", [{**row, "rollout/last_group/others_ended_s": 4.0} for row in rows * 2])
    assert "most groups wait for the last one for 50%" in " ".join(read_progress(run_folder).bottleneck.advice)


def test_keys_in_the_advice_exist():
    """A key that is named as something to set is one."""
    import re

    from verl.config import PPO
    from verl.tracking import bottleneck

    every = find_bottleneck(
        [{**row, "communication": {"seconds": 9.0, "bytes": 1}} for row in rows_of(dict.fromkeys(bottleneck.RULES, 1.0))],
        metrics_of(**{"perf/all_gather_ms": 9.0, "perf/memory_fragmentation": 0.5,
                      "timing_s/old_log_prob": 5.0, "timing_s/ref": 5.0, "rollout/max_running": 32,
                      "rollout/num_decode_steps": 100, "rollout/num_generated_tokens": 100}), CONFIG,
    )  # fmt: skip
    keys = set(PPO.leaves)
    named = set(
        re.findall(r"\b((?:trainer|data|actor_rollout_ref|reward|algorithm)\.[\w.]*\w)", " ".join(every.advice))
    )
    assert len(named) > 8
    assert not named - keys


def test_the_first_step_warms_up():
    rows = [{**rows_of({"other": 100.0})[0]}, *rows_of({"rollout": 1.0}, count=5)]
    assert find_bottleneck(rows, [], {}).name == "rollout-bound"
    assert find_bottleneck([], [], {}) is None


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("data: {train_batch_size: 16}\ntrainer: {test_freq: 2}\n")
    rewards = [0.1, 0.2, 0.4, 0.3, 0.5]
    metrics = [
        {"step": i + 1, "time": 1.0, "critic/score/mean": r, "timing_s/step": 2.0} for i, r in enumerate(rewards)
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    rows = rows_of({"rollout": 1.5, "training": 0.5}, {"rollout": 1.5}, count=5, exchanged=2_000_000)
    (folder / "timeline.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 6, "torn')
    log = "2026-01-02 03:04:05,678 INFO 1 verl: fine\n2026-01-02 03:04:06,678 WARNING 1 verl.rewards: a scorer hung\n"
    (folder / "logs" / "rank_0.log").write_text(log)
    (folder / "curves.json").write_text(json.dumps({"mean reward": {"critic/score/mean": "training"}}))
    return folder


def test_show_a_stopped_run(run_folder, capsys):
    assert main(["show", str(run_folder)]) == 0
    printed = capsys.readouterr().out
    for text in (
        "stopped at step 5 of 100",
        "same command",
        "rollout-bound",
        "75.0%",
        "mean reward, training",
        "0.1 → 0.5",
        "a scorer hung",
    ):
        assert text in printed
    assert "fine" not in printed
    assert "2.0 MB" in printed


def test_only_what_can_be_better_has_a_best_value(run_folder, capsys):
    names = ("train/loss", "train/rewards/margins", "val/reward", "actor/kl_loss", "actor/reward_kl_penalty", "length")
    (run_folder / "curves.json").write_text(json.dumps({"all": {name: name for name in (*names, "actor/ppo_kl")}}))
    values = {"time": 1.0, "actor/ppo_kl": 0.0}  # with one update a step it is not printed
    rows = [{**values, "step": step, **dict.fromkeys(names, float(step))} for step in (1, 2)]
    write_lines(run_folder / "metrics.jsonl", rows)
    curves = read_progress(run_folder).curves
    assert list(curves) == list(names)
    assert [curves[name].best for name in names] == [1.0, 2.0, 2.0, None, None, None]
    assert main(["show", str(run_folder)]) == 0
    assert capsys.readouterr().out.count("best") == 3


def test_show_a_live_and_a_finished_run(run_folder):
    me = psutil.Process()
    holder = {"pid": os.getpid(), "host": os.uname().nodename, "started": me.create_time()}
    (run_folder / "run.lock").write_text(json.dumps(holder))
    live = read_progress(run_folder)
    assert (live.status, live.seconds_left) == ("running", 2.0 * 95)
    assert str(os.getpid()) in live.process
    (run_folder / "run.lock").write_text(json.dumps({**holder, "started": 1.0}))  # another process has that number now
    assert read_progress(run_folder).status == "stopped"
    (run_folder / "summary.json").write_text("{}")
    assert read_progress(run_folder).status == "finished"


def test_show_forgets_warnings_of_a_run_that_was_started_over(run_folder):
    lines = (f"2026-11-29 05:{minute}:00,000 WARNING 1 verl.x: at {minute}" for minute in (23, 28))
    (run_folder / "logs/another.log").write_text("\n".join(lines))
    assert len(read_progress(run_folder).complaints) == 3
    (run_folder / "superseded_20261129-052752_abc").mkdir()
    assert [line[-5:] for line in read_progress(run_folder).complaints] == ["at 28"]


def test_show_as_json_and_before_the_first_step(run_folder, capsys):
    (run_folder / "timeline.jsonl").unlink()
    (run_folder / "metrics.jsonl").unlink()
    assert main(["show", str(run_folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["step"], printed["bottleneck"], printed["curves"]) == (0, None, {})


def test_show_refuses_what_is_no_run(tmp_path, capsys):
    with pytest.raises(ConfigError, match="is not a run folder"):
        read_progress(tmp_path)
    assert main(["show", str(tmp_path)]) == 2
    assert "trainer.default_local_dir" in capsys.readouterr().err


def test_show_starts_without_torch(run_folder):
    code = (
        "import sys; from verl.cli.main import main; code = main(['show', sys.argv[1]]); "
        "assert not {'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules), 'heavy imports'; raise SystemExit(code)"
    )
    python("-c", code, run_folder)


@example([1.7e308, -9.9e291])
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80))
def test_sparklines_have_one_block_a_point_or_fit(points):
    finite = [p for p in points if p == p and abs(p) != float("inf")]
    assert len(sparkline(points)) == min(len(finite), 32)


def test_sparklines_rise_and_durations_read_well():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    seconds = (None, 0.0312, 3.21, 9.97, 45.4, 250, 7500, 273_600)
    texts = ["", "0.031 s", "3.2 s", "10 s", "45 s", "4 min 10 s", "2 h 5 min", "3 d 4 h"]
    assert list(map(duration, seconds)) == texts
