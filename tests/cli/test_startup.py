"""Modules that the start of a run imports, and the garbage collector afterwards. Modules are counted, not seconds."""

import json
import os
import subprocess
import sys

from tests.letters_task import overrides, write_task

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tiny_run_imports_what_it_uses(tiny_llama, tmp_path):
    task = write_task(tmp_path)
    keys = overrides(
        tiny_llama, task, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.total_training_steps=1"
    )
    ending = last_line(_RUN, "train", *keys)
    assert ending["code"] == 0
    assert not {name.partition(".")[0] for name in ending["modules"]} & set(_UNUSED)
    own = [name for name in ending["modules"] if name.startswith("verl.")]
    assert len(own) <= _MAX_OWN_MODULES, own
    assert ending["collects"]
    assert ending["frozen"] > 300_000  # the objects of torch and transformers, which no collection looks through


def test_a_page_without_a_reader_imports_no_server():
    assert not {"starlette", "uvicorn", "sqlite3", "jinja2", "torch"} & set(last_line(_PAGE))
