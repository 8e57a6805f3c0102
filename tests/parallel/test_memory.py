"""The settings of the allocator and of torch's waiting threads, in separate processes: they last as long as the process."""

import gc
import os
import platform
import sys
from types import SimpleNamespace

import pytest

from tests.commands import ran
from verl.parallel import process_settings

_START = """
import ctypes, resource
from verl.parallel.process_settings import give_back_holes, keep_freed_memory
kept = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
"""
# page faults of allocating, touching and freeing 64 MiB ten times
_COUNT = """
def touch():
    block = libc.malloc(64 << 20)
    libc.memset(block, 1, 64 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")


def said(code, **environment):
    """The words that a process with the allocator of `_START` prints in `code`."""
    clean = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES" and not k.startswith("MALLOC_")}
    command = [sys.executable, "-c", _START + code]
    done = ran(*command, env=clean | environment)
    return done.stdout.split()


def faults(**environment):
    is_kept, count = said(_COUNT, **environment)
    return is_kept == "True", int(count)


@pytest.mark.parametrize(("modules", "expected"), [({}, ["freeze"]), ({"torch": None}, [])])
def test_imports_stay_unless_torch_was_there(modules, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(process_settings, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    with process_settings.imports_stay():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert calls == expected


@needs_glibc
def test_freed_memory_is_used_again_without_page_faults():
    is_kept, count = faults()
    assert is_kept
    assert count < 200  # 10 x 16,384 when every block is mapped again


@needs_glibc
def test_settings_of_the_user_stand():
    is_kept, count = faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert not is_kept
    assert count > 10_000


_HOLES = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
blocks = [libc.malloc(1 << 20) for _ in range(64)]
for block in blocks:
    libc.memset(block, 1, 1 << 20)
held = resident()
for block in blocks[:-1]:  # the last one keeps the others from the top of the heap
    libc.free(block)
freed = resident()
done = [give_back_holes(step) for step in (1, 127, 128, 128)]
print(kept, held - freed, freed - resident(), *done)
"""


@needs_glibc
def test_holes_are_returned_now_and_then():
    is_kept, at_once, later, *given_back = said(_HOLES)
    assert is_kept == "True"
    assert int(at_once) <= 1
    assert int(later) >= 60
    assert given_back == ["False", "False", "True", "False"]


SHOW = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"


def spin_count(code, **environment):
    variables = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", f"{code}; {SHOW}"]
    done = ran(*command, env={**variables, **environment})
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        ("import verl", {}, "1000"),
        ("import verl.cli.main", {}, "1000"),
        ("import verl", {"GOMP_SPINCOUNT": "5"}, "5"),
        ("import verl", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("import sys; sys.modules['torch'] = None; import verl", {}, "None"),
    ],
)
def test_the_setting(code, environment, expected):
    assert spin_count(code, **environment) == expected
