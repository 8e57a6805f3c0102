"""The page that a run starts for itself."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.config import LoadedConfig, RunConfig
from verl.distributions import load_part
from verl.errors import MissingExtraError
from verl.tracking import run_folder


@contextmanager
def page_of(loaded: LoadedConfig[RunConfig], *, whole_process: bool) -> Iterator[None]:
    """While entered, a separate process serves the page of the run, if trainer.page asks for a page. The header of the run has
    its address, so that a start that fails shows none.

    `whole_process`: this process has no other work; `auto` asks for a page only then, and not with VERL_PAGE=0 in the
    environment. Raises MissingExtraError without verl-page or a package of it, and ConfigError when the address is taken.
    """
    rule, trainer = loaded.config.trainer.page, loaded.config.trainer
    prometheus = _prometheus(loaded.config)
    is_set = rule.enable is True or prometheus is not None
    is_off = os.environ.get("VERL_PAGE") == "0"
    has_page = is_set or (rule.enable == "auto" and whole_process and not trainer.val_only and not is_off)
    if not has_page or os.environ.get("RANK", "0") != "0":
        yield
        return
    from verl.parallel.child_processes import spare

    try:
        labels = {"model_name": str(prometheus.served_model_name)} if prometheus is not None else {}
        page = load_part("verl.page.launch").start_page(
            Path(trainer.default_local_dir).expanduser(), rule.host, rule.port, labels
        )
    except MissingExtraError:
        if is_set:
            raise
        yield
        return
    spare(page.process.pid)
    run_folder.address_of_page = page.address
    try:
        if prometheus is not None:
            server = load_part("verl.page.server")
            server.write_scrape_config(Path(prometheus.file).expanduser(), page.host, page.port, page.token)
            if not server.reload_prometheus(prometheus.port):
                print(f"Start Prometheus with --config.file={prometheus.file} to collect them.", file=sys.stderr)
        yield
    finally:
        run_folder.address_of_page = ""
        page.close()


def _prometheus(config: object) -> Any:
    """The section rollout.prometheus where it is enabled, else None."""
    group = getattr(config, "actor_rollout_ref", None)
    return group.rollout.prometheus if group is not None and group.rollout.prometheus.enable else None
