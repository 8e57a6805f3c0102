"""Reward functions that attack, one for each name of a reply, and the processes of their sandbox."""

import os

import psutil

from verl.rewards.sandbox.limits import Limits

ATTACKS = r"""
import contextlib, ctypes, os, platform, signal, socket, struct, subprocess, sys, tempfile, threading, time


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
    time.sleep(0.02)  # processes of the first clock tick of a call may be of an earlier sample
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


def answer_from_fork():  # the fork raises, and is a copy of the scorer that would say so
    if os.fork() == 0:
        raise ValueError("of the fork")
    time.sleep(0.2)
    return 0.75


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


def kernel_keyrings():
    # how many of these calls work: add_key, and keyctl (it finds the keyring of the session)
    first = 248 if platform.machine() == "x86_64" else 217
    libc = ctypes.CDLL(None)
    added = libc.syscall(first, b"user", b"planted", b"x", 1, -1)
    return float((added >= 0) + (libc.syscall(first + 2, 0, -3, 1) >= 0))


def write_kernel_settings():
    # files of the kernel that can be opened for writing: what runs after a crash, to suspend the machine, its log
    found = []
    for file in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/power/state", "/dev/kmsg"):
        with contextlib.suppress(OSError), open(file, "a") as opened:
            found.append(file if os.fstat(opened.fileno()).st_rdev != os.makedev(1, 3) else "")  # /dev/null in its place
    return {"score": 0.0, "written": [file for file in found if file]}


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


def print_for_ever():
    if os.fork() == 0:
        while True:
            os.write(1, b"x" * 65536)
    return 0.25


def print_own(text):
    print(text)
    print("a longer line", "y" * 1000)
    return 0.5


def keep_files():
    kept = globals()["kept"] = []
    while True:
        kept.append(open("/dev/null"))


def keep_memory():
    kept = globals()["kept"] = []
    while True:
        kept.append(bytearray(1 << 20))


def keep_processes():
    for _ in range(14):
        if os.fork() == 0:
            time.sleep(1000)
    return 0.25


def start_processes():
    children = [subprocess.Popen(["sleep", "0.1"]) for _ in range(8)]
    return 0.5 if [child.wait() for child in children] else None


def keep_the_interpreter():
    def keep():
        time.sleep(0.2)
        9**9**9  # in C: no other thread runs

    threading.Thread(target=keep).start()
    return 0.25


def keep_burning():
    if os.fork() == 0:
        loop()
    return 0.25


def open_file():
    with open("/dev/null"):
        return 0.5


def allocate_some():
    return 0.5 if bytearray(64 << 20) else None


def wait(seconds=0.4, began=os.devnull):
    open(began, "a").close()
    time.sleep(seconds)
    return 0.5


def end_later():
    def end():
        time.sleep(0.2)
        os._exit(3)

    threading.Thread(target=end).start()
    return 0.25


def forge_later():
    def write():
        time.sleep(0.2)
        forge()

    threading.Thread(target=write).start()
    return 0.25


def list_folder(path):
    return {"score": 0.5, "names": os.listdir(path)}


def read_file(path):
    return {"score": 0.5, "text": open(path).read()}


def surrogate():
    return {"score": 0.5, "\ud800": "\ud800"}


def raise_forged():
    raise ValueError("\x1b[2J\n2026-01-01 00:00:00 ERROR verl: a forged line \ud800")


def write_later(folder):
    def write():
        while not os.path.exists(f"{folder}/answered"):
            time.sleep(0.01)
        for fd in range(3, 4096):  # the channel has the number that it has in the run
            try:
                os.write(fd, bytes(100))
            except OSError:
                pass
        open(f"{folder}/written", "a").close()

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


def processes_of(run):
    """Ids of the scorers of the process `run`, of the processes between them and the run, and of their forks."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"verl.rewards.worker" in words and str(run).encode() in words:
            pids.append(int(name))
    return pids


def reaper_of(processes):
    (pid,) = (c.pid for c in psutil.Process().children() if c.pid in processes)
    return pid


def chain_of_scorer(pool):
    """Ids of the processes from the run to the scorer; the last is the youngest."""
    first = psutil.Process(pool._processes[0].pid)
    (process_1,) = first.children()
    (scorer,) = process_1.children()
    return {"unshare": first.pid, "process 1": process_1.pid, "scorer": scorer.pid}
