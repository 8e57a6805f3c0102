"""The runner of the GPU report with short steps, its page, and two real steps on the CPU; benchmarks/gpu/sizes.py runs through
all of its parts with a tiny model, and with the packages that it names."""

import json
import os
import random
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from gpu import rehearse, report, sizes
from gpu.report import BEGIN, END, FIGURES, PAGE, PREDICTIONS, Step, keep, read_report, rewrite_page, section
from torch.utils.flop_counter import FlopCounterMode

from tests.commands import python
from tests.processes import is_alive, wait_until

NUMBERS = {"rate": [2.5, "GB/s"]}
NUMBER = f"""
import json, os, subprocess, sys, time
open(os.environ["GPU_REPORT_RESULTS"], "w").write(json.dumps({NUMBERS}))
"""
GRANDCHILD = "print(subprocess.Popen(['sleep', '60']).pid, flush=True); "
HANGS = Step("hangs", ("-c", NUMBER + GRANDCHILD + "time.sleep(60)"), 1.0)
ABORTS = Step("aborts", ("-c", NUMBER + "os.abort()"), 10.0)
PASSES = Step("passes", ("-c", NUMBER), 10.0)


def test_a_step_that_hangs_or_aborts_keeps_its_numbers(tmp_path):
    report.run(tmp_path, (HANGS, ABORTS, PASSES), minutes=2)
    rows = read_report(tmp_path / "report.jsonl")
    assert [row["status"] for row in rows] == ["killed after 2 s", -6, 0]
    assert all(row["numbers"] == NUMBERS for row in rows)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["logs.tar.gz", "report.jsonl"]
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert len(archive.getmembers()) == 6
    pid = rows[0]["tail"][0]
    assert wait_until(lambda: not is_alive(pid)), "processes that a step has started end with it"


def test_a_step_without_time_is_listed_and_shorter_ones_run(tmp_path):
    long = Step("long", ("-c", "raise SystemExit(3)"), 600.0)
    report.run(tmp_path, (long, PASSES), minutes=1)
    first, second = read_report(tmp_path / "report.jsonl")
    assert "s left" in first["skipped"]
    assert "status" not in first
    assert second["status"] == 0


def test_logs_are_cut_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_LOG_BYTES", 100)
    report.run(tmp_path, (Step("prints", ("-c", "print('x' * 10_000 + 'end')"), 30.0),), minutes=1)
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert archive.extractfile("logs/00.log").read() == b"x" * 96 + b"end\n"


def test_a_runner_that_is_killed_leaves_a_report_that_parses(tmp_path):
    table, moments = tmp_path / "steps.json", random.Random(0)
    table.write_text(json.dumps([[f"step {i}", ["-c", NUMBER], 10.0] for i in range(200)]))
    for out in (tmp_path / str(number) for number in range(4)):
        command = [sys.executable, report.__file__, "run", "--out", str(out), "--steps", str(table)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as runner:
            time.sleep(moments.uniform(0, 1.5))
            runner.kill()
        section([row for file in out.glob("report.jsonl") for row in read_report(file)])
        for logs in out.glob("logs.tar.gz"):
            tarfile.open(logs).getmembers()
    (tmp_path / "other.jsonl").write_text("3\n")
    with pytest.raises(ValueError, match="not the result of a step"):
        read_report(tmp_path / "other.jsonl")


ROWS = [
    {"step": "environment", "expected_s": 20, "status": 0, "seconds": 9.5, "tail": ["secret"],
     "numbers": {"device": ["NVIDIA H100", ""], "copy": [2900.0, "GB/s"]}},
    {"step": "decode sweep", "expected_s": 120, "status": "killed after 9 s", "seconds": 9.0,
     "numbers": {"0.5b, 64 rows": [30123.4, "tokens/s"], "1.5b, 64 rows, share of bandwidth": [51.0, "%"], "other": [1, ""]}},
    {"step": "loop", "expected_s": 50, "skipped": "3 s left"},
    {"step": "decode sweep", "expected_s": 120, "skipped": "3 s left"},
]  # fmt: skip


def test_numbers_stand_next_to_their_predictions(tmp_path):
    text = section(ROWS)
    assert "NVIDIA H100" in text
    for line in (
        "| environment | copy | 3,000 GB/s | 2,900 GB/s |",
        "| decode sweep | killed after 9 s | 9.0 | 120 |",
        "| decode sweep | 0.5b, 64 rows | 38,000 tokens/s | 30,123 tokens/s |",
        "| decode sweep | 0.5b, 512 rows, top-p, added time of a step | 2 to 5 ms | not yet |",
        "| decode sweep | 1.5b, 64 rows, share of bandwidth | - | 51 % |",
        "| loop | skipped: 3 s left | - | 50 |",
        "| training profile | 0.5b, activations kept, MFU | 47 % | not yet |",
    ):
        assert line in text.splitlines()
    assert "| other |" not in text
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rewrite_page(page, text)
    assert page.read_text() == f"before\n{text}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="lacks the lines"):
        rewrite_page(page, text)
    keep(ROWS, tmp_path / "kept.jsonl")
    assert "secret" not in (tmp_path / "kept.jsonl").read_text()
    assert section(read_report(tmp_path / "kept.jsonl")) == text


def test_the_page_is_current():
    rows = read_report(FIGURES) if FIGURES.exists() else []
    assert section(rows) in PAGE.read_text(encoding="utf-8"), (
        "run: python benchmarks/gpu/report.py render docs/gpu.jsonl"
    )


def test_predictions_are_of_steps():
    predictions = json.loads(PREDICTIONS.read_text())["steps"]
    assert predictions.keys() <= {step.name for step in (*report.STEPS, report.main_job(Path("folder")))}


def test_names_of_torch_cuda_exist():
    """Lines for a GPU do not run on a CPU, so a name that torch.cuda lacks goes unnoticed."""
    for file in Path(report.__file__).parent.glob("*.py"):
        names = set(re.findall(r"torch\.cuda\.(\w+)", file.read_text(encoding="utf-8")))
        assert not [name for name in names if not hasattr(torch.cuda, name)], file.name


def test_every_gpu_test_is_of_a_step():
    tests = Path(__file__).resolve().parents[1]
    files = (file for file in tests.rglob("test_*.py") if file != Path(__file__))
    marked = [file for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]
    names = {f"tests/{file.relative_to(tests).as_posix()}" for file in marked}
    assert len(names) > 2
    assert names <= {word for step in report.STEPS for word in step.command}


def test_no_step_has_the_name_of_a_package_that_libraries_look_for():
    """The folder of a step's script is the first on its path: there `kernels.py` was taken for the package of that name."""
    files = Path(report.__file__).parent.glob("*.py")
    assert not {file.stem for file in files} & {"kernels", "peft", "accelerate", "triton", "deepspeed", "vllm", "trl"}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({f"log-{i}": 1 for i in range(9)}, "9 files"),
        ({"a/b/c/log": 1}, "too deep"),
        ({"a log": 1}, "odd name"),
        ({"log": (16 << 20) + 1}, "too large"),
    ],
)
def test_what_a_machine_does_not_send_back_fails_the_rehearsal(tmp_path, files, sentence):
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    with pytest.raises(AssertionError, match=sentence):
        rehearse.check_output(tmp_path)
    rehearse.check_output(tmp_path / "none")


