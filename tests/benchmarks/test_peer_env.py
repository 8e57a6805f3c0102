"""Commands that build the peers' environments; none is built."""

import subprocess

import peer_env
import pytest

from tests.run import trl_oracle


@pytest.fixture
def ran(monkeypatch):
    """Commands that would have been run; each succeeds, and the first makes the folder's Python."""
    commands = []

    def run(command, **settings):
        commands.append(list(command))
        if "venv" in command:
            python = peer_env.python_of(peer_env.Path(command[-1]))
            python.parent.mkdir(parents=True)
            python.write_text("")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(peer_env.subprocess, "run", run)
    return commands


@pytest.mark.parametrize("name", sorted(peer_env.PEERS))
def test_torch_is_installed_first_and_strays_are_removed(name, tmp_path):
    make, first, *installs, remove, proof = peer_env.PEERS[name].commands(tmp_path)
    assert make[1:3] == ["-m", "venv"]
    assert first[-1] == "torch==2.13.0"
    assert all("torch==2.13.0" not in command for command in installs)
    assert {"torchvision", "torchaudio", "torchcodec"} <= set(remove)
    assert proof[0] == str(tmp_path / "bin" / "python")
    pinned = [
        package for command in [first, *installs] for package in command if package[0].isalpha() and "==" in package
    ]
    assert len(pinned) == 2


def test_an_environment_is_made_once(ran, tmp_path):
    folder = tmp_path / "env"
    python = peer_env.ensure("trl", folder)
    assert python == folder / "bin" / "python"
    assert len(ran) == len(peer_env.PEERS["trl"].commands(folder))
    peer_env.ensure("trl", folder)
    assert len(ran) == len(peer_env.PEERS["trl"].commands(folder))


def test_an_environment_of_the_user_s_is_taken_when_it_has_the_peer(ran, tmp_path):
    python = peer_env.python_of(tmp_path)
    python.parent.mkdir()
    python.write_text("")
    assert peer_env.ensure("vllm", tmp_path) == python
    assert ran == [[str(python), "-c", peer_env.PEERS["vllm"].proof]]


def test_a_failure_names_the_command_and_the_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(peer_env.subprocess, "run", lambda command, **s: subprocess.CompletedProcess(command, 3))
    with pytest.raises(SystemExit, match=r"exit code 3.*-m venv.*Remove"):
        peer_env.ensure("trl", tmp_path / "env")


def test_a_peer_s_python_is_not_led_into_ours(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("KEPT", "yes")
    assert "PYTHONPATH" not in peer_env.clean_environment()
    assert peer_env.clean_environment()["KEPT"] == "yes"


def test_environments_lie_where_git_does_not_look():
    ignored = (peer_env.ROOT / ".gitignore").read_text().splitlines()
    assert "/work" in ignored
    for name in peer_env.PEERS:
        assert peer_env.default_folder(name).is_relative_to(peer_env.ROOT / "work")


def test_a_comparison_is_skipped_where_its_peer_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(trl_oracle.peer_env, "default_folder", lambda name: tmp_path / name)
    with pytest.raises(pytest.skip.Exception, match=r"vllm is not there; benchmarks/peers/peer_env.py makes it"):
        trl_oracle.python_of("vllm")
