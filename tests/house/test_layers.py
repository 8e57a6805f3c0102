"""The order of the house: imports run downwards, neighbours of one layer do not know each other, nothing runs in circles."""

import ast

import pytest

from tests.house.source import files, imports, relative, room, tree

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
    ("roles",),
    ("runtime",),
    ("planner",),
    ("programs",),
    ("run",),
    ("cli",),
)
HEIGHT = {room: height for height, row in enumerate(LAYERS) for room in row}

# Names that recipes import or commands start. They only hand on, so they may look anywhere, and nothing looks at them.
FACES = (
    "verl",
    "verl.__main__",
    "verl.base_config",
    "verl.model_merger",
    "verl.protocol",
    "verl.single_controller",
    "verl.single_controller.base",
    "verl.single_controller.base.decorator",
    "verl.single_controller.ray",
    "verl.single_controller.ray.base",
    "verl.utils",
    "verl.trainer",
    "verl.trainer.constants_ppo",
    "verl.trainer.logger",
    "verl.trainer.main_eval",
    "verl.trainer.main_generation",
    "verl.trainer.main_generation_server",
    "verl.trainer.main_ppo",
    "verl.trainer.main_ppo_sync",
    "verl.trainer.config",
    "verl.trainer.ppo",
    "verl.trainer.ppo.core_algos",
    "verl.trainer.ppo.metric_utils",
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.reward",
    "verl.trainer.ppo.rollout_corr_helper",
    "verl.trainer.ppo.utils",
    "verl.worker",
    "verl.workers",
    "verl.workers.config",
)
# folders of such names, and of the code behind them that is not anywhere else
FACE_FOLDERS = ("verl.compat", "verl.experimental", "verl.utils", "verl.workers.reward_manager")
# import paths that hold code of their own still
WITH_CODE = (
    "verl.model_merger",
    "verl.trainer.logger",
    "verl.trainer.ppo.core_algos",
    "verl.trainer.ppo.metric_utils",
    "verl.utils.hdfs_io",
    "verl.utils.seqlen_balancing",
    "verl.utils.torch_functional",
    "verl.utils.tracking",
)


def is_face(name):
    return name in FACES or any(name == folder or name.startswith(f"{folder}.") for folder in FACE_FOLDERS)


def own_files():
    return [name for name in files() if not is_face(name)]


def ours(name):
    return [i for i in imports(name) if i.module == "verl" or i.module.startswith("verl.")]


def test_every_room_has_its_place():
    rooms = {room(name) for name in own_files()}
    assert rooms <= set(HEIGHT), f"give {rooms - set(HEIGHT)} a row in LAYERS"


def test_faces_exist():
    assert set(FACES) <= set(files())


def test_import_paths_only_hand_on():
    """What an import path needs is in verl/compat or in a room of ours; `__getattr__` puts off an import."""
    wrong = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for name, path in files().items()
        if is_face(name) and name.split(".")[1:2] != ["compat"] and name not in WITH_CODE
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "__getattr__"
    ]
    assert not wrong, "\n".join(wrong)


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
