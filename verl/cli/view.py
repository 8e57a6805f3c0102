"""`verl view RUN ...`: runs in a browser."""

import sys
from pathlib import Path

from verl.cli.parser import Parser
from verl.errors import ConfigError

_ABOUT = "Show runs, running or ended, in a browser: curves, steps, groups, samples, tokens. Writes nothing but notes."


def run_view(argv: list[str]) -> int:
    """Serve the page until Ctrl-C, or write it to a folder: the exit code."""
    parser = Parser(prog="verl view", description=_ABOUT)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, default=0, help="port to listen at (default: any that is free)")
    parser.add_argument("--export", metavar="FOLDER", help="write the pages to a new folder, and serve nothing")
    parser.add_argument("--steps", type=int, default=20, help="with --export: newest steps of each run (default: 20)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        raise ConfigError(f"--steps={arguments.steps} leaves no step to export. Give a number from 1 on.")
    from verl.tracking.run_folder import run_folders

    folders = [run for name in arguments.runs for run in run_folders(Path(name).expanduser())]
    if arguments.export is not None:
        return _export(folders, Path(arguments.export).expanduser(), arguments.steps)
    from verl.page.launch import address_of, listen, new_token
    from verl.page.server import serve_page

    listening, token = listen(arguments.host, arguments.port), new_token()
    print(f"{address_of(listening, token)}\nCtrl-C ends the page; runs continue.", flush=True)
    serve_page(folders, listening, token)
    return 0


def _export(folders: list[Path], out: Path, num_steps: int) -> int:
    from verl.page.pages import export_pages

    count = export_pages(folders, out, num_steps=num_steps, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{count} pages; open {out / 'index.html'}")
    return 0
