"""Stacks of a thread that others wait for: read by another thread, sent by a reporter, and dumped on a signal."""

import os
import threading

import pytest

from tests.processes import wait_until
from verl.parallel.stack_dump import (
    Reporter,
    all_stacks,
    calls,
    dump_of,
    dumps_on_signal,
    in_debugger,
    innermost,
    longest_call,
)


@pytest.fixture
def stuck():
    """A thread that carries out `critic.update` and hangs in `deep`."""
    ended, began = threading.Event(), threading.Event()

    def deep():
        began.set()
        ended.wait(120)

    def run():
        with calls("critic.update"):
            deep()

    thread = threading.Thread(target=run, name="stuck")
    thread.start()
    assert began.wait(120)
    yield thread
    ended.set()
    thread.join(120)


def test_the_longest_call_and_where_it_is(stuck):
    with calls("rollout.generate"):
        text = longest_call()
    assert text.startswith("critic.update for 0 s, in wait (threading.py:")
    assert "deep (test_stack_dump.py:" in text
    assert longest_call(at_least_s=5) == ""
    assert "thread stuck:" in all_stacks()


def test_nothing_runs():
    with calls("outer"), pytest.raises(ValueError), calls("inner"):
        raise ValueError
    assert longest_call() == ""


def test_a_reporter_repeats_itself_until_it_is_closed(stuck):
    heard = []
    reporter = Reporter(0.04, heard.append)
    assert wait_until(lambda: len(heard) >= 2)
    reporter.close()
    assert "deep (test_stack_dump.py:" in heard[0]


def test_stacks_are_written_when_a_signal_asks_for_them(tmp_path):
    file = tmp_path / "stacks.txt"
    with dumps_on_signal(file):
        dump = dump_of(os.getpid(), file, 2.0)
        assert "dump_of (stack_dump.py:" in innermost(dump)
        assert "test_stacks_are_written" in innermost(dump)
        assert not in_debugger(dump)
    assert file.read_text() == dump
    with dumps_on_signal(tmp_path / "unasked.txt"):
        pass
    assert not (tmp_path / "unasked.txt").exists()


def test_who_is_waited_for_is_shown_too():
    waits = 'Thread 0x1:\n  File "/lib/threading.py", line 320 in wait\n'
    works = 'Thread 0x2:\n  File "verl/store.py", line 7 in write\n  File "verl/store.py", line 3 in save\n'
    main = 'Current thread 0x3:\n  File "/lib/concurrent/futures/_base.py", line 9 in result\n'
    text = innermost("\n".join([waits, works, main]))
    assert text == "result (_base.py:9), while another thread was in write (store.py:7) < save (store.py:3)"
    assert innermost("\n".join([waits, main, works])) == "write (store.py:7) < save (store.py:3)"
    assert innermost("") == ""


def test_a_process_that_is_gone_has_no_stack(tmp_path):
    (tmp_path / "stacks.txt").touch()
    assert dump_of(2**22 + 1, tmp_path / "stacks.txt", 0.1) == ""


def test_a_debugger_is_noticed():
    assert in_debugger('Current thread 0x1:\n  File "/usr/lib/python3/bdb.py", line 3 in wait\n')
