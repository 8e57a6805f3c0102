"""Reading of run folders: files that grow, are replaced, or are damaged."""

import itertools
import json
import shutil

import pytest

from tests.json_lines import read_lines, write_lines
from tests.page.folders import add_step, append, make_run, sample, write_samples
from verl.page import life, panels, steps
from verl.page.index import SampleIndex
from verl.page.pages import Site
from verl.page.reader import RunReader


@pytest.fixture
def run_folder(tmp_path):
    return make_run(tmp_path / "run")


def read(folder):
    run = RunReader(folder, "run")
    run.refresh(0)
    return run


def test_rows_arrive_as_they_are_written(run_folder):
    run = read(run_folder)
    version = run.version
    assert run.step == 3
    assert run.refresh(0) == version
    add_step(run_folder, 4, reward=0.9)
    assert run.refresh(0) > version
    assert list(run.metrics["critic/score/mean"].values) == [0.5, 0.5, 0.5, 0.9]
    assert run.total_steps == 10
    assert [span["name"] for span in run.spans_of(4)] == ["gen", "reward", "update_actor"]


def test_a_long_file_is_read_at_evenly_spaced_places(run_folder):
    """The first page and its memory do not grow with the run; later rows are all read."""
    for step in range(4, 5000):
        append(run_folder / "metrics.jsonl", {"step": step, "time": 1.0, "x": step})
    run = RunReader(run_folder, "run")
    run.max_bytes = 150_000
    run.refresh(0)
    steps = list(run.metrics["x"].steps)
    assert 500 < len(steps) < 2000
    assert (steps[0], steps[-1], sorted(set(steps))) == (4, 4999, steps)
    assert max(later - step for step, later in itertools.pairwise(steps)) < 100
    assert any("evenly spaced steps" in problem for problem in run.problems)
    append(run_folder / "metrics.jsonl", {"step": 5000, "time": 1.0, "x": 5000})
    run.refresh(0)
    assert list(run.metrics["x"].steps) == [*steps, 5000]


def test_a_step_of_a_long_run_is_read_from_its_place(run_folder):
    for step in range(4, 4000):
        add = {"step": step, "time": 1.0, "x": step}
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(add) + "\n" + "damaged\n" * (step % 500 == 0))
    run = RunReader(run_folder, "run")
    assert [run.metrics_of(step).get("x") for step in (4, 1999, 2000, 2001, 3999, 4000)] == [
        4, 1999, 2000, 2001, 3999, None,
    ]  # fmt: skip
    assert run.metrics_of(2)["critic/score/mean"] == 0.5


def test_steps_that_were_left_out_are_no_resumption(run_folder):
    run = read(run_folder)
    start = run.timeline[-1]["start"]
    run.timeline.append({**run.timeline[-1], "step": 50, "start": start + 1000})
    assert run.marks() == []


def test_half_a_line_is_read_when_it_is_whole(run_folder):
    run = read(run_folder)
    line = json.dumps({"step": 4, "time": 1.0, "critic/score/mean": 0.75}) + "\n"
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        run.refresh(0)
        assert run.step == 3
        file.write(line[20:])
    run.refresh(0)
    assert run.metrics["critic/score/mean"].last == 0.75
    assert run.problems == []


def test_a_resumed_run_replaces_its_rows(run_folder):
    run = read(run_folder)
    rows = (run_folder / "metrics.jsonl").read_text().splitlines()[:2]
    (run_folder / "new").write_text("\n".join(rows) + "\n")
    (run_folder / "new").rename(run_folder / "metrics.jsonl")
    append(run_folder / "metrics.jsonl", {"step": 3, "time": 1.0, "critic/score/mean": 0.1})
    run.refresh(0)
    assert list(run.metrics["critic/score/mean"].steps) == [1, 2, 3]
    assert run.metrics["critic/score/mean"].last == 0.1


def test_damage_is_a_sentence(run_folder):
    with (run_folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "x"}\nnull\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
    run = read(run_folder)
    assert run.problems == ["metrics.jsonl is damaged: 4 lines cannot be read and are left out."]
    assert run.step == 3


@pytest.mark.parametrize("name", ["config.yaml", "curves.json", "timeline.jsonl", "tokens.jsonl", "spans.jsonl"])
def test_a_folder_without_a_file_is_read(run_folder, name):
    """Older versions wrote fewer files; other things may lie in their places."""
    (run_folder / name).unlink()
    (run_folder / name).mkdir()
    run = read(run_folder)
    index = SampleIndex(run_folder, run_folder.parent)
    index.update()
    assert panels.panels(run, index)
    assert run.status == "stopped"


