"""The notebook of examples/notebooks, executed in a Jupyter kernel on a tiny model, and its outputs."""

import json
import sys
from pathlib import Path

import pytest

from verl.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_notebook_runs_and_shows_curve_metrics_and_samples(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    pytest.importorskip("pandas", reason="needs the extra scripts")
    monkeypatch.setenv("MODEL", str(make_tiny_model(tmp_path / "model")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kernels = tmp_path / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    notebook = nbformat.read(ROOT / "examples" / "notebooks" / "grpo.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    outputs = [cell.get("outputs", []) for cell in notebook.cells if cell.cell_type == "code"]
    html = ["".join(o["data"].get("text/html", "") for o in cell if "data" in o) for cell in outputs]
    assert "<svg" in html[1]
    assert "at step 2 of 2" in html[1]
    assert "critic/score/mean" in html[2]
    assert html[3].count("<tr") == 6  # a header and five samples
    printed = "".join(o["text"] for o in outputs[4] if o["output_type"] == "stream" and o["name"] == "stdout")
    assert [line.split()[0] for line in printed.splitlines() if line[:1].isdigit()] == ["1", "2", "3"]
