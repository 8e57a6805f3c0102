"""The process that runs reward functions: reads requests from one socket, answers, dies with its parent.

Started by process.py as `python -m verl.rewards.worker FD PARENT_PID`. What the reward function prints goes to the
log file that is this process's stdout and stderr; the socket is inherited by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

from verl.errors import RewardError
from verl.rewards.functions import (
    BATCH_ARGUMENTS,
    MODEL_REPLY,
    MODEL_SCORE,
    SAMPLE_ARGUMENTS,
    RewardFunction,
    RewardFunctionSpec,
    load_reward_function,
)
from verl.rewards.wire import ChannelClosed, encode, receive, send

Outcome = dict[str, Any]  # {"score": float, "parts": dict} or {"error": "what the function did"}


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before the request above took hold
        os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def apply_limits(memory_mb: int | None) -> None:
    """What this process may take from the machine: `memory_mb` MiB of address space beyond what it holds already (so
    that importing a large library is not charged to the first sample), no core dumps. None: no memory limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb:
        limit = _address_space_bytes() + memory_mb * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc on this system
        return 0


class Caller:
    """Calls a reward function and turns whatever it does into outcomes."""

    def __init__(self, function: RewardFunction, spec: RewardFunctionSpec):
        self.function = function
        self.spec = spec
        self._loop: asyncio.AbstractEventLoop | None = None
        self.out_of_memory = False

    def score(self, samples: list[list[Any]]) -> list[Outcome]:
        """One outcome per sample, each sample being [data_source, solution_str, ground_truth, extra_info,
        {argument: what the reward model said}]."""
        if self.spec.batched:
            return self._score_batch(samples)
        return [self._score_one(sample) for sample in samples]

    def _score_one(self, sample: list[Any]) -> Outcome:
        try:
            *given, from_model = sample
            return outcome(self._call({**dict(zip(SAMPLE_ARGUMENTS, given, strict=True)), **from_model}))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
            return self._failure(error)

    def _score_batch(self, samples: list[list[Any]]) -> list[Outcome]:
        *columns, from_model = [list(column) for column in zip(*samples, strict=True)]
        said = {
            many: [row[one] for row in from_model] for one, many in (MODEL_SCORE, MODEL_REPLY) if one in from_model[0]
        }
        try:
            results = self._call({**dict(zip(BATCH_ARGUMENTS, columns, strict=True)), **said})
            results = list(results.tolist() if hasattr(results, "tolist") else results)
            if len(results) != len(samples):
                return [{"error": f"returned {len(results)} scores for {len(samples)} samples"}] * len(samples)
            return [outcome(result) for result in results]
        except BaseException as error:  # noqa: BLE001 - as above; a batch shares its fate
            return [self._failure(error)] * len(samples)

    def _call(self, arguments: dict[str, Any]) -> Any:
        result = self.function(**arguments, **self.spec.kwargs)
        if inspect.isawaitable(result):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(_finish(result))
        return result

    def _failure(self, error: BaseException) -> Outcome:
        if isinstance(error, MemoryError):
            self.out_of_memory = True
            return {"error": "needed more memory than reward.memory_mb allows"}
        frames = traceback.extract_tb(error.__traceback__)
        place = f" (line {frames[-1].lineno} of {os.path.basename(frames[-1].filename)})" if frames else ""
        return {"error": f"raised {type(error).__name__}: {str(error)[:300]}{place}"}


async def _finish(awaitable: Any) -> Any:
    return await awaitable


def outcome(result: Any) -> Outcome:
    """What a reward function returned, as {"score", "parts"} or {"error"}: a finite number or bool, or a dict with
    one under "score" whose other entries become the parts. A plain number is its own "acc"."""
    if not isinstance(result, dict):
        score = _number(result)
        return {"score": score, "parts": {"acc": score}} if isinstance(score, float) else {"error": score}
    if "score" not in result:
        return {"error": f"returned a dict without 'score' (it has {sorted(map(str, result))})"}
    score = _number(result["score"])
    if not isinstance(score, float):
        return {"error": score}
    return {"score": score, "parts": {str(k): _plain(v) for k, v in result.items() if k != "score"}}


def _number(value: Any) -> float | str:
    """The value as a float, or what is wrong with it."""
    plain = _plain(value)
    if not isinstance(plain, (bool, int, float)):
        return f"returned {'None' if value is None else 'a ' + type(value).__name__} where a number is needed"
    try:
        number = float(plain)
    except OverflowError:
        return "returned an integer too large for a score"
    return number if math.isfinite(number) else f"returned {number}, which is not a finite number"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def set_up(message: dict[str, Any]) -> Caller:
    """Load the function, import what its data sources need, then close the limits. Raises RewardError."""
    sys.path.extend(p for p in message["sys_path"] if p not in sys.path)
    spec = RewardFunctionSpec(**message["function"])
    function = load_reward_function(spec)
    if spec.builtin:
        from verl.rewards.scorers.route import warm

        warm(message["data_sources"])
    apply_limits(message["memory_mb"])
    return Caller(function, spec)


def serve(channel: socket.socket, caller: Caller) -> None:
    """Answer requests until the parent closes the channel."""
    while True:
        request = receive(channel)
        start = time.perf_counter()
        outcomes = caller.score(request["samples"])
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        reply = {
            "id": request["id"],
            "outcomes": outcomes,
            "seconds": time.perf_counter() - start,
            "out_of_memory": caller.out_of_memory,
        }
        send(channel, _encode_reply(reply))


def _encode_reply(reply: dict[str, Any]) -> bytes:
    try:
        return encode(reply)
    except RewardError:
        return encode({**reply, "outcomes": list(_without_odd_parts(reply["outcomes"]))})


def _without_odd_parts(outcomes: Iterable[Outcome]) -> Iterable[Outcome]:
    for item in outcomes:
        try:
            encode(item)
            yield item
        except RewardError:
            yield {"error": "returned a dict with values that are neither numbers, text, lists nor dicts"}


def main() -> None:
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    os.set_inheritable(fd, False)
    faulthandler.enable()
    try:
        _run(socket.socket(fileno=fd))
    except ChannelClosed:
        pass
    except BaseException:  # noqa: BLE001 - the process ends here; the log keeps the reason
        traceback.print_exc()
    os.killpg(0, signal.SIGKILL)  # we lead our own process group: whatever the reward function started ends with us


def _run(channel: socket.socket) -> None:
    try:
        caller = set_up(receive(channel))
    except ChannelClosed:
        raise
    except RewardError as error:
        send(channel, encode({"error": str(error)}))
        return
    except BaseException as error:  # noqa: BLE001 - a user's file may even exit while it is imported
        send(channel, encode({"error": f"Loading the reward function raised {type(error).__name__}: {error}"}))
        return
    send(channel, encode({"ready": True}))
    serve(channel, caller)


if __name__ == "__main__":
    main()
