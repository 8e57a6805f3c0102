"""Command lines typed by mistake, and files of every wrong kind: a sentence, never a traceback or "a bug in verl"."""

import random

from tests.cli.commands import FILES, cases, make_files, outcome


def test_random_command_lines(tmp_path):
    commands = list(cases(random.Random(0), 60, tmp_path))
    assert len({verb for verb, _ in commands}) > 5


def test_files_that_import_check_reads(tmp_path):
    make_files(random.Random(0), tmp_path)
    for name in FILES:
        assert outcome(["import-check", str(tmp_path / name)]) in ("done", "exit code 1", "exit code 2")


def test_what_import_check_cannot_read(tmp_path, verl):
    make_files(random.Random(0), tmp_path)
    assert f"{tmp_path / 'pipe.sh'} is not a file" in verl("import-check", tmp_path / "pipe.sh")[1]
    (tmp_path / "deep.py").write_text(FILES["deep.py"])
    assert "nested too deep" in verl("import-check", tmp_path / "deep.py")[1]
