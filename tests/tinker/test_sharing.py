"""Checkpoints that travel between tenants and machines, sessions as their owner sees them, and limits that make room."""

import hashlib
import time
from dataclasses import replace

import httpx
import pytest
import torch

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types  # noqa: E402

from tests.tinker.data import datum  # noqa: E402
from tests.tinker.test_requests import in_process  # noqa: E402
from tests.tinker.test_tenants import post, rows  # noqa: E402
from verl.cli.main import main  # noqa: E402
from verl.errors import CheckpointError  # noqa: E402
from verl.manifest import find_damage  # noqa: E402
from verl.tinker import service as service_module  # noqa: E402
from verl.tinker import sharing  # noqa: E402
from verl.tinker.journal import RequestJournal  # noqa: E402
from verl.tinker.tenants import TenantLimits, Tenants, read_tenants  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-2)
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])


@pytest.fixture
def people(shared):
    """Clients of ada and bob."""
    clients = {name: tinker.ServiceClient(base_url=shared.url, api_key=f"tml-{name}") for name in ("ada", "bob")}
    shared._clients += clients.values()
    return clients


def trained(shared, client):
    trainer = client.create_lora_training_client(base_model=shared.service.bases.names[0], rank=2, seed=1).result()
    trainer.forward_backward([datum(0)], "cross_entropy")
    trainer.optim_step(ADAM).result()
    return trainer


def urls_of(shared, path, key):
    model, kind, name = path.removeprefix("tinker://").split("/")
    answer = post(
        shared, f"training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls", b"", key, method="GET"
    )
    return answer, answer.json().get("urls", {})


def test_a_checkpoint_is_downloaded_by_urls_that_need_no_key(shared, people, tmp_path, monkeypatch):
    trainer = trained(shared, people["ada"])
    path = trainer.save_weights_external("a").result().path
    folder = shared.service.checkpoints.find(path).folder
    answer, urls = urls_of(shared, path, "tml-ada")
    assert set(urls) == {"adapter_model.safetensors", "adapter_config.json", "state.json"}
    for name, url in urls.items():
        assert httpx.get(url).content == (folder / name).read_bytes()
    url = urls["state.json"]
    for changed in (url.replace("state.json", "adapter_config.json"), url.replace("/external", "/sampler")):
        assert httpx.get(changed).status_code == 403
    monkeypatch.setattr(sharing.time, "time", lambda now=time.time: now() + 3601)
    assert "has expired" in httpx.get(url).json()["detail"]
    assert urls_of(shared, path, "tml-bob")[0].status_code == 404
    with pytest.raises(tinker.BadRequestError, match="Encrypted"):
        trainer.save_weights_external("b", age_encryption_recipients=["age1x"]).result()
    trainer.save_state("c").result()  # its number was used


def test_a_published_checkpoint_is_read_and_copied_by_others(shared, people):
    ada, bob = trained(shared, people["ada"]), people["bob"]
    path, rest = ada.save_state("w").result().path, people["ada"].create_rest_client()
    with pytest.raises(tinker.NotFoundError, match="There is no checkpoint"):
        bob.copy_weights(path).result() if bob._project_id else bob.create_sampling_client(model_path=path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="public already"):
        rest.publish_checkpoint_from_tinker_path(path).result()
    assert [c.public for c in rest.list_checkpoints(ada.model_id).result().checkpoints] == [True]
    before = bob.create_sampling_client(model_path=path).result().compute_logprobs(PROMPT).result()
    copied = [post(shared, "copy_weights", {"source_path": path}, "tml-bob").json()["tinker_path"] for _ in range(2)]
    assert copied[0] == copied[1] != path
    with pytest.raises(tinker.NotFoundError):
        bob.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert post(shared, "weights_info", {"tinker_path": path}, "tml-bob").status_code == 404
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert bob.create_sampling_client(model_path=copied[0]).result().compute_logprobs(PROMPT).result() == before
    resumed = bob.create_training_client_from_state_with_optimizer(copied[0]).result()
    resumed.forward_backward([datum(1)], "cross_entropy")
    resumed.optim_step(ADAM).result()
    assert find_damage(shared.service.checkpoints.find(copied[0]).folder) is None


