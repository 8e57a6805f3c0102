"""Roles are called by typed handles: no method is called by a string, and none is replaced at run time."""

import ast
import inspect

import pytest

from tests.house.source import files, relative, tree
from verl.parallel.register import registered
from verl.roles.api import ModelHandle, RewardHandle, RolloutHandle
from verl.roles.model import ModelRole
from verl.roles.reward import RewardWorker
from verl.roles.rollout import RolloutWorker

FOLDERS = ("roles", "programs", "run", "runtime")
# where a call that has travelled as data becomes a call of a method
DISPATCH = {f"verl/runtime/{name}.py" for name in ("rank_workers", "ray")}
HANDLES = {"rollout", "reward", "actor", "critic", "reference", "role", "worker", "group", "weights", "model"}


def modules():
    for path in files().values():
        name = relative(path)
        if name.startswith(tuple(f"verl/{folder}/" for folder in FOLDERS)):
            yield name, tree(path)


def calls_by_string(module):
    """Lines with getattr(x, name)(...), and with getattr(handle, "name")."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Call) and getattr(node.func.func, "id", "") == "getattr":
            yield node.lineno
        if getattr(node.func, "id", "") == "getattr" and getattr(node.args[0], "id", "") in HANDLES:
            yield node.lineno


def replaced_methods(module):
    """Lines that assign to an attribute of a handle: `roles.rollout.publish = ...`, `rollout.publish = ...`."""
    for node in ast.walk(module):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if not isinstance(target, ast.Attribute):
                continue
            owner = target.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name in HANDLES:
                yield node.lineno


def test_no_method_of_a_role_is_called_by_a_string():
    calls = [f"{name}:{line}" for name, module in modules() if name not in DISPATCH for line in calls_by_string(module)]
    assert calls == []


def test_no_method_of_a_role_is_replaced():
    assert [f"{name}:{line}" for name, module in modules() for line in replaced_methods(module)] == []


def test_nothing_asks_what_a_call_returned():
    """Calls return futures in every runtime. Arguments of users' own workers are the exception."""
    asks = [
        f"{name}:{node.lineno}"
        for name, module in modules()
        if name != "verl/runtime/worker_group.py"
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "hasattr"
        and getattr(node.args[1], "value", "") in ("get", "ready")
    ]
    assert asks == []


@pytest.mark.parametrize(
    ("handle", "role"), [(ModelHandle, ModelRole), (RolloutHandle, RolloutWorker), (RewardHandle, RewardWorker)]
)
def test_a_handle_has_the_methods_that_its_role_registers(handle, role):
    """With equal parameters; a role may take more, which have defaults. A call that does not block returns a future."""
    declared = registered(role)
    assert {name for name, value in vars(handle).items() if inspect.isfunction(value) and name[0] != "_"} == set(
        declared
    )
    for name, declaration in declared.items():
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (handle, role))
        shared = [(p.name, p.kind, p.default) for p in ours.parameters.values()]
        extra = list(theirs.parameters.values())[len(shared) :]
        assert [(p.name, p.kind, p.default) for p in theirs.parameters.values()][: len(shared)] == shared, name
        assert all(p.default is not p.empty for p in extra), name
        assert ours.return_annotation.startswith("Future[") is not declaration.blocking, name
