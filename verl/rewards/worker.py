"""Worker process that runs a reward function: `python -m verl.rewards.worker FD RUN_PID`, started in a sandbox.

consumes: one set-up message, then requests     produces: one answer to each, under its id
waits for: the run, which closes the channel to end it

The reward function's prints go to the log file that is this process's stdout and stderr; no program that it starts
inherits the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import inspect
import json
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
from verl.parallel.framing import ChannelClosed, ChannelCorrupt, encode_frame, receive, receive_bytes, send
from verl.rewards.functions import (
    BATCH_ARGUMENTS,
    MODEL_REPLY,
    MODEL_SCORE,
    SAMPLE_ARGUMENTS,
    RewardFunction,
    RewardFunctionSpec,
    load_reward_function,
)
from verl.rewards.sandbox.launch import describe_exit
from verl.rewards.sandbox.limits import Limits
from verl.rewards.sandbox.prctl import filter_system_calls, hide_memory
from verl.rewards.sandbox.processes import end_below, reap_descendants

Outcome = dict[str, Any]  # {"score": float, "parts": dict} or {"error": "what the function did"}

_END_TIMEOUT_S = 4.0
# errors of the kernel when a limit is reached, and the key of the limit
_REFUSALS = {errno.EFBIG: ("wrote a larger file", "max_file_mb"), errno.EMFILE: ("opened more files", "max_open_files")}
_NO_NETWORK = "Reward functions have no network in this run; set reward.network=True if this one needs it."
_NETWORK_EVENTS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}


class Caller:
    """Calls a reward function and converts its results and exceptions to outcomes."""

    def __init__(self, function: RewardFunction, spec: RewardFunctionSpec):
        self.function = function
        self.spec = spec
        self._loop: asyncio.AbstractEventLoop | None = None
        self.out_of_memory = False

    def score(self, samples: list[list[Any]]) -> list[Outcome]:
        """One outcome per sample. A sample is [data_source, solution_str, ground_truth, extra_info, {argument: output
        of the reward model}]."""
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
        arguments = {
            many: [row[one] for row in from_model] for one, many in (MODEL_SCORE, MODEL_REPLY) if one in from_model[0]
        }
        try:
            results = self._call({**dict(zip(BATCH_ARGUMENTS, columns, strict=True)), **arguments})
            results = list(results.tolist() if hasattr(results, "tolist") else results)
            if len(results) != len(samples):
                return [{"error": f"returned {len(results)} scores for {len(samples)} samples"}] * len(samples)
            return [outcome(result) for result in results]
        except BaseException as error:  # noqa: BLE001 - as above; one call scores the batch, one error fails it
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
    """Convert the result of a reward function to {"score", "parts"} or {"error"}.

    A number or bool is its own part "acc"; of a dict the entry "score" is the score and the others are the parts.
    """
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
    """The value as a finite float, or its defect as a sentence."""
    plain = _plain(value)
    if not isinstance(plain, (bool, int, float)):
        return f"returned {'None' if value is None else 'a ' + type(value).__name__} where a number is needed"
    try:
        number = float(plain)
    except OverflowError:
        return "returned an integer too large for a score"
    return number if number - number == 0 else f"returned {number}, which is not a finite number"


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def enter_limits(message: dict[str, Any]) -> Limits:
    """Set the limits of this process and all that it starts, but for memory."""
    limits = Limits(**message["limits"])
    limits.apply(message["max_tasks"])
    with contextlib.suppress(OSError):  # the namespaces hold without it; where there are none, a notice says so
        filter_system_calls(sockets=limits.network)
    if not limits.network:
        sys.addaudithook(_explain_refusal)
    return limits


def _explain_refusal(event: str, arguments: tuple[Any, ...]) -> None:
    """Name the config key to Python code that tries to reach the network; the kernel is what refuses it."""
    if event in _NETWORK_EVENTS:
        raise PermissionError(errno.EACCES, _NO_NETWORK)


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


def run(channel: socket.socket) -> None:
    """Set up as the first message says, then answer requests until the run closes the channel."""
    message = receive(channel)
    reply = {"id": message["id"]}
    try:
        caller = set_up(message, enter_limits(message))
    except RewardError as error:
        send(channel, encode_frame({**reply, "error": str(error)}))
        return
    except BaseException as error:  # noqa: BLE001 - a user's file may even exit while it is imported
        text = f"Loading the reward function raised {type(error).__name__}: {error}"
        send(channel, encode_frame({**reply, "error": text}))
        return
    send(channel, encode_frame({**reply, "ready": True}))
    forks = message["process_per_sample"]
    if forks:
        adopt_orphans()  # of a sample, to be ended with it
        with contextlib.suppress(OSError):
            hide_memory()  # from the processes that score
    while True:
        request = receive_bytes(channel)
        send(
            channel, answer_from_fork(channel, caller, request, message["alone"]) if forks else answer(caller, request)
        )


def answer(caller: Caller, request: bytes) -> bytes:
    """Score in this process."""
    message = json.loads(request)
    start = time.perf_counter()
    outcomes = caller.score(message["samples"])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return _encode_reply(
        {
            "id": message["id"],
            "outcomes": outcomes,
            "seconds": time.perf_counter() - start,
            "out_of_memory": caller.out_of_memory,
        }
    )


def answer_from_fork(channel: socket.socket, caller: Caller, request: bytes, alone: bool) -> bytes:
    """Score in a process forked for this call, then end it and all that it started.

    The process cannot reach `channel`. `alone`: every process that this one sees belongs to the sandbox.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        channel.close()
        ours.close()
        _score_and_exit(theirs, caller, request)
    theirs.close()
    failure = ""
    reply = b""
    with ours:
        try:
            reply = receive_bytes(ours)
        except ChannelClosed:
            _, status = os.waitpid(pid, 0)
            failure = describe_exit(os.waitstatus_to_exitcode(status))
            pid = 0
        except ChannelCorrupt:
            failure = "wrote to the channel on which its result is sent"
    _end_others(pid, alone)
    if not failure:
        return reply
    message = json.loads(request)
    outcomes = [{"error": failure}] * len(message["samples"])
    return encode_frame({"id": message["id"], "outcomes": outcomes, "seconds": 0.0, "out_of_memory": False})


