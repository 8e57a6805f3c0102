"""The process that serves the page of a run: `python -m verl.page`, started by verl.page.launch.

Its listening socket is inherited, the token comes in the environment, and it ends with its parent. The server is imported
when the first connection comes, so a run without a reader does not pay for it.
"""

import argparse
import contextlib
import json
import logging
import os
import select
import socket
from pathlib import Path

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
    listening = socket.socket(fileno=arguments.fd)
    select.select([listening], [], [])  # without a deadline: the process ends with its parent
    from verl.page.server import serve_page  # before the priority falls, since a reader waits

    with contextlib.suppress(OSError):  # the run comes first
        os.nice(19)
        # if Linux shares time by session, nice has no effect beyond one
        Path("/proc/self/autogroup").write_text("19")
    logging.basicConfig(level=logging.ERROR)
    serve_page(arguments.folders, listening, os.environ.pop("VERL_PAGE_TOKEN"), json.loads(arguments.labels))


if __name__ == "__main__":
    main()
