"""The newest metrics of the runs in the text format of Prometheus, and the file that tells Prometheus where they are."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl.tracking.files import write_atomically

if TYPE_CHECKING:
    from verl.page.pages import Site

_RELOAD_S = 2.0
_NAME = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def exposition(site: Site, labels: Mapping[str, str]) -> str:
    """verl_{metric}{run="..."} of the newest step that has it, for all runs; also verl_step, verl_total_steps, verl_running
    and verl_seconds_since_step."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for key, view in site.views.items():
        run = view.run
        run.refresh()
        written = run.times.get(run.step)
        facts = {
            "step": run.step, "total_steps": run.total_steps, "running": int(run.is_running),
            "seconds_since_step": None if written is None else max(time.time() - written, 0.0),
        }  # fmt: skip
        metrics = {name: series.last for name, series in run.metrics.items()}
        shown = {"run": key, **labels}
        for name, value in {**metrics, **facts}.items():
            if value is not None:
                samples.setdefault(name, []).append((shown, value))
    return gauges(samples)


def gauges(samples: Mapping[str, Iterable[tuple[Mapping[str, str], float]]]) -> str:
    """The text of verl_{name}{labels} value, for all (labels, value) of each name."""
    lines = []
    for name, values in sorted((f"verl_{_NAME.sub('_', name)}", values) for name, values in samples.items()):
        lines += [f"# TYPE {name} gauge\n", *(f"{name}{_labels(labels)} {value!r}\n" for labels, value in values)]
    return "".join(lines)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{_NAME.sub("_", n)}="{str(v).translate(_ESCAPES)}"' for n, v in labels.items()) + "}"


def reload_prometheus(port: int) -> bool:
    """Ask Prometheus on this machine to read its settings again; whether it did (it needs --web.enable-lifecycle)."""
    import httpx

    try:
        return httpx.post(f"http://127.0.0.1:{port}/-/reload", timeout=_RELOAD_S, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def write_scrape_config(file: Path, host: str, port: int, token: str, interval_s: int = 10) -> None:
    """Write a settings file of Prometheus that scrapes the page. Only the user can read it: it holds the token."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = (
        f"global:\n  scrape_interval: {interval_s}s\nscrape_configs:\n  - job_name: verl\n    authorization:\n"
        f"      credentials: {token}\n    static_configs:\n      - targets: ['{host}:{port}']\n"
    )
    file.touch(mode=0o600)
    write_atomically(file, text)
    file.chmod(0o600)