def _score_and_exit(channel: socket.socket, caller: Caller, request: bytes) -> None:
    code = 1
    try:
        with contextlib.suppress(OSError):
            hide_memory(False)
        send(channel, answer(caller, request))
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's code; the log keeps the reason
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_others(pid: int, alone: bool) -> None:
    """End the process `pid` that we forked (0: it has ended) and whatever it started."""
    if alone:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)  # every process of the namespace but process 1 and this one
    else:
        end_below(os.getpid(), _END_TIMEOUT_S)
    if pid:
        os.waitpid(pid, 0)
    reap_descendants(os.getpid(), _END_TIMEOUT_S)


def _encode_reply(reply: dict[str, Any]) -> bytes:
    try:
        return encode_frame(reply)
    except RewardError:
        return encode_frame({**reply, "outcomes": list(_without_odd_parts(reply["outcomes"]))})


def _without_odd_parts(outcomes: Iterable[Outcome]) -> Iterable[Outcome]:
    for item in outcomes:
        try:
            encode_frame(item)
            yield item
        except RewardError:
            yield {
                "error": f"returned a dict{_odd_key(item)} with values that are neither numbers, text, lists nor dicts"
            }


def _odd_key(item: Outcome) -> str:
    for key, value in (item.get("parts") or {}).items():
        try:
            encode_frame({str(key): value})
        except RewardError:
            return f" (key {key!r})"
    return ""


def main() -> None:
    """Serve the run on the inherited socket until it closes it."""
    faulthandler.enable()
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    with contextlib.suppress(ChannelClosed):
        run(socket.socket(fileno=fd))


if __name__ == "__main__":
    main()
