"""Tools of an MCP server, a child process, over its standard input and output."""

import asyncio
import json
import logging
import os
import signal
import sys
import time

import psutil
import pytest

from tests.agents.test_runs import ENDS, ROLLOUT, episodes
from tests.processes import wait_until
from verl.errors import ConfigError, MissingExtraError
from verl.tools import mcp_client
from verl.tools.tool_registry import load_all_tools
from verl.tracking import logs

SERVER = """
import os, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("words")

@server.tool()
def echo(text: str) -> str:
    \"\"\"Say a text again.\"\"\"
    return f"heard {text}"

@server.tool()
def pid() -> int:
    \"\"\"The number of the server's process.\"\"\"
    return os.getpid()

@server.tool()
def fail() -> str:
    \"\"\"Fail.\"\"\"
    raise RuntimeError("it is broken")

@server.tool()
def sleep(seconds: float) -> str:
    \"\"\"Sleep.\"\"\"
    time.sleep(seconds)
    return "slept"

server.run()
"""


@pytest.fixture
def tools(tmp_path):
    """write(selection) -> the YAML file."""

    def write(*selection, config="{type: mcp, timeout: 20}", **settings):
        (tmp_path / "server.py").write_text(SERVER)
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # a server gets what its entry says
        settings = settings or {"command": sys.executable, "args": [str(tmp_path / "server.py")], "env": env}
        (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"words": settings}}))
        section = {"mcp_servers_config_path": str(tmp_path / "servers.json"), "tool_selected_list": list(selection)}
        file = tmp_path / "tools.yaml"
        file.write_text(f"tools: [{{config: {config}, mcp: {json.dumps(section)}}}]")
        return str(file)

    return write


def is_there():
    pytest.importorskip("mcp", reason="needs the extra mcp", exc_type=ImportError)


def call(tool, **parameters):
    return asyncio.run(tool.execute("", parameters))


def test_a_server_is_asked_and_started_again(tools):
    is_there()
    by_name = {tool.name: tool for tool in load_all_tools(tools())}
    assert set(by_name) == {"echo", "pid", "fail", "sleep"}
    assert by_name["echo"].tool_schema.function.description == "Say a text again."
    assert by_name["echo"].tool_schema.function.parameters.required == ["text"]
    assert call(by_name["echo"], text="ünï")[0].text == "heard ünï"
    with pytest.raises(RuntimeError, match="fail"):  # newer servers keep the reason to themselves
        call(by_name["fail"])
    first = int(call(by_name["pid"])[0].text)
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while True:
        try:
            second = int(call(by_name["pid"])[0].text)
            break
        except Exception:  # noqa: BLE001 - the client's, until it has seen the end
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert second != first


HOSTILE = """
import os, sys, threading, time

def shout(pipe, line):
    for _ in range(300):
        os.write(pipe, line)

shout(1, b"no JSON \\x1b[31m at all \\xff\\n")
shout(1, b'{"jsonrpc": 7}\\n')
shout(2, b"\\x1b]0;title\\x07\\nERROR: forged\\n\\x9b31m\\xff")
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
"""


def lines_of(text):
    return [line for line in text.splitlines() if line.strip()]


def test_what_a_server_writes_is_escaped_and_counted(tools, tmp_path, caplog, capfd):
    """And a child of its that leaves its session ends with it."""
    is_there()
    logs._ADOPTING._counts.clear()
    tools()
    (tmp_path / "hostile.py").write_text(HOSTILE + SERVER)
    caplog.set_level(logging.INFO)
    settings = {"command": sys.executable, "args": [str(tmp_path / "hostile.py"), str(tmp_path / "child")]}
    by_name = {tool.name: tool for tool in load_all_tools(tools(**settings))}
    server = int(call(by_name["pid"])[0].text)
    written = "".join(capfd.readouterr())
    assert "\x1b" not in written
    assert "forged" not in written
    lines = [record.getMessage() for record in caplog.records]
    assert all(text.isprintable() for text in lines)
    assert any("writes: ERROR: forged" in text for text in lines)
    assert len([text for text in lines if text.startswith("The MCP server")]) <= mcp_client.MAX_LINES
    assert len(lines) <= mcp_client.MAX_LINES + 3 * logs.MAX_ADOPTED
    child = int((tmp_path / "child").read_text())
    assert psutil.pid_exists(child)
    os.kill(server, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=20)
    assert not psutil.pid_exists(child)


def test_a_call_has_its_time(tools):
    is_there()
    (tool,) = load_all_tools(tools("sleep", config="{type: mcp, timeout: 0.2}"))
    with pytest.raises(Exception, match="(?i)time"):
        call(tool, seconds=5)


def test_a_run_calls_it(agent_run, tools):
    is_there()
    run = agent_run(
        ENDS, "trainer.total_training_steps=1", f"{ROLLOUT}.multi_turn.function_tool_path=null",
        f"{ROLLOUT}.multi_turn.tool_config_path={tools('echo')}",
    )  # fmt: skip
    results = episodes(run, "tool")
    assert any(r["result"]["text"].startswith("heard") for r in results)


def test_what_cannot_be_used_is_refused(tools, tmp_path, monkeypatch):
    is_there()
    with pytest.raises(ConfigError, match="no tool 'ecko'; did you mean 'echo'"):
        load_all_tools(tools("ecko"))
    with pytest.raises(ConfigError, match="neither url nor command"):
        load_all_tools(tools(args=[]))
    with pytest.raises(ConfigError, match="could not be used"):
        load_all_tools(tools(command=sys.executable, args=["-c", "pass"]))
    file = tools()
    (tmp_path / "servers.json").write_text("[]")
    with pytest.raises(ConfigError, match="mcpServers"):
        load_all_tools(file)


def test_without_the_package_the_extra_is_named(tools, monkeypatch):
    file = tools("echo")
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mcp>=2'"):
        load_all_tools(file)
    mcp_client._load_servers.cache_clear()


@pytest.mark.slow
def test_a_server_ends_with_its_run(tools):
    is_there()
    script = (
        "import asyncio, os; from verl.tools.tool_registry import load_all_tools\n"
        f"(tool,) = load_all_tools({tools('pid')!r})\n"
        "print(asyncio.run(tool.execute('', {}))[0].text, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    server = int(done.stdout)
    assert wait_until(lambda: not os.path.exists(f"/proc/{server}"))
