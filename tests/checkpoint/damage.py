"""Damage to checkpoints on disks, in copies and by hand, and its outcome for a run that is to resume from one."""

import json
import os
import shutil
from pathlib import Path

import torch

from tests import damage
from tests.checkpoint.attack import State, put, state_of
from tests.checkpoint.states import make_roles, read_checkpoint, write_config
from tests.damage import ODD_TEXTS, of_files, parent_of, places, put_no_file
from verl.checkpoint.role import RoleCheckpoint
from verl.checkpoint.store import CheckpointStore
from verl.engines.api import EngineState, whole
from verl.engines.state import Parameters, TrainedState
from verl.errors import CheckpointError
from verl.manifest import find_damage
from verl.models.rounding import Rounding


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def one_file(rng, folder: Path, suffix: str = "") -> Path:
    return rng.choice([p for p in _files(folder) if p.name.endswith(suffix) and not p.is_symlink()])


flip, cut, append, zero_block = (
    of_files(change, one_file) for change in (damage.flip, damage.cut, damage.append, damage.zero_block)
)


def delete(rng, folder):
    one_file(rng, folder).unlink()


def rename(rng, folder):
    file = one_file(rng, folder)
    file.rename(
        file.with_name(rng.choice([f"{file.name}.bak", "model-00002.safetensors", f"x{file.name}", f".{file.name}"]))
    )


def swap(rng, folder):
    one, other = rng.sample(_files(folder), 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def mix(rng, folder):
    """A file of the checkpoint before it."""
    file = one_file(rng, folder)
    shutil.copy(folder.with_name("global_step_1") / file.relative_to(folder), file)


def edit_json(rng, folder):
    file = one_file(rng, folder, ".json")
    document = json.loads(file.read_bytes())
    path = rng.choice([p for p in places(document) if p] or [()])
    if not path:
        document = rng.choice([[], None, {"step": 2}, "text"])
    else:
        place, key = parent_of(document, path), path[-1]
        double = place[key] * 2 if isinstance(place[key], int | str) else 0
        place[key] = rng.choice([None, 7, -1, "text", [], {}, 1e400, double])
        if rng.random() < 0.3 and isinstance(place, dict):
            place[f"{key}x"] = place.pop(key)
    file.write_text(json.dumps(document))


def not_a_file(rng, folder):
    file, kinds = one_file(rng, folder), ("folder", "pipe", "loop", "nowhere", "other", "device")
    file.unlink()
    put_no_file(rng, file, kinds, one_file(rng, folder))


def break_json(rng, folder):
    one_file(rng, folder, rng.choice([".json", "manifest.json"])).write_text(rng.choice(ODD_TEXTS))


def add_file(rng, folder):
    name = rng.choice(
        ["actor/huggingface/model-00009.safetensors", "actor/lora_adapter/adapter_config.json", "critic/extra.json",
         "critic/huggingface/config.json", "actor/huggingface/model_new.safetensors"]
    )  # fmt: skip
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(one_file(rng, folder, Path(name).suffix), folder / name)


def drop_role(rng, folder):
    shutil.rmtree(folder / rng.choice(["actor", "actor/huggingface"]))


def empty(rng, folder):
    shutil.rmtree(folder)
    if rng.random() < 0.7:
        folder.mkdir()
    else:
        rng.choice([lambda: folder.write_text("x"), lambda: folder.symlink_to("nowhere"), lambda: None])()


def other_step(rng, folder):
    folder.rename(folder.with_name(rng.choice(["global_step_7", "global_step_02", "global_step_20"])))


def wrong_tensors(rng, folder):
    """A file as another program writes it: other shapes or dtypes in as many bytes."""
    file = one_file(rng, folder, ".safetensors")
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = rng.choice([n for n in header if n != "__metadata__"])
    if rng.random() < 0.5:
        header[name]["shape"] = [*header[name]["shape"], 1]
    else:
        header[name]["dtype"] = {"F32": "I32", "F64": "I64", "BF16": "F16", "I64": "F64", "BOOL": "U8"}[
            header[name]["dtype"]
        ]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def harmless(rng, folder):
    """Damage that people and tools do to good checkpoints."""
    kind = rng.choice(["touch", "note", "hidden", "moved", "link"])
    if kind == "touch":
        os.utime(one_file(rng, folder))
    elif kind == "note":
        (folder / "NOTES.md").write_text("the good one")
    elif kind == "hidden":
        (folder / "actor" / ".cache.json").write_text("{}")
    elif kind == "moved":
        elsewhere = folder.parent / "elsewhere" / folder.name
        elsewhere.parent.mkdir()
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    else:
        file = one_file(rng, folder)
        file.rename(folder / "kept")
        file.symlink_to(folder / "kept")


KINDS = (
    flip, cut, append, zero_block, delete, rename, swap, mix, edit_json, break_json, not_a_file, add_file, drop_role, empty,
    other_step, wrong_tensors, harmless,
)  # fmt: skip


def outcome(rng, root: Path, content: State, saved) -> tuple[str, str]:
    """(kind of damage, outcome) for the newer of the two checkpoints in `content`, or for the only one: "whole" (it is loaded,
    and equals the saved state `saved`), "older one taken" or "refused". Raises AssertionError for a checkpoint that loads
    as another state, and any error that is no sentence."""
    put(content, root)
    kind = rng.choice(KINDS)
    before = _bytes_by_name(root / "global_step_2")
    kind(rng, root / "global_step_2")
    alone = rng.random() < 0.5
    if alone:
        shutil.rmtree(root / "global_step_1")
    store = CheckpointStore(root)
    said = newest = None
    try:
        newest = store.find()
    except CheckpointError as error:
        said = str(error)
    if said is not None:
        assert str(root) in said
        assert alone, f"{kind.__name__}: the older one was there: {said}"
        return kind.__name__, "refused"
    assert newest is not None, f"{kind.__name__}: a run would start afresh without a word"
    loaded = read_checkpoint(newest)
    if newest.name == "global_step_1":
        assert find_damage(root / "global_step_2") is not None
        return kind.__name__, "older one taken"
    assert kind is harmless or _bytes_by_name(root / "global_step_2") == before, (
        f"{kind.__name__} is loaded as if whole"
    )
    assert (loaded.step, loaded.trainer_state) == saved[:2], kind.__name__
    assert _same(loaded.roles["actor"], saved[2]), kind.__name__
    return kind.__name__, "whole"


def two_checkpoints(root: Path):
    """Saves steps 1 and 2 under `root`; returns what `outcome` wants of step 2."""
    for step in (1, 2):
        CheckpointStore(root).save(
            step, make_roles(step), {"step": step, "next_ordinal": 8 * step, "kl": {"value": 0.1}}
        )
    loaded = read_checkpoint(root / "global_step_2")
    return loaded.step, loaded.trainer_state, loaded.roles["actor"]


def _bytes_by_name(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in _files(folder)}


def _same(one: EngineState, other: EngineState) -> bool:
    def raw(tensors):
        return {
            n: (t.dtype, t.shape, whole(t).contiguous().reshape(-1).view(torch.uint8).tolist())
            for n, t in tensors.items()
        }

    return (raw(one.model), raw(one.optimizer), one.extra) == (raw(other.model), raw(other.optimizer), other.extra)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)


