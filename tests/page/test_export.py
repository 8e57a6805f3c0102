"""Pages as files."""

import re
from urllib.parse import unquote

import pytest

from tests.page.folders import make_run, sample, write_samples
from verl.cli.main import main


def test_every_link_of_an_export_leads_to_a_file(tmp_path, capsys):
    folder = make_run(tmp_path / "my run", steps=2)
    write_samples(folder, "val", 2, [sample(7, 0, response="<script>alert(1)</script>")])
    out = tmp_path / "out"
    assert main(["view", str(folder), "--export", str(out), "--steps", "1"]) == 0
    pages = sorted(out.rglob("*.html"))
    assert len(pages) == 1 + 4 + (1 + 4 + 16) + (1 + 1)
    assert f"{len(pages)} pages" in capsys.readouterr().out
    for page in pages:
        text = page.read_text()
        assert "<script>alert" not in text
        for target in re.findall(r'(?:href|src)="([^"#]*)"', text):
            assert not target.startswith(("/", "http")), target
            assert (page.parent / unquote(target)).is_file(), f"{page.relative_to(out)} links to {target}"
    assert "hx-get" not in "".join(page.read_text() for page in pages)
    step = (out / "run" / "my-run" / "train" / "2.html").read_text()
    assert 'href="../../../run/my-run/train/2/u/' in step


def test_a_folder_of_runs_is_its_runs(tmp_path):
    for name in ("first", "second"):
        make_run(tmp_path / "runs" / name, steps=1)
    (tmp_path / "runs" / "model").mkdir()
    assert main(["view", str(tmp_path / "runs"), "--export", str(tmp_path / "out")]) == 0
    assert {"first", "second"} <= {page.name for page in (tmp_path / "out" / "run").iterdir()}


def test_an_export_replaces_nothing(tmp_path, capsys):
    folder = make_run(tmp_path / "run", steps=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert main(["view", str(folder), "--export", str(tmp_path / "out")]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["-1", "0"])
def test_an_export_of_no_steps_is_refused(tmp_path, capsys, steps):
    folder = make_run(tmp_path / "run", steps=1)
    assert main(["view", str(folder), "--export", str(tmp_path / "out"), "--steps", steps]) == 2
    assert "--steps" in capsys.readouterr().err
