"""Pages that are written by a program are current, and commands and files that pages name exist."""

import ast
import doctest
import functools
import importlib.util
import os
import re
import subprocess

import pytest

import verl
from tests.house.source import ROOT, files, nodes
from verl import families
from verl.cli.main import VERBS
from verl.config import PPO, PREFERENCE, SFT
from verl.config.roots.reward_model import RM
from verl.registry import load_module

PAGES = sorted(
    p
    for folder in ("", "docs", "examples", "benchmarks")
    for p in (ROOT / folder).glob("*.md")
    if p.name != "config.md"  # generated
)
SCHEMAS = (PPO, PREFERENCE, SFT, RM)
KEY = re.compile(
    r"`(?![\w.]+\.(?:py|md|json|jsonl|yaml|txt|png|sqlite|lock|safetensors)`)([a-z_]\w*(?:\.[a-z_]\w*)+)(?:=[^`]*)?`"
)
KEY_OF_COMMAND = re.compile(r"(?<=[\s\"'])([a-z_]\w*(?:\.[a-z_]\w*)+)=")
NO_KEYS = {  # names with dots that begin as a section does
    "reward_model.ground_truth": "a field of a row",
    "reward.collect": "a span of the timeline",
    "reward.num_defaulted": "a metric of benchmarks",
    "rollout.generate": "a span of the timeline",
}
TEXTS = (".md", ".py", ".yaml", ".ipynb", ".html", ".sh", ".sbatch")
PACKAGE_FILE = re.compile(r"`((?:verl|tests|docs|examples|benchmarks)/[\w./-]*\w\.(?:py|md|yaml|sh))`")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def commands(text):
    """Lines of code blocks, without their comments, and what stands in backticks."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    return [*lines, *re.findall(r"`([^`\n]+)`", text)]


def test_nothing_installs_the_other_project_of_this_name():
    """On the index `verl` is another project: documents install an extra from a checkout, messages name its packages."""
    further = [*(ROOT / "docs").glob("*.*"), *(ROOT / "examples").rglob("*.*"), *(ROOT / "verl").rglob("*.*")]
    texts = {page: page.read_text("utf-8", errors="ignore") for page in {*PAGES, *further} if page.suffix in TEXTS}
    named = re.compile(r"pip install [^`\n]*?(?<=[ '\"])verl(?:-\w+)?(?=[\[=<>'\"`\s]|$)", re.M)
    wrong = {f"{page.relative_to(ROOT)}: {match[0]}" for page, text in texts.items() for match in named.finditer(text)}
    assert not {text for text in wrong if "CHANGELOG" not in text and "docs/history" not in text}
    extras = {
        name for text in texts.values() for names in re.findall(r"'\.\[([\w,-]+)\]'", text) for name in names.split(",")
    }
    assert extras
    assert extras <= set(re.findall(r"^([\w-]+) = \[", read("pyproject.toml"), re.M))


def test_the_features_of_the_seed_documents_are_shown():
    """Every row has a test or names the missing part, and has numbers of both sides or of neither; markers name rows."""
    generator = load_module(str(ROOT / "docs" / "make_seed_features.py"))
    rows, marked = generator.rows(), generator.marked()
    assert [name for name, row in rows.items() if not (name in marked or "open" in row)] == []
    assert [name for name, row in rows.items() if ("seed" in row) != ("ours" in row)] == []
    assert [
        row["benchmark"] for row in rows.values() if "benchmark" in row and not (ROOT / row["benchmark"]).exists()
    ] == []
    assert set(marked) <= set(rows)
    assert read("docs/seed_features.md") == generator.page(), "run: python docs/make_seed_features.py"


@pytest.mark.parametrize(
    ("model", "gpu"), [("Qwen2.5-0.5B", "h100_sxm"), ("Qwen2.5-7B", "a100_sxm"), ("Qwen2.5-32B", "b200_sxm")]
)
def test_the_table_of_gpus_is_the_planners(model, gpu):
    generator = load_module(str(ROOT / "docs" / "make_which_gpu.py"))
    (row,) = [line for line in read("docs/which-gpu.md").splitlines() if line.startswith(f"| {model} ")]
    column = 2 + list(generator.GPUS).index(gpu)
    assert row.split("|")[column].strip() == generator.cell(model, gpu), "run: python docs/make_which_gpu.py"


def test_the_table_of_versions_is_current():
    generator = load_module(str(ROOT / "benchmarks" / "versions.py"))
    assert read("docs/versions.md") == generator.page(), "run: python benchmarks/versions.py"


@pytest.mark.parametrize("page", ["api.md", "formulas.md"])
def test_a_page_of_docstrings_is_current(page):
    generator = load_module(str(ROOT / "docs" / "make_api.py"))
    assert read(f"docs/{page}") == generator.PAGES[page](), "run: python docs/make_api.py"
    assert {name for names in generator.GROUPS.values() for name in names} == {*verl.__all__} - {"__version__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    missing = [f for f in PACKAGE_FILE.findall(text) if not (ROOT / f).exists()]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_that_a_page_names_exist(page):
    named = commands(page.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.M))
    for command in named:
        for target in re.findall(r"^\s*make ([a-z][\w-]*)", command):
            assert target in targets, command
        for config in re.findall(r"^\s*make \w+ CONFIG=(\w+)", command):
            assert (ROOT / "verl" / "config" / "yaml" / f"{config}.yaml").exists(), command
        for verb in re.findall(r"^\s*verl ([a-z][a-z-]*)\b", command):
            assert verb in (*VERBS, "help"), command
        for module in re.findall(r"python -m (verl[\w.]*)", command):
            assert module in files() or importlib.util.find_spec(module), command


@functools.cache
def config_names():
    """Keys and sections of all programs in every spelling, also without their first parts (`actor.grad_clip`)."""
    spelled = {name for schema in SCHEMAS for name in (*schema.leaves, *schema.sections, *schema.compat.exact)}
    return {name.split(".", n)[n] for name in spelled for n in range(name.count(".") + 1)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_config_keys_that_a_page_names_exist(page):
    sections = {name.split(".")[0] for name in config_names() if "." in name}
    text = page.read_text(encoding="utf-8")
    lines = [line for line in commands(text.replace("\\\n", " ")) if re.search(r"\bverl(?:\.trainer\.| )", line)]
    written = [*KEY.findall(text), *(key for line in lines for key in KEY_OF_COMMAND.findall(line))]
    keys = [key for key in written if key.split(".")[0] in sections]
    unknown = set(keys) - config_names() - set(NO_KEYS)
    missing = [key for key in unknown if not any(schema.locate(schema.resolve(key)[0]) for schema in SCHEMAS)]
    assert not missing, missing


@functools.cache
def words_of_the_package():
    """Words between slashes in names of the package, without what exists for scripts of other releases."""
    read = [file for name, file in files().items() if not name.startswith("verl.compat")]
    values = [node.value for file in read for node in nodes(file) if isinstance(node, ast.Constant)]
    names = [value for value in values if isinstance(value, str) and not re.search(r"\s", value)]
    return {word for name in names for word in name.split("/")}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_folders_and_metrics_that_a_page_names_exist(page):
    """`actor/lora_adapter`, `val/accuracy`: the last part is a text of the package."""
    names = re.findall(r"`(?!(?:work|verl|tests|docs|examples|benchmarks)/)(?:[\w-]+/)+(\w+)`", page.read_text("utf-8"))
    missing = [name for name in names if name not in words_of_the_package() and not (ROOT / ".ci" / name).exists()]
    assert not missing, missing


def test_pages_name_every_row_of_a_family():
    pages = {"algorithms": (families.ADVANTAGES, families.POLICY_LOSSES), "preferences": (families.PREFERENCE_LOSSES,)}
    for page, members in {**pages, "rewards": (families.REWARD_MANAGERS,)}.items():
        text = read(f"docs/{page}.md")
        missing = [f"{row.family} {name}" for row in members for name in row.built_in if f"`{name}`" not in text]
        assert not missing, f"docs/{page}.md lacks {missing}"


def test_examples_are_listed():
    listed = re.findall(r"^\| `(\w+\.py)` \|", read("examples/README.md"), re.M)
    assert listed == sorted(f.name for f in (ROOT / "examples").glob("[0-9]*.py"))


def test_other_defaults_are_among_the_differences():
    text = read("docs/differences.md")
    missing = [row for row in PPO.compat.differences if "| " + " | ".join(row) + " |" not in text]
    assert not missing, f"docs/differences.md lacks or contradicts rows of verl/config/compat.yaml: {missing}"


def test_examples_of_docstrings_give_what_they_show():
    modules = [name for name, path in files().items() if ">>>" in path.read_text(encoding="utf-8")]
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = {name: doctest.testmod(load_module(name), optionflags=flags) for name in modules}
    assert len(results) >= 15
    assert not {name for name, result in results.items() if result.failed}


@pytest.mark.parametrize("has_torch", [True, False])
def test_make_keeps_the_torch_of_an_environment_that_is_there(has_torch, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("python", "pip"):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" != -c ] || exit {int(not has_torch)}\n')
        script.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCH", "MAKEFLAGS")}
    subprocess.run(["make", f"VENV={tmp_path}", f"{tmp_path}/stamps/torch"], cwd=ROOT, env=environment, check=True)
    assert ("-m pip install" in (tmp_path / "calls").read_text()) == (not has_torch)
