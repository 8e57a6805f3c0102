"""The actor of users' own workers on Ray. It imports little by itself: a batch's tensordict would add 90 MB and 1.7 s to each
process."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from verl.parallel.child_processes import unblock_sigterm
from verl.parallel.stack_dump import calls, longest_call


class UserProcess:
    """The actor of one place. Results travel as they are; an error travels with its traceback."""

    def __init__(
        self,
        rank: int,
        size: int,
        classes: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]],
        environment: dict[str, str],
    ):
        unblock_sigterm()
        self.rank, self.size, self.classes, self.environment = rank, size, classes, environment
        self.workers: dict[str, Any] = {}

    def place(self) -> tuple[str, int]:
        from verl.parallel.collectives import free_port
        from verl.runtime.ray_cluster import own_address

        return own_address(), free_port()

    def join(self, address: str, port: int) -> Any:
        """Make the workers, in the environment of their group; (node name, process id)."""
        place = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "LOCAL_RANK": 0,
        }
        os.environ.update({**self.environment, **{name: str(value) for name, value in place.items()}})
        return _answer(self._make)

    def _make(self) -> tuple[str, int]:
        self.workers = {name: cls(*args, **kwargs) for name, (cls, args, kwargs) in self.classes.items()}
        return socket.gethostname(), os.getpid()

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with calls(f"{role or 'group'}.{method}"):
            return _answer(lambda: getattr(self.workers[role], method)(*args, **kwargs))

    def stuck(self) -> str:
        """The call that has been running longest, with its innermost frames."""
        return longest_call()

    def end(self) -> None:
        """Nothing to end."""


def _answer(run: Callable[[], object]) -> object:
    unblock_sigterm()
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - a user's worker may raise anything; the driver raises it again
        return {"error": type(error).__name__, "text": traceback.format_exc()}
