"""Handlers for log records: a rotating file per rank, and the terminal, without secrets and control characters. LOG_LEVEL sets
the level of `verl` (default INFO)."""

import contextlib
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from verl.config.secrets import hide, remember_secrets
from verl.foreign_text import clean, printable
from verl.regular_files import open_regular

log = logging.getLogger(__name__)

MAX_ADOPTED = 20  # records of one library in an hour
_FILE_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_MAX_FILE_BYTES = 20_000_000
_NUM_OLD_FILES = 3
_PLAIN = logging.Formatter()
_NEXT_LINE = re.compile(r"\n(?!    )")  # several handlers clean one record


class CleanRecords(logging.Filter):
    """Masks known secrets in a record's message and traceback, and escapes control characters; passes all records. Further
    lines of a record are indented, so that no text can pass for a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # wrong arguments: the handler reports them
            return True
        short = _shown(message)
        if short != message:
            record.msg, record.args = short, None
        if record.exc_info and not record.exc_text:
            record.exc_text = _PLAIN.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = _shown("\n" + record.exc_text).removeprefix("\n")
        return True


def _shown(text: str) -> str:
    return _NEXT_LINE.sub("\n    ", printable(hide(text)))


class _AdoptingHandler(logging.Handler):
    """Logs records of other libraries as records of this module: one line of escaped text each, without a traceback (with
    LOG_LEVEL=DEBUG it follows). Of one library MAX_ADOPTED pass in an hour."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, int]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        library, hour = record.name.partition(".")[0], int(record.created // 3600)
        self._counts[library, hour] += 1
        if (count := self._counts[library, hour]) > MAX_ADOPTED:
            return
        try:
            text = clean(record.getMessage())
        except Exception:  # noqa: BLE001 - wrong arguments of the library, or an object that it logs
            text = clean(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        why = "" if error is None else f" ({type(error).__name__}: {clean(error)})"
        rest = "; its further records of this hour are left out" if count == MAX_ADOPTED else ""
        log.log(record.levelno, "%s: %s%s%s", clean(library), text, why, rest)
        if error is not None:
            log.debug("The traceback of %s", library, exc_info=error)


_ADOPTING = _AdoptingHandler()


def adopt_loggers(*libraries: str) -> None:
    """Log these libraries' records only through this module, since they contain text that strangers send."""
    for library in map(logging.getLogger, libraries):
        library.handlers, library.propagate = [_ADOPTING], False


def log_level() -> int:
    """The level named by LOG_LEVEL, or INFO."""
    level = logging.getLevelName(os.environ.get("LOG_LEVEL", "INFO").upper())
    return level if isinstance(level, int) else logging.INFO


def setup_logging(log_dir: Path, rank: int = 0) -> None:
    """Set up a worker process: log to `log_dir`/rank_{rank}.log, and warnings to its terminal."""
    log_dir.mkdir(parents=True, exist_ok=True)
    add_log_file(log_dir, rank)
    handler = terminal_handler(Console(stderr=True))
    handler.setLevel(max(log_level(), logging.WARNING))
    add_handler(handler)


class _LogFile(RotatingFileHandler):
    """Records that a full disk or a lost folder refuses are left out: the terminal has them."""

    def _open(self) -> TextIOWrapper:
        return os.fdopen(
            open_regular(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8"
        )

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def add_log_file(log_dir: Path, rank: int) -> logging.Handler:
    """Also log to `log_dir`/rank_{rank}.log, until `remove_handler`."""
    handler = _LogFile(log_dir / f"rank_{rank}.log", maxBytes=_MAX_FILE_BYTES, backupCount=_NUM_OLD_FILES, delay=True)
    handler.setFormatter(logging.Formatter(_FILE_FORMAT))
    return add_handler(handler)


def terminal_handler(console: Console) -> logging.Handler:
    """A handler that prints above a live progress bar, or plain lines when not a terminal."""
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S", markup=False)
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    return handler


@contextlib.contextmanager
def once(handler: logging.Handler) -> Iterator[None]:
    """While entered, handlers that the user has put on the terminal (`logging.basicConfig`) leave out the records that
    `handler` prints there, so that none appears twice or breaks a live bar."""

    def left_out(record: logging.LogRecord) -> bool:
        return record.levelno < handler.level

    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    handlers = [h for h in logging.getLogger().handlers if getattr(h, "stream", None) in terminal]
    for other in handlers:
        other.addFilter(left_out)
    try:
        yield
    finally:
        for other in handlers:
            other.removeFilter(left_out)


def add_handler(handler: logging.Handler) -> logging.Handler:
    """Attach to the root logger, with secrets masked. Other libraries keep its level (WARNING); `verl` has LOG_LEVEL."""
    remember_secrets()
    handler.addFilter(CleanRecords())
    logging.getLogger("verl").setLevel(log_level())
    logging.getLogger().addHandler(handler)
    return handler


def remove_handler(handler: logging.Handler) -> None:
    """Detach and close."""
    logging.getLogger().removeHandler(handler)
    with contextlib.suppress(OSError):
        handler.close()
