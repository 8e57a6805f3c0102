"""Code asks for the facts of rollout engines: their names stand only in verl/rollout/, in the table of verl/families.py, in
YAML and in verl/compat/."""

import ast
import dataclasses
import re

import pytest

from tests.house.source import ROOT, files, nodes, relative
from verl.families import FACTS, ROLLOUT_ENGINES, EngineFacts, engine_facts, engines_with, needs_engine
from verl.rollout.api import RolloutEngine

NAMES = ROLLOUT_ENGINES.built_in
HOME = ("verl/families.py", "verl/rollout/", "verl/compat/")
# texts that are no name of a rollout engine: file -> text -> what it names
OTHER = {
    "verl/page/server.py": {"http": "a kind of ASGI connection"},
    "verl/data/pictures.py": {"http": "a scheme of URLs"},
    "verl/parallel/device.py": {"native": "instructions of a CPU"},
    "verl/cli/doctor.py": {"native": "instructions of a CPU"},
    "verl/cli/machine/findings.py": {"native": "instructions of a CPU"},
    "verl/cli/machine/probes.py": {"native": "instructions of a CPU"},
    "verl/cli/machine/packages.py": {"vllm": "a package", "sglang": "a package"},
    "verl/cli/machine/requirements.py": {"vllm": "a package"},
    "verl/config/sections/rollout.py": {"vllm": "an API of a service", "sglang": "an API of a service"},
    "verl/tinker/server.py": {"http": "a scheme of URLs"},
    "verl/tools/tool_registry.py": {"native": "a kind of tool"},
}
CHOICE = re.compile(rf"\bname=['\"]?({'|'.join(NAMES)})\b")
SECTIONS = "verl/config/sections/"  # the documentation of keys


def texts():
    """(place, text) of every text outside of the homes of engine names."""
    for file in files().values():
        path = relative(file)
        if not path.startswith(HOME):
            yield from (
                (f"{path}:{node.lineno}", path, node.value)
                for node in nodes(file)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )


def test_no_other_file_compares_with_the_name_of_a_rollout_engine():
    wrong = [place for place, path, text in texts() if text in NAMES and text not in OTHER.get(path, {})]
    assert not wrong, "ask for a fact (verl.families.engine_facts) at " + ", ".join(wrong)


def test_every_exception_is_needed():
    present = {(path, text) for _, path, text in texts()}
    assert {(path, text) for path, row in OTHER.items() for text in row} <= present


def test_messages_name_rollout_engines_by_their_facts():
    wrong = [place for place, path, text in texts() if not path.startswith(SECTIONS) and CHOICE.search(text)]
    assert not wrong, "name the engines of verl.families.engines_with at " + ", ".join(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_class_has_the_facts_of_its_row(name):
    assert ROLLOUT_ENGINES.get(name).facts is ROLLOUT_ENGINES.facts[name] is engine_facts(name)


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_is_of_some_engines_and_read_somewhere(fact):
    assert 0 < len(engines_with(fact)) <= len(NAMES)
    declared = re.compile(rf"\b{fact}: bool|\b{fact}=True")
    reads = re.compile(rf"\b{fact}\b")
    assert any(reads.search(declared.sub("", file.read_text(encoding="utf-8"))) for file in files().values())


def test_facts_of_engines_outside_of_the_package(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.families import EngineFacts\nfrom verl.rollout.api import RolloutEngine\n\n\n"
        "class Plain(RolloutEngine):\n    pass\n\n\nclass Mine(RolloutEngine):\n    facts = EngineFacts(records_experts=True)\n"
    )
    assert engine_facts(f"{tmp_path}/mine.py:Mine") == EngineFacts(records_experts=True)
    assert engine_facts(f"{tmp_path}/mine.py:Plain") == RolloutEngine.facts == EngineFacts()
    assert engine_facts("registered later") == engine_facts("missing.py:Mine") == EngineFacts()
    assert engine_facts(None) == engine_facts("native")


def test_a_need_names_the_engines_that_meet_it():
    sentence = needs_engine("KEY=R3", "records_experts")
    assert sentence == "KEY=R3 needs a rollout engine that returns the experts that it chose: native, vllm"


def test_the_table_of_the_guide_has_the_facts():
    """docs/engines.md has a row for each fact and a column for each engine."""
    text = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    section = text.partition("## Rollout engines")[2].partition("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    assert head == ["fact", "the engine", *(f"`{name}`" for name in NAMES)]
    assert rows == [
        [f"`{f.name}`", FACTS[f.name], *("yes" if getattr(engine_facts(name), f.name) else "" for name in NAMES)]
        for f in dataclasses.fields(EngineFacts)
    ]
