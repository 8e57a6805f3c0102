"""Functions as objects: known by all that decides their results, and compared with their file."""

import functools
import importlib
import itertools
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

import verl.api
from tests.commands import python
from verl.errors import ConfigError
from verl.registry import is_in_process, reference_to
from verl.user_objects import digest_of_object, short_traceback


def weigh(value):
    return 2 * value


def closure(value):
    return lambda completions: [value] * len(completions)


def default(value):
    def score(completions, value=value):
        return [value] * len(completions)

    return score


def keyword_default(value):
    def score(completions, *, value=value):
        return [value] * len(completions)

    return score


class Scorer:
    def __init__(self, value):
        self.value = value

    def score(self, completions):
        return [self.value] * len(completions)

    def __call__(self, completions):
        return self.score(completions)


def inner_function(value):
    helper = closure(value)
    return lambda completions: helper(completions)


def class_in_a_closure(value):
    class Table:
        entries = {"a": [value]}

    return lambda completions: Table.entries


FORMS = {
    "closure": closure,
    "default": default,
    "keyword default": keyword_default,
    "partial": lambda value: functools.partial(weigh, value=value),
    "partial of a closure": lambda value: functools.partial(closure(value), completions=[]),
    "bound method": lambda value: Scorer(value).score,
    "instance": Scorer,
    "function in a closure": inner_function,
    "class in a closure": class_in_a_closure,
}
VALUES = [
    1.0,
    2.0,
    True,
    "a",
    b"a",
    None,
    (1, 2),
    [1, [2]],
    {"a": {"b": 1}},
    {"a", "b"},
    np.arange(3),
    np.arange(3.0),
    1 + 2j,
]


@pytest.mark.parametrize("form", FORMS)
def test_every_value_that_a_function_has_counts(form):
    digests = [digest_of_object(FORMS[form](value)) for value in VALUES]
    assert digests == [digest_of_object(FORMS[form](value)) for value in VALUES]
    assert len(set(digests)) == len(VALUES)


def test_code_and_globals_count_and_cycles_end():
    def of(source, name="score", **values):
        space = {"__name__": "__main__", **values}
        exec(source, space)  # a cell of a notebook
        return digest_of_object(space[name])

    source = "def helper(x): return x * SCALE\ndef score(completions): return [helper(c) for c in completions]"
    first = of(source, SCALE=1.0)
    assert of("\n\n" + source, SCALE=1.0) == first
    assert of(source, SCALE=2.0) != first
    assert of(source.replace("x * SCALE", "x + SCALE"), SCALE=1.0) != first
    loop = [1]
    loop.append(loop)
    assert digest_of_object(closure(loop)) == digest_of_object(closure(loop))


def test_digests_are_the_same_in_another_process(tmp_path):
    code = (
        "from tests.test_user_objects import *\n"
        "print([digest_of_object(FORMS[f](v)) for f in FORMS for v in VALUES], end='')"
    )
    run = python("-c", code)
    assert run.stdout == str([digest_of_object(FORMS[form](value)) for form, value in itertools.product(FORMS, VALUES)])


# -- files --------------------------------------------------------------------------------------------------------------

