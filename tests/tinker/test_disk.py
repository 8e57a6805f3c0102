"""The disk of the service: full, cleaned up, shared between checkpoints and samplers, and locked against a second service."""

import errno
import json
import os
import time

import httpx
import pytest
import torch

from tests.json_lines import read_lines

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types  # noqa: E402

from tests.processes import wait_until  # noqa: E402
from tests.tinker.data import datum  # noqa: E402
from verl.cli.main import main  # noqa: E402
from verl.errors import CheckpointError  # noqa: E402
from verl.models.adapter_weights import AdapterWeights  # noqa: E402
from verl.tinker import checkpoints, journal, service  # noqa: E402
from verl.tinker.journal import COVERED, AcceptedRequest, RequestJournal  # noqa: E402
from verl.tinker.records import RefusedRequest  # noqa: E402
from verl.tinker.snapshots import Snapshots  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-2)
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])


def train(trainer):
    trainer.forward_backward([datum(0)], "cross_entropy")
    return trainer.optim_step(ADAM).result()


def test_a_request_waits_while_the_disk_takes_no_journal(served):
    trainer = served.trainer()
    train(trainer)
    file = served.service.journal._file
    (pages,) = file.execute("PRAGMA page_count").fetchone()
    file.execute(f"PRAGMA max_page_count = {pages}")
    try:
        future = trainer.forward_backward([datum(n, length=60) for n in range(200)], "cross_entropy")
        wait_until(lambda: served.service.paused)
        assert "full" in served.service.paused
        answer = httpx.post(f"{served.url}/api/v1/create_session", content=b'{"tags": [], "sdk_version": "0"}')
        assert answer.status_code == 503
        assert "disk does not take its journal" in answer.json()["detail"]
    finally:
        file.execute("PRAGMA max_page_count = 1073741823")
    assert len(future.result().loss_fn_outputs) == 200
    assert trainer.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_save_on_a_full_disk_fails_with_a_sentence_and_training_continues(served, monkeypatch):
    trainer = served.trainer()
    train(trainer)

    def full(path, tensors):
        path.write_bytes(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_tensors", full)
        with pytest.raises(tinker.RequestFailedError, match="disk is full"):
            trainer.save_state("a").result()
    assert train(trainer).metrics["grad_norm"] > 0
    assert trainer.save_state("a").result().path.endswith("weights/a")


def test_a_sampler_outlives_its_checkpoint_and_a_checkpoint_its_time(served, monkeypatch):
    trainer, client, store = served.trainer(), served.client(), served.service.checkpoints
    train(trainer)
    path = trainer.save_weights_for_sampler("a", ttl_seconds=3600).result().path
    sampler = client.create_sampling_client(model_path=path).result()
    before = sampler.compute_logprobs(PROMPT).result()
    store.remove_expired()
    assert store.find(path).expires == pytest.approx(time.time() + 3600, abs=60)
    monkeypatch.setattr(checkpoints.time, "time", lambda now=time.time: now() + 3601)
    store.remove_expired()
    assert not list(store.listed(trainer.model_id))
    snapshots = served.service.snapshots
    served.service.bases.bench().sampling._held.clear()
    assert sampler.compute_logprobs(PROMPT).result() == before
    assert len(list(snapshots.root.glob("*.safetensors"))) >= 1
    for name in list(served.service.samplers):
        served.service.samplers[name].last_use -= service.IDLE_SAMPLER_S + 1
    served.service.sweep()
    assert not list(snapshots.root.glob("*.safetensors"))


def test_a_model_has_a_run_folder(served, tmp_path, capsys):
    trainer = served.trainer()
    for _ in range(2):
        train(trainer)
    folder = served.service.checkpoints.root / trainer.model_id
    assert main(["show", str(folder)]) == 0
    assert "at step 2" in capsys.readouterr().out
    assert main(["view", str(folder), "--export", str(tmp_path / "pages")]) == 0
    assert list((tmp_path / "pages").rglob("*.html"))
    (row,) = map(json.loads, (folder / "samples/train/step_000002.jsonl").read_text().splitlines())
    assert len(row["response_ids"]) == len(row["train_log_probs"]) == len(row["weights"])
    spans = read_lines(folder / "spans.jsonl")
    assert [span["name"] for span in spans if span["step"] == 2] == ["forward_backward", "optim_step"]
    timeline = read_lines(folder / "timeline.jsonl")
    assert timeline[-1]["phases"]["update"] > 0


def test_weights_are_shared_with_and_without_links(tmp_path, monkeypatch):
    store, file = Snapshots(tmp_path), tmp_path / "adapter"
    adapter = AdapterWeights(2, {"layer.lora_A": torch.ones(2, 3), "layer.lora_B": torch.ones(4, 2)})
    digest = store.write(adapter)
    shared = store.root / f"{digest}.safetensors"
    file.write_bytes(shared.read_bytes())
    for number, link in enumerate((os.link, None)):
        shared.unlink()
        if link is None:
            monkeypatch.setattr(os, "link", lambda *names: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
        store.link(file, digest)
        assert store.load(digest).rank == 2, number
    store.remove_unused(set())
    with pytest.raises(RefusedRequest, match="not on the server's disk"):
        store.load(digest)


def accepted(seq_id, route="optim_step"):
    return AcceptedRequest(f"m/{seq_id}", "s", "m", seq_id, route, "local", "digest", b"body")


def test_a_journal_retains_what_a_restart_needs(tmp_path):
    file = RequestJournal(tmp_path, "base")
    for seq_id in range(1, 5):
        file.accept(accepted(seq_id))
    for seq_id in (1, 2, 3):
        file.answer(f"m/{seq_id}", b"{}", "application/json", runs_again=seq_id != 3)
    file.cover("m", 1)
    file.forget_answers(0)
    file.close()
    file = RequestJournal(tmp_path, "base")
    rows = {row.seq_id: (row.route, row.body, row.answer) for row in file.requests()}
    # 1 is in a state; 2 runs again and has an answer; 3 only used its number; 4 was not answered
    assert rows == {
        2: ("optim_step", b"body", b"{}"), 3: (journal.REFUSED, None, None), 4: ("optim_step", b"body", None),
    }  # fmt: skip
    file.cover("m", 2)
    file.flush()
    assert [row.route for row in file.requests()] == [COVERED, journal.REFUSED, "optim_step"]


def test_a_folder_has_one_service_of_one_model(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "BUSY_S", 0.1)
    first = RequestJournal(tmp_path, "base")
    first.session("s", "local")
    first.flush()
    with pytest.raises(CheckpointError, match="Only one service"):
        RequestJournal(tmp_path, "base")
    first.close()
    with pytest.raises(CheckpointError, match="belongs to a service of base"):
        RequestJournal(tmp_path, "other")
