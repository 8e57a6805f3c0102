"""The notebooks: their calls fit the API, and they run in a Jupyter kernel. A kernel that is interrupted has a usable run."""

import ast
import inspect
import json
import os
import re
import signal
import sys
import threading

import pytest

import verl
from tests.house.source import ROOT
from tests.processes import wait_until
from verl.config import PPO, SFT
from verl.models.tiny import make_tiny_model

NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
SCHEMAS = {"train": PPO, "Trainer": PPO, "evaluate": PPO, "generate": PPO, "sft": SFT}


def cells_of(notebook):
    return [c for c in json.loads(notebook.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]


def calls_of(notebook):
    """(function of verl, call) of all cells; lines of Jupyter's own stand aside."""
    for cell in cells_of(notebook):
        text = re.sub(r"^(\s*)%.*", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("verl."):
                yield ast.unparse(node.func).removeprefix("verl."), node


def keys_in(name, value):
    """The dotted keys of nested dicts in the source."""
    if not isinstance(value, ast.Dict):
        return [name]
    inner = [(key.value, v) for key, v in zip(value.keys, value.values, strict=True)]
    return [key for part, v in inner for key in keys_in(f"{name}.{part}".lstrip("."), v)]


def test_the_readme_lists_them():
    listed = re.findall(r"`notebooks/(\w+\.ipynb)`", (ROOT / "examples/README.md").read_text("utf-8"))
    assert listed == [notebook.name for notebook in NOTEBOOKS]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_fit_the_api(notebook):
    calls = list(calls_of(notebook))
    assert calls
    for name, call in calls:
        signature = inspect.signature(getattr(verl, name) if name != "train" else verl.Trainer)
        arguments = {word.arg: word.value for word in call.keywords}
        signature.bind(*call.args, **arguments)
        sections = [name for name in ("trainer", "actor_rollout_ref", "data", "optim") if name in arguments]
        keys = [key for section in sections for key in keys_in(section, arguments[section])]
        keys += keys_in("", arguments["config"]) if "config" in arguments else []
        schema = SCHEMAS[name]
        assert not [key for key in keys if not schema.locate(schema.resolve(key)[0])]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_small_and_of_a_run_without_errors(notebook):
    assert notebook.stat().st_size < 120_000
    cells = cells_of(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "error" not in {output["output_type"] for cell in cells for output in cell["outputs"]}


@pytest.fixture
def client_of(tmp_path, monkeypatch):
    """`client_of(notebook)` executes cells in a kernel of this Python, in an empty folder, with a tiny model."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    pytest.importorskip("pandas", reason="needs the extra pandas")
    monkeypatch.setenv("MODEL", str(make_tiny_model(tmp_path / "model")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kernels = tmp_path / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    resources = {"metadata": {"path": str(tmp_path)}}
    return lambda cells: nbclient.NotebookClient(cells, timeout=240, kernel_name="python3", resources=resources)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook, client_of):
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    executed = client_of(nbformat.read(notebook, as_version=4)).execute()
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    displays = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    assert sum("<progress" in html for html in displays) == len(
        re.findall(r"verl\.(?:sft|train|Trainer)\(", notebook.read_text())
    )
    assert any("critic/score/mean" in html for html in displays)


RUN = """
import os
import verl
run = verl.train(
    os.environ["MODEL"], [{"prompt": f"{n}?"} for n in range(64)], lambda completions, **c: [len(t) for t in completions],
    output_dir="runs/stopped", trainer={"total_training_steps": STEPS},
    config={"data.train_batch_size": 4, "data.max_response_length": 8, "actor_rollout_ref.rollout.n": 2},
)
"""


@pytest.mark.slow
def test_an_interrupted_kernel_has_a_run_that_is_used_and_resumed(client_of, tmp_path):
    """Interrupt, look at the run and its model in the same kernel, and run the cell again."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    new = nbformat.v4.new_code_cell
    client = client_of(nbformat.v4.new_notebook())
    metrics = tmp_path / "runs/stopped/metrics.jsonl"

    def num_steps():
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def execute(source):
        client.nb.cells.append(new(source))
        return client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)

    def interrupt(kernel):
        """As Jupyter does, once the run has taken steps."""
        if wait_until(lambda: num_steps() >= 2, 200):
            os.kill(kernel, signal.SIGINT)

    with client.setup_kernel():
        kernel = int(execute("import os; print(os.getpid())")["outputs"][0]["text"])
        threading.Thread(target=interrupt, args=(kernel,), daemon=True).start()
        with pytest.raises(Exception, match="Stopped on request") as stopped:
            execute(RUN.replace("STEPS", "100000"))
        assert "InterruptedRun" in str(stopped.value)
        reached = num_steps()
        after = execute(
            "r = verl.Run('runs/stopped'); print(r.model_path.is_dir(), r.summary()['step'], len(r.metrics()))"
        )
        assert after["outputs"][-1]["text"].split() == ["True", str(reached), str(reached)]
        execute(RUN.replace("STEPS", str(reached + 2)) + "print(run.summary()['step'])")
        assert client.nb.cells[-1]["outputs"][-1]["text"].split() == [str(reached + 2)]