@pytest.mark.slow
def test_steps_run_on_a_cpu(tmp_path, monkeypatch):
    """`make gpu-rehearsal` runs all of them."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    chosen = report.chosen_steps(["environment", "fsdp of one rank", "training profile"], None)
    report.run(tmp_path, chosen, minutes=8, device="cpu")
    rows = {row["step"]: row for row in read_report(tmp_path / "report.jsonl")}
    assert [row["status"] for row in rows.values()] == [0, 0, 0], rows
    gap = rows["fsdp of one rank"]["numbers"]["float32, largest relative gap of weights after three steps"][0]
    assert gap < 1e-5
    assert rows["environment"]["numbers"].keys() >= json.loads(PREDICTIONS.read_text())["steps"]["environment"].keys()


ROOT = Path(__file__).resolve().parents[2]

# packages that a machine with a GPU need not have
ABSENT = ("omegaconf", "ray", "vllm", "trl", "rich", "psutil", "pyarrow", "peft", "datasets", "matplotlib")

WITHOUT = f"""
import importlib.machinery, runpy, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
sys.argv = ["sizes.py", "--quick", "--json", sys.argv[1]]
runpy.run_path({str(ROOT / "benchmarks" / "gpu" / "sizes.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_all_parts_run_with_the_packages_that_it_names(tmp_path):
    out = tmp_path / "out.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    python("-c", WITHOUT, out, timeout=170, env=environment, cwd=tmp_path)
    values = json.loads(out.read_text())
    assert not [name for name in values if name.endswith(": error")]
    assert values["fp32 greedy tokens that differ from generate"] == 0
    for name in ("decode, 4 rows", "GRPO, step"):
        assert values[name] > 0


def test_counted_flops_are_those_that_pytorch_counts():
    """The needed FLOPs of a step without sharing (one sample a prompt), against a count of the operations of a plain
    forward."""
    module = sizes.build("tiny", torch.device("cpu"))
    shape = sizes.Shape(3, 1, 10, 6, (1,), 64, 1)
    with sizes.plain(module, "eager") as reference, torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference(input_ids=torch.zeros(3, 15, dtype=torch.int64), use_cache=False, logits_to_keep=6)
    config = module.config
    # the eager form computes the pairs that the mask hides, too
    per_pair = 4 * config.hidden_size * config.num_hidden_layers
    hidden_pairs = 3 * (15 * 15 - 15 * 16 / 2)
    rotary = 3 * 2 * 15 * config.hidden_size // config.num_attention_heads // 2  # frequencies times positions
    counted = counter.get_total_flops() - per_pair * hidden_pairs
    assert abs(sizes.forward_flops(module, shape) - counted) <= 3 * rotary
