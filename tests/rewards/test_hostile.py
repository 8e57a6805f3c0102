"""Scorers that attack: each costs its own sample, is named, and leaves no process, no folder and no score of others behind."""

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tests.rewards.test_pool import request, wait_until
from verl.rewards.sandbox import launch
from verl.rewards.sandbox.limits import Limits

ATTACKS = """
import ctypes, os, signal, socket, struct, subprocess, sys, tempfile, threading, time


def loop():
    while True:
        pass


def loop_in_c():
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    return 9**9**9


def fork_bomb():
    while True:
        os.fork()


def fork_and_leave():  # each child is the leader of a session of its own, and half of them are soon orphans
    first = os.getpid()
    while True:
        if os.fork() == 0:
            os.setsid()
        elif os.getpid() % 2 and os.getpid() != first:
            os._exit(0)


def allocate():
    return len(bytearray(100 << 30))


def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    time.sleep(1000)


def sleep_beside():
    os.fork()
    time.sleep(1000)


def forge():
    reply = b'{"id":%d,"outcomes":[{"score":1e9,"parts":{}}],"seconds":0.0,"out_of_memory":false}'
    for fd in range(3, 4096):
        for number in range(4):
            message = bytes(16) + reply % number
            try:
                os.write(fd, struct.pack(">I", len(message)) + message)
            except OSError:
                pass
    return 1e9


def segfault():
    ctypes.string_at(0)


def write_file():
    with open(os.path.join(tempfile.gettempdir(), "big"), "wb") as file:
        for _ in range(100):
            file.write(bytes(1 << 20))


def open_files():
    return [open("/dev/null") for _ in range(10000)]


def burn():
    for _ in range(2):
        if os.fork() == 0:
            loop()
    time.sleep(1000)


def connect(port):
    socket.create_connection(("127.0.0.1", port), 1).close()
    return 1.0


def connect_from_program(port):
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0)


def look_up(port):
    return float(len(socket.getaddrinfo("localhost", port)))


def connect_to_path(path):
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
    return 1.0


def new_user_namespace():
    return float(ctypes.CDLL(None).unshare(1 << 28) == 0)


def trace_process_1():
    return float(len(open("/proc/1/mem", "rb").name))


def link_folder(path):
    folder = tempfile.gettempdir()
    os.rmdir(folder)
    os.symlink(path, folder)
    return 0.25


def flood_log():
    for _ in range(3):
        os.write(1, bytes(1 << 20))
    return 0.25


def many_parts():
    return {"score": 1.0, **{str(i): i for i in range(300)}}


def large_part():
    return {"score": 1.0, "text": "x" * (8 << 20)}


def write_later():
    def write():
        time.sleep(0.05)
        for fd in range(3, 4096):  # the channel has the number that it has in the run
            try:
                os.write(fd, bytes(100))
            except OSError:
                pass

    threading.Thread(target=write).start()
    return 0.25


def poison():
    globals()["compute_score"] = lambda **sample: 1e9
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    return 0.25


def hide(path):
    temporary = tempfile.mkdtemp()
    os.makedirs(os.path.join(temporary, "a", "b"))
    os.chmod(os.path.join(temporary, "a"), 0)
    open(path, "w").write(f"{temporary} {'PLANTED_API_KEY' in os.environ}")
    return 0.25


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str in globals():
        return globals()[solution_str](**(extra_info or {}))
    return float(solution_str)
"""

SIX = {  # attack -> words of the sentence
    "loop": "took longer than 0.4 s",
    "loop_in_c": "took longer than 0.4 s",
    "fork_bomb": "started more processes than reward.max_processes=16 allows",
    "allocate": "needed more memory than reward.memory_mb allows",
    "ignore_sigterm": "took longer than 0.4 s",
    "forge": "wrote to the channel",
    "segfault": "SIGSEGV",
}
LIMITS = Limits(max_processes=16, max_file_mb=4, max_open_files=64)


@pytest.fixture
def attacked(make_pool, tmp_path):
    """attacked(**pool options): a pool whose function attacks when the reply names an attack."""
    path = tmp_path / "attacks.py"
    path.write_text(ATTACKS)

    def make(**options):
        return make_pool(path=str(path), **{"timeout_s": 0.4, "limits": LIMITS, **options})

    return make


