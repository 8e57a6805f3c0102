"""`verl view RUN ...`: runs in a browser; and the page that a run starts for itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.cli.parser import Parser
from verl.config import LoadedConfig, RunConfig
from verl.errors import ConfigError, MissingExtraError

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


@contextmanager
def page_of(loaded: LoadedConfig[RunConfig], *, whole_process: bool) -> Iterator[None]:
    """While entered, a separate process serves the page of the run, if trainer.page asks for a page. The header of the run has
    its address, so that a start that fails shows none.

    `whole_process`: this process has no other work; `auto` asks for a page only then, and not with VERL_PAGE=0 in the
    environment. Raises MissingExtraError without the extra `page`, and ConfigError when the address is taken.
    """
    rule, trainer = loaded.config.trainer.page, loaded.config.trainer
    prometheus = _prometheus(loaded.config)
    asked = rule.enable is True or prometheus is not None
    is_off = os.environ.get("VERL_PAGE") == "0"
    has_page = asked or (rule.enable == "auto" and whole_process and not trainer.val_only and not is_off)
    if not has_page or os.environ.get("RANK", "0") != "0":
        yield
        return
    from verl.page import launch
    from verl.parallel.child_processes import spare

    try:
        labels = {"model_name": str(prometheus.served_model_name)} if prometheus is not None else {}
        page = launch.start_page(Path(trainer.default_local_dir).expanduser(), rule.host, rule.port, labels)
    except MissingExtraError:
        if asked:
            raise
        yield
        return
    spare(page.process.pid)
    launch.address_of_run = page.address
    try:
        if prometheus is not None:
            from verl.page.server import reload_prometheus, write_scrape_config

            write_scrape_config(Path(prometheus.file).expanduser(), page.host, page.port, page.token)
            if not reload_prometheus(prometheus.port):
                print(f"Start Prometheus with --config.file={prometheus.file} to collect them.", file=sys.stderr)
        yield
    finally:
        launch.address_of_run = ""
        page.close()


def _prometheus(config: object) -> Any:
    """The section rollout.prometheus where it is enabled, else None."""
    group = getattr(config, "actor_rollout_ref", None)
    return group.rollout.prometheus if group is not None and group.rollout.prometheus.enable else None
