"""The counts of benchmarks/fuzz.py, a little of some sections."""

import importlib
import inspect
import logging

import fuzz
import pytest


@pytest.fixture
def level():
    """The script silences verl for the rest of its process."""
    logger = logging.getLogger("verl")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.mark.usefixtures("level")
def test_fuzz(capsys):
    sections = ["rows", "checkpoints", "run-folders"]
    counts = fuzz.main([*sections, "--count", "12"])
    assert {name: sum(c.values()) for name, c in counts.items()} == dict.fromkeys(sections, 12)
    assert "checkpoints: 12 cases, seed 0" in capsys.readouterr().out


def test_every_section_is_there():
    for section in fuzz.SECTIONS.values():
        module, _, function = section.cases.partition(":")
        assert list(inspect.signature(getattr(importlib.import_module(module), function)).parameters) == [
            "rng",
            "count",
            "folder",
        ]


@pytest.mark.usefixtures("level")
def test_a_failure_names_its_case(monkeypatch, capsys):
    def cases(rng, count, folder):
        yield "kind", "refused"
        raise ZeroDivisionError

    monkeypatch.setattr("tests.data.mutations.cases", cases)
    with pytest.raises(ZeroDivisionError):
        fuzz.main(["rows", "--seed", "7"])
    assert capsys.readouterr().err == "rows --seed 7 --count 10000: case 1 failed\n"
