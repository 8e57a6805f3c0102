"""`verl scale RUN rollout=3`: devices of a role of a running run."""

import sys
from pathlib import Path

from verl.cli.parser import Parser
from verl.errors import ConfigError

_ABOUT = """Set the number of devices that generate or score in a run on Ray, its placement included. The run follows at a
weight sync, once Ray has free devices. Samples, weights and the ledger are the same at any size."""


def run_scale(argv: list[str]) -> int:
    """Write the request and print the requested sizes; returns the exit code."""
    parser = Parser(prog="verl scale", description=_ABOUT)
    parser.add_argument("run", help="the run folder (trainer.default_local_dir)")
    parser.add_argument(
        "sizes", nargs="*", metavar="ROLE=N", help="rollout=N, reward=N; without any: print the requested sizes"
    )
    arguments = parser.parse_args(argv)
    from verl.runtime.ray_sizes import ask_role_sizes, read_role_sizes
    from verl.tracking.progress import read_progress

    folder = Path(arguments.run).expanduser()
    sizes = dict(map(_size, arguments.sizes))
    requested = ask_role_sizes(folder, sizes) if sizes else read_role_sizes(folder)
    sizes_text = ", ".join(f"{role}={size}" for role, size in requested.items())
    note = ". The run follows at a weight sync, once Ray has free devices; roles that share processes change together."
    print(f"{sizes_text}{note if sizes else ''}" if sizes_text else "no other size was requested")
    if sizes and read_progress(folder).status != "running":
        print(f"verl: the run in {folder} is not running; it follows when it is resumed.", file=sys.stderr)
    return 0


def _size(text: str) -> tuple[str, int]:
    role, sign, size = text.partition("=")
    if not sign or not size.isdecimal():
        raise ConfigError(f"{text!r} is not a size of a role. Write rollout=3 or reward=2.")
    return role, int(size)
