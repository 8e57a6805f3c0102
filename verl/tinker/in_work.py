"""Requests that were computed when the server's process died, so that a restart does not repeat for ever what kills it.

    {"computing": [ids], "deaths": {id: count}}      in_work.json in the folder of the service, one line

The file is written without a sync: it outlives the process, and a power loss is no fault of a request. A request during which
the process has died is computed alone the next time, so that a second death blames no other.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from verl.errors import DeadlineError, WorkerLostError

log = logging.getLogger(__name__)

NAME = "in_work.json"
MOST_DEATHS = 2  # during one request, until it is answered with an error
_MOST_BYTES = 1 << 20
LOST = (WorkerLostError, DeadlineError)  # a process of the workers is gone, or hangs


class InWork:
    """The requests that threads compute, in the file of `folder`, and the deaths of earlier lives during them."""

    def __init__(self, folder: Path):
        self._path, self._computing = folder / NAME, Counter[str]()
        self._lock, self._turn = threading.Lock(), threading.RLock()
        self.began, self.deaths = time.monotonic(), self._of_earlier_lives()
        self._write()

    def _of_earlier_lives(self) -> Counter[str]:
        try:
            with self._path.open("rb") as file:
                document = json.loads(file.read(_MOST_BYTES).partition(b"\n")[0])
            deaths = Counter({str(name): int(count) for name, count in document["deaths"].items()})
            return deaths + Counter(map(str, document["computing"]))
        except FileNotFoundError:
            return Counter()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("%s cannot be read (%s), so it is not known what ended the server.", self._path, error)
            return Counter()

    def is_suspect(self, request_id: str) -> bool:
        """Whether the process has died while it computed this request."""
        return self.deaths[request_id] > 0

    def failure(self, request_id: str) -> str:
        """The reason why a request is not computed again; "" if it is."""
        if (count := self.deaths[request_id]) < MOST_DEATHS:
            return ""
        return f"The server's process ended {count} times while it computed this request, so it is not computed again."

    @contextlib.contextmanager
    def computing(self, request_ids: Collection[str]) -> Iterator[None]:
        """Inside, these requests are computed. While there are suspects, threads compute one after the other."""
        with self._turn if self.deaths else contextlib.nullcontext():
            with self._lock:
                self._computing.update(request_ids)
                self._write()
            try:
                yield
            except LOST:
                with self._lock:
                    self._end(request_ids)
                    self.deaths.update(request_ids)
                    self._write()
                raise
            except BaseException:
                self._forget(request_ids)
                raise
            self._forget(request_ids)

    def _forget(self, request_ids: Collection[str]) -> None:
        with self._lock:
            self._end(request_ids)
            for name in self.deaths.keys() & set(request_ids):
                del self.deaths[name]
            self._write()

    def _end(self, request_ids: Collection[str]) -> None:
        self._computing -= Counter(request_ids)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forget all suspects but these, which will be computed."""
        self._forget(self.deaths.keys() - set(request_ids))

    def close(self) -> None:
        """The process ends without a fault of what it computes."""
        with self._lock:
            self._computing.clear()
            self._write()

    def _write(self) -> None:
        """Replace the line in place, which needs no space on a full disk."""
        text = json.dumps({"computing": sorted(self._computing), "deaths": self.deaths}).encode() + b"\n"
        with contextlib.suppress(OSError):  # then a death is not noticed
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, text, 0)
                os.ftruncate(descriptor, len(text))
            finally:
                os.close(descriptor)
