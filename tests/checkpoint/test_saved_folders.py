"""Everything that verl saves is compared with its manifest when it is loaded, and is on the disk when the save returns. More:
benchmarks/fuzz.py saved-folders."""

import os
import random
from collections import Counter

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import verl
from tests.api.session_loop import KEYS
from tests.checkpoint.saved_folders import every_file
from tests.damage import cut, flip
from verl.checkpoint.export import export
from verl.errors import CheckpointError, ModelError
from verl.manifest import MANIFEST, new_file, new_folder


def test_a_flipped_bit_a_cut_and_a_missing_file_are_named(tmp_path):
    outcomes = Counter(every_file(random.Random(0), tmp_path, (flip, cut, None)))
    assert {kind for kind, _ in outcomes} >= {"session", "export", "model of a checkpoint", "adapter"}
    unnamed = {kind: n for (kind, what), n in outcomes.items() if what != "named"}
    assert all(n == 1 for n in unnamed.values()), unnamed
    assert set(unnamed) <= {"export", "gguf", "service samplers"}


@pytest.fixture
def synced(monkeypatch):
    """The content of each file and folder when it was last synced."""
    contents = {}

    def content(path):
        return sorted(os.listdir(path)) if os.path.isdir(path) else os.stat(path).st_size

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        contents[os.stat(path).st_ino] = content(path)

    monkeypatch.setattr(os, "fsync", fsync)
    return lambda path: contents.get(os.stat(path).st_ino) == content(path)


def test_a_session_and_an_export_are_on_the_disk_when_the_call_returns(tiny_llama, tmp_path, synced):
    with verl.Session(tiny_llama, config=KEYS) as session:
        saved = session.save(tmp_path / "new" / "session")
    exported = export(tiny_llama, tmp_path / "exports" / "model")
    for top in (saved, exported):
        places = [top, *top.rglob("*"), *list(top.parents)[:2]]
        assert not [str(place) for place in places if not synced(place)]


def test_an_export_is_read_by_other_programs_and_a_changed_one_says_what_to_do(tiny_llama, tmp_path):
    out = export(tiny_llama, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(out)
    AutoTokenizer.from_pretrained(out)
    (out / "generation_config.json").write_text('{"eos_token_id": 1}')
    with pytest.raises(ModelError, match=r"generation_config\.json .* if you changed it on purpose, remove manifest"):
        export(out, tmp_path / "again")
    (out / MANIFEST).unlink()
    assert export(out, tmp_path / "again").is_dir()


def test_a_session_of_an_earlier_release_loads_with_a_warning(tiny_llama, tmp_path, caplog):
    with verl.Session(tiny_llama, config=KEYS) as session:
        saved = session.save(tmp_path / "session")
        (saved / MANIFEST).unlink()
        with pytest.raises(CheckpointError, match="manifest.json is missing"):
            session.load(saved)
        (saved / "session.json").write_text('{"num_prompts": 0, "version": 0}')
        session.load(saved)
    assert "earlier release, without digests" in caplog.text


@pytest.mark.parametrize("new", [new_folder, new_file])
def test_a_write_that_fails_leaves_nothing(tmp_path, new):
    def write():
        with new(tmp_path / "a"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert not list(tmp_path.iterdir())


def test_a_manifest_of_another_program_is_ignored(tiny_llama, tmp_path):
    out = export(tiny_llama, tmp_path / "out")
    (out / MANIFEST).write_text('{"files": {"config.json": 3}, "version": 1}')
    assert export(out, tmp_path / "again").is_dir()


def test_a_manifest_that_was_cut_anywhere_is_damage(tiny_llama, tmp_path):
    manifest = export(tiny_llama, tmp_path / "out") / MANIFEST
    text = manifest.read_text()
    for length in (0, 1, 8, 40, 100, len(text) - 1):  # the first digest is behind the 60th character
        manifest.write_text(text[:length])
        with pytest.raises(ModelError, match=r"manifest\.json (cannot be read|was changed)"):
            export(manifest.parent, tmp_path / "again")
