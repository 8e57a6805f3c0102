"""Saving, finding and loading; damage; retention."""

import errno
import json
import os
import shutil
from collections import namedtuple
from hashlib import blake2b

import numpy as np
import pytest
import torch

from tests.checkpoint.states import assert_same_state, make_roles, make_state, read_checkpoint, write_config
from verl.checkpoint.store import CheckpointStore, RoleCheckpoint
from verl.checkpoint.tensor_files import read_tensors, write_tensors
from verl.errors import CheckpointError
from verl.manifest import FileRecord, find_damage, record_of, write_file
from verl.parallel import digests

pytestmark = pytest.mark.seed("F1")


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run")


def test_two_step_round_trip_is_bit_exact(store):
    trainer_state = {"step": 3, "kl": 0.1 + 0.2, "text": "ü", "list": [1, None], "nan": float("inf")}
    assert store.find() is None
    path = store.save(3, make_roles(3, "actor", "critic"), trainer_state)
    first = read_checkpoint(store.find())
    assert (first.step, first.trainer_state) == (3, trainer_state)
    again = {name: RoleCheckpoint(state, write_config) for name, state in first.roles.items()}
    second_path = store.save(4, again, first.trainer_state)
    second = read_checkpoint(store.find())
    assert second.step == 4
    for i, name in enumerate(("actor", "critic")):
        assert_same_state(first.roles[name], make_state(3 + i))
        assert_same_state(second.roles[name], make_state(3 + i))
    for file in ("actor/optimizer.safetensors", "critic/huggingface/model.safetensors", "actor/extra.json"):
        assert (path / file).read_bytes() == (second_path / file).read_bytes()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 5, 1 << 20, (1 << 20) + 1, (17 << 20) + 3])
def test_a_digest_is_of_the_digests_of_each_mebibyte(tmp_path, monkeypatch, num_bytes, compiled):
    content = np.random.default_rng(0).bytes(num_bytes)
    leaves = [blake2b(content[at : at + (1 << 20)], digest_size=32) for at in range(0, num_bytes, 1 << 20)]
    if not compiled:
        monkeypatch.setattr(digests, "_compiled", lambda: None)
    record = write_file(tmp_path / "file", [content[:3], memoryview(content)[3:]])
    joined = blake2b(b"".join(leaf.digest() for leaf in leaves), digest_size=32)
    assert record == FileRecord(num_bytes, (leaves[0] if len(leaves) == 1 else joined).hexdigest())
    assert record_of(tmp_path / "file") == record
    assert (tmp_path / "file").read_bytes() == content


