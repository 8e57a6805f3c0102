"""`verl completion`: the candidates of a command line, and the script of bash."""

import shutil
import subprocess
import sys

import pytest

from tests.commands import ran
from verl.cli import completion, main
from verl.config import PPO, SFT


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], ["help", *main.VERBS]),
        (["exp"], ["export"]),
        (["help", "doc"], ["doctor"]),
        (["train", "data.train_f"], ["data.train_files="]),
        (["train", "actor_rollout_ref.mo"], ["actor_rollout_ref.model."]),
        (["sft", "model.pa"], ["model.path="]),
        (["dpo", "preference.be"], ["preference.beta="]),
        (["train", "--dry"], ["--dry-run"]),
        (["generate", "--out"], ["--output"]),
        (["show", "runs/"], []),
        (["no-such-verb", "data."], []),
    ],
)
def test_candidates(words, expected):
    assert completion.completions_of(words) == expected


@pytest.mark.parametrize(("verb", "schema"), [("train", PPO), ("sft", SFT)])
def test_every_key_can_be_completed(verb, schema):
    begun, keys = [""], set()
    while begun:
        names = completion.completions_of([verb, begun.pop()])
        keys |= {name for name in names if name.endswith("=")}
        begun += [name for name in names if name.endswith(".")]
    assert keys == {f"{path}=" for path in schema.leaves}


@pytest.mark.parametrize("shell", completion.SCRIPTS)
def test_scripts(shell, verl):
    code, said = verl("completion", shell)
    assert (code, said) == (0, completion.SCRIPTS[shell] + "\n")
    if shutil.which(shell) is not None:
        assert subprocess.run([shell, "-n"], input=said, text=True, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("line", "replies"), [("tra", ["train"]), ("train data.train_f", ["data.train_files="]), ("show runs", [])]
)
def test_bash_completes(line, replies):
    words = line.split()
    script = (
        f'verl() {{ {sys.executable} -m verl "$@"; }}; compopt() {{ :; }}\n{completion.SCRIPTS["bash"]}\n'
        f"COMP_WORDS=(verl {' '.join(words)}); COMP_CWORD={len(words)}; _verl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = ran("bash", "-c", script)
    assert done.stdout.split() == replies
