"""Stop a run, start it again: the same metrics and weights, bit for bit. (Killed runs: tests/benchmarks/test_chaos.py.)"""

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.forked import Forked
from tests.run.conftest import Run, merge
from tests.runtime.ranks import wait_for_steps
from tests.slow import slow
from verl.checkpoint.background import BackgroundStore
from verl.checkpoint.store import CheckpointStore
from verl.errors import CheckpointError, FolderLostError, InterruptedRun
from verl.manifest import MANIFEST, find_damage, record_of, write_manifest
from verl.programs.ppo_program import PPOProgram
from verl.rollout.native.compiled.library import kernels
from verl.rollout.native.drafts.costs import StepCosts
from verl.rollout.native.drafts.texts import Guess, TextIndex
from verl.run.loop import Loop, StopRequested, StopSignal
from verl.tracking.ledger.reader import Ledger

STEPS = 4
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.shuffle=True",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
)


def weights(run: Run, step: int = STEPS) -> dict[str, bytes]:
    with safe_open(run.folder / f"global_step_{step}/actor/huggingface/model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}


@pytest.fixture
def unbroken(shared_run, tiny_overrides):
    return shared_run(tiny_overrides, *SETTINGS)


@pytest.mark.parametrize("in_background", [False, True])
def test_stopped_and_resumed_run_equals_the_unbroken_one(tiny_run, unbroken, in_background):
    saving = f"actor_rollout_ref.actor.checkpoint.async_save={in_background}"
    tiny_run(*SETTINGS, saving, "trainer.total_training_steps=2", folder="broken")
    # the learning-rate schedule is constant, so two short runs are one long one
    resumed = tiny_run(*SETTINGS, saving, folder="broken")
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed) == weights(unbroken)


@pytest.mark.skipif(kernels() is None, reason="the decoding kernels are not compiled for this processor")
def test_a_resumed_run_with_drafts_equals_the_unbroken_one_without(tiny_run, unbroken, monkeypatch):
    monkeypatch.setattr(StepCosts, "of", lambda self, num_tokens: 1.0)  # all drafts are tried
    monkeypatch.setattr(TextIndex, "guess", lambda self, name, end: Guess(end[-1], 4, 1.0))
    settings = (*SETTINGS, "actor_rollout_ref.rollout.max_num_seqs=2")
    settings = (*settings, "actor_rollout_ref.rollout.speculative.methods=[ngram,history]")
    tiny_run(*settings, "trainer.total_training_steps=2", folder="broken")
    resumed = tiny_run(*settings, folder="broken")
    assert weights(resumed) == weights(unbroken)
    metrics = [json.loads(line) for line in (resumed.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("rollout/num_drafts", 0) for row in metrics) > 0


@pytest.mark.parametrize("has_checkpoint", [True, slow(False)])
def test_a_template_that_writes_the_time_reads_the_same_after_a_resume(tiny_run, tmp_path, monkeypatch, has_checkpoint):
    """Once, strftime_now of a resumed run gave other prompts, and other weights."""
    from verl.models.tiny import CHAT_TEMPLATE

    template = tmp_path / "template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y %H:%M:%S ') }}" + CHAT_TEMPLATE)
    settings = (*SETTINGS, "data.max_prompt_length=80", f"actor_rollout_ref.model.custom_chat_template={template}")
    clock = ["2024-01-01T00:00:00"]
    monkeypatch.setattr("verl.run.state.now", lambda: clock[0])
    unbroken = tiny_run(*settings, folder="unbroken")
    tiny_run(*settings, f"trainer.total_training_steps={2 if has_checkpoint else 1}", folder="broken")
    if not has_checkpoint:
        shutil.rmtree(unbroken.folder.parent / "broken" / "global_step_1")
        (unbroken.folder.parent / "broken" / "latest_checkpointed_iteration.txt").unlink()
    clock[0] = "2025-12-31T23:59:59"
    resumed = tiny_run(*settings, folder="broken")
    assert "01 Jan 2024 00:00:00" in (resumed.folder / f"samples/train/step_{STEPS:06d}.jsonl").read_text()
    assert weights(resumed) == weights(unbroken)
    over = tiny_run(*settings, "trainer.resume_mode=disable", "trainer.total_training_steps=1", folder="broken")
    assert "31 Dec 2025 23:59:59" in (over.folder / "samples/train/step_000001.jsonl").read_text()


