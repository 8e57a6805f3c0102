"""Tracker, the recipes' Tracking, spans and sample records."""

import itertools
import json
import threading
import time

import numpy as np
import pytest
import torch

from tests.commands import python
from verl.data_proto.proto import DataProto
from verl.data_proto.sample_rows import sample_rows
from verl.errors import DeadlineError
from verl.models.tiny import make_tokenizer
from verl.tracking.files import read_json_rows
from verl.tracking.run_folder import RunFolder
from verl.tracking.timeline import Spans
from verl.tracking.tracker import Behind, Tracker


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        yield folder


def test_metrics_are_on_disk_at_once_and_strict_json(folder):
    tracker = Tracker(folder, ["console", "file"], "p", "e", {})
    tracker.log({"a": torch.tensor(0.5), "b": np.float32(2), "n": 3, "nan": float("nan")}, 1)
    row = json.loads(folder.metrics.read_text())
    assert {k: v for k, v in row.items() if k != "time"} == {"step": 1, "a": 0.5, "b": 2.0, "n": 3, "nan": None}
    assert isinstance(row["n"], int)
    tracker.close()
    tracker.close()


def test_samples_and_dumps(folder, tmp_path):
    rows = [
        {
            "prompt": f"q{i}",
            "response": "r",
            "ground_truth": str(i),
            "score": 0.5,
            "reward_parts": {"acc": i},
            "log_probs": [0.1],
        }
        for i in range(5)
    ]
    dumps = {"rollout_data_dir": str(tmp_path / "r"), "validation_data_dir": str(tmp_path / "v")}
    with Tracker(folder, [], "p", "e", {}, **dumps) as tracker:
        tracker.samples("train", 12, rows)
        tracker.samples("train", 12, rows[:2])
        tracker.samples("val", 0, rows)
    assert [row["prompt"] for row in read_json_rows(folder.samples / "train" / "step_000012.jsonl")] == ["q0", "q1"]
    assert next(iter(read_json_rows(tmp_path / "r" / "12.jsonl"))) == {
        "input": "q0", "output": "r", "gts": "0", "score": 0.5, "step": 12, "acc": 0,
    }  # fmt: skip
    assert len(list(read_json_rows(tmp_path / "v" / "0.jsonl"))) == 5


def test_validation_table_shows_the_same_prompts_each_time(folder):
    tables = []

    class Collector:
        def __init__(self, info):
            pass

        def start(self):
            pass

        def log(self, metrics, step):
            pass

        def table(self, name, rows, step):
            tables.append((name, rows, step))

        def close(self):
            pass

    from verl.tracking.sinks.api import SINKS

    SINKS.register("collector_of_a_test")(Collector)
    rows = [{"prompt": f"q{i}", "response": str(i), "score": 0.0, "response_ids": [1]} for i in range(20)]
    with Tracker(folder, ["collector_of_a_test"], "p", "e", {}, log_val_generations=3) as tracker:
        tracker.samples("val", 0, rows)
        tracker.samples("val", 5, rows[::-1])
        tracker.samples("train", 5, rows)
    assert [(name, step) for name, _, step in tables] == [("val/generations", 0), ("val/generations", 5)]
    assert tables[0][1] == tables[1][1]
    assert set(tables[0][1][0]) == {"prompt", "response", "score"}
    assert len(tables[0][1]) == 3


def test_tracking_of_recipes(tmp_path, monkeypatch, capfd):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "rows.jsonl"))
    tracking = Tracking("p", "e", default_backend=["console", "file"], config={"a": {"b": 1}})
    tracking.log({"loss": 0.25}, step=3)
    tracking.log({"loss": 0.5}, step=4, backend="file")
    tracking.close()
    assert "step:3 - loss:0.25" in capfd.readouterr().out
    assert [row["step"] for row in read_json_rows(tmp_path / "rows.jsonl")] == [3, 4]


def test_tracking_that_is_never_closed_loses_nothing(tmp_path):
    code = "from verl.utils.tracking import Tracking; t = Tracking('p', 'e', 'file'); [t.log({'x': i}, i) for i in range(50)]"
    python("-c", code, cwd=tmp_path)
    assert len(list(read_json_rows(tmp_path / "p" / "e.jsonl"))) == 50


