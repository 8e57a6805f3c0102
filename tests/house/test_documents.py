"""Pages that are written by a program are current, and commands and files that pages name exist."""

import importlib.util
import re

import pytest

from tests.house.source import ROOT, files
from verl.cli.main import VERBS
from verl.config import PPO
from verl.registry import load_module

PAGES = sorted(
    p
    for folder in ("", "docs", "examples", "benchmarks")
    for p in (ROOT / folder).glob("*.md")
    if p.name not in ("config.md", "lab-notebook.md")  # generated, kept current by tests; a history
)
PACKAGE_FILE = re.compile(r"`((?:verl|tests|docs|examples|benchmarks)/[\w./-]*\w\.(?:py|md|yaml|sh))`")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def commands(text):
    """Lines of code blocks, without their comments, and what stands in backticks."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    return [*lines, *re.findall(r"`([^`\n]+)`", text)]


def test_the_features_of_the_seed_documents_are_shown():
    """Every row has a test or says what is missing, and a number of ours beside one of theirs; markers name rows."""
    generator = load_module(str(ROOT / "docs" / "make_seed_features.py"))
    rows, marked = generator.rows(), generator.marked()
    assert [name for name, row in rows.items() if not (name in marked or "open" in row)] == []
    assert [name for name, row in rows.items() if ("seed" in row) != ("ours" in row)] == []
    assert [
        row["benchmark"] for row in rows.values() if "benchmark" in row and not (ROOT / row["benchmark"]).exists()
    ] == []
    assert set(marked) <= set(rows)
    assert read("docs/seed_features.md") == generator.page(), "run: python docs/make_seed_features.py"


def test_the_figures_of_precision_are_current():
    generator = load_module(str(ROOT / "docs" / "make_precision.py"))
    assert read("docs/precision.md") == generator.page(), "run: python docs/make_precision.py"
    assert generator.PICTURE.exists() == bool(generator.kept())


def test_figures_of_precision_are_those_of_the_benchmark(tmp_path, monkeypatch):
    generator = load_module(str(ROOT / "docs" / "make_precision.py"))
    monkeypatch.setattr(generator, "PICTURE", tmp_path / "precision.svg")
    points = [{"step": 0, "sampled": 0.15, "greedy": 0.6}, {"step": 20, "sampled": 0.7, "greedy": None}]
    runs = [
        {"side": side, "seed": 1, "steps": [{"step_s": 12.5}], "points": points}
        for side in ("dithered", "float32", "trl shipped")
    ]
    rows = generator.reduced({"machine": {"processor": "P"}, "results": {"runs": runs}})
    assert generator.figures_block(rows).splitlines()[-2:] == [
        "| P | float32 | 1 | 20 | 0.150 -> 0.700 | - | 12.5 |",
        "| P | bfloat16, dithered | 1 | 20 | 0.150 -> 0.700 | - | 12.5 |",
    ]
    generator.draw(rows)
    assert "<svg" in (tmp_path / "precision.svg").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    missing = [f for f in PACKAGE_FILE.findall(text) if not (ROOT / f).exists()]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_that_a_page_names_exist(page):
    found = commands(page.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.M))
    for command in found:
        for target in re.findall(r"^\s*make ([a-z]\w*)", command):
            assert target in targets, command
        for config in re.findall(r"^\s*make \w+ CONFIG=(\w+)", command):
            assert (ROOT / "verl" / "config" / "yaml" / f"{config}.yaml").exists(), command
        for verb in re.findall(r"^\s*verl ([a-z][a-z-]*)\b", command):
            assert verb in VERBS, command
        for module in re.findall(r"python -m (verl[\w.]*)", command):
            assert module in files() or importlib.util.find_spec(module), command


def test_examples_are_listed():
    listed = re.findall(r"^\| `(\w+\.py)` \|", read("examples/README.md"), re.M)
    assert listed == sorted(f.name for f in (ROOT / "examples").glob("[0-9]*.py"))


def test_other_defaults_are_among_the_differences():
    text = read("docs/differences.md")
    missing = [row for row in PPO.compat.differences if "| " + " | ".join(row) + " |" not in text]
    assert not missing, f"docs/differences.md lacks or contradicts rows of verl/config/compat.yaml: {missing}"