def test_a_finished_run_is_left_as_it_is_and_says_what_to_do(tiny_run, caplog):
    settings = (
        "trainer.total_training_steps=1 trainer.save_freq=1 trainer.test_freq=1 trainer.val_before_train=True".split()
    )
    settings += ["actor_rollout_ref.actor.checkpoint.save_contents=[model]"]
    run = tiny_run(*settings)
    before = json.loads((run.folder / "summary.json").read_text())
    assert before["reward_after"] is not None
    tiny_run(*settings, "actor_rollout_ref.actor.optim.lr=0.001")
    assert json.loads((run.folder / "summary.json").read_text()) == before
    assert "taken all of its 1 steps: nothing is left to do" in caplog.text
    assert "Optimizer and learning rate of actor start over" in caplog.text
    assert "resumes with changed settings: actor_rollout_ref.actor.optim.lr: 0.002 -> 0.001." in caplog.text


def test_without_a_validation_after_training_there_is_no_reward_after(tiny_run):
    run = tiny_run("trainer.total_training_steps=1", "trainer.val_before_train=True", "trainer.test_freq=-1")
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["reward_before"] is not None
    assert summary["reward_after"] is None


def test_interrupt_saves_and_says_how_to_go_on(unbroken, tiny_run, tiny_overrides, tmp_path):
    folder, settings = tmp_path / "interrupted", merge(SETTINGS, ["trainer.save_freq=-1"])
    overrides = merge([*tiny_overrides, f"trainer.default_local_dir={folder}"], settings)
    process = Forked("verl.trainer.main_ppo", *overrides, env=os.environ)
    wait_for_steps(folder / "metrics.jsonl", 1, timeout_s=60)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("the run had ended before the signal came")
    assert process.returncode == 130
    assert "Run the same command again" in " ".join(output.split())
    rows = [row for row in tiny_run(*settings, folder="interrupted").repeatable if row["step"] > 0]
    assert rows == [row for row in unbroken.repeatable if row["step"] > 0]


@pytest.mark.parametrize(("place", "max_bytes"), [(-5, 1 << 20), (-5, 0), (12, 0)])
def test_damaged_checkpoint_falls_back_to_the_one_before(
    tiny_run, tiny_overrides, shared_run, unbroken, tmp_path, monkeypatch, caplog, place, max_bytes
):
    """Damaged bytes are noticed before the load, or in tensors of more than `max_bytes` during it."""
    monkeypatch.setattr("verl.run.state.SMALL_BYTES", max_bytes)
    saved = shared_run(tiny_overrides, *SETTINGS, "trainer.total_training_steps=3")
    folder = shutil.copytree(saved.folder, tmp_path / "damaged")
    file = folder / "global_step_3/actor/huggingface/model.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    resumed = tiny_run(*SETTINGS, folder="damaged")
    assert "global_step_3 is damaged and not used: actor/huggingface/model.safetensors does not have" in caplog.text
    assert resumed.repeatable == unbroken.repeatable
    assert weights(resumed) == weights(unbroken)


