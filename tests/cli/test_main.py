"""Verbs, exit codes, what an error looks like, and how quickly --help starts. Modules that the start of a run imports are
counted, not seconds, and the garbage collector runs afterwards."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys

import pytest

from tests.commands import python, ran
from tests.letters_task import overrides, write_task
from verl import errors
from verl.cli import main as main_module
from verl.cli.main import VERBS, main
from verl.config import PPO, SFT, load_config
from verl.registry import load_module

COMMANDS = {
    "verl.trainer.main_ppo": ("train",),
    "verl.trainer.main_eval": ("eval",),
    "verl.trainer.main_generation": ("generate", "--output", "x"),
    "verl.trainer.main_generation_server": ("generate", "--output", "x"),
    "verl.trainer.main_ppo_sync": ("train",),
    "verl.trainer.sft_trainer": ("sft",),
    "verl.trainer.sft_trainer_ray": ("sft",),
    "verl.trainer.fsdp_sft_trainer": ("sft",),
    "verl.experimental.one_step_off_policy.main_ppo": ("train",),
    "verl.experimental.fully_async_policy.fully_async_main": ("train",),
}


def fresh_python(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_help_lists_every_verb(verl):
    said = verl.ends(0, "--help")
    for name, verb in VERBS.items():
        assert f"{name} " in said
        assert verb.meaning in said


def test_help_groups_the_verbs_and_has_examples_that_parse(verl):
    _, said = verl("--help")
    verbs = [name for names in main_module._GROUPS.values() for name in names]
    assert sorted(verbs) == sorted(VERBS)
    commands = said.partition("examples:\n")[2].partition("\n\n")[0].replace("\\\n", "").splitlines()
    assert [command.split()[:2] for command in commands] == [["verl", "sft"], ["verl", "train"], ["verl", "show"]]
    for schema, command in ((SFT, commands[0]), (PPO, commands[1])):
        assert load_config(command.split()[2:], schema=schema, check=False).settings


@pytest.mark.parametrize(
    ("verb", "words"), [("show", "usage: verl show"), ("grpo", "verl train"), ("trian", "'train'")]
)
def test_help_of_a_verb_by_name(verb, words, capsys):
    with contextlib.suppress(SystemExit):
        main(["help", verb])
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_no_verb_is_a_usage_error(verl):
    verl.ends(2, words=["usage: verl VERB"])


def test_unknown_verb_names_the_nearest(verl):
    verl.ends(2, "trian", words=["did you mean 'train'?"])


@pytest.mark.parametrize(("verb", "words"), [("merge", "verl export"), ("grpo", "verl train"), ("bench", "verl plan")])
def test_verbs_known_elsewhere_say_what_to_do(verb, words, verl):
    said = verl.ends(2, verb, "--help")
    assert words in said


def test_an_argument_that_is_no_text_is_refused(verl):
    verl.ends(2, "train", "trainer.default_local_dir=\udcc3x", words=["PYTHONUTF8=1"])


def test_version(verl):
    from verl import __version__

    assert verl("--version") == (0, f"{__version__}\n")


HELP = """
import json, os, sys
calls = 0

def count(frame, event, argument):
    global calls
    calls += event == "call"

sys.setprofile(count)
from verl.cli.main import main
import verl.config  # as most verbs do

def said(verb):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1)
        code = "none"
        try:
            main([verb, "--help"])
        except SystemExit as end:
            code = end.code
        heavy = sorted({"torch", "ray", "transformers", "omegaconf", "pyarrow"} & set(sys.modules))
        print(json.dumps([code, heavy, calls]), flush=True)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as output:
        text = output.read()
    os.wait()
    return text

