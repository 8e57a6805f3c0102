"""The order of the house: imports run downwards, neighbours of one layer do not know each other, nothing runs in circles."""

import pytest

from tests.house.source import files, imports, relative, room

# From the ground up. A room may import from rooms of earlier rows and from itself.
LAYERS = (
    ("_version", "errors"),
    ("registry",),
    ("data_proto",),
    ("config",),
    ("parallel",),
    ("algorithms",),
    ("models",),
    ("tracking",),
    ("rewards", "data", "engines", "rollout"),
    ("reshard", "checkpoint"),
    ("workers",),
    ("controller",),
    ("planner",),
    ("trainer",),
    ("cli",),
)
HEIGHT = {room: height for height, row in enumerate(LAYERS) for room in row}

# Names that recipes import or commands start. They only hand on, so they may look anywhere, and nothing looks at them.
FACES = (
    "verl",
    "verl.__main__",
    "verl.model_merger",
    "verl.protocol",
    "verl.single_controller",
    "verl.single_controller.base",
    "verl.single_controller.base.decorator",
    "verl.single_controller.ray",
    "verl.single_controller.ray.base",
    "verl.utils",
    "verl.trainer.logger",
    "verl.trainer.main_eval",
    "verl.trainer.main_generation",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.core_algos",
    "verl.trainer.ppo.metric_utils",
    "verl.worker",
    "verl.workers.reward_manager",
)


def is_face(name):
    return name in FACES or name.startswith("verl.utils.")


def own_files():
    return [name for name in files() if not is_face(name)]


def ours(name):
    return [i for i in imports(name) if i.module == "verl" or i.module.startswith("verl.")]


def test_every_room_has_its_place():
    rooms = {room(name) for name in own_files()}
    assert rooms <= set(HEIGHT), f"give {rooms - set(HEIGHT)} a row in LAYERS"


def test_faces_exist():
    assert set(FACES) <= set(files())


def test_imports_run_downwards():
    wrong = [
        f"{relative(files()[name])}:{found.line} imports {found.module}"
        for name in own_files()
        for found in ours(name)
        if room(found.module) in HEIGHT
        and room(found.module) != room(name)
        and HEIGHT[room(found.module)] >= HEIGHT[room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_of_ours_imports_a_face():
    """Otherwise code would begin to live behind the old names."""
    wrong = [
        f"{relative(files()[name])}:{found.line} imports {found.module}"
        for name in own_files()
        for found in ours(name)
        if is_face(found.module)
    ]
    assert not wrong, "\n".join(wrong)


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
