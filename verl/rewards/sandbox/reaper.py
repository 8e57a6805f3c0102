"""Parent of a scorer if the kernel grants no PID namespace: ends with the run, and ends all that the scorer started.

python -m verl.rewards.sandbox.reaper RUN_PID COMMAND...

consumes: nothing     produces: the scorer's exit code, 128 + N for signal N     waits for: the scorer, or SIGTERM
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from verl.parallel.child_processes import adopt_orphans, die_with
from verl.rewards.sandbox.processes import hide_memory, kill_descendants

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Ended(BaseException):
    """The run has ended or wants the scorer to end, or a signal from elsewhere asks for it."""


def _end(signal_number: int, frame: FrameType | None) -> None:
    raise _Ended(signal_number)


def main() -> None:
    """Start the scorer in a separate session and wait for its end; leaves no process behind."""
    run_pid, command = int(sys.argv[1]), sys.argv[2:]
    for number in _ENDING:
        signal.signal(number, _end)
    group, code = 0, 1
    try:
        adopt_orphans()
        die_with(run_pid, signal.SIGTERM)
        hide_memory()
        group = subprocess.Popen(command, start_new_session=True, close_fds=False).pid
        code = _wait_for(group)
    except _Ended as ended:
        code = 128 + ended.args[0]
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        kill_descendants(group=group)
        os._exit(code)


def _wait_for(pid: int) -> int:
    while True:
        ended, status = os.wait()  # reaps orphans too
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
