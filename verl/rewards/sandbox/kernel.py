"""Linux system calls that Python does not wrap: namespaces, mounts, capabilities, a filter of system calls.

Every function raises OSError where the kernel refuses, and on other systems.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_FILE_CAPABILITIES = 0b11111  # chown, dac_override, dac_read_search, fowner, fsetid: what root's files need
_SOCKET_CALL = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # machine -> (audit architecture, number)
_IO_URING_SETUP = 425  # the same everywhere; its rings open sockets without the call `socket`


def _call(name: str, *arguments: Any) -> None:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{name} is a Linux call")
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, value: int, more: Any = None) -> None:
    unused = ctypes.c_ulong(0)
    _call("prctl", option, ctypes.c_ulong(value), unused if more is None else more, unused, unused)


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """This process gets the signal when the thread that started it ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def hide_memory(hidden: bool = True) -> None:
    """Whether processes of the same user may look into this one (ptrace, /proc/PID/mem and fd)."""
    _prctl(_PR_SET_DUMPABLE, 0 if hidden else 1)


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` name for new ones. In a new user namespace this user keeps its number."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", ctypes.c_int(flags))
    if flags & CLONE_NEWUSER:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if flags & CLONE_NEWNS:  # else what is mounted from now on would be mounted for the whole machine
        _call("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def mount_proc() -> None:
    """A /proc that shows the processes of this PID namespace alone."""
    _call("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV | _MS_NOEXEC), None)


def drop_privileges() -> None:
    """For good, for this process and all that it starts: no capability but those over files, and none by starting a
    program that would have more."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if not _FILE_CAPABILITIES >> capability & 1:
            try:
                _prctl(_PR_CAPBSET_DROP, capability)
            except OSError:  # past the last one, or this process has none to drop
                break
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    _call("capget", ctypes.create_string_buffer(header, 8), held)
    _, permitted, _, _, _, _ = struct.unpack("=6I", held.raw)
    kept = permitted & _FILE_CAPABILITIES
    data = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
    _call("capset", ctypes.create_string_buffer(header, 8), ctypes.create_string_buffer(data, 24))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def can_refuse_sockets() -> bool:
    """Whether `refuse_sockets` knows this machine."""
    return sys.platform == "linux" and platform.machine() in _SOCKET_CALL


def refuse_sockets() -> None:
    """For good, for this process and all that it starts: no sockets but those between processes of this machine
    (AF_UNIX). Needs no rights."""
    if not can_refuse_sockets():
        raise OSError(errno.ENOSYS, f"there is no filter of system calls for {platform.machine()}")
    program = _socket_filter(*_SOCKET_CALL[platform.machine()])
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Filter(len(program) // 8, program)))


def _socket_filter(architecture: int, socket_call: int) -> bytes:
    """The filter as the kernel's packet filter code: (operation, jump if true, jump if false, operand)."""
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    number_at, architecture_at, first_argument_at = 0, 4, 16
    unix, allow, refuse = 1, 0x7FFF0000, 0x00050000 | errno.EACCES
    code = (
        (load, 0, 0, architecture_at),
        (equal, 0, 7, architecture),  # calls of another architecture have other numbers: refuse them all
        (load, 0, 0, number_at),
        (at_least, 5, 0, 0x40000000),  # the x32 calls of x86_64
        (equal, 4, 0, _IO_URING_SETUP),
        (equal, 0, 2, socket_call),
        (load, 0, 0, first_argument_at),
        (equal, 0, 1, unix),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
