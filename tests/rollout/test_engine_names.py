"""Names of vLLM and SGLang are looked up in sources; one that is missing stops the start with its name and version."""

import ast
import importlib
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import verl.rollout
from tests.rollout.simulated import weight_transfer
from tests.rollout.test_vllm import EOS, VOCABULARY
from verl.config import RolloutConfig
from verl.errors import ModelError
from verl.rollout.engine_names import IN_PROCESS, SERVICE, USES, _imported_names, lookup, require_names
from verl.rollout.http.server import arguments
from verl.rollout.vllm.settings import make_setup

PACKAGE = Path(verl.rollout.__file__).parent


def write_sources(root, package, without=()):
    """A `package` below `root` with every name that verl uses, except for the names `without`."""
    imported = _imported_names(PACKAGE / "vllm" / "library.py", package)
    files = defaultdict(lambda: defaultdict(list))  # file -> statement or head of a class -> members of the class
    for name in [*imported, *(name for names in USES[package].values() for name in names)]:
        place, _, rest = name.partition(":")
        owner, dot, member = rest.rpartition(".")
        folder = root.joinpath(*place.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        if name in without:
            continue
        statements = files[folder / "__init__.py"]
        if rest.startswith("/"):
            statements[f"ROUTE = {rest!r}"] = []
        elif dot:
            statements[f"class {owner.replace('*', 'Fields')}:"].append(f"    {member}: int")
        else:
            statements[f"if {rest!r}:"] = [f"    from nowhere import {rest}"]
    for file, statements in files.items():
        file.write_text("".join("\n".join([head, *body]) + "\n" for head, body in statements.items()))
    (root / package / "__init__.py").open("a").close()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Makes `package`, with all names but some, the installed one."""

    def install(package, without=()):
        write_sources(tmp_path, package, without)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, package, raising=False)
        importlib.invalidate_caches()

    return install


@pytest.mark.parametrize("package", USES)
def test_all_names_of_a_package_that_has_them(package, sources):
    sources(package)
    for way, names in lookup(package).items():
        assert names
        assert all(names.values()), [name for name, is_there in names.items() if not is_there]
        require_names(package, way, "")


@pytest.mark.parametrize(
    ("package", "way", "name"),
    [
        ("vllm", IN_PROCESS, "vllm.v1.engine.llm_engine:LLMEngine.step"),
        ("vllm", IN_PROCESS, "vllm.sampling_params:RequestOutputKind"),
        ("vllm", SERVICE, "vllm.entrypoints:/weight_info"),
        ("sglang", SERVICE, "sglang.srt.arg_groups.fields:*.tp_size"),
    ],
)
def test_a_missing_name_is_in_the_sentence_with_the_version(package, way, name, sources, monkeypatch):
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {package: [package]})
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    sources(package, {name})
    with pytest.raises(
        ModelError, match=rf"{package} 9.9 has no {name.replace('*', '.')}, .*; try 1.0\. `verl doctor`"
    ):
        require_names(package, way, "try 1.0")


def test_a_member_may_come_from_a_base_of_another_module(sources, tmp_path):
    sources("vllm", {"vllm.entrypoints.llm:LLM.sleep"})
    (tmp_path / "vllm" / "mixins.py").write_text("class Sleeps:\n    def __init__(self):\n        self.sleep = 1\n")
    file = tmp_path / "vllm" / "entrypoints" / "llm" / "__init__.py"
    file.write_text("from vllm.mixins import Sleeps\n" + file.read_text().replace("class LLM:", "class LLM(Sleeps):"))
    assert lookup("vllm")[IN_PROCESS]["vllm.entrypoints.llm:LLM.sleep"]


def test_a_package_that_is_not_installed_has_no_names(monkeypatch):
    monkeypatch.setitem(USES, "no_such_engine", {})
    assert lookup("no_such_engine") == {}
    require_names("no_such_engine", SERVICE, "")


def test_every_argument_that_verl_gives_is_looked_up(load):
    config = RolloutConfig(prompt_length=20, response_length=12, enable_prefix_caching=False, enforce_eager=True)
    setup = make_setup(config, weight_transfer("a/model"), load("llama"), eos_token_ids=(EOS,), vocab_size=VOCABULARY)
    assert {f"vllm.engine.arg_utils:EngineArgs.{name}" for name in setup.llm} <= {*USES["vllm"][IN_PROCESS]}
    options = [o for o in arguments(config, weight_transfer("a/model"), load("llama"), 8123) if o.startswith("--")]
    fields = {f"sglang.srt.arg_groups.fields:*.{option[2:].replace('-', '_')}" for option in options}
    assert fields <= {*USES["sglang"][SERVICE]}


def test_every_import_inside_sglang_is_looked_up():
    imported = set(_imported_names(PACKAGE / "http" / "in_sglang.py", "sglang"))
    assert len(imported) > 3
    places = [name.split(":") for name in USES["sglang"][SERVICE]]
    assert imported <= {f"{module}:{name.partition('.')[0]}" for module, name in places}


def test_every_route_that_verl_calls_is_looked_up():
    tree = ast.parse((PACKAGE / "http" / "dialects.py").read_text(encoding="utf-8"))
    called = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "post") and node.args
        if isinstance(node.args[0], ast.Constant) and str(node.args[0].value).startswith("/")
    }
    routes = {name.partition(":")[2] for ways in USES.values() for name in ways[SERVICE]}
    assert len(called) > 6
    assert called <= routes
