"""The one reader of files that a user or a run folder names: regular files, and nothing that blocks or has no end; and files
that appear complete or not at all."""

import ast
import errno
import os
import stat
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.errors import ConfigError, VerlError, nearest
from verl.foreign_text import clean

MAX_BYTES = 64 << 20  # of a file that is read at once
# errors of file systems that cannot sync a folder (CIFS, 9p and many in user space)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EISDIR)
_PARSING = threading.Lock()
_KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def kind_of(path: Path) -> str | None:
    """The kind of `path`, links followed: "a file", "a folder", "a pipe", "a link to itself"; None for nothing. Raises OSError
    if looking is forbidden, ValueError for a name that no file can have."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "a device")
    except (FileNotFoundError, NotADirectoryError):
        return f"a link to {clean(os.readlink(path), 120)}, which does not exist" if path.is_symlink() else None
    except (OSError, RuntimeError) as error:
        if getattr(error, "errno", None) == errno.ELOOP:
            return "a link to itself"
        raise


def require_regular(path: str | Path, what: str, error: type[VerlError] = ConfigError, fix: str = "") -> Path:
    """`path` with `~` replaced. Raises `error`, beginning with `what`, unless it is a regular file, or a link to one, that this
    process may read; `fix` ends the sentence."""
    file, name = Path(os.path.expanduser(path)), f"{what} {clean(path)}"
    fix = fix or "Name a regular file."
    try:
        kind = kind_of(file) if str(path) else "an empty name"
    except (OSError, ValueError) as caught:
        raise error(f"{name} cannot be read: {getattr(caught, 'strerror', None) or caught}. {fix}") from caught
    if kind is None:
        folder = file.absolute().parent
        siblings = [entry.name for entry in os.scandir(folder)] if os.access(folder, os.R_OK | os.X_OK) else []
        place = "" if str(file.absolute()) == str(path) else f" (looked at {clean(file.absolute())})"
        raise error(f"{name} does not exist{place}{nearest(file.name, siblings) or '.'} {fix}")
    if kind != "a file":
        raise error(f"{name} is {kind}. {fix}")
    if not os.access(file, os.R_OK):
        raise error(f"{name} cannot be read: permission denied. Let the user of this run read it.")
    return file


def read_user_text(
    path: str | Path, what: str, error: type[VerlError] = ConfigError, *, fix: str = "", max_bytes: int = MAX_BYTES
) -> str:
    """The text of a file that a user names. Raises `error` as `require_regular`, also for a file larger than `max_bytes`
    or not UTF-8."""
    file = require_regular(path, what, error, fix)
    try:
        return read_text(file, max_bytes)
    except (OSError, ValueError) as caught:
        raise error(f"{what} {clean(path)} cannot be read: {clean(caught)}. {fix}".rstrip()) from caught


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a regular file. Raises OSError, and ValueError for a file that is larger or not UTF-8."""
    content = bytearray()
    with os.fdopen(open_regular(path), "rb") as file:  # in parts: a read reserves the memory that it may need
        while len(content) <= max_bytes and (part := file.read(1 << 16)):
            content += part
    if len(content) > max_bytes:
        raise ValueError(f"it has more than {max_bytes:,} bytes")
    return content.decode()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Raises OSError, also for a pipe, since it would block, and for a device, since it may
    have no end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "it is not a regular file", str(path))
    return descriptor


def cache_folder(variable: str, name: str) -> Path:
    """The folder that an environment variable names, else verl/`name` in the user's cache. Raises OSError for a user without a
    home."""
    folder = os.environ.get(variable) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "verl", name)
    path = os.path.expanduser(folder)
    if path.startswith("~"):
        raise FileNotFoundError(errno.ENOENT, "the user has no home folder", folder)
    return Path(path)


def sync_file(path: Path) -> None:
    """Sync a file or folder that other code wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> bool:
    """Sync the names in a folder; False if the file system has no such operation."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        return False
    return True


def make_folder(path: Path) -> None:
    """Make a folder and those above it, for good; nothing if it exists."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name next to `path`. The file becomes `path`, synced, when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def syntax_tree(source: str | bytes) -> ast.Module:
    """`ast.parse`, whose count of depth in Python 3.11 is one for all threads: two at a time can end with a SystemError."""
    with _PARSING:
        return ast.parse(source)


def imported_files(file: Path) -> Iterator[Path]:
    """The modules in the folder of a Python file that it imports."""
    try:
        tree = syntax_tree(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # its import says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level <= 1:
            aliases = [alias.name for alias in node.names]  # objects of the module, or modules of the package
            names = [node.module, *(f"{node.module}.{name}" for name in aliases)] if node.module else aliases
        else:
            continue
        for name in names:
            beside = file.parent.joinpath(*name.split("."))
            yield from (place for place in (beside.with_suffix(".py"), beside / "__init__.py") if place.is_file())