def test_an_owner_lists_searches_and_ends_its_sessions(bench, tmp_path):
    async def act(service, ada, bob):
        body = {"tags": [], "user_metadata": {"run": "7"}, "display_name": "My best run", "sdk_version": "0"}
        session = (await ada.post("create_session", body)).json()["session_id"]
        listed = (await ada.post("sessions", b"", "GET")).json()["sessions"]
        assert listed == [session, ada.session]
        session_facts = (await ada.post(f"sessions/{ada.session}", b"", "GET")).json()
        assert (session_facts["training_run_ids"], session_facts["sampler_ids"]) == ([ada.model], [ada.sampler])
        assert (await bob.post(f"sessions/{session}", b"", "GET")).status_code == 404
        for request, sessions in (
            ({"display_name": "best my"}, [session]), ({"display_name": "worst"}, []),
            ({"user_metadata": {"run": "7"}}, [session]),
            ({"session_id": ada.session}, [ada.session]), ({"session_id": bob.session}, []),
            ({"owner": {"type": "accessible"}, "limit": 1}, [session]), ({"statuses": [{"type": "failed"}]}, []),
            ({"owner": {"type": "user", "owner_urns": ["bob"]}}, []),
        ):  # fmt: skip
            answer = (await ada.post("sessions/search", request)).json()
            assert [row["session_id"] for row in answer["sessions"]] == sessions, request
        cursor = (await ada.post("sessions/search", {"limit": 1})).json()["next_cursor"]
        answer = (await ada.post("sessions/search", {"limit": 1, "cursor": cursor})).json()
        assert ([row["session_id"] for row in answer["sessions"]], answer.get("next_cursor")) == ([ada.session], None)
        assert (await ada.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})).status_code == 204
        assert (await ada.post("sessions", b"", "GET")).json()["sessions"] == [ada.session]

    in_process(bench, tmp_path, act)


def limited(service, **limits):
    """Give all tenants other limits."""
    for digest, tenant in list(service.tenants._keys.items()):
        service.tenants._keys[digest] = replace(tenant, limits=replace(tenant.limits, **limits))
    for model in service.models.values():
        model.tenant = replace(model.tenant, limits=replace(model.tenant.limits, **limits))


def test_the_session_that_was_silent_for_longest_makes_room(bench, tmp_path):
    async def act(service, ada, bob):
        limited(service, models=1)
        second = await type(ada)(service, ada.http, "ada").open_session()
        body = {
            "session_id": second,
            "base_model": service.bases.names[0],
            "model_seq_id": 0,
            "lora_config": {"rank": 2},
        }
        refused = await ada.post("create_model", body)
        assert (refused.status_code, "1 models" in refused.text) == (400, True)
        service.sessions[ada.session].last_sign -= service_module.SILENT_S + 1
        assert (await ada.post("create_model", body)).status_code == 200
        assert set(service.sessions) == {second, bob.session}

    in_process(bench, tmp_path, act)


def test_snapshots_are_counted_in_bytes_and_replaced_ones_make_room(bench, tmp_path):
    async def act(service, ada, bob):
        size, seq_ids = service.bases.bench().training.adapters[ada.model].weights.num_bytes(), iter(range(1, 99))

        async def snapshot():
            await ada.result(await ada.post("forward_backward", rows(ada.model, next(seq_ids), [datum(0, 5)])))
            step = {"model_id": ada.model, "seq_id": next(seq_ids), "adam_params": {"learning_rate": 0.1}}
            await ada.result(await ada.post("optim_step", step))
            number = next(seq_ids)
            body = {"model_id": ada.model, "seq_id": number, "sampling_session_seq_id": number}
            return await ada.result(await ada.post("save_weights_for_sampler", body))

        limited(service, bytes=int(2.9 * size))
        names = [(await snapshot())["sampling_session_id"] for _ in range(2)]
        assert service.stored_bytes("ada") > 2 * size
        assert "checkpoints and snapshots" in (await snapshot())["error"]
        for name in names:
            service.samplers[name].last_use -= 1000
        assert "sampling_session_id" in await snapshot()
        assert names[0] not in service.samplers
        assert names[1] in service.samplers  # the newest was never replaced
        service.samplers[names[1]].last_use -= 3600
        service.sweep()
        assert names[1] not in service.samplers

    in_process(bench, tmp_path, act)


def test_another_optimizer_is_refused_at_creation_and_leaves_no_model(bench, tmp_path):
    async def act(service, ada, bob):
        body = {
            "session_id": ada.session,
            "base_model": service.bases.names[0],
            "model_seq_id": 5,
            "lora_config": {"rank": 2},
        }
        answer = await ada.post("create_model", {**body, "optimizer_config": {"type": "dimuon"}})
        assert (answer.status_code, "AdamW, not dimuon" in answer.text) == (400, True)
        assert (await ada.post("create_model", {**body, "optimizer_config": {"type": "adamw"}})).status_code == 200

    in_process(bench, tmp_path, act)


def test_a_sampling_client_loads_the_tokenizer_of_the_model_folder(served):
    trainer = served.client().create_lora_training_client(base_model=served.service.bases.names[1], rank=2).result()
    path = trainer.save_weights_for_sampler("a").result().path
    sampler = served.client().create_sampling_client(model_path=path).result()
    assert sampler.get_tokenizer().encode("a") == trainer.get_tokenizer().encode("a")


