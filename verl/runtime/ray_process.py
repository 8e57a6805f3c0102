"""A process of a run on Ray as its driver sees it: its place, and the answers of its calls."""

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.errors import VerlError, error_of
from verl.parallel.child_processes import unblock_sigterm
from verl.parallel.serialize import StoredBuffers, decode, encode

log = logging.getLogger(__name__)

Packed = list[Any]  # the document and the buffers of verl/parallel/serialize.py; Ray carries them without copying
PackedAnswer = Packed | dict[str, str]  # a packed result, or the class and the text of an error


@dataclass
class Process:
    """One actor with its place; `roles` name it in errors."""

    rank: int
    handle: Any
    roles: str = ""
    node: str = "?"
    node_id: str = ""  # Ray's name of the node
    pid: int = 0
    log_file: Path | None = None
    is_added: bool = False  # after the start of the run, see verl/runtime/ray_scaling.py
    is_lost: bool = False  # it has died, and the run continues without it
    watched_by: str = ""  # the concurrency group of its method `stuck`: a report of the running call

    def __str__(self) -> str:
        node = f"node {self.node}, Ray's {self.node_id[:8]}" if self.node_id else f"node {self.node}"
        place = f"{node}, process {self.pid}" if self.pid else "not yet started"
        return f"rank {self.rank} ({self.roles}; {place})"


def open_answer(answer: object, place: str) -> Any:
    """The packed result of a process, or its error raised here with its place."""
    if not isinstance(answer, dict) or "error" not in answer:
        return answer
    kind, text = answer["error"], answer["text"]
    error = error_of(kind, f"{text} [{place}]", RuntimeError)
    raise error if isinstance(error, VerlError) else RuntimeError(f"{place} failed:\n{text}")


def last_lines(process: Process) -> str:
    """The end of its log, as a part of an error; "" without one."""
    if process.log_file is None or not process.log_file.exists():
        return ""
    lines = process.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    return f"The end of its log: {' | '.join(lines)}. " if lines else ""


def pack(value: object, *, is_answer: bool = False) -> Packed:
    """A value as Ray carries it; columns that are in its store go as references."""
    document, buffers = encode(value, StoredBuffers(is_answer=is_answer))
    return [document, *buffers]


def unpack(packed: Packed, read: Callable[[Any], Any] = np.asarray, reference: object = None) -> Any:
    """Inverse of `pack`; `read` gives a buffer for what Ray has carried. With the `reference` of `packed` in Ray's store, large
    tensors stay there."""
    return decode(packed[0], StoredBuffers((read(b) for b in packed[1:]), reference))


def answer_call(run: Callable[[], object]) -> PackedAnswer:
    """The packed result of `run`, or its error: VerlError as it is, other errors with their traceback."""
    unblock_sigterm()  # Ray runs calls on several threads
    try:
        return pack(run(), is_answer=True)
    except VerlError as error:
        log.error("%s", error)
        return {"error": type(error).__name__, "text": str(error)}
    except Exception as error:  # any error is sent to the caller
        log.exception("A call failed.")
        return {"error": type(error).__name__, "text": traceback.format_exc()}