print(json.dumps({verb: said(verb) for verb in sys.argv[1:]}))
"""


def test_help_of_every_verb_starts_without_torch_and_quickly():
    """Each verb in a fork of a process that has only imported the command line and the config. Calls of functions, of which
    a busy machine makes no more."""
    done = fresh_python(HELP, *VERBS)
    assert done.returncode == 0, done.stderr
    for verb, said in json.loads(done.stdout).items():
        text, _, facts = said.rstrip().rpartition("\n")
        code, heavy, calls = json.loads(facts)
        assert (code, heavy) == (0, []), verb
        assert f"verl {verb}" in text
        assert calls < 250_000, verb  # 113,000 to 149,000 when written


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.DataError, errors.CheckpointError, errors.DeadlineError])
def test_an_error_of_ours_is_a_sentence_and_the_code_of_its_type(kind, verl, monkeypatch):
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.setattr("verl.data.prepare.main", raising(kind("The cause, the place, the fix.")))
    said = verl.ends(kind.exit_code, "data")
    assert said == "verl data: The cause, the place, the fix.\n"


def test_debug_shows_the_traceback_too(verl, monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "debug")
    monkeypatch.setattr("verl.data.prepare.main", raising(errors.DataError("A sentence.")))
    said = verl.ends(errors.DataError.exit_code, "data", words=["Traceback"])
    assert said.endswith("verl data: A sentence.\n")


def test_an_interrupt_is_130(verl, monkeypatch):
    monkeypatch.setattr("verl.data.prepare.main", raising(KeyboardInterrupt()))
    assert verl("data") == (130, "verl data: interrupted.\n")


def in_verl(error):
    """A function that raises, compiled as if it were in a file of the package."""
    names = {"error": error}
    exec(compile("def run(argv):\n    raise error\n", main_module.__file__, "exec"), names)
    return names["run"]


NO_MEMORY = "verl data: there is not enough memory. Lower lengths or batch sizes"


@pytest.mark.parametrize(
    ("error", "sentence", "is_a_bug"),
    [
        (ZeroDivisionError("in the deep\x1b[31m"), r"ZeroDivisionError: in the deep\x1b[31m", True),
        (MemoryError(), NO_MEMORY, False),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            NO_MEMORY,
            False,
        ),
    ],
)
def test_an_exception_in_verl_is_a_bug_but_for_a_lack_of_memory(error, sentence, is_a_bug, verl, monkeypatch):
    monkeypatch.setattr("verl.data.prepare.main", in_verl(error))
    said = verl.ends(70, "data")
    assert sentence in said
    assert ("this is a bug in verl" in said) == is_a_bug


@pytest.mark.parametrize("text", ["1 / 0", "json.loads('{')"])
def test_code_of_the_user_is_named(text, verl, monkeypatch, tmp_path):
    """Both an error of the user's code and an error of a library that it calls name the user's file."""
    file = tmp_path / "mine.py"
    file.write_text(f"import json\n\n\ndef main(argv):\n    {text}\n")
    monkeypatch.setattr("verl.data.prepare.main", lambda argv: load_module(str(file)).main(argv))
    said = verl.ends(70, "data", words=[f"verl data: {file}, line 5, raised "])
    assert "bug in verl" not in said


def test_a_full_disk_that_a_library_reports_in_its_own_way(verl, monkeypatch):
    monkeypatch.setattr("verl.data.prepare.main", in_verl(Exception("No space left on device (os error 28)")))
    assert verl("data") == (
        1, "verl data: Reading or writing failed: No space left on device. Free some space, and run the same command again.\n"
    )  # fmt: skip


def test_a_terminal_without_the_characters(verl, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr("verl.data.prepare.main", lambda argv: print("café \u2713"))
    assert verl("data")[0] == 0
    sys.stdout.seek(0)
    assert sys.stdout.read() == "caf\\xe9 \\u2713\n"


REFUSALS = {
    errno.ENOSPC: "Free some space",
    errno.EACCES: "this user may read and write",
    errno.EISDIR: "Name a file, not a folder",
}


@pytest.mark.parametrize("number", REFUSALS)
def test_what_the_system_refuses_is_a_sentence(number, verl, monkeypatch):
    monkeypatch.setattr("verl.data.prepare.main", raising(OSError(number, os.strerror(number), "rows.jsonl")))
    said = verl.ends(1, "data")
    assert said.startswith(f"verl data: Reading or writing rows.jsonl failed: {os.strerror(number)}. ")
    assert REFUSALS[number] in said
    assert said.count("\n") == 1


def test_other_errors_of_the_system_are_bugs(verl, monkeypatch):
    monkeypatch.setattr("verl.data.prepare.main", raising(FileNotFoundError(errno.ENOENT, "No such file", "gone")))
    verl.ends(70, "data", words=["FileNotFoundError"])


RUN_MODULES = """
import contextlib, io, json, runpy, sys
for module, options in json.loads(sys.argv[1]).items():
    sys.argv[1:] = [*options, "data.train_file=x"]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
    print(json.dumps([module, code, said.getvalue()]))