SCORE = "def score(completions):\n    return [SCALE] * len(completions)\n"
GUARD = 'if __name__ == "__main__":\n    import sys\n    from verl.registry import reference_to\n'
SAY = "    print(reference_to(score), end='')\n"
SCRIPTS = {  # the script, and the name with another value after its import
    "the default": (f"SCALE = 1.0\n{SCORE}{GUARD}{SAY}", ""),
    "set below the guard": (f"SCALE = 1.0\n{SCORE}{GUARD}    SCALE = 7.0\n{SAY}", "SCALE"),
    "set by a function": (
        f"SCALE = 1.0\n{SCORE}def main():\n    global SCALE\n    SCALE = 7.0\n    print(reference_to(score), end='')\n"
        f"{GUARD}    main()\n",
        "SCALE",
    ),
    "only below the guard": (f"{SCORE}{GUARD}    SCALE = 7.0\n{SAY}", "SCALE"),
    "computed, then set": (f"SCALE = float('1')\n{SCORE}{GUARD}    SCALE = 7.0\n{SAY}", "SCALE"),
    "computed": (f"SCALE = float('7')\n{SCORE}{GUARD}{SAY}", ""),
    "read by a helper": (
        f"SCALE: float = 1.0\n{SCORE.replace('score', 'helper')}def score(completions):\n    return helper(completions)\n"
        f"{GUARD}    SCALE = 7.0\n{SAY}",
        "SCALE",
    ),
    "a counter of the function": (
        "CALLS = 0\ndef score(completions):\n    global CALLS\n    CALLS += 1\n    return [CALLS]\n"
        f"{GUARD}    score([])\n{SAY}",
        "",
    ),
    "a local of the same name": (
        f"SCALE = 1.0\n{SCORE}def other():\n    SCALE = 3\n    return SCALE\n{GUARD}{SAY}",
        "",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_whose_globals_have_other_values_uses_its_function(name, tmp_path):
    script, other = SCRIPTS[name]
    (tmp_path / "script.py").write_text(script)
    run = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=120)
    assert is_in_process(run.stdout) == bool(other), run.stdout + run.stderr
    assert (f"would give another {other}. Set globals outside" in run.stderr) == bool(other), run.stderr


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "edited_rewards.py").write_text("SCALE = 1.0\n" + SCORE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("edited_rewards")
    del sys.modules["edited_rewards"]


EDITS = {"SCALE = 1.0": "SCALE = 5.0", "[SCALE]": "[SCALE + 1]", "return": "global SCALE; return"}


@pytest.mark.parametrize("edit", [None, *EDITS])
def test_an_edited_file_is_not_mistaken_for_the_function(edit, module, caplog):
    file = module.__file__
    assert reference_to(module.score) == f"{file}:score"
    with open(file) as opened:
        text = opened.read()
    with open(file, "w") as opened:
        opened.write("# a comment\n\n" + (text if edit is None else text.replace(edit, EDITS[edit])))
    is_other = edit in ("SCALE = 1.0", "[SCALE]")
    assert is_in_process(reference_to(module.score)) == is_other
    assert ("importing" in caplog.text) == is_other


def in_verl(function, source="    return function(*arguments)"):
    """`function` as if a file of verl called it."""
    scope = {"function": function, "ConfigError": ConfigError}
    exec(compile(f"def call(*arguments):\n{source}\n", verl.api.__file__, "exec"), scope)
    return scope["call"]


def files_of(trace):
    return [Path(frame.filename).name for frame in traceback.extract_tb(trace)]


def raise_config_error():
    raise ConfigError("no such key")


@pytest.mark.parametrize("error", [ConfigError("no such key"), KeyboardInterrupt()])
def test_an_error_of_the_api_shows_one_frame_of_verl(monkeypatch, error):
    fail = in_verl(in_verl(error, "    raise function"))
    nested = short_traceback(in_verl(short_traceback(fail)))  # as verl.train, which calls Trainer.step
    with pytest.raises(type(error)) as caught:
        nested()
    assert files_of(caught.tb) == ["test_user_objects.py", "user_objects.py"]
    monkeypatch.setenv("LOG_LEVEL", "DEBUG")
    with pytest.raises(type(error)) as caught:
        nested()
    assert files_of(caught.tb).count("api.py") == 3


def test_an_error_of_the_api_keeps_the_frames_of_the_users_code():
    with pytest.raises(ConfigError) as caught:  # of a callback
        short_traceback(in_verl(in_verl(raise_config_error)))()
    assert files_of(caught.tb) == ["test_user_objects.py", "user_objects.py", "test_user_objects.py"]


@pytest.mark.parametrize(("function", "frames"), [(lambda text: float(text), ["test_user_objects.py"]), (float, [])])
def test_a_cause_without_code_of_the_user_is_left_out(function, frames):
    source = (
        "    try:\n        function('x')\n    except ValueError as error:\n        raise ConfigError('no') from error"
    )
    with pytest.raises(ConfigError) as caught:
        short_traceback(in_verl(function, source))()
    cause = caught.value.__cause__
    assert (files_of(cause.__traceback__) if cause else []) == frames