def test_layout(store):
    path = store.save(20, make_roles(0, "actor", "critic"), {})
    files = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
    role = ["extra.json", "huggingface/config.json", "huggingface/model.safetensors", "huggingface/tokenizer.json"]
    role += ["optimizer.safetensors"]
    assert files == [f"actor/{f}" for f in role] + [f"critic/{f}" for f in role] + [
        "manifest.json",
        "trainer_state.json",
    ]
    assert path.name == "global_step_20"
    assert (store.root / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert not [p for p in store.root.iterdir() if p.name.startswith(".")]
    # the weights are float32 whatever the module computed in, and the config says so
    assert json.loads((path / "actor/huggingface/config.json").read_text())["dtype"] == "float32"


def test_safetensors_files_are_what_the_library_reads(tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = make_state(1).optimizer
    write_tensors(tmp_path / "ours.safetensors", tensors)
    loaded = load_file(tmp_path / "ours.safetensors")
    save_file(tensors, tmp_path / "theirs.safetensors")
    theirs = read_tensors(tmp_path / "theirs.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(theirs[name], tensor)


@pytest.mark.parametrize("contents", [("model",), ("hf_model",), ("model", "extra"), ("optimizer", "extra"), ()])
def test_save_contents(store, contents):
    path = store.save(1, make_roles(1, contents=contents), {})
    assert (path / "actor/huggingface/model.safetensors").exists() == bool({"model", "hf_model"} & set(contents))
    assert (path / "actor/optimizer.safetensors").exists() == ("optimizer" in contents)
    assert (path / "actor/extra.json").exists() == ("extra" in contents)
    assert (path / "actor/huggingface/config.json").exists()
    loaded = read_checkpoint(path, {"actor": contents}).roles["actor"]
    assert bool(loaded.optimizer) == ("optimizer" in contents)
    if set(contents) != {"model", "optimizer", "extra"}:
        with pytest.raises(CheckpointError, match="saved without"):
            read_checkpoint(path)


def test_load_contents(store):
    path = store.save(1, make_roles(1), {})
    state = read_checkpoint(path, {"actor": ["model"]}).roles["actor"]
    assert state.model
    assert (state.optimizer, state.extra) == ({}, {})


def all_files(path):
    return [f for f in sorted(path.rglob("*")) if f.is_file()]


def test_a_flipped_byte_in_any_file_is_an_error(store):
    path = store.save(2, make_roles(2), {"step": 2})
    for file in all_files(path):
        content = file.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1}:
            broken = bytearray(content)
            broken[place] ^= 1
            file.write_bytes(broken)
            damage = find_damage(path)
            assert damage is not None, (file, place)
            assert file.name in damage
        file.write_bytes(content)
        assert find_damage(path) is None


def test_every_byte_of_the_manifest_counts(store):
    path = store.save(2, make_roles(2), {"step": 2})
    content = (path / "manifest.json").read_bytes()
    for place in range(len(content)):
        broken = bytearray(content)
        broken[place] ^= 1
        (path / "manifest.json").write_bytes(broken)
        assert find_damage(path), place


@pytest.mark.parametrize("how", ["missing", "truncated", "longer", "empty"])
def test_missing_and_cut_files_are_errors(store, how):
    path = store.save(2, make_roles(2), {"step": 2})
    for file in all_files(path):
        content = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes({"truncated": content[:-1], "longer": content + b" ", "empty": b""}[how])
        assert file.name in (find_damage(path) or ""), file
        assert find_damage(path, max_bytes=0), file
        file.write_bytes(content)


def test_damaged_one_is_named_and_the_next_older_taken(store, caplog):
    for step in (1, 2, 3):
        store.save(step, make_roles(step), {"step": step})
    file = store.path(3) / "actor/optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    file.write_bytes(content)
    (store.path(2) / "manifest.json").unlink()
    assert store.find() == store.path(1)
    assert "global_step_3 is damaged" in caplog.text
    assert "actor/optimizer.safetensors does not have the content" in caplog.text
    assert "save did not finish" in caplog.text
    assert f"Resuming from {store.path(1)}" in caplog.text


def test_all_damaged_does_not_start_afresh_silently(store):
    path = store.save(1, make_roles(1), {})
    (path / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is missing.*resume_mode=disable"):
        store.find()
    assert store.find("disable") is None


def test_resume_path(store, tmp_path):
    for step in (1, 2):
        store.save(step, make_roles(step), {"step": step})
    assert store.find("resume_path", str(store.path(1))) == store.path(1).resolve()
    with pytest.raises(CheckpointError, match="resume_from_path"):
        store.find("resume_path", None)
    with pytest.raises(CheckpointError, match="global_step_2, global_step_1"):
        store.find("resume_path", str(tmp_path / "global_step_9"))
    with pytest.raises(CheckpointError, match="not a folder named global_step_N"):
        store.find("resume_path", str(store.root))
    (store.path(1) / "actor/extra.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"damaged: actor/extra\.json"):
        store.find("resume_path", str(store.path(1)))
    shutil.move(store.path(2), tmp_path / "global_step_7")
    with pytest.raises(CheckpointError, match="step 2 under another name"):
        store.find("resume_path", str(tmp_path / "global_step_7"))


def test_digits_of_other_scripts_make_no_step(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "global_step_9\N{ARABIC-INDIC DIGIT THREE}").mkdir()
    store.save(1, make_roles(1), {})
    assert store.candidates() == [1]


def test_retention_counts_on_the_disk(tmp_path):
    for step in (5, 10, 15):
        CheckpointStore(tmp_path, keep=2).save(step, make_roles(step), {})  # each save is a restarted run
    assert CheckpointStore(tmp_path).candidates() == [15, 10]
    assert all(find_damage(tmp_path / f"global_step_{s}") is None for s in (10, 15))


def test_retention_does_not_count_damaged_ones(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, make_roles(1), {})
    store.save(2, make_roles(2), {})
    (tmp_path / "global_step_2/trainer_state.json").unlink()
    store.save(3, make_roles(3), {})
    assert store.candidates() == [3, 2, 1]
    store.save(4, make_roles(4), {})
    assert store.candidates() == [4, 3, 2]


def test_retention_reads_a_damaged_one_once(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=3)
    store.save(1, make_roles(1), {})
    (tmp_path / "global_step_1/trainer_state.json").unlink()
    for step in (2, 3):
        store.save(step, make_roles(step), {})
    assert caplog.text.count("global_step_1 is damaged and does not count as kept") == 1


@pytest.mark.parametrize("keep", [None, 0, -1])
def test_keep_all(tmp_path, keep):
    store = CheckpointStore(tmp_path, keep=keep)
    for step in range(1, 5):
        store.save(step, make_roles(step), {})
    assert store.candidates() == [4, 3, 2, 1]


def test_removal_that_fails_does_not_hurt(tmp_path, around, caplog):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, make_roles(1), {})

    def refuse(original, path, ignore_errors=False, **more):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied")
        original(path, ignore_errors, **more)

    around(shutil, "rmtree", refuse)
    assert store.save(2, make_roles(2), {}) == store.path(2)
    assert "was not removed" in caplog.text
    assert CheckpointStore(tmp_path).find() == store.path(2)


def test_saving_a_step_again_replaces_it(store):
    store.save(2, make_roles(2), {"try": 1})
    store.save(2, make_roles(9), {"try": 2})
    loaded = read_checkpoint(store.find())
    assert loaded.trainer_state == {"try": 2}
    assert_same_state(loaded.roles["actor"], make_state(9))
    assert [p.name for p in store.root.glob("*global*")] == ["global_step_2"]


def test_checkpoints_of_an_earlier_run_are_set_aside(store, caplog):
    for step in (5, 10):
        store.save(step, make_roles(step), {"run": 1})
    store.save(2, make_roles(2), {"run": 2})  # started again in the same folder
    assert store.candidates() == [2]
    assert read_checkpoint(store.find()).trainer_state == {"run": 2}
    (store.root / "global_step_3" / "actor").mkdir(parents=True)  # of another release, without a manifest
    for step in (2, 3):
        CheckpointStore(store.root, keep=1).save(step, make_roles(step), {"run": 3})
    aside = sorted(p.name.split("_", 2)[2] for p in store.root.glob("superseded_*"))
    assert aside == ["global_step_10", "global_step_2", "global_step_3", "global_step_5"]
    assert "earlier run" in caplog.text


def test_a_checkpoint_of_the_existing_release_is_named(store):
    (store.root / "global_step_5/actor").mkdir(parents=True)
    (store.root / "global_step_5/actor/model_world_size_8_rank_0.pt").write_bytes(b"theirs")
    with pytest.raises(
        CheckpointError, match=r"model_world_size_8_rank_0\.pt is of another release .*verl.model_merger"
    ):
        store.find()


def test_no_room_is_said_before_anything_is_written(store, monkeypatch):
    store.save(1, make_roles(1), {})
    before = sorted(p.name for p in store.root.iterdir())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    with pytest.raises(CheckpointError, match=r"needs 0\.07 GB.*0\.00 GB free; nothing was written"):
        store.save(2, make_roles(2), {})
    assert sorted(p.name for p in store.root.iterdir()) == before


def test_a_disk_that_lies_is_an_error_before_the_checkpoint_counts(store, around):
    store.save(1, make_roles(1), {})
    from verl.checkpoint import tensor_files as module

    def corrupted(write_model, folder, tensors):
        records = write_model(folder, tensors)
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        return records

    around(module, "write_model", corrupted)
    with pytest.raises(CheckpointError, match=r"Checkpoint 2 was not kept.*model\.safetensors"):
        store.save(2, make_roles(2), {})
    assert store.candidates() == [1]


def test_a_folder_that_takes_the_place_of_the_run_meanwhile_gets_no_file(store, monkeypatch):
    from verl.checkpoint import store as module

    def renamed(source, target):
        source.rename(target)
        store.root.rename(store.root.with_name("moved"))
        store.root.mkdir()

    monkeypatch.setattr(module, "rename", renamed)
    with pytest.raises(CheckpointError, match="Checkpoint 1 could not be saved"):
        store.save(1, make_roles(1), {})
    assert not list(store.root.iterdir())


def test_state_that_json_cannot_hold(store):
    with pytest.raises(CheckpointError, match="trainer's state cannot be saved as JSON"):
        store.save(1, make_roles(1), {"x": object()})
    assert store.candidates() == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EPERM, "change its permissions and attributes"),
        (errno.EDQUOT, "Free some of your quota"),
        (errno.EBADF, "disk"),
    ],
)
def test_the_advice_fits_the_error_of_the_system(number, advice, store, monkeypatch):
    def refuse(self, *arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(CheckpointStore, "_put_in_place", refuse)
    with pytest.raises(CheckpointError) as error:
        store.save(1, make_roles(1), {})
    assert advice in str(error.value)
    assert "Free some space" not in str(error.value)


def test_run_folder_that_does_not_exist_yet(tmp_path):
    store = CheckpointStore(tmp_path / "a" / "b")
    assert store.candidates() == []
    assert store.find() is None
    store.save(1, make_roles(1), {})
    assert store.find() == store.path(1)


def test_a_disk_that_is_full_while_the_tokenizer_is_written(store):
    """The library reports it as a plain Exception."""

    def full(folder):
        raise Exception("No space left on device (os error 28)")

    with pytest.raises(
        CheckpointError, match="Checkpoint 1 could not be saved .*: No space left on device .* Free some space"
    ):
        store.save(1, {"actor": RoleCheckpoint(make_state(1), full)}, {})
    assert list(store.root.iterdir()) == []
    assert store.save(1, make_roles(1), {}) == store.find()
