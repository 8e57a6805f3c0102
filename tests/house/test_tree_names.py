"""Names of the config tree: code below programs/ reads specs, and messages get the paths of keys from full_key."""

import ast
import re

from tests.house.source import files, nodes, package_of, relative
from verl.config import full_key

BELOW_PROGRAMS = ("specs", "runtime", "roles", "agents", "rollout", "rewards", "reshard", "parallel", "engines")
TREE = re.compile(r"actor_rollout_ref|PPOConfig")


def test_no_package_below_programs_names_a_key_of_the_tree():
    wrong = [
        f"{relative(file)}:{number}"
        for name, file in files().items()
        if package_of(name) in BELOW_PROGRAMS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if TREE.search(line)
    ]
    assert not wrong, "read a spec of verl/specs.py: " + ", ".join(wrong)


def test_full_key_is_called_with_the_end_of_a_key():
    for name, file in files().items():
        for node in nodes(file):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "full_key":
                (ending,) = node.args
                assert not isinstance(ending, ast.Constant) or full_key(ending.value), (
                    f"{relative(file)}:{node.lineno} {name}"
                )


def test_no_parameter_is_a_config_of_any_type():
    wrong = [
        f"{relative(file)}:{node.lineno}"
        for file in files().values()
        for node in nodes(file)
        if isinstance(node, ast.arg) and node.arg == "config" and getattr(node.annotation, "id", "") == "Any"
    ]
    assert not wrong, "name the section, or the tree: " + ", ".join(wrong)
