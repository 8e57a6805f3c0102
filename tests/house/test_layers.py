"""The order of the packages: imports run downwards, neighbours of one layer do not know each other, nothing runs in circles."""

import ast

import pytest

from tests.house.line_ceilings import part_of
from tests.house.source import files, imports, nodes, package_of, relative
from verl.compat.finder import IS_PACKAGE
from verl.distributions import PARTS, is_installed

# From the ground up. A package may import from packages of earlier rows and from itself. The last rows are the parts of
# verl/distributions.py, which the core does not import.
LAYERS = (
    ("_version", "foreign_text"),
    ("errors",),
    ("distributions", "regular_files"),
    ("user_objects",),
    ("registry",),
    ("families", "model_families"),
    ("data_proto",),
    ("config",),
    ("specs",),
    ("parallel",),
    ("manifest",),
    ("algorithms",),
    ("models",),
    ("tracking",),
    ("rewards", "data", "engines", "rollout"),
    ("reshard", "checkpoint"),
    ("roles",),
    ("runtime",),
    ("programs",),
    ("run",),
    ("api", "cli", "session"),
    ("page", "planner", "clusters", "drafts", "agents"),
    ("tasks",),
    ("tinker",),
    ("compat",),  # serves scripts of other releases
)
HEIGHT = {package: height for height, row in enumerate(LAYERS) for package in row}

# Import paths of other releases that have a file; the others are rows of verl/compat/import_paths.py.
COMPATIBILITY_FILES = ("verl", "verl.__main__", "verl.protocol", "verl.trainer.config", "verl.trainer.main_ppo")


def is_import_path(name):
    return name in COMPATIBILITY_FILES or name in IS_PACKAGE


def own_files():
    return [name for name in files() if not is_import_path(name)]


def ours(name):
    return [i for i in imports(name) if i.module == "verl" or i.module.startswith("verl.")]


def test_every_package_has_a_layer():
    packages = {layer_of(name) for name in own_files()}
    assert packages <= set(HEIGHT), f"give {packages - set(HEIGHT)} a row in LAYERS"


def test_import_paths_only_hand_on():
    """The code behind an import path is in verl/compat or below; `__getattr__` defers an import, and `__dir__` names it."""
    wrong = [
        f"{relative(files()[name])}:{node.lineno} {node.name}"
        for name in COMPATIBILITY_FILES
        for node in nodes(files()[name])
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in ("__getattr__", "__dir__")
    ]
    assert not wrong, "\n".join(wrong)


def layer_of(name):
    """The package of a module of the core, or the part beside the core that has the module."""
    part = part_of(files()[name]) if name in files() else "core"
    return package_of(name) if part == "core" else part


def is_type_of_a_part(imported):
    """The core tells checkers of types what a part returns; at run time it does not import it."""
    return imported.for_types_only and imported.module in files() and part_of(files()[imported.module]) != "core"


def is_upward(name, module):
    ours, theirs = layer_of(name), layer_of(module)
    return theirs in HEIGHT and theirs != ours and HEIGHT[theirs] >= HEIGHT[ours]


@pytest.mark.parametrize("is_wrong", [is_upward, lambda name, module: is_import_path(module)], ids=["up", "old name"])
def test_imports_run_downwards_and_use_no_import_path(is_wrong):
    """Code of ours that used an import path would begin to live behind the old names."""
    wrong = [
        f"{relative(files()[name])}:{imported.line} imports {imported.module}"
        for name in own_files()
        for imported in ours(name)
        if is_wrong(name, imported.module) and not is_type_of_a_part(imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_no_other_distribution():
    """Not in functions either; a checker of types may look. `verl.cli.main` and `verl.families` have their modules as texts."""
    wrong = [
        f"{relative(path)}:{imported.line} imports {imported.module} of verl-{part_of(files()[imported.module])}"
        for name, path in files().items()
        if part_of(path) == "core"
        for imported in ours(name)
        if imported.module in files() and part_of(files()[imported.module]) != "core" and not imported.for_types_only
    ]
    assert not wrong, "\n".join(wrong)


def test_every_part_is_recognized_by_its_first_package():
    for part, modules in PARTS.items():
        assert is_installed(part), f"{part}: {modules[0]} has no __init__.py"
        missing = [module for module in modules if module not in files()]
        assert not missing, missing


def test_no_cycles():
    """Imports inside functions count: they are where cycles hide. Those for type checkers do not."""
    edges = {
        name: sorted({i.module for i in ours(name) if not i.for_types_only and i.module in files()} - {name})
        for name in files()
    }
    done = set()

    def visit(name, path):
        if name in path:
            pytest.fail("a cycle of imports: " + " -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            for target in edges[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in edges:
        visit(name, [])