def test_spans_nest_and_reset(tmp_path):
    heard = []
    spans = Spans(tmp_path / "spans.jsonl", heard.append)
    with spans("step"):
        for _ in range(2):
            with spans("gen"):
                time.sleep(0.01)
        with spans("gen"), spans("gen"):
            pass
        assert list(spans.take()) == ["gen"], "an open span is counted when it ends"
    rest = spans.take()
    assert rest["step"] >= 0.02
    assert spans.take() == {}
    spans.write(4)
    spans.write(4)
    rows = list(read_json_rows(tmp_path / "spans.jsonl"))
    assert [row["name"] for row in rows] == ["gen", "gen", "gen", "gen", "step"]
    assert [row["parent"] for row in rows] == ["step", "step", "gen", "step", None]
    assert {row["step"] for row in rows} == {4}
    assert heard[:3] == ["step", "gen", "gen"]


def test_span_inside_itself_counts_once(monkeypatch):
    spans, seconds = Spans(), itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    with spans("gen"), spans("gen"):
        pass
    assert spans.take() == {"gen": 3}


def test_span_ends_when_its_body_fails():
    spans = Spans()
    with pytest.raises(RuntimeError), spans("gen"):
        raise RuntimeError
    with spans("adv"):
        pass
    assert list(spans.take()) == ["gen", "adv"]


def make_batch():
    tokenizer = make_tokenizer()
    pad = tokenizer.pad_token_id
    prompts = torch.tensor([[pad, *tokenizer("ab")["input_ids"]], tokenizer("abc")["input_ids"]])
    responses = torch.tensor([[*tokenizer("xy")["input_ids"], 258, pad], tokenizer("wxyz")["input_ids"]])
    attention = torch.tensor([[0, 1, 1, 1, 1, 1, 0], [1] * 7]).bool()
    batch = DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "attention_mask": attention,
            "response_mask": attention[:, 3:],
            "rollout_log_probs": -torch.arange(8.0).reshape(2, 4),
            "token_level_scores": torch.tensor([[0, 0, 1.0, 0], [0, 0, 0, 0.5]]),
            "weight_version": torch.tensor([3, 3]),
        },
        {
            "uid": np.array(["u0", "u1"], dtype=object),
            "reward_parts": np.array([{"acc": 1}, {}], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": "7"}, None], dtype=object),
        },
    )
    return batch, tokenizer


def test_sample_rows_are_readable_and_unpadded():
    batch, tokenizer = make_batch()
    first, second = sample_rows(batch, tokenizer)
    assert (first["prompt"], first["response"], first["score"], first["ground_truth"]) == ("ab", "xy", 1.0, "7")
    assert first["response_ids"].tolist() == [*tokenizer("xy")["input_ids"], 258]
    assert first["log_probs"].tolist() == [0.0, -1.0, -2.0]
    assert first["weight_version"] == 3
    assert first["reward_parts"] == {"acc": 1}
    assert (second["prompt"], second["response"], second["ground_truth"]) == ("abc", "wxyz", None)
    assert len(second["log_probs"]) == len(second["response_ids"]) == 4
    batch.batch["is_scored"] = torch.tensor([True, False])
    assert [row["score"] for row in sample_rows(batch, tokenizer)] == [1.0, None]


def test_lines_of_samples_have_the_exact_values_of_tokens(folder):
    values = np.array([-0.1, 1e-7, np.nan, -np.inf, 3.0, 1e20], np.float32)
    rows = [
        {"prompt": '"ä"', "response_ids": np.arange(3), "log_probs": values, "response_mask": values > 0},
        {"prompt": "b", "response_ids": np.arange(0), "advantages": values[:1].astype(np.float64), "parts": [1, 2]},
    ] * 40
    with Tracker(folder, [], "p", "e", {}) as tracker:
        tracker.samples("train", 1, lambda: rows)
    first, second = list(read_json_rows(folder.sample_file("train", 1)))[-2:]
    assert first == {
        "step": 1, "prompt": '"ä"', "response_ids": [0, 1, 2],
        "log_probs": [float(values[0]), float(values[1]), None, None, 3, float(values[5])],
        "response_mask": [False, True, False, False, True, True],
    }  # fmt: skip
    assert second == {
        "step": 1, "prompt": "b", "response_ids": [], "advantages": [float(values[0])], "parts": [1, 2],
    }  # fmt: skip


def test_an_error_of_writing_samples_is_raised_by_the_next_call(folder):
    def fail():
        raise OSError("no space")

    tracker = Tracker(folder, [], "p", "e", {})
    tracker.samples("train", 1, fail)
    with pytest.raises(OSError, match="no space"):
        tracker.samples("train", 2, [])
    tracker.samples("train", 2, [])
    tracker.close()


def test_work_that_does_not_end_has_a_deadline():
    release = threading.Event()
    work = Behind(release.wait, "The samples of step 7 were")
    with pytest.raises(DeadlineError, match=r"samples of step 7 were not written within 0\.01 s"):
        work.finish(0.01)
    release.set()
    work.finish(10)
