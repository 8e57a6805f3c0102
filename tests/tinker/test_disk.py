"""The disk of the service: full, cleaned up, shared between checkpoints and samplers, and locked against a second service."""

import errno
import json
import os
import shutil
import time

import httpx
import pytest
import torch

from tests.json_lines import read_lines

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types  # noqa: E402

from tests.processes import wait_until  # noqa: E402
from tests.tinker.data import datum  # noqa: E402
from tests.tinker.served import running  # noqa: E402
from tests.tinker.test_tenants import PROTOBUF, model_of, post, rows  # noqa: E402
from verl.cli.main import main  # noqa: E402
from verl.cli.serve import serving_config  # noqa: E402
from verl.errors import CheckpointError  # noqa: E402
from verl.models.adapter_weights import AdapterWeights  # noqa: E402
from verl.tinker import checkpoints, journal, service  # noqa: E402
from verl.tinker.journal import COVERED, AcceptedRequest, RequestJournal  # noqa: E402
from verl.tinker.records import RefusedRequest  # noqa: E402
from verl.tinker.snapshots import Snapshots  # noqa: E402
from verl.tinker.workbench import Workbench  # noqa: E402

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


def test_data_of_a_tenant_outlive_a_full_disk_a_moved_folder_and_a_renamed_model(tiny_llama, tmp_path, monkeypatch):
    """A model in the middle of a step, its checkpoint and its sampler."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

    def service_of(name, model):
        keys = ["actor_rollout_ref.actor.fsdp_config.dtype=float32"]
        return running(Workbench(serving_config(str(tmp_path / model), keys, rank=8)), tmp_path / name)

    def answer(route, body, media="application/json"):
        posted = post(served, route, body, media=media)
        assert posted.status_code == 200, posted.text
        return post(served, "retrieve_future", {"request_id": posted.json()["request_id"]}).content

    def forward(model, seq_id):
        return answer("forward_backward", rows(model, seq_id, [datum(7)]), PROTOBUF)

    def sample(seq_id):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
        params = {"max_tokens": 5, "seed": 1, "stop": []}
        body = {
            "sampling_session_id": f"{owner}:sample:0",
            "seq_id": seq_id,
            "prompt": prompt,
            "sampling_params": params,
        }
        return answer("asample", body)

    shutil.copytree(tiny_llama, tmp_path / "model")
    with service_of("service", "model") as served:
        model, owner = model_of(served, "tml-ada")
        before = forward(model, 1)
        answer("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}})
        path = json.loads(answer("save_weights", {"model_id": model, "seq_id": 3, "path": "a"}))["path"]
        answer("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0})
        drawn, file = sample(0), served.service.journal._file
        (pages,) = file.execute("PRAGMA page_count").fetchone()
        file.execute(f"PRAGMA max_page_count = {pages}")
        large = rows(model, 5, [datum(n, length=60) for n in range(200)])
        assert post(served, "forward_backward", large, media=PROTOBUF).status_code == 503
        file.execute("PRAGMA max_page_count = 1073741823")
        answer("forward_backward", large, PROTOBUF)
        assert forward(model, 6) != before
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "service").rename(tmp_path / "elsewhere/service")
    (tmp_path / "model").rename(tmp_path / "renamed")
    with service_of("elsewhere/service", "renamed") as served:
        assert sample(1) == drawn
        loading = {"session_id": owner, "model_seq_id": 1, "path": path, "optimizer": True}
        answer("load_weights", loading)
        loaded = f"{owner}:train:1"
        assert forward(model, 7) == forward(loaded, 1), "the step before the move counts once"
        norms = [
            json.loads(answer("optim_step", {"model_id": one, "seq_id": seq_id, "adam_params": {}}))["metrics"][
                "grad_norm"
            ]
            for one, seq_id in ((model, 8), (loaded, 2))
        ]
        assert norms[0] > norms[1], "the gradients before the move count too"
        listed = post(served, "checkpoints", b"", method="GET").json()["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [path]


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
    served.service.bases.bench().samplers[0]._held.clear()
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