def test_a_folder_that_is_not_there_yet(tmp_path):
    run = read(tmp_path / "later")
    assert "It appears here when the run starts" in run.problems[0]
    make_run(tmp_path / "later")
    run.refresh(0)
    assert run.step == 3
    shutil.rmtree(tmp_path / "later")
    run.refresh(0)
    assert run.status == "removed"
    assert "was removed" in run.problems[0]


def test_crashes_and_resumptions_are_marked(run_folder):
    append(
        run_folder / "events.jsonl", {"time": 1.0, "event": "restarted", "cause": "SIGKILL", "step": 2, "phase": "gen"}
    )
    run = read(run_folder)
    rows = read_lines(run_folder / "timeline.jsonl")
    rows[2]["start"] += 60
    write_lines(run_folder / "timeline.jsonl", rows)
    run = read(run_folder)
    assert [(mark["step"], mark["kind"]) for mark in run.marks()] == [(2, "crash"), (3, "resume")]


class TestIndex:
    def test_very_many_files_are_listed_once(self, run_folder, tmp_path, monkeypatch):
        monkeypatch.setattr("verl.page.index._MANY_FILES", 2)
        index = SampleIndex(run_folder, tmp_path)
        assert index.num_unread() == 3
        index.update()
        assert index.num_unread() == 0
        add_step(run_folder, 4)
        assert (index.num_unread(), index.listing()) == (0, {"train": (3, 3)})  # as they were listed
        assert index.update()
        assert (index.num_unread(), index.listing()) == (0, {"train": (4, 4)})
        assert not index.update()

    def test_groups_have_their_statistics(self, run_folder, tmp_path):
        scores = {0: [1, 1, 0, 0], 1: [1, 1, 1, 1], 2: [0, 0, 0, 0]}
        rows = [sample(o, k, score=float(s)) for o, values in scores.items() for k, s in enumerate(values)]
        write_samples(run_folder, "train", 1, rows)
        index = SampleIndex(run_folder, tmp_path)
        assert index.update()
        first = index.statistics()["train"][0]
        assert first["rows"] == 12
        assert first["mean"] == pytest.approx(0.5)
        assert first["without_signal"] == pytest.approx(2 / 3)
        assert first["group_spread"] == pytest.approx(0.5 / 3)
        assert not index.update()

    def test_samples_without_a_score_are_in_no_statistic(self, run_folder, tmp_path):
        scores = {0: [1.0, None, 0.5, None], 1: [0.5, 0.5, None, None], 2: [None] * 4, 3: [0.0, None, None, None]}
        rows = [{**sample(o, k), "score": s} for o, values in scores.items() for k, s in enumerate(values)]
        write_samples(run_folder, "train", 1, rows)
        index = SampleIndex(run_folder, tmp_path)
        index.update()
        first = index.statistics()["train"][0]
        assert first["rows"] == 16
        assert (first["mean"], first["low"], first["high"]) == (0.5, 0.0, 0.75)
        assert (first["without_signal"], first["group_spread"]) == (0.5, 0.125)

    def test_a_replaced_file_is_indexed_again_and_a_lost_one_forgotten(self, run_folder, tmp_path):
        index = SampleIndex(run_folder, tmp_path)
        index.update()
        write_samples(run_folder, "train", 2, [sample(0, 0, response="something else")])
        (run_folder / "samples" / "train" / "step_000003.jsonl").unlink()
        assert index.update()
        assert [row["step"] for row in index.statistics()["train"]] == [1, 2]
        assert index.rows("SELECT count(*) AS n FROM shown")[0]["n"] == 16 + 1
        assert not list(index.containing("8 + "))  # of the lost file
        assert [len(ids) for ids in index.containing("something ELSE")] == [1]
        assert index.row("train", 2, 0)["response"] == "something else"
        assert index.row("train", 2, 7) is None
        assert index.row("train", 3, 0) is None

    def test_damaged_rows_are_left_out(self, run_folder, tmp_path):
        file = run_folder / "samples" / "train" / "step_000001.jsonl"
        good = sample(0, 0)
        odd = {"score": "high", "response": 7, "response_ids": {"a": 1}, "advantages": [None], "ordinal": -1, "uid": []}
        file.write_bytes(b"\xff\n[1]\n" + json.dumps(odd).encode() + b"\n" + json.dumps(good).encode() + b"\n")
        index = SampleIndex(run_folder, tmp_path)
        index.update()
        first = index.statistics()["train"][0]
        assert (first["rows"], first["damaged"]) == (2, 2)

    def test_a_damaged_index_is_built_again(self, run_folder, tmp_path):
        index = SampleIndex(run_folder, tmp_path)
        index.update()
        index.path.write_bytes(b"no database" * 1000)
        again = SampleIndex(run_folder, tmp_path)
        again.update()
        assert len(again.statistics()["train"]) == 3

    def test_an_index_that_cannot_be_written_is_elsewhere(self, run_folder, tmp_path):
        """A full disk refuses a database like a folder in its place."""
        name = SampleIndex(run_folder, tmp_path).path.name
        (tmp_path / "cache" / name).mkdir(parents=True)
        index = SampleIndex(run_folder, tmp_path / "cache")
        index.update()
        assert len(index.statistics()["train"]) == 3
        assert index.path.parent.name.startswith("verl-page-")

    def test_nothing_is_written_to_the_run_folder(self, run_folder, tmp_path):
        before = {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")}
        run, index = read(run_folder), SampleIndex(run_folder, tmp_path)
        index.update()
        panels.panels(run, index)
        assert {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")} == before

    def test_two_copies_have_indexes_of_their_own(self, run_folder, tmp_path):
        shutil.copytree(run_folder, tmp_path / "elsewhere" / "run")
        paths = {SampleIndex(f, tmp_path).path for f in (run_folder, tmp_path / "elsewhere" / "run")}
        assert len(paths) == 2


def test_thinned_curves_keep_their_peaks():
    steps = list(range(10_000))
    values = [0.0] * 10_000
    values[4321], values[7777] = 5.0, -3.0
    points = panels.thin(steps, values)
    assert len(points) <= panels.MAX_POINTS + 1
    assert points[4321] == 5.0
    assert points[7777] == -3.0
    assert panels.thin(steps[:10], values[:10]) == dict(zip(steps[:10], values[:10], strict=True))


class TestPlan:
    def test_the_plan_stands_next_to_the_measured_step(self, run_folder, tmp_path):
        for step, seconds in ((1, 1.0), (2, 3.0)):
            append(
                run_folder / "planned.jsonl",
                {"step": step, "seconds": seconds, "phases": {"rollout": 0.5, "communication": seconds - 0.5},
                 "roles": {"rollout": {"busy_s": 0.5}}, "communication": {"seconds": 0.1, "bytes": 8}},
            )  # fmt: skip
        run = read(run_folder)
        bars = steps.plan_bars(run.planned_row(2), run.timeline[1])
        name, total, parts = bars["sides"][0]
        assert (name, total) == ("planned", 3.0)
        assert [(phase, round(start), round(width)) for phase, start, width, _ in parts] == [
            ("rollout", 0, 167),
            ("communication", 167, 833),
        ]
        assert bars["sides"][1][2][0] == ("rollout", 0.0, pytest.approx(1000 / 3), 1.0)
        assert ("training", None, 0.9) in bars["rows"]
        assert ("rollout busy", 0.5, 1.0) in bars["rows"]
        assert run.planned_row(3)["seconds"] == 3.0  # beyond the plan its last step
        assert steps.plan_bars(None, run.timeline[0]) is None
        panel = next(p for p in panels.panels(run, SampleIndex(run_folder, tmp_path)) if p.title.endswith("the plan"))
        assert [line.label for line in panel.lines] == ["measured", "planned"]
        site = Site([run_folder], cache=tmp_path)
        try:
            page = site.page("/run/run/train/1")
            assert "Plan against measured" in page
            assert 'aria-label="planned: rollout 0.5 s, communication 0.5 s"' in page
        finally:
            site.close()


class TestEpisodes:
    def test_the_transcript_of_an_agent(self, run_folder, tmp_path):
        journal = run_folder / "episodes" / "step_000001.rank0.jsonl"
        journal.parent.mkdir()
        name = {"split": "train", "episode": "train/0/1"}
        messages = [{"role": "user", "content": "go"}, {"role": "tool", "content": "heard <b>"}]
        for text in ("first", "again"):  # a step that was taken again after a kill
            result = {"name": "echo", "text": text, "error": None, "seconds": 0.25}
            append(journal, {"kind": "tool", **name, "call": 0, "result": result, "arguments": '{"a": 1}'})
        append(journal, {"kind": "episode", **name, "messages": messages, "error": "it took too long"})
        append(
            journal, {"kind": "episode", "episode": "train/0/11", "messages": [{"role": "user", "content": "other"}]}
        )
        journal.write_bytes(journal.read_bytes() + b'{"kind": "epis')
        episode = life.episode_of(run_folder, {"ordinal": 0, "sample_index": 1}, "train", 1)
        assert episode["messages"] == messages
        assert [call["text"] for call in episode["calls"]] == ["again"]
        assert life.episode_of(run_folder, {"ordinal": 5, "sample_index": 1}, "train", 1) is None
        site = Site([run_folder], cache=tmp_path)
        try:
            page = site.page("/run/run/train/1/s/1")
            assert "Conversation" in page
            assert "heard &lt;b&gt;" in page
            assert "The episode failed: it took too long" in page
            assert "250 ms" in page or "0.25 s" in page
            assert "Conversation" not in site.page("/run/run/train/1/s/0")
        finally:
            site.close()
