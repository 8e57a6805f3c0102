"""The process that runs reward functions: reads requests from one socket and answers each under its number.

Its keeper (keeper.py) forks it into a box (box.py) and alone talks with the run. What the reward function prints goes to
the log file that is this process's stdout and stderr; the socket is inherited by no program that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import inspect
import json
import math
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

from verl.errors import RewardError
from verl.parallel.child_processes import adopt_orphans
from verl.parallel.framing import NUMBER_BYTES, ChannelClosed, ChannelCorrupt, encode, receive_bytes, send
from verl.rewards.functions import (
    BATCH_ARGUMENTS,
    MODEL_REPLY,
    MODEL_SCORE,
    SAMPLE_ARGUMENTS,
    RewardFunction,
    RewardFunctionSpec,
    load_reward_function,
)
from verl.rewards.sandbox import kernel
from verl.rewards.sandbox.box import Limits, how_it_ended
from verl.rewards.sandbox.processes import end_all_below, reap_all_below

Outcome = dict[str, Any]  # {"score": float, "parts": dict} or {"error": "what the function did"}


# what the kernel answers when a limit is reached, and the key of the limit
_END_TIMEOUT_S = 4.0
_REFUSALS = {errno.EFBIG: ("wrote a larger file", "max_file_mb"), errno.EMFILE: ("opened more files", "max_open_files")}


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
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            did, key = _REFUSALS[error.errno]
            return {"error": f"{did} than reward.{key} allows"}
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


def set_up(message: dict[str, Any], limits: Limits) -> Caller:
    """Load the function, import what its data sources need, then limit memory. Raises RewardError."""
    sys.path.extend(p for p in message["sys_path"] if p not in sys.path)
    spec = RewardFunctionSpec(**message["function"])
    function = load_reward_function(spec)
    if spec.builtin:
        from verl.rewards.scorers.route import warm

        warm(message["data_sources"])
    limits.apply_memory()
    return Caller(function, spec)


def run(channel: socket.socket, number: bytes, message: dict[str, Any], limits: Limits, *, alone: bool) -> None:
    """Set up as `message` says, answer under `number`, then serve until the keeper closes the channel. `alone`: this
    process sees none but its guard, which is process 1, and those that it starts."""
    faulthandler.enable()
    try:
        caller = set_up(message, limits)
    except RewardError as error:
        send(channel, number + encode({"error": str(error)}))
        return
    except BaseException as error:  # noqa: BLE001 - a user's file may even exit while it is imported
        text = f"Loading the reward function raised {type(error).__name__}: {error}"
        send(channel, number + encode({"error": text}))
        return
    send(channel, number + encode({"ready": True}))
    forks = message["process_per_sample"]
    if forks:
        adopt_orphans()  # of a sample, to be ended with it
        with contextlib.suppress(OSError):
            kernel.hide_memory()  # from the processes that score
    with contextlib.suppress(ChannelClosed):
        while True:
            request = receive_bytes(channel)
            number, request = request[:NUMBER_BYTES], request[NUMBER_BYTES:]
            answer = answer_from_fork(channel, caller, request, alone) if forks else answer_here(caller, request)
            send(channel, number + answer)


def answer_here(caller: Caller, request: bytes) -> bytes:
    """Score in this process."""
    message = json.loads(request)
    start = time.perf_counter()
    outcomes = caller.score(message["samples"])
    _flush()
    reply = {
        "id": message["id"],
        "outcomes": outcomes,
        "seconds": time.perf_counter() - start,
        "out_of_memory": caller.out_of_memory,
    }
    return _encode_reply(reply)


def answer_from_fork(channel: socket.socket, caller: Caller, request: bytes, alone: bool) -> bytes:
    """Score in a process forked for this call, which cannot reach `channel`, and end all that it has started: whatever
    the call did to its process is gone with it."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        channel.close()
        ours.close()
        _score_and_exit(theirs, caller, request)
    theirs.close()
    failure = ""
    answer = b""
    with ours:
        try:
            answer = receive_bytes(ours)
        except ChannelClosed:
            _, status = os.waitpid(pid, 0)
            failure = how_it_ended(os.waitstatus_to_exitcode(status))
            pid = 0
        except ChannelCorrupt:
            failure = "wrote to the channel on which its result is sent"
    _end_others(pid, alone)
    if not failure:
        return answer
    message = json.loads(request)
    outcomes = [{"error": failure}] * len(message["samples"])
    return encode({"id": message["id"], "outcomes": outcomes, "seconds": 0.0, "out_of_memory": False})


def _score_and_exit(channel: socket.socket, caller: Caller, request: bytes) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError):
            kernel.hide_memory(False)
        send(channel, answer_here(caller, request))
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not go on in its parent's code; the log keeps the reason
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_others(pid: int, alone: bool) -> None:
    """End the process `pid` that we forked (0: it has ended) and whatever it started."""
    if alone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # every process that we see but our guard and us
    else:
        end_all_below(os.getpid(), _END_TIMEOUT_S)
    if pid:
        os.waitpid(pid, 0)
    reap_all_below(os.getpid(), _END_TIMEOUT_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


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
            yield {
                "error": f"returned a dict{_odd_key(item)} with values that are neither numbers, text, lists nor dicts"
            }


def _odd_key(item: Outcome) -> str:
    for key, value in (item.get("parts") or {}).items():
        try:
            encode({str(key): value})
        except RewardError:
            return f" (key {key!r})"
    return ""