def forged(rng, root: Path) -> tuple[str, str]:
    """(kind, outcome) of a checkpoint with right digests and tensors of another model: a run must refuse it."""
    net = Net()
    state = TrainedState(net, Parameters(net, None), None, None, "", Rounding())
    model = {name: value.clone() for name, value in state.save({}).model.items()}
    name = rng.choice(sorted(model))
    kind = rng.choice(["shape", "number format", "missing", "superfluous", "renamed"])
    if kind == "shape":
        model[name] = rng.choice([model[name].unsqueeze(0), model[name].reshape(-1)[:-1], torch.zeros(0)])
    elif kind == "number format":
        model[name] = model[name].to(rng.choice([torch.bfloat16, torch.float64, torch.int32, torch.bool]))
    elif kind == "missing":
        del model[name]
    elif kind == "superfluous":
        model[f"{name}.more"] = torch.ones(2)
    else:
        model[f"x{name}"] = model.pop(name)
    shutil.rmtree(root, ignore_errors=True)
    store = CheckpointStore(root)
    path = store.save(1, {"actor": RoleCheckpoint(EngineState(model, {}, {}), write_config, ("model",))}, {})
    assert store.find() == path
    try:
        state.load(read_checkpoint(path, {"actor": ["model"]}).roles["actor"])
    except CheckpointError:
        return f"other tensors: {kind}", "refused"
    raise AssertionError(f"{kind} of {name} is loaded as if it fitted")


def cases(rng, count, folder):
    """(kind of damage, outcome) of `count` checkpoints. Every tenth is of another model, and its digests are right."""
    saved = two_checkpoints(folder / "saved")
    content = state_of(folder / "saved")
    for number in range(count):
        yield outcome(rng, folder / "run", content, saved) if number % 10 else forged(rng, folder / "forged")