def processes_of(run):
    """Ids of the scorers of the process `run`, of the processes between them and the run, and of what they forked."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"verl.rewards.worker" in words and str(run).encode() in words:
            found.append(int(name))
    return found


def reaper_of(processes):
    (found,) = (c.pid for c in psutil.Process().children() if c.pid in processes)
    return found


@pytest.mark.parametrize("attack", SIX)
def test_an_attack_costs_one_sample_and_leaves_nothing(attacked, attack):
    pool = attacked()
    before, bad, after = pool.score_all([request("0.25"), request(attack), request("0.5")])
    assert (before.score, before.error) == (0.25, None)
    assert (after.score, after.error) == (0.5, None)
    assert bad.score == -0.5
    for words in (SIX[attack], "compute_score", "attacks.py", f"for sample {attack}", "default score -0.5"):
        assert words in bad.error
    pool.close()
    assert processes_of(os.getpid()) == []


def test_attacks_in_processes_of_their_own(attacked):
    pool = attacked(process_per_sample=True)
    attacks = ("segfault", "fork_bomb", "forge")
    scores = pool.score_all([request(r) for attack in attacks for r in ("0.25", attack)])
    assert [s.score for s in scores] == [0.25, -0.5] * 3
    assert all(SIX[attack] in bad.error for attack, bad in zip(attacks, scores[1::2], strict=True))
    pool.close()
    assert processes_of(os.getpid()) == []


@pytest.fixture
def no_namespaces(monkeypatch):
    """As if the kernel granted none."""
    monkeypatch.setattr(launch, "namespace_command", lambda network: ())


@pytest.mark.slow
def test_the_same_where_the_kernel_grants_no_namespaces(attacked, no_namespaces, caplog):
    """pytest -m slow tests/rewards/test_hostile.py"""
    with caplog.at_level(logging.WARNING), socket.create_server(("127.0.0.1", 0)) as server:
        port = {"port": server.getsockname()[1]}
        (connected,) = attacked(timeout_s=10).score_all([request("connect_from_program", extra_info=port)])
    assert (connected.score, connected.error) == (0.0, None)
    attacks = ("ignore_sigterm", "fork_bomb", "fork_and_leave", "segfault", "forge")
    pool = attacked()
    scores = pool.score_all([request(r) for attack in attacks for r in (attack, "0.5")])
    for attack, bad, after in zip(attacks, scores[::2], scores[1::2], strict=True):
        # of a limit on the clock and one on processes, whichever is seen first
        words = (SIX.get(attack, SIX["fork_bomb"]), *(["took longer"] if "fork" in attack else []))
        assert any(w in bad.error for w in words), bad.error
        assert (after.score, after.error) == (0.5, None)
    pool.close()
    assert len(processes_of(os.getpid())) == 2, "more than the first pool's reaper and scorer"
    assert "grants no PID namespace" in caplog.text
    assert "grants no network namespace" in caplog.text


@pytest.mark.slow
def test_processes_of_their_own_without_namespaces(attacked, no_namespaces):
    """pytest -m slow tests/rewards/test_hostile.py"""
    pool = attacked(process_per_sample=True, timeout_s=2.0)
    attacks = ("poison", "fork_bomb", "fork_and_leave", "forge")
    scores = pool.score_all([request(r) for attack in attacks for r in (attack, "0.5")])
    assert scores[0].score == 0.25
    assert all(bad.score == -0.5 for bad in scores[2::2])
    assert [(after.score, after.error) for after in scores[1::2]] == [(0.5, None)] * 4
    assert len(processes_of(os.getpid())) == 2, "a process of a sample lives on beside reaper and scorer"
    pool.close()
    assert processes_of(os.getpid()) == []


@pytest.mark.slow
def test_a_reaper_that_is_killed_leaves_nothing(attacked, no_namespaces):
    """pytest -m slow tests/rewards/test_hostile.py"""
    pool = attacked(timeout_s=20)
    futures = [pool.submit([request(r)]) for r in ("sleep_beside", "0.5")]
    assert wait_until(lambda: len(processes_of(os.getpid())) == 3, 20)
    first = set(processes_of(os.getpid()))
    os.kill(reaper_of(first), signal.SIGKILL)
    # the cause is unknown: the sample gets a second worker, which is killed too
    assert wait_until(lambda: len(found := processes_of(os.getpid())) == 3 and first.isdisjoint(found), 20)
    os.kill(reaper_of(processes_of(os.getpid())), signal.SIGKILL)
    (killed,), (after,) = (future.result(20) for future in futures)
    assert "ended its process by SIGKILL" in killed.error
    assert after.score == 0.5
    pool.close()
    assert processes_of(os.getpid()) == []


def test_limits_name_their_key(attacked):
    limits = Limits(cpu_s=0.2, max_file_mb=4, max_open_files=64)
    attacks = [request(name) for name in ("write_file", "open_files", "burn")]
    written, opened, burned = attacked(timeout_s=5, limits=limits).score_all(attacks)
    assert "wrote a larger file than reward.max_file_mb allows" in written.error
    assert "opened more files than reward.max_open_files allows" in opened.error
    assert "used more processor time than reward.cpu_s=0.2 s allows" in burned.error


def test_no_network_unless_the_config_says_so(attacked):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = {"port": server.getsockname()[1]}
        attempts = [request(name, extra_info=port) for name in ("connect", "look_up", "connect_from_program")]
        connected, looked_up, program = attacked(timeout_s=5).score_all(attempts)
        assert "set reward.network=True" in connected.error
        assert "set reward.network=True" in looked_up.error
        assert (program.score, program.error) == (0.0, None)
        allowed = attacked(timeout_s=5, limits=Limits(network=True)).score_all(attempts)
        assert [s.error for s in allowed] == [None] * 3
        assert [s.score for s in allowed][::2] == [1.0, 1.0]


def test_results_that_later_steps_could_not_use_cost_their_own_sample(attacked):
    pool = attacked(timeout_s=5)
    replies = ("1e39", "-3e38", "1e17", "many_parts", "large_part", "0.5")
    high, low, large, many, long, after = pool.score_all([request(r) for r in replies])
    for score in (high, low):
        assert "returned a number beyond 1e+18 as 'score'" in score.error
    assert (large.score, large.error) == (1e17, None)
    assert "returned a dict with 300 parts; at most 256" in many.error
    assert "more than the 1 MiB allowed for a sample" in long.error
    assert (after.score, after.error) == (0.5, None)


def test_prints_of_one_sample_leave_room_for_those_of_the_next(attacked, tmp_path):
    pool = attacked(timeout_s=5, log_dir=tmp_path)  # files of at most 4 MiB, the log among them
    scores = pool.score_all([request("flood_log", key=str(i)) for i in range(8)])
    assert [s.error for s in scores] == [None] * 8


def test_a_scorer_that_is_stopped_from_outside_is_replaced_and_the_sample_scored_again(attacked, caplog):
    pool = attacked(timeout_s=1)
    pool.start()
    scorer = max(processes_of(os.getpid()))
    os.kill(scorer, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING):
        (score,) = pool.score_all([request("0.5")])
    assert (score.score, score.error) == (0.5, None)
    assert "was stopped by a signal" in caplog.text


def test_no_way_out_by_paths_namespaces_or_process_1(attacked, tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        ways = [
            request("connect_to_path", extra_info={"path": path}),
            *map(request, ("new_user_namespace", "trace_process_1")),
        ]
        connected, renamed, traced = attacked(timeout_s=5).score_all(ways)
    assert "PermissionError" in connected.error
    assert (renamed.score, renamed.error) == (0.0, None)
    assert "PermissionError" in traced.error


def test_removing_the_folder_follows_no_link(attacked, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o755)
    (kept / "file").write_text("x")
    pool = attacked(timeout_s=5)
    (score,) = pool.score_all([request("link_folder", extra_info={"path": str(kept)})])
    assert score.error is None
    pool.close()
    assert (kept / "file").read_text() == "x"
    assert kept.stat().st_mode & 0o777 == 0o755


def test_what_a_scorer_writes_after_its_answer_costs_nobody_a_sample(attacked, caplog):
    pool = attacked(timeout_s=5)
    with caplog.at_level(logging.WARNING):
        (first,) = pool.score_all([request("write_later")])
        time.sleep(0.2)
        (second,) = pool.score_all([request("0.5")])
    assert (first.score, first.error) == (0.25, None)
    assert (second.score, second.error) == (0.5, None)
    assert "Between two samples the scorer wrote to the channel" in caplog.text


def test_what_a_sample_does_to_its_own_process_does_not_last(attacked):
    pool = attacked(timeout_s=5, process_per_sample=True)
    poisoned, healthy = pool.score_all([request("poison"), request("0.5")])
    assert (poisoned.score, healthy.score) == (0.25, 0.5)
    assert len(processes_of(os.getpid())) == 3, "a process of the first sample lives on beside unshare, sh and scorer"


def test_a_private_folder_is_removed_and_keys_stay_outside(attacked, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "0123456789")
    pool = attacked()
    (score,) = pool.score_all([request("hide", extra_info={"path": str(tmp_path / "said")})])
    assert score.error is None
    folder, sees_key = (tmp_path / "said").read_text().split()
    assert sees_key == "False"
    assert os.path.isdir(os.path.dirname(folder))
    pool.close()
    assert not os.path.exists(os.path.dirname(folder))


def test_attackers_end_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "attacks.py").write_text(ATTACKS)
    program = textwrap.dedent(
        f"""
        import time
        from verl.data_proto.samples import ScoreRequest
        from verl.rewards.functions import RewardFunctionSpec
        from verl.rewards.pool import RewardPool
        pool = RewardPool(RewardFunctionSpec({str(tmp_path / "attacks.py")!r}), num_workers=1, timeout_s=99, memory_mb=256)
        pool.start()
        pool.submit([ScoreRequest("1", "s", "ignore_sigterm", "")])
        time.sleep(0.3)
        print("ready", flush=True)
        time.sleep(99)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        assert len(processes_of(parent.pid)) == 4
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_until(lambda: not processes_of(parent.pid))
