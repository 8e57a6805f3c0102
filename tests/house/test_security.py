"""Guards that keep a run safe from its inputs, and secrets out of its outputs."""

import ast

from tests.house.source import PACKAGE, ROOT, files, nodes, relative
from verl.config import PPO, SCHEMAS
from verl.config.secrets import is_secret_name

# (file, call) -> why it may listen on more than this machine, or how it keeps strangers out
LISTENERS: dict[tuple[str, str], str] = {
    ("verl/parallel/framing.py", "listener.bind"): "for callers of listening_socket, which have a row here",
    (
        "verl/page/launch.py",
        "listening_socket",
    ): "the address of trainer.page.host, loopback by default; every request needs the token",
    ("verl/parallel/collectives.py", "probe.bind"): "asks whether a port is free and closes it at once",
    ("verl/parallel/collectives.py", "socket.create_server"): "for ranks that meet at loopback, and only there",
    (
        "verl/agents/gateway/app.py",
        "listening_socket",
    ): "at loopback unless the user gives an address, with a random token",
    ("verl/compat/endpoint.py", "listening_socket"): "as the gateway, with a random token in each path",
    (
        "verl/compat/python.py",
        "listening_socket",
    ): "a port that a script asks for, at loopback unless it names an address",
    (
        "verl/reshard/link.py",
        "socket.create_server",
    ): "at the address that a service is called from, for workers with the random token of a bucket",
    ("verl/agents/gateway/loopback.py", "listening.bind"): "at the loopback of a sandbox, which no other process has",
    ("verl/parallel/collectives.py", "dist.TCPStore"): "listens to other machines only where the ranks are on several",
}
# files that name sys.executable for another reason than to start a Python process -> the reason
STARTERS = {
    "verl/__init__.py": "a message",
    "verl/parallel/child_processes.py": "the one place",
    "verl/rewards/programs.py": "a program of a model, in a new folder",
    "verl/agents/gateway/loopback.py": "python -I",
    "verl/cli/machine/packages.py": "a fact of the doctor",
}
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SERVERS = (
    "listening_socket",
    "HTTPServer",
    "ThreadingHTTPServer",
    "TCPServer",
    "ThreadingTCPServer",
    "TCPStore",
    "create_server",
    "start_server",
)


def calls():
    for path in files().values():
        for node in nodes(path):
            if isinstance(node, ast.Call):
                yield relative(path), node


def name_of(call):
    return ast.unparse(call.func)


def test_code_that_comes_with_a_model_runs_only_when_the_config_says_so():
    """trust_remote_code is False in every declaration, and every call that passes it passes the config's value."""
    assert [
        leaf.default for path, leaf in PPO.leaves.items() if path.endswith("trust_remote_code") and leaf.default
    ] == []
    wrong = [
        f"{file}:{call.lineno}"
        for file, call in calls()
        for keyword in call.keywords
        if keyword.arg == "trust_remote_code" and "trust_remote_code" not in ast.unparse(keyword.value)
    ]
    assert not wrong, wrong
    trusting = [
        f"{relative(path)}:{node.lineno}"
        for path in files().values()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        for argument, default in [
            *zip(reversed(node.args.args), reversed(node.args.defaults), strict=False),
            *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
        ]
        if argument.arg == "trust_remote_code" and isinstance(default, ast.Constant) and default.value
    ]
    assert not trusting, trusting


def test_weights_are_never_pickles():
    """Models are read from safetensors; transformers would otherwise fall back to torch's pickles."""
    wrong = [
        f"{file}:{call.lineno}"
        for file, call in calls()
        if name_of(call).endswith(".from_pretrained")
        and ("Model" in name_of(call) or name_of(call).startswith("factory"))
        and not any(k.arg in ("use_safetensors", "gguf_file") for k in call.keywords)
    ]
    assert not wrong, wrong


def test_what_listens_is_listed_or_stays_on_this_machine():
    """A socket that verl opens is bound to loopback, or has a row in LISTENERS that says what protects it."""
    wrong = []
    for file, call in calls():
        name = name_of(call)
        last = name.rpartition(".")[2]
        binds = last == "bind" and len(call.args) == 1 and isinstance(call.args[0], ast.Tuple)
        if (binds or last in SERVERS) and (file, name) not in LISTENERS:
            address = call.args[0] if call.args else None
            host = address.elts[0] if isinstance(address, ast.Tuple) and address.elts else None
            if not (isinstance(host, ast.Constant) and host.value in LOOPBACK):
                wrong.append(f"{file}:{call.lineno} {name}")
    assert not wrong, f"bind to {LOOPBACK[0]}, ask for a token, and give it a row here: {wrong}"


def test_listed_listeners_exist():
    listening = {(file, name_of(call)) for file, call in calls()}
    assert set(LISTENERS) <= listening


def test_nothing_listens_everywhere_by_a_literal():
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in files().values()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::")
    ]
    assert not wrong, wrong


def test_model_output_is_not_run_in_the_core():
    """Only verl/rewards/programs.py, which runs inside a sandbox, starts programs from replies."""
    users = {
        relative(path)
        for name, path in files().items()
        if "run_program" in path.read_text(encoding="utf-8") and name != "verl.rewards.programs"
    }
    assert users <= {"verl/rewards/scorers/code.py", "verl/agents/tools/python.py"}


def test_no_key_of_the_tree_is_taken_for_a_secret():
    """A key of ours whose name looks like a secret's would be masked in config.yaml."""
    leaves = [path for schema in SCHEMAS.values() for path in schema.leaves]
    assert [path for path in leaves if is_secret_name(path.rpartition(".")[2])] == []


def test_the_page_on_security_names_every_limit():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = ("timeout_s", "cpu_s", "memory_mb", "max_file_mb", "max_open_files", "max_processes", "network")
    returned = ("max_output_kb", "max_result_kb", "max_parts", "max_abs_score", "process_per_sample")
    assert [key for key in (*named, *returned) if f"`reward.{key}`" not in text] == []
    assert (PACKAGE / "rewards" / "sandbox" / "launch.py").exists()


def test_every_python_process_is_started_by_one_function():
    starters = {
        relative(path)
        for path in files().values()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }
    assert starters == set(STARTERS)