def test_top_log_probs_begin_with_the_scored_tokens_of_a_prompt(served):
    sampler = served.client().create_sampling_client(base_model=served.service.bases.names[0]).result()
    params = types.SamplingParams(max_tokens=1)
    wishes = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    every, last = (
        sampler.sample(PROMPT, 1, params, **wishes, **more).result() for more in ({}, {"prompt_logprobs_last_n": 2})
    )
    assert last.prompt_logprobs == [None, None, *every.prompt_logprobs[2:]]
    assert last.topk_prompt_logprobs == [None, None, *every.topk_prompt_logprobs[2:]]


def test_named_tokens_of_a_prompt_have_their_log_probs(served):
    """Dense and sparse, in the layout of the request; -1 and what is not listed have none."""
    sampler = served.client().create_sampling_client(base_model=served.service.bases.names[0]).result()
    params = types.SamplingParams(max_tokens=1)
    ids = torch.tensor([[4, -1], [-1, -1], [6, 4]])
    scores = sampler.compute_logprobs(PROMPT).result()
    top = sampler.sample(PROMPT, 1, params, topk_prompt_logprobs=100).result().topk_prompt_logprobs
    wide = torch.nn.functional.pad(ids, (0, 14), value=-1)
    forms = [types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(wide, pad_value=-1)]
    assert forms[1].sparse_crow_indices is not None
    for form in forms:
        answer = sampler.sample(PROMPT, 1, params, target_prompt_logprobs=form).result().target_prompt_logprobs
        assert (answer.shape, answer.sparse_crow_indices) == (form.shape, form.sparse_crow_indices)
        values = answer.to_torch()[:, :2]
        assert values[0].tolist() == pytest.approx([scores[1], 0], abs=1e-6)
        assert values[1].tolist() == [0, 0]
        assert values[2, 0].item() == pytest.approx(scores[3], abs=1e-6)
        if 4 in dict(top[3]):
            assert values[2, 1].item() == pytest.approx(dict(top[3])[4], abs=1e-6)
    for odd, sentence in ((ids[:2], r"shape \[3, 1 to"), (ids + 10**6, "none of the model's")):
        with pytest.raises(tinker.BadRequestError, match=sentence):
            sampler.sample(PROMPT, 1, params, target_prompt_logprobs=types.TensorData.from_torch(odd)).result()


def test_clip_thresholds_in_the_wrong_order_are_refused(served):
    trainer = served.trainer()
    with pytest.raises(tinker.BadRequestError, match="is above clip_high"):
        trainer.forward_backward([datum(0, policy=True)], "ppo", {"clip_low_threshold": 2.0}).result()


def test_a_folder_belongs_to_a_model_however_its_path_is_written(bench, tmp_path, monkeypatch):
    models = tmp_path / "models"
    models.mkdir()
    (models / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "moved"
    for base in (str(models), "models", f"{models}/"):
        RequestJournal(tmp_path / "service", base).close()
    models.rename(moved)
    journal = RequestJournal(tmp_path / "service", str(moved))
    assert journal.aliases[str(models)] == str(moved)
    assert journal.path.stat().st_mode & 0o077 == 0
    journal.close()
    (moved / "config.json").write_text('{"other": 1}')
    (moved / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "other").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "other/config.json")
    with pytest.raises(CheckpointError, match="belongs to a service of"):
        RequestJournal(tmp_path / "service", str(tmp_path / "other"))


def test_a_folder_in_use_is_refused_before_the_model_is_loaded(tmp_path, tiny_llama, monkeypatch, capsys):
    from verl.tinker import bases, journal

    monkeypatch.setattr(journal, "BUSY_S", 0.1)
    monkeypatch.setattr(bases, "open_bench", lambda config: pytest.fail("the model was loaded"))
    first = RequestJournal(tmp_path, str(tiny_llama))
    first.session("s", "local")
    first.flush()
    assert main(["serve", "tinker", f"model={tiny_llama}", f"folder={tmp_path}"]) != 0
    assert "Only one service" in capsys.readouterr().err
    first.close()


def test_keys_are_read_again_when_their_file_changes(tmp_path, caplog):
    file, sums = tmp_path / "keys", [hashlib.sha256(key.encode()).hexdigest() for key in ("tml-a", "tml-b")]
    file.write_text(f"{sums[0]} tenant=ada\n")
    tenants = read_tenants(str(file))
    for text, names in (
        (f"{sums[0]} tenant=ada\n{sums[1]} tenant=bob\n", ["ada", "bob"]),
        ("nonsense\n", ["ada", "bob"]),
    ):
        file.write_text(text)
        tenants._read_at = 1  # as if it had been written later
        assert [tenants.of_key(key).name for key in ("tml-a", "tml-b")] == names
    assert "The keys stay as they were" in caplog.text
    assert Tenants(limits=TenantLimits(models=3)).of_key("any").limits.models == 3
