"""Weights & Biases, offline without an account or network."""

import logging
import netrc
import os
import socket
from typing import Any

from verl.tracking.sinks.api import Sink, columns_and_cells

log = logging.getLogger(__name__)

_DEFAULT_HOST = "api.wandb.ai"
_CONNECT_TIMEOUT_S = 3.0


class WandbSink(Sink):
    """WANDB_MODE has precedence; otherwise online needs an API key (WANDB_API_KEY or ~/.netrc) and a reachable host. Files go
    to WANDB_DIR or the run folder. A resumed run continues the same W&B run."""

    package = extra = "wandb"

    def start(self) -> None:
        import wandb

        self.run = wandb.init(
            project=self.info.project,
            name=self.info.experiment,
            config=self.info.config,
            dir=os.environ.get("WANDB_DIR") or str(self.info.root),
            id=self.run_id(),
            resume="allow",
            mode=_mode(),
            settings=wandb.Settings(silent=True),
        )

    def table(self, name: str, rows: list[dict[str, object]], step: int) -> None:
        import wandb

        columns, cells = columns_and_cells(rows)
        # `commit=False`: the metrics of the step follow and belong to this row
        self.run.log({name: wandb.Table(columns=columns, data=cells)}, step=step, commit=False)


def _mode() -> Any:
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return mode
    base = os.environ.get("WANDB_BASE_URL", f"https://{_DEFAULT_HOST}")
    host = base.split("//")[-1].split("/")[0].split(":")[0]
    if not os.environ.get("WANDB_API_KEY") and not _has_login(host):
        reason = "there is no API key (run `wandb login`, or set WANDB_API_KEY)"
    elif not _answers(host, 80 if base.startswith("http://") else 443):
        reason = f"{host} cannot be reached"
    else:
        return "online"
    log.warning("wandb runs offline: %s. Upload later with `wandb sync`; WANDB_MODE overrides this.", reason)
    return "offline"


def _has_login(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
        return True
    except OSError:
        return False
