"""One public name stands for one thing: no class or function is defined under the same name in two modules."""

import ast
from collections import defaultdict

from tests.house.source import files, package_of, relative, tree

# name -> why several modules may define it
ONE_CONTRACT = {
    "compute_score": "the function that every scorer of rewards/scorers has",
    "main": "the function that `python -m` and the command line start",
    "evaluate": "the call of the Python API, and the function of the host behind it",
    "generate": "the call of the Python API, and the program behind it",
    "sft": "the call of the Python API, and the preference loss of that name in the config",
    "train": "the call of the Python API, and the function of the host behind it",
    "prepare": "the function that every task of data/tasks has",
    "row_of": "the function that every task of data/tasks has",
    "agg_loss": "the function of other releases beside ours, which their scripts import by this name",
    "collate_fn": "two functions of that name in other releases, which scripts import",
    "gpg": "the advantage estimator and the loss of one paper, by its name in the config",
}


def public_definitions():
    """Name -> files of the package that define it at top level; verl/compat repeats names of other releases."""
    places = defaultdict(list)
    for name, path in files().items():
        for node in tree(path).body if package_of(name) != "compat" else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                places[node.name].append(relative(path))
    return places


def test_a_public_name_has_one_definition():
    twice = {name: places for name, places in public_definitions().items() if len(places) > 1}
    wrong = {name: places for name, places in twice.items() if name not in ONE_CONTRACT}
    places = "\n".join(f"{name}: {', '.join(places)}" for name, places in wrong.items())
    assert not wrong, f"rename one, or begin its name with _:\n{places}"


def test_exceptions_are_needed():
    defined = public_definitions()
    assert [name for name in ONE_CONTRACT if len(defined[name]) < 2] == []
