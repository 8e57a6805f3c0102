"""Worker process that runs a reward function: `python -m verl.rewards.worker FD RUN_PID`, started in a sandbox.

consumes: one set-up message, then requests     produces: one answer to each, under its id
waits for: the run, until it closes the channel

The reward function's prints go to the pipe that is this process's stdout and stderr; no program that it starts inherits
the channel.
"""

import contextlib
import errno
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import RewardError
from verl.foreign_text import clean
from verl.parallel.child_processes import adopt_orphans
from verl.parallel.framing import ChannelClosed, ChannelCorrupt, encode_frame, receive, receive_bytes, send
from verl.rewards.functions import (
    BATCH_ARGUMENTS,
    MODEL_REPLY,
    MODEL_SCORE,
    SAMPLE_ARGUMENTS,
    Raised,
    RewardFunction,
    RewardFunctionSpec,
    finished,
    load_reward_function,
)
from verl.rewards.outcome import Outcome, outcome, within_size
from verl.rewards.sandbox.launch import describe_exit
from verl.rewards.sandbox.limits import KIB, Limits
from verl.rewards.sandbox.processes import filter_system_calls, hide_memory, kill_descendants

# errors of the kernel when a limit is reached; leftovers of earlier samples may count towards it
_REFUSALS: dict[int | None, str] = {
    errno.EFBIG: "wrote a larger file than reward.max_file_mb allows",
    errno.EMFILE: "opened more files than reward.max_open_files allows",
    errno.ENOMEM: "needed more memory than reward.memory_mb allows",
    errno.ENOSPC: "found no space left on a disk",
    errno.EDQUOT: "found no space left on a disk",
    errno.EAGAIN: "",  # of fork, but of other calls too
}
_NO_NETWORK = "Reward functions have no network in this run; set reward.network=True if this one needs it."
_NETWORK_EVENTS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"}


class Caller:
    """Calls a reward function and converts its results and exceptions to outcomes. `was_limited`: a limit was reached."""

    def __init__(self, function: RewardFunction, spec: RewardFunctionSpec, limits: Limits):
        self.function = function
        self.spec = spec
        self.limits = limits
        self.was_limited = False
        self.raised: tuple[type[BaseException], ...] = ()  # exceptions that are the caller's, not the function's

    def score(self, samples: list[list[object]]) -> list[Outcome]:
        """One outcome per sample. A sample is [data_source, solution_str, ground_truth, extra_info, {argument: output
        of the reward model}]."""
        if self.spec.batched:
            return self._score_batch(samples)
        return [self._score_one(sample) for sample in samples]

    def _score_one(self, sample: list[Any]) -> Outcome:
        try:
            *positional, from_model = sample
            result = self._call({**dict(zip(SAMPLE_ARGUMENTS, positional, strict=True)), **from_model})
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
            return self._failure(error)
        return self._outcome(result)

    def _score_batch(self, samples: Sequence[Sequence[object]]) -> list[Outcome]:
        *columns, from_model = [list(column) for column in zip(*samples, strict=True)]
        arguments = {
            many: [row[one] for row in from_model] for one, many in (MODEL_SCORE, MODEL_REPLY) if one in from_model[0]
        }
        try:
            results = self._call({**dict(zip(BATCH_ARGUMENTS, columns, strict=True)), **arguments})
            results = list(results.tolist() if hasattr(results, "tolist") else results)
            if len(results) != len(samples):
                return [{"error": f"returned {len(results)} scores for {len(samples)} samples"}] * len(samples)
        except BaseException as error:  # noqa: BLE001 - as above; one call scores the batch, one error fails it
            return [self._failure(error)] * len(samples)
        return [self._outcome(result) for result in results]

    def _outcome(self, result: object) -> Outcome:
        if isinstance(result, Raised):
            return self._failure(result.error)
        try:
            return outcome(result, self.limits)
        except BaseException as error:  # noqa: BLE001 - a result may be an object of any class
            return self._failure(error)

    def _call(self, arguments: dict[str, object]) -> Any:
        return finished(self.function(**arguments, **self.spec.kwargs))

    def _failure(self, error: BaseException) -> Outcome:
        if isinstance(error, self.raised):
            raise error
        number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno if isinstance(error, OSError) else None
        no_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
        self.was_limited |= number in _REFUSALS or no_thread
        if refusal := _REFUSALS.get(number):
            return {"error": refusal}
        frames = [] if isinstance(error, RewardError) else traceback.extract_tb(error.__traceback__)
        place = f" (line {frames[-1].lineno} of {clean(os.path.basename(frames[-1].filename))})" if frames else ""
        return {"error": f"raised {type(error).__name__}: {clean(error)}{place}"}


