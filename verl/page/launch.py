"""Start of the page of a run, in a separate process that ends with this process."""

import importlib.util
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verl.errors import ConfigError, MissingExtraError
from verl.parallel.child_processes import python_command
from verl.parallel.framing import listening_socket

PACKAGES = ("starlette", "uvicorn", "sse_starlette")


@dataclass(frozen=True)
class Page:
    """A page that was started. `address` has the token."""

    process: subprocess.Popen[bytes]
    address: str
    host: str
    port: int
    token: str
    owner: int = field(default_factory=os.getpid)

    def close(self) -> None:
        """End the process; does nothing in a fork of the process that started it."""
        if os.getpid() == self.owner:
            self.process.kill()
            self.process.wait(30)


def missing_package() -> str | None:
    """A package of the extra `page` that is not installed; None when all are."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)


def start_page(folder: Path, host: str, port: int, labels: Mapping[str, str] | None = None) -> Page:
    """Start the page about `folder`; it need not exist yet. Raises MissingExtraError, and ConfigError when the address is
    taken."""
    missing = missing_package()
    if missing is not None:
        raise MissingExtraError("trainer.page", "page", missing, "set trainer.page.enable=False")
    listening, token = listen(host, port), new_token()
    with listening:
        process = subprocess.Popen(
            python_command("verl.page", "--parent", str(os.getpid()), "--fd", str(listening.fileno()),
                           "--labels", json.dumps(dict(labels or {})), str(folder)),
            pass_fds=(listening.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "VERL_PAGE_TOKEN": token, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C is for the run: the page ends with its parent
        )  # fmt: skip
        bound = listening.getsockname()[:2]
        return Page(process, address_of(listening, token), bound[0], bound[1], token)


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket. Raises ConfigError when the address is taken or is none of this machine."""
    try:
        return listening_socket(host, port, 64)
    except OSError as error:
        raise ConfigError(
            f"The address {host}:{port} cannot be taken: {error.strerror}. Choose another port (0: any that is free)."
        ) from error


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(18)


def address_of(listening: socket.socket, token: str) -> str:
    """The address that opens the page."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={token}"
