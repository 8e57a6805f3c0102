"""A scorer's view of the machine, and the removal of the files it leaves in its folder."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commands import ran
from tests.rewards.test_pool import request
from verl.rewards.sandbox import launch
from verl.rewards.sandbox.limits import Limits


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


def test_no_way_out_by_paths_namespaces_or_process_1(attacked, tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        ways = [
            request("connect_to_path", extra_info={"path": path}),
            *map(request, ("new_user_namespace", "trace_process_1", "kernel_keyrings", "write_kernel_settings")),
        ]
        pool = attacked(timeout_s=5)
        connected, renamed, traced, keys, settings = pool.score_all(ways)
    assert "PermissionError" in connected.error
    assert (renamed.score, renamed.error) == (keys.score, keys.error) == (0.0, None)
    assert "PermissionError" in traced.error
    if pool._processes[0].sandbox.has_namespaces or os.geteuid():
        assert settings.parts == {"written": []}


def test_the_kernel_limits_the_processes_of_a_namespace():
    """The limit holds for root's processes too. The ids of processes that have ended are reused."""
    command = launch.namespace_command(False, (), 40)
    if not (command and launch._linux_is_at_least(6, 14)):
        pytest.skip("the kernel limits no process ids by namespace")
    count = """
import os
for _ in range(500):
    os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ), 0)
try:
    for started in range(1000):
        os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
except BlockingIOError:
    print(started)
"""
    done = subprocess.run([*command, sys.executable, "-c", count], capture_output=True, text=True, timeout=120)
    assert 30 <= int(done.stdout) <= 40, done.stderr
    assert int(Path("/proc/sys/kernel/pid_max").read_text()) > 400, "the machine keeps its own limit"


def test_credentials_and_sockets_are_not_there(attacked, tmp_path, monkeypatch):
    """In the scorer's mount namespace: keys in the home, the socket of an agent, and shared memory of other processes."""
    (tmp_path / ".ssh").mkdir()
    for name in (".ssh/id", ".netrc", "notes"):
        (tmp_path / name).write_text("planted")
    (shared := Path("/dev/shm/planted_by_a_test")).touch()
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        try:
            pool = attacked(timeout_s=5)
            ways = [
                request("list_folder", extra_info={"path": str(tmp_path / ".ssh")}),
                request("list_folder", extra_info={"path": "/dev/shm"}),
                *(request("read_file", extra_info={"path": str(tmp_path / n)}) for n in (".netrc", "agent", "notes")),
            ]
            keys, memory, password, socket_file, notes = pool.score_all(ways)
            if not pool._processes[0].sandbox.has_namespaces:
                pytest.skip("the kernel grants no namespaces")
        finally:
            shared.unlink()
    assert "/dev/shm" not in launch.hidden_paths([f"{shared.parent}/rewards.py"]), "where the function itself lies"
    assert (keys.parts, memory.parts) == ({"names": []}, {"names": []})
    assert (password.parts, socket_file.parts) == ({"text": ""}, {"text": ""})
    assert notes.parts == {"text": "planted"}


def test_removing_the_folder_follows_no_link(attacked, tmp_path):
    outside = tmp_path / "kept"
    outside.mkdir(mode=0o755)
    (outside / "file").write_text("x")
    pool = attacked(timeout_s=5)
    (score,) = pool.score_all([request("link_folder", extra_info={"path": str(outside)})])
    assert score.error is None
    pool.close()
    assert (outside / "file").read_text() == "x"
    assert outside.stat().st_mode & 0o777 == 0o755


TREES = st.recursive(
    st.sampled_from(["file", "link to file", "link to folder", "link to nothing", "fifo"]),
    lambda below: st.tuples(st.sampled_from([0o000, 0o500, 0o700]), st.lists(below, max_size=4)),
    max_leaves=10,
)


def plant(tree, path, outside):
    if isinstance(tree, tuple):
        path.mkdir()
        for number, below in enumerate(tree[1]):
            plant(below, path / str(number), outside)
        path.chmod(tree[0])
    elif tree == "file":
        path.touch(0o400)
    elif tree == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"link to file": outside / "file", "link to folder": outside}.get(tree, outside / "none"))


@given(TREES)
@settings(max_examples=40, deadline=None)
def test_a_folder_is_removed_and_nothing_behind_its_links(tree):
    with tempfile.TemporaryDirectory() as place:
        outside = Path(place) / "kept"
        outside.mkdir(mode=0o750)
        (outside / "file").write_text("x")
        (outside / "file").chmod(0o440)
        plant(tree, Path(place) / "folder", outside)
        launch.remove_folder(str(Path(place) / "folder"))
        assert os.listdir(place) == ["kept"]
        assert os.listdir(outside) == ["file"]
        assert (outside.stat().st_mode & 0o777, (outside / "file").stat().st_mode & 0o777) == (0o750, 0o440)


def test_a_folder_deeper_than_python_recurses_is_removed(tmp_path):
    place = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("deep", dir_fd=place)
    for _ in range(sys.getrecursionlimit() + 200):
        below = os.open("deep", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
        os.mkdir("deep", dir_fd=place)
    os.close(place)
    launch.remove_folder(str(tmp_path / "deep"))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the rest of this file runs as this user then")
def test_all_of_this_as_a_user_without_privileges():
    """pytest -m slow tests/rewards/test_sandbox.py: as root these files run once more, as user 65534."""
    folder = Path(tempfile.mkdtemp(prefix="unprivileged_"))
    folder.chmod(0o777)
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all")
    env = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*arguments):
        command = [*user, sys.executable, *arguments]
        return subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)

    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("sandbox", "innocent", "hostile")]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}/tests", "-m", "slow or not slow")
    try:
        if run("-c", "import pytest, verl").returncode:
            pytest.skip("Python's or this folder is not for other users to read")
        ended = run("-m", "pytest", *files, *options)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    finally:
        ran("rm", "-rf", folder)


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
