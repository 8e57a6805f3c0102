"""The share of the Python names that existing recipes import and that import here, weighted by how many projects use each."""

import importlib
from pathlib import Path

# module, name, projects of the recipe collection and the examples of August 2026 that import it
TABLE = Path(__file__).with_name("surface.tsv")
LEAST_SHARE = 0.75


def rows():
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    return [(module, name, int(projects)) for module, name, projects in (line.split("\t") for line in lines)]


def imports(module, name):
    try:
        found = importlib.import_module(module)
        return hasattr(found, name) or importlib.import_module(f"{module}.{name}") is not None
    except ImportError:
        return False


def test_enough_of_the_names_import():
    table = rows()
    assert len({(module, name) for module, name, _ in table}) == len(table)
    missing = [(module, name, projects) for module, name, projects in table if not imports(module, name)]
    total = sum(projects for _, _, projects in table)
    share = 1 - sum(projects for *_, projects in missing) / total
    listing = "\n".join(
        f"{projects:3} {module}.{name}" for module, name, projects in sorted(missing, key=lambda r: -r[2])
    )
    assert share >= LEAST_SHARE, f"{share:.1%} of {total} imports; missing:\n{listing}"