def enter_limits(message: dict[str, Any]) -> Limits:
    """Set the limits of this process and all that it starts, but for memory."""
    limits = Limits(**message["limits"])
    limits.apply(message["max_tasks"])
    filter_system_calls(sockets=limits.network)  # the namespaces hold without it; a notice says if there are none
    if not limits.network:
        sys.addaudithook(_explain_refusal)
    return limits


def _explain_refusal(event: str, arguments: tuple[object, ...]) -> None:
    """Name the config key to Python code that tries to reach the network; the kernel is what refuses it."""
    if event in _NETWORK_EVENTS:
        raise PermissionError(errno.EACCES, _NO_NETWORK)


def load_caller(spec: RewardFunctionSpec, data_sources: list[str], limits: Limits) -> Caller:
    """Load the function and import what its data sources need. Raises RewardError."""
    function = load_reward_function(spec)
    if spec.path is None:
        from verl.rewards.scorers.route import warm

        warm(data_sources)
    return Caller(function, spec, limits)


def run(channel: socket.socket) -> None:
    """Set up as the first message says, then answer requests until the run closes the channel."""
    message = receive(channel)
    reply = {"id": message["id"]}
    try:
        limits = enter_limits(message)
        sys.path.extend(p for p in message["sys_path"] if p not in sys.path)
        caller = load_caller(RewardFunctionSpec(**message["function"]), message["data_sources"], limits)
        limits.apply_memory()
    except RewardError as error:
        send(channel, encode_frame({**reply, "error": str(error)}))
        return
    except BaseException as error:  # noqa: BLE001 - a user's file may even exit while it is imported
        text = f"Loading the reward function raised {type(error).__name__}: {clean(error)}"
        send(channel, encode_frame({**reply, "error": text}))
        return
    send(channel, encode_frame({**reply, "ready": True}))
    forks = message["process_per_sample"]
    if forks:
        adopt_orphans()  # of a sample, to be ended with it
        hide_memory()  # from the processes that score
    while True:
        request = receive_bytes(channel)
        send(
            channel, answer_from_fork(channel, caller, request, message["alone"]) if forks else answer(caller, request)
        )


def answer(caller: Caller, request: bytes) -> bytes:
    message = json.loads(request)
    caller.was_limited = False
    start = time.perf_counter()
    outcomes = caller.score(message["samples"])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return _reply(message, outcomes, caller.limits, time.perf_counter() - start, caller.was_limited)


def _reply(
    message: Mapping[str, object],
    outcomes: list[Outcome],
    limits: Limits,
    seconds: float = 0.0,
    was_limited: bool = False,
) -> bytes:
    reply = {"id": message["id"], "outcomes": outcomes, "seconds": seconds, "was_limited": was_limited}
    encoded = encode_frame(reply)
    if len(encoded) > limits.max_result_kb * KIB:  # a single sample may be too large
        encoded = encode_frame({**reply, "outcomes": [within_size(result, limits) for result in outcomes]})
    return encoded


def answer_from_fork(channel: socket.socket, caller: Caller, request: bytes, alone: bool) -> bytes:
    """Score in a process forked for this call, then end it and all that it started; once more if the fork was killed.

    The process cannot reach `channel`. `alone`: every process that this one sees belongs to the sandbox.
    """
    for _ in range(2):
        reply, failure = _call_fork(channel, caller, request, alone)
        if "SIGKILL" not in failure:  # a person or the system sends it, too
            break
    message = json.loads(request)
    return reply if not failure else _reply(message, [{"error": failure}] * len(message["samples"]), caller.limits)


def _call_fork(channel: socket.socket, caller: Caller, request: bytes, alone: bool) -> tuple[bytes, str]:
    """(reply, "") or (b"", the function's failure)."""
    parent_end, child_end = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        channel.close()
        parent_end.close()
        _score_and_exit(child_end, caller, request)
    child_end.close()
    reply, failure = b"", ""
    with parent_end:
        try:
            reply = receive_bytes(parent_end)
        except ChannelClosed:
            _, status = os.waitpid(pid, 0)
            failure = describe_exit(os.waitstatus_to_exitcode(status))
        except ChannelCorrupt:
            failure = "wrote to the channel on which its result is sent"
    if alone:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(-1, signal.SIGKILL)  # every process of the namespace but process 1 and this one
    kill_descendants()
    return reply, failure


def _score_and_exit(channel: socket.socket, caller: Caller, request: bytes) -> None:
    code = 1
    try:
        hide_memory(False)
        send(channel, answer(caller, request))
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's code; the log keeps the reason
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Serve the run on the inherited socket until it closes it."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # one from outside is no exception of the function's
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    channel = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=channel.close)  # a process that the function forks answers nothing
    with contextlib.suppress(ChannelClosed):
        run(channel)


if __name__ == "__main__":
    main()
