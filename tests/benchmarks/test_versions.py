"""The table of versions: outcomes of a JUnit report, refusals, and earlier rows that stay."""

import json

import versions

REPORT = """<testsuites><testsuite>
<testcase classname="tests.engines.test_fsdp" name="test_two_ranks_equal_one_device[check_fsdp]"/>
<testcase classname="tests.engines.test_fsdp" name="test_two_ranks_equal_one_device[check_tensor]"><failure/></testcase>
<testcase classname="tests.models.test_varlen" name="test_flash"><skipped/></testcase>
<testcase classname="tests.models.test_load" name="test_a"><error/></testcase>
</testsuite></testsuites>"""
FIRST, LAST = versions.CELLS[0], versions.CELLS[-1]
REFUSED = {**LAST._asdict(), "date": "2026-11-26", "pip": "pip: no", "refusal": "unmet", "seconds": 3}


def test_chosen_files_exist():
    files = [name for name in versions.TESTS if name.endswith(".py")]
    assert len(files) > 20
    assert all((versions.ROOT / name).is_file() for name in files)


def test_outcomes_of_a_report(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert versions.outcomes(tmp_path / "report.xml") == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": [
            "tests.engines.test_fsdp::test_two_ranks_equal_one_device[check_tensor]",
            "tests.models.test_load::test_a",
        ],
        "distributed": {"FSDP 2": "passed", "TP 2": "failed"},
    }


def test_rows_have_outcomes_or_the_sentence_of_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    (tmp_path / "report.xml").write_text(REPORT)
    tested = {**FIRST._asdict(), "date": "2026-11-26", **versions.outcomes(tmp_path / "report.xml"), "seconds": 3}
    for row in (REFUSED, {**tested, "passed": 7}, tested):  # the later result of a cell counts
        versions.record(row)
    rows = json.loads((tmp_path / "versions.json").read_text())
    assert rows == [tested, REFUSED], "in the order of the cells"
    lines = versions.block(rows).splitlines()
    assert f"| {FIRST.python} | 1 passed, 2 failed, 1 skipped | passed | failed | not run | 2026-11-26 |" in lines[2]
    assert "| pip: no. `verl train`: unmet | - | - | - |" in lines[3]
    assert f"- PyTorch {FIRST.torch}, Python {FIRST.python}: `tests.models.test_load::test_a`" in lines