"""


def test_commands_of_other_releases_are_verbs():
    """As `python -m MODULE` runs them, in one process."""
    done = fresh_python(RUN_MODULES, json.dumps({module: options for module, (_, *options) in COMMANDS.items()}))
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [module for module, *_ in said] == list(COMMANDS), done.stderr
    for module, code, error in said:
        assert code == 2
        assert error.startswith(f"verl {COMMANDS[module][0]}: "), error
        assert "data.train_files" in error


def test_the_package_is_a_command():
    python("-m", "verl", "--version")


def raising(error):
    def run(argv):
        raise error

    return run


def test_a_reader_that_closes_the_output_early_is_no_error():
    for arguments in (["--help"], ["train", "--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "verl", *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # written at the end
        )
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, "")


def test_one_rank_of_a_node_says_what_is_wrong_with_the_config(verl, monkeypatch):
    for kind, rank, says in (
        (errors.ConfigError, "1", False),
        (errors.ConfigError, "0", True),
        (errors.DataError, "1", True),
    ):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setattr("verl.data.prepare.main", raising(kind("The cause.")))
        said = verl.ends(kind.exit_code, "data")
        assert ("The cause." in said) is says


def test_main_reads_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl", "--version"])
    assert main() == 0
    assert capsys.readouterr().out


def test_a_command_with_a_closed_output_has_its_own_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python starts a process with closed output (`>&-`)
    assert main(["--version"]) == 0


_STREAMS = """
import importlib, json, os, subprocess, sys
main = importlib.import_module("verl.cli.main")

def report(*_, **__):
    file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    child = subprocess.run([sys.executable, "-c", "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"])
    os.write(file, json.dumps([file, child.returncode, sys.stdin.read(), sys.stdout.write("a")]).encode())
    return 0

main.run_verb = report
main.main(["train"])
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_streams_has_empty_ones(closed, tmp_path):
    """`verl chat` reads an end, and no file that a program opens gets the number of a stream."""
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", _STREAMS, str(tmp_path / "report")]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    file, child, text, written = json.loads((tmp_path / "report").read_text())
    assert file > 2
    assert (child, text, written) == (0, "", 1)


_MAX_OWN_MODULES = 421  # 420 when written; a run of one process imports no engine, tracker or program that it lacks
_UNUSED = ("ray", "vllm", "sglang", "deepspeed", "megatron", "matplotlib", "pandas", "datasets", "starlette", "uvicorn")
_RUN = """
import gc, json, sys
from verl.cli.main import main
code = main(sys.argv[1:])
names = sorted(sys.modules)
print(json.dumps({"code": code, "modules": names, "frozen": gc.get_freeze_count(), "collects": gc.isenabled()}))
"""
_PAGE = "import json, sys, verl.page.__main__; print(json.dumps(sorted(sys.modules)))"


def last_line(code, *arguments, **environment):
    command = [sys.executable, "-c", code, *arguments]
    done = ran(*command, timeout=300, env={**os.environ, **environment})
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tiny_run_imports_what_it_uses(tiny_llama, tmp_path):
    task = write_task(tmp_path)
    keys = overrides(
        tiny_llama, task, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.total_training_steps=1"
    )
    ending = last_line(_RUN, "train", *keys)
    assert ending["code"] == 0
    assert not {name.partition(".")[0] for name in ending["modules"]} & set(_UNUSED)
    verl_modules = [name for name in ending["modules"] if name.startswith("verl.")]
    assert len(verl_modules) <= _MAX_OWN_MODULES, verl_modules
    assert ending["collects"]
    assert ending["frozen"] > 300_000  # objects of torch and transformers: no collection visits them


def test_a_page_without_a_reader_imports_no_server():
    assert not {"starlette", "uvicorn", "sqlite3", "jinja2", "torch"} & set(last_line(_PAGE))
