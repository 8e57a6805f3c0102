"""Where log records go: a rotating file per rank, and the terminal. LOG_LEVEL sets what `verl` says (default INFO)."""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from verl.config.secrets import remember_secrets
from verl.tracking.secrets import HideSecrets

_FILE_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_MAX_FILE_BYTES = 20_000_000
_NUM_OLD_FILES = 3


def log_level() -> int:
    """The level that LOG_LEVEL names, or INFO."""
    level = logging.getLevelName(os.environ.get("LOG_LEVEL", "INFO").upper())
    return level if isinstance(level, int) else logging.INFO


def setup_logging(log_dir: Path, rank: int = 0) -> None:
    """For a worker process: log to `log_dir`/rank_{rank}.log, and warnings to its terminal."""
    log_dir.mkdir(parents=True, exist_ok=True)
    add_log_file(log_dir, rank)
    handler = terminal_handler(Console(stderr=True))
    handler.setLevel(max(log_level(), logging.WARNING))
    add_handler(handler)


def add_log_file(log_dir: Path, rank: int) -> logging.Handler:
    """Everything at LOG_LEVEL and above goes to `log_dir`/rank_{rank}.log too, until `remove_handler`."""
    handler = RotatingFileHandler(
        log_dir / f"rank_{rank}.log", maxBytes=_MAX_FILE_BYTES, backupCount=_NUM_OLD_FILES, encoding="utf-8", delay=True
    )
    handler.setFormatter(logging.Formatter(_FILE_FORMAT))
    return add_handler(handler)


def terminal_handler(console: Console) -> logging.Handler:
    """A handler that prints above a live progress bar; plain lines where nobody watches."""
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S", markup=False)
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    return handler


def add_handler(handler: logging.Handler) -> logging.Handler:
    """Attach to the root logger, secrets masked. Other libraries keep the root's level (WARNING); ours is LOG_LEVEL."""
    remember_secrets()
    handler.addFilter(HideSecrets())
    logging.getLogger("verl").setLevel(log_level())
    logging.getLogger().addHandler(handler)
    return handler


def remove_handler(handler: logging.Handler) -> None:
    """Detach and close."""
    logging.getLogger().removeHandler(handler)
    handler.close()
