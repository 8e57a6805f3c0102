"""The process that serves the page of a run: `python -m verl.page`, started by verl.page.launch.

Its listening socket is inherited, the token comes in the environment, and it ends with its parent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
from pathlib import Path

from verl.page.server import serve_page
from verl.parallel.child_processes import die_with


def main() -> None:
    """Serve until the parent ends."""
    parser = argparse.ArgumentParser(prog="python -m verl.page")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--labels", default="{}")
    parser.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    with contextlib.suppress(OSError):  # the run comes first
        os.nice(19)
        Path("/proc/self/autogroup").write_text(
            "19"
        )  # where Linux shares time by session, nice has no effect beyond one
    logging.basicConfig(level=logging.ERROR)
    serve_page(
        arguments.folders, socket.socket(fileno=arguments.fd), os.environ.pop("VERL_PAGE_TOKEN"),
        json.loads(arguments.labels),
    )  # fmt: skip


if __name__ == "__main__":
    main()
