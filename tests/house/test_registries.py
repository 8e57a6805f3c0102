"""Every row of every registry names something that is there."""

import ast

import pytest

from tests.house.source import files, tree
from verl.registry import Registry, load_object


def registries():
    """(file, name) of every module-level `NAME = Registry(...)`."""
    for name, path in files().items():
        for node in tree(path).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Call) and ast.unparse(value.func) == "Registry":
                yield f"{name}:{target.id}"


@pytest.mark.parametrize("place", sorted(registries()))
def test_rows_resolve(place):
    registry = load_object(place)
    assert isinstance(registry, Registry)
    assert list(registry), "an empty family"
    for row in registry:
        assert callable(registry.get(row)) or not isinstance(registry.get(row), str)
