"""Commands that a test waits for, in another process."""

import subprocess
import sys


def ran(*command, code=0, timeout=120, **more):
    """The `subprocess.CompletedProcess` of a command that ends with `code`, with its outputs as texts."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, check=False, **more)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-4000:]
    return done


def python(*arguments, **more):
    """The same of this Python."""
    return ran(sys.executable, *arguments, **more)
