"""Process attributes that neither Python nor util-linux sets: hidden memory, and a seccomp filter."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys

from verl.parallel.child_processes import prctl

_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 1 << 28
# machine -> (audit architecture, numbers of the calls socket, clone, unshare, and add_key, after which come the two others of
# the kernel's keyrings)
_MACHINES = {"x86_64": (0xC000003E, 41, 56, 272, 248), "aarch64": (0xC00000B7, 198, 220, 97, 217)}
_IO_URING_SETUP, _CLONE3 = 425, 435  # the same on every machine; io_uring opens sockets without the call `socket`


def hide_memory(hidden: bool = True) -> bool:
    """Set whether processes of the same user may read and write this process (ptrace, /proc/PID/mem and fd); False where
    the kernel cannot."""
    return prctl(_SET_DUMPABLE, 0 if hidden else 1)


def can_filter() -> bool:
    """Whether `filter_system_calls` supports this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def filter_system_calls(*, sockets: bool) -> bool:
    """Refuse new user namespaces and the keyrings of the kernel, which hold this user's tickets and tokens, and sockets unless
    `sockets`, to this process and all that it starts, for good; False where there is no such filter.

    Sockets of every family are refused (EACCES), those to other processes of the machine included; socketpair works.
    Needs no rights.
    """
    if not can_filter():
        return False
    program = _program(sockets, *_MACHINES[platform.machine()])
    pointer = ctypes.byref(_Filter(len(program) // 8, program))
    return prctl(_SET_NO_NEW_PRIVS, 1) and prctl(_SET_SECCOMP, _SECCOMP_MODE_FILTER, pointer)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _program(sockets: bool, architecture: int, socket: int, clone: int, unshare: int, add_key: int) -> bytes:
    """The filter in classic BPF: (operation, jump if true, jump if false, operand)."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number_at, architecture_at, first_argument_at = 0, 4, 16
    allow = (answer, 0, 0, 0x7FFF0000)

    def refuse(error: int) -> tuple[int, int, int, int]:
        return (answer, 0, 0, 0x00050000 | error)

    code = [
        (load, 0, 0, architecture_at),
        *((equal, 1, 0, architecture), refuse(errno.EACCES)),  # calls of another architecture have other numbers
        (load, 0, 0, number_at),
        *((at_least, 0, 1, 0x40000000), refuse(errno.EACCES)),  # the x32 calls of x86_64
        *((equal, 0, 1, _CLONE3), refuse(errno.ENOSYS)),  # its flags are in memory; the C library falls back to clone
    ]
    for call in (*range(add_key, add_key + 3), *(() if sockets else (socket, _IO_URING_SETUP))):
        code += [(equal, 0, 1, call), refuse(errno.EACCES)]
    for call in (clone, unshare):
        code += [(equal, 0, 4, call), (load, 0, 0, first_argument_at), (any_bit, 0, 1, _CLONE_NEWUSER)]
        code += [refuse(errno.EPERM), allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*code, allow])
