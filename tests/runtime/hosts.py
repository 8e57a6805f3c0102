"""Two hosts on one machine, with separate networks, names, processes and shared memory, and with common files."""

import os
import shutil
import subprocess

import pytest

from tests.runtime.ranks import ROOT, end_tree, environment

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_OWN = """
hostname host$1
mount -t tmpfs none /dev/shm
mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""


class Hosts:
    """A cable between two network namespaces. As Debian does, each host gives its own name to its loopback. Leaving ends what
    runs there."""

    def __init__(self, folder):
        self._names = [f"verl{os.getpid()}h{number}" for number in (1, 2)]
        self._files = [folder / f"hosts_{number}" for number in (1, 2)]
        self._running = []
        self.folder = folder

    def __enter__(self):
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"network namespaces cannot be made here: {error}")
        return self

    def _make(self):
        if not shutil.which("unshare"):
            raise OSError("there is no unshare")
        for name in self._names:
            _ip("netns", "add", name)
        ends = [f"{name}v" for name in self._names]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address, file in zip(self._names, ends, ADDRESSES, self._files, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                _ip("-n", name, "link", "set", device, "up")
            number = self._names.index(name)
            lines = ["127.0.0.1 localhost", f"127.0.1.1 host{number + 1}", f"{ADDRESSES[1 - number]} host{2 - number}"]
            file.write_text("\n".join(lines) + "\n")
        self.start(0, ["true"]).communicate(timeout=120)
        if self._running.pop().returncode:
            raise OSError("unshare is not allowed")

    def start(self, number, command, **more):
        """A process of host 0 or 1, with both outputs in one pipe."""
        inside = "unshare --uts --pid --fork --kill-child --mount-proc --ipc bash -ec".split()
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[number], *inside, _OWN, "x", str(number + 1), self._files[number], *command],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(**more),
        )  # fmt: skip
        self._running.append(process)
        return process

    def cut(self):
        """Pull the cable: from now on nothing that is sent arrives, without an error."""
        _ip("-n", self._names[1], "link", "set", f"{self._names[1]}v", "down")

    def __exit__(self, *_):
        for process in self._running:
            end_tree(process.pid)
            process.stdout.close()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=120)
