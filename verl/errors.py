"""Every error that verl raises on purpose.

A message is one or two sentences: the cause, the place and the fix. The command line prints the message only; a traceback is
kept for errors that are not of these types, because those are our bugs.
"""

import difflib
import errno
import importlib.metadata
import os
import re
from collections.abc import Iterable

from verl.foreign_text import printable


class VerlError(Exception):
    """Base of all errors with a message for the user; `exit_code` is what the command line returns. Control characters of
    foreign text in the message become their escapes."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(Exception.__str__(self))  # KeyError would quote it


def is_failure(error: BaseException) -> bool:
    """Whether an error is an Exception or the panic of a library written in Rust, unlike an interrupt or an exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """The first line of the text of an error, or its type. The text of pydantic's begins with a count: its first message."""
    is_pydantic = type(error).__module__.startswith("pydantic")
    errors: list[dict[str, str]] = getattr(error, "errors", list)() if is_pydantic else []
    text = errors[0]["msg"] if errors else str(error)
    return (text.strip() or type(error).__name__).splitlines()[0][:300]


class ConfigError(VerlError):
    """A key is unknown, unread, of the wrong type, or contradicts another one."""

    exit_code = 2


class FewRowsError(ConfigError):
    """Fewer rows train than a batch has."""

    def __init__(self, num_rows: int, batch_size: int, place: str = ""):
        super().__init__(
            f"data.train_batch_size={batch_size} is more than the {num_rows} rows that train{place}. Lower it, or add rows."
        )
        self.num_rows = num_rows


class NameConfigError(ConfigError, ValueError, KeyError, AttributeError):
    """A registry or module has no such name, or has it already. The further bases are the types of Python's mappings, modules
    and functions: scripts catch those."""


class BatchError(ValueError, AssertionError):
    """Batches do not fit together; scripts catch either type."""


class DataError(VerlError):
    """A data file or one of its rows cannot be used; names file, row and field."""

    exit_code = 3


class UnavailableRowError(DataError):
    """A row asks for a feature that is not available; `feature` is the sentence without the row, for all rows that do."""

    def __init__(self, feature: str, place: str = ""):
        super().__init__(f"{place}: {feature}" if place else feature)
        self.feature = feature


class ModelError(VerlError):
    """A model folder cannot be loaded, or a model cannot do what is asked of it."""

    exit_code = 4


class RefusedError(ModelError):
    """A service did not take a request for what it asked, such as more tokens than there is room for."""


class RewardError(VerlError):
    """A reward function cannot be found, has the wrong signature, or fails on a reference answer."""

    exit_code = 5


class CheckpointError(VerlError):
    """A checkpoint is damaged, incomplete or does not fit this run."""

    exit_code = 6


class FolderLostError(CheckpointError):
    """The run folder was removed, replaced or taken by another run while a run was using it."""


def install_command(extra: str, package: str) -> str:
    """The command that installs the packages of an extra, or `package` if it brings none. It names no extra of verl: the index
    has another project under that name."""
    try:
        declared = importlib.metadata.requires("verl") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    requirements = [text.partition(";")[0] for text in declared if text.endswith(f'extra == "{extra}"')]
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in requirements or [package])])


class MissingExtraError(VerlError):
    """An optional package is not installed; the message names the packages to install."""

    exit_code = 7

    def __init__(self, what: str, extra: str, package: str, instead: str = ""):
        super().__init__(
            f"{what} needs the package '{package}', which is not installed. Install it with: "
            f"{install_command(extra, package)}{f', or {instead}' if instead else ''}"
        )


class DistributionError(MissingExtraError, ModuleNotFoundError):
    """A distribution of verl is not installed, or is of another release than the core; `name` is the module that it has."""

    def __init__(self, text: str, module: str):
        VerlError.__init__(self, text)
        self.name = module


class NumericsError(VerlError):
    """A loss, gradient, log-probability or reward is not finite."""

    exit_code = 8


class DeadlineError(VerlError):
    """A wait passed its deadline; the message names what was waited for and for how long."""

    exit_code = 9


class WorkerLostError(VerlError):
    """A process of the run has died or cannot be reached; the message names its rank and what it was doing."""

    exit_code = 10


class UnreachableError(VerlError):
    """A service that is not a process of the run cannot be reached; the message names its address. Starting the run again would
    not help."""

    exit_code = 11


class InterruptedRun(VerlError):
    """The run was interrupted and saved; the message says how to resume."""

    hint = "Run the same command again to resume."  # the end of the message; the Python API has another one
    exit_code = 130


def error_of(kind: str, text: str, other: type[Exception] = VerlError) -> Exception:
    """The error that another process had: of the class `kind` of this module, or of `other` if it has none."""
    cls = globals().get(kind)
    error = Exception.__new__(cls if isinstance(cls, type) and issubclass(cls, VerlError) else other)
    Exception.__init__(error, text)
    return error


def nearest(name: str, names: Iterable[str]) -> str:
    """A clause "; did you mean 'a' or 'b'?" for an unknown name, or "" when nothing is close."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    if not close:
        return ""
    return "; did you mean " + " or ".join(repr(c) for c in close) + "?"


# errors of the operating system that are no bugs of verl -> advice
SYSTEM_ERRORS = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Free some of your quota",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "Choose a folder that can be written",
    errno.EACCES: "Choose a place that this user may read and write, or change its permissions and attributes",
    errno.EPERM: "Choose a place that this user may read and write, or change its permissions and attributes",
    errno.EISDIR: "Name a file, not a folder",
    errno.ENOTDIR: "Name a folder, not a file",
    errno.EIO: "Check the disk",
    errno.ESTALE: "Check the network file system",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ELOOP: "Choose a name that is no link to itself",
    errno.ENXIO: "Name a file",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "Close other programs: the system has too many open files",
    errno.EAGAIN: "Raise the limit of processes (ulimit -u)",
    errno.ENOMEM: "Free some memory",
}

_IN_TEXT = re.compile(r"\(os error (\d{1,3})\)|\bOs \{ code: (\d{1,3})\b")

_NO_THREAD = {
    "RuntimeError": ("can't start new thread",),
    "PanicException": ("ThreadPoolBuildError", "failed to spawn"),
}


def os_error_of(error: BaseException) -> OSError | None:
    """The operating system's error that `error` is, or that its text reports: tokenizers and safetensors raise errors of other
    types, and Python and tokenizers have no number for a thread that does not start."""
    if isinstance(error, OSError):
        return error
    if any(words in str(error) for words in _NO_THREAD.get(type(error).__name__, ())):
        return OSError(errno.EAGAIN, "a thread could not be started")
    has_errno_text = type(error) is Exception or type(error).__module__.startswith("safetensors")
    match = _IN_TEXT.search(str(error)) if has_errno_text else None
    if match is None:
        return None
    number = int(match[1] or match[2])
    return OSError(number, os.strerror(number))