def test_a_failed_save_does_not_keep_a_stopped_run_from_saving(tiny_run, tmp_path, monkeypatch, caplog):
    """The save of step 1 fails in the background, and the run is asked to stop before it knows of that."""
    commit, folder = CheckpointStore.commit, tmp_path / "stopped"

    def full_disk(self, *arguments):
        monkeypatch.setattr(CheckpointStore, "commit", commit)
        raise OSError(errno.ENOSPC, "No space left on device")

    def stops_after_a_step(self):
        metrics = folder / "metrics.jsonl"
        if metrics.exists() and metrics.read_text():
            raise StopRequested

    monkeypatch.setattr(CheckpointStore, "commit", full_disk)
    monkeypatch.setattr(StopSignal, "check", stops_after_a_step)
    with pytest.raises(InterruptedRun, match="after step 1 of 4; saved to"):
        tiny_run(*SETTINGS, "actor_rollout_ref.actor.checkpoint.async_save=True", folder="stopped")
    assert "No space left on device" in caplog.text
    assert CheckpointStore(folder).find() == folder / "global_step_1"


def test_a_second_ctrl_c_waits_for_no_save(tiny_run, monkeypatch):
    closed = []
    monkeypatch.setattr(BackgroundStore, "close", lambda self: closed.append(self))
    for error in (KeyboardInterrupt, ValueError):

        def step(self, step, error=error):
            raise error

        monkeypatch.setattr(Loop, "_step", step)
        with pytest.raises(error):
            tiny_run("actor_rollout_ref.actor.checkpoint.async_save=True")
    assert len(closed) == 1


def removed(folder):
    shutil.rmtree(folder)


def replaced_by_a_link(folder):
    folder.rename(folder.with_name("moved"))
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.fixture
def lose_folder(around, tmp_path, monkeypatch):
    """The folder `lost` is changed by `how` while step 2 trains, or before the first step."""

    def lose(how, step=2):
        def loses(train, self, number):
            result = train(self, number)
            if number == step:
                monkeypatch.undo()
                how(tmp_path / "lost")
            return result

        around(PPOProgram, "step", loses)

    return lose


@pytest.mark.parametrize(("how", "in_background"), [(removed, False), (replaced_by_a_link, True)])
def test_a_run_whose_folder_is_lost_saves_elsewhere(tiny_run, unbroken, lose_folder, how, in_background):
    saving = f"actor_rollout_ref.actor.checkpoint.async_save={in_background}"
    lose_folder(how)
    with pytest.raises(FolderLostError, match=r"lost was re(moved|placed)") as error:
        tiny_run(*SETTINGS, saving, folder="lost")
    rescued = Path(re.search(r"after step 2 is in (\S+): set trainer\.default_local_dir to it", str(error.value))[1])
    assert not list((rescued.parent / "lost").glob("*"))  # nothing was begun again there
    resumed = tiny_run(*SETTINGS, saving, folder=rescued.name)
    assert weights(resumed) == weights(unbroken)
    with Ledger.open(resumed.folder) as ledger, Ledger.open(unbroken.folder) as other:
        assert ledger.multiset_of_trained() == other.multiset_of_trained()


def test_a_folder_that_is_lost_at_the_end_is_no_success(tiny_run, lose_folder):
    lose_folder(removed, step=STEPS)
    with pytest.raises(FolderLostError, match=f"after step {STEPS} is in "):
        tiny_run(*SETTINGS, "trainer.save_freq=-1", folder="lost")


def test_a_checkpoint_with_an_impossible_state_is_refused(tiny_run):
    """Its digests are right."""
    folder = tiny_run(*SETTINGS, "trainer.total_training_steps=1").folder
    saved = folder / "global_step_1"
    state = json.loads((saved / "trainer_state.json").read_text())
    for changes in ({"step": -(10**30)}, {"weight_version": 0.5}, {"samples": {**state["samples"], "cursor": -1}}):
        (saved / "trainer_state.json").write_text(json.dumps({**state, **changes}))
        files = [p for p in saved.rglob("*") if p.is_file() and p.name != MANIFEST]
        (saved / MANIFEST).unlink()
        write_manifest(saved, 1, {p.relative_to(saved).as_posix(): record_of(p) for p in files})
        assert find_damage(saved) is None
        words = rf"trainer_state\.json has {next(iter(changes))}=.*so verl train has not saved it"
        with pytest.raises(CheckpointError, match=words):
            tiny_run(*SETTINGS)
