"""Images of samples, notes and plans in a run folder, and their pages."""

import base64
import io
import json

import pytest
from PIL import Image

from tests.json_lines import read_lines
from tests.page.folders import PLAN, make_run, sample
from verl.cli.main import main
from verl.page.pages import NotFound, Site
from verl.page.text import collapsed
from verl.tracking.pictures import SIDE, stored_images, thumbnail
from verl.tracking.run_folder import RunFolder
from verl.tracking.tracker import Tracker


def picture(size, color="red"):
    return Image.new("RGB", size, color)


def opened(url):
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run; the first sample of step 1 has two images; the second sample has one of them."""
    monkeypatch.setenv("VERL_PAGE_CACHE", str(tmp_path / "cache"))
    folder = make_run(tmp_path / "run", steps=1)
    red, blue = thumbnail(picture((40, 30))), thumbnail(picture((9, 9), "blue"))
    rows = [sample(0, 0, images=[red, blue]), sample(0, 1, images=[red]), sample(1, 0)]
    with Tracker(RunFolder(folder), [], "project", "experiment", {}) as tracker:
        tracker.samples("train", 1, rows)
    return folder


@pytest.fixture
def site(folder):
    opened = Site([folder])
    yield opened
    opened.close()


def stored(folder):
    return read_lines(folder / "samples/train/step_000001.jsonl")


@pytest.mark.parametrize(
    ("size", "small"), [((40, 30), (40, 30)), ((2048, 1024), (SIDE, SIDE // 2)), ((1, 9000), (1, SIDE))]
)
def test_a_thumbnail_has_its_shape_and_a_limit(size, small):
    assert opened(thumbnail(picture(size))).size == small


def test_marks_of_an_image_are_counted():
    assert collapsed("a <|pad|><|pad|><|pad|><|pad|>b <s><s>") == "a <|pad|> × 4 b <s><s>"


def test_each_image_is_stored_once(folder):
    first, second, third = stored(folder)
    assert first["images"][0] == second["images"][0]
    assert "images" not in third
    assert {file.name for file in (folder / "samples/images").iterdir()} == set(first["images"])


def test_images_are_on_the_pages_of_sample_and_group(site, folder):
    urls = stored_images(stored(folder)[0], folder / "samples/images")
    assert [opened(url).size for url in urls] == [(40, 30), (9, 9)]
    for path in ("/run/run/train/1/s/0", "/run/run/train/1/u/0"):
        assert all(f'<img src="{url}"' in site.page(path) for url in urls)
    assert "<img" not in site.page("/run/run/train/1/s/2")


@pytest.mark.parametrize("content", [b"", b"<svg onload=alert(1)>", b"\xff\xd8\xff" + b"0" * 99])
def test_a_damaged_image_is_a_sentence(site, folder, content):
    (folder / "samples/images" / stored(folder)[0]["images"][0]).write_bytes(content)
    html = site.page("/run/run/train/1/s/0")
    assert "image 1 is missing or damaged" in html
    assert html.count("<img") == 1


@pytest.mark.parametrize("name", ["../../config.yaml", "/etc/hostname", "a.jpg", 7, None])
def test_only_files_of_the_run_are_read(folder, name):
    assert stored_images({"images": [name]}, folder / "samples/images") == [""]


def test_an_image_of_a_copied_folder_has_a_limit(folder):
    name = "0" * 32 + ".jpg"
    picture((SIDE + 1, 1)).save(folder / "samples/images" / name)
    assert stored_images({"images": [name]}, folder / "samples/images") == [""]


def test_an_export_has_images_and_plan(folder, tmp_path):
    (folder / "plan.json").write_text(json.dumps({"best": PLAN, "runner_up": None}))
    assert main(["view", str(folder), "--export", str(tmp_path / "out")]) == 0
    assert "data:image/jpeg;base64," in (tmp_path / "out/run/run/train/1/s/0.html").read_text()
    assert "dp 16, ZeRO-3" in (tmp_path / "out/run/run/plan.html").read_text()


def test_a_plan_has_its_page(site, folder):
    (folder / "plan.json").write_text(json.dumps({"best": PLAN, "runner_up": {**PLAN, "step_s": 11.0}}))
    assert ">Plan</a>" in site.page("/run/run")
    html = site.page("/run/run/plan")
    for text in ("<b>16 × H100</b>", "<b>9.5 s</b>", "40 GB", "10%", "trainer.nnodes=2", "11 s a step"):
        assert text in html
    assert 'aria-label="actor train: matmul 1.5 s, head 0.5 s"' in html


@pytest.mark.parametrize(
    "plan", [None, "", "[]", {}, {"best": {**PLAN, "step_s": "x"}}, {"best": {**PLAN, "placement": [1]}}]
)
def test_without_a_readable_plan_there_is_no_page(site, folder, plan):
    if plan is not None:
        (folder / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    assert ">Plan</a>" not in site.page("/run/run")
    with pytest.raises(NotFound):
        site.page("/run/run/plan")


def test_notes_and_their_tags(site, folder):
    (folder / "notes.md").write_text("# Baseline\n<b>lr</b> too high #base #lr-sweep #base, see http://host/#part\n")
    assert site.views["run"].run.notes.tags == ["base", "lr-sweep"]
    home, run = site.page("/"), site.page("/run/run")
    assert '<span class="tag">lr-sweep</span>' in home
    assert "&lt;b&gt;lr&lt;/b&gt; too high" in run
    (folder / "notes.md").write_bytes(b"\xff")
    assert site.views["run"].run.notes.tags == []
