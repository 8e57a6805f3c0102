"""Command lines as people type them by mistake, with files of every wrong kind, and what becomes of them."""

import contextlib
import io
import os
import random

from tests.foreign_text import NASTY, foreign_text, prints
from verl import errors
from verl.cli.main import VERBS, main

SCRIPT = """set -x
MODEL=a/b
python3 -m verl.trainer.main_ppo \\
    data.train_files=$MODEL \\
    trainer.n_gpus_per_node=$((4 * 2))
"""
CONFIG = "trainer: {total_epochs: 3}\ndata: {seed: 7}\n"
REWARD = "import verl\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
FILES = {
    "script.sh": SCRIPT,
    "config.yaml": CONFIG,
    "reward.py": REWARD,
    "deep.py": "x = " + "-" * 100_000 + "1\n",
    "brackets.py": "(" * 10_000,
    "nul.py": "x = 1\0",
    "quote.sh": "echo '" + "\nx" * 2000,
    "deep.sh": "python -m verl.trainer.main_ppo data.seed=$((" + "(" * 3000 + "1" + ")" * 3000 + "))\n",
    "large.sh": "python -m verl.trainer.main_ppo data.seed=$((9 ** 9 ** 9 ** 9)) trainer.nnodes=$((1 / 0))\n",
    "modules.sh": "python -m verl.\npython -m verl..x y\npython -m verl.trainer.main_ppo --config-path\n",
    "empty.yaml": "",
    "rows.jsonl": '{"a": 1}\n',
    "train.jsonl": '{"question": 3}\n',
    "model.gguf": "GGUF",
    "config.json": "[]",
    "metrics.jsonl": '{"step": "x"}\n[\n',
    "run.lock": "[" * 5000,
    "summary.json": "{}",
}
OPTIONS = (
    "--help", "-h", "--json", "--step", "--role", "--dtype", "--compare", "--program", "--dry-run", "--output", "--config-name",
    "--config-path", "--tasks", "--source", "--train", "--test", "--seed", "--multirun", "--", "-", "--version",
)  # fmt: skip
WORDS = (
    "sft",
    "ppo",
    "gsm8k",
    "char_count",
    "reasoning_gym",
    "actor",
    "float16",
    "-1",
    "0",
    "9" * 30,
    "1e400",
    "x",
    "",
    "trainer",
    "a=b",
)
SETTINGS = (
    "trainer.total_epochs=3",
    "trainer.nnodes=x",
    "data.seed=[",
    "data.train_files=rows.jsonl",
    "trainer.x=1",
    "hydra.run.dir=x",
)
CODES = {
    0,
    1,
    2,
    *(kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")),
}


def make_files(rng, folder) -> list[str]:
    """One of each of FILES, some of them changed, a pipe, a folder, a link to itself and one to nothing: their names."""
    for name, text in FILES.items():
        content = bytearray(text.encode())
        if content and rng.random() < 0.3:
            at = rng.randrange(len(content))
            content[at : at + 3] = rng.choice(
                [rng.randbytes(3), rng.choice(sorted(NASTY.values())).encode("utf-8", "surrogatepass")]
            )
        (folder / name).write_bytes(content)
    for kind in ("sh", "yaml", "py", "jsonl"):
        for name in ("pipe", "folder", "loop", "nothing"):
            place = folder / f"{name}.{kind}"
            if not os.path.lexists(place):
                {"pipe": os.mkfifo, "folder": os.mkdir}.get(
                    name, lambda p: p.symlink_to(p if p.stem == "loop" else "gone")
                )(place)
    return [str(p) for p in sorted(folder.iterdir())] + [
        str(folder),
        "x" * 300,
        "/dev/null",
        "/dev/zero",
        "/proc/self/mem",
    ]


def command(rng: random.Random, files: list[str]) -> list[str]:
    """A verb with arguments at random."""
    verb = rng.choice([*VERBS, "import-check", "import-check", "show"])
    pools = (files, files, OPTIONS, WORDS, SETTINGS)
    arguments = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(5))]
    if rng.random() < 0.2:
        arguments.append(foreign_text(rng)[1])
    return [verb, *arguments]


def outcome(arguments: list[str]) -> str:
    """ "0", or what kind of sentence: no traceback, no bug of verl, and all of it prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse: --help
            code = end.code
    said = out.getvalue() + err.getvalue()
    assert "Traceback" not in said, (arguments, said)
    assert "bug in verl" not in said, (arguments, said)
    assert code in CODES, (arguments, code, said)
    assert prints(said), (arguments, ascii(said))
    assert said.strip(), (arguments, "not a word")
    return "done" if code == 0 else f"exit code {code}"


def cases(rng, count, folder):
    """(verb, outcome) of `count` command lines, run inside `folder`."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        for number in range(count):
            if number % 50 == 0:
                (folder / "f").mkdir(exist_ok=True)
                files = make_files(rng, folder / "f")
            arguments = command(rng, files)
            if arguments[0] == "doctor":
                arguments = ["doctor", "--nothing", *arguments[1:]]  # its report takes seconds
            yield arguments[0], outcome(arguments)
    finally:
        os.chdir(before)
