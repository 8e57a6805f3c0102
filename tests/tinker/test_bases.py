"""Several base models in one service: loaded on demand, with room for one, and equal to a service that has each alone."""

import hashlib
import json
import logging
import weakref
from contextlib import contextmanager

import pytest
import torch

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types  # noqa: E402

from tests.tinker.data import datum  # noqa: E402
from tests.tinker.served import base_of, running  # noqa: E402
from verl.cli.serve import serving_config  # noqa: E402
from verl.errors import ConfigError  # noqa: E402
from verl.models.tiny import make_tiny_model  # noqa: E402
from verl.tinker import bases as module  # noqa: E402
from verl.tinker.bases import BaseEntry, Bases  # noqa: E402
from verl.tinker.in_work import InWork  # noqa: E402
from verl.tinker.tenants import Tenant, Tenants  # noqa: E402
from verl.tinker.workbench import Workbench  # noqa: E402

FLOAT = "actor_rollout_ref.actor.fsdp_config.dtype=float32"
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = make_tiny_model(tmp_path_factory.mktemp("teacher") / "teacher", "qwen2")
    return Workbench(serving_config(str(path), [FLOAT], rank=8))


def tenants_of(*names):
    return Tenants({hashlib.sha256(f"tml-{name}".encode()).hexdigest(): Tenant(name) for name in names})


@contextmanager
def both(bench, teacher, folder, monkeypatch, idle_s=0.0, tenants=None, **settings):
    """A service with room for one of two base models, which may leave after `idle_s` seconds."""
    monkeypatch.setattr(module, "IDLE_S", idle_s)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    loads = []

    def base(workbench, names, **more):
        one = base_of(workbench, names, num_bytes=6, **more)
        load = one.load
        one.load = lambda: (loads.append(names[1]), load())[1]
        return one

    student = base(bench, [str(bench.engine._trained.base), "student"])
    held = Bases([student, base(teacher, [str(teacher.engine._trained.base), "teacher"], **settings)], most_bytes=10)
    with running(bench, folder, tenants, bases=held) as served:
        served.loads = loads
        yield served


def steps(served, between=lambda: None, base="student"):
    """Two steps of a model with `between` after every request: its metrics, and its saved weights."""
    trainer = served.client().create_lora_training_client(base_model=base, rank=4, seed=1).result()
    metrics = []
    for step in range(2):
        between()
        passed = trainer.forward_backward([datum(step)], "cross_entropy").result().metrics
        between()
        stepped = trainer.optim_step(ADAM).result().metrics
        between()
        metrics.append((passed, stepped))
    path = trainer.save_state("last").result().path
    return metrics, served.service.checkpoints.load(path, optimizer=True), path


def same(first, second):
    assert first[0] == second[0]
    (one, other) = (result[1] for result in (first, second))
    for name, tensor in one.weights.tensors.items():
        assert torch.equal(tensor, other.weights.tensors[name]), name
    assert {n: t.tolist() for n, t in one.optimizer_tensors().items()} == {
        n: t.tolist() for n, t in other.optimizer_tensors().items()
    }


def test_a_base_model_that_leaves_in_the_middle_of_a_step_changes_no_bit(bench, teacher, tmp_path, monkeypatch):
    with running(bench, tmp_path / "alone") as served:
        reference = steps(served, base="base")
    with running(teacher, tmp_path / "teacher") as served:
        sampler = served.client().create_sampling_client(base_model="base")
        expected = sampler.compute_logprobs(PROMPT).result()
    with both(bench, teacher, tmp_path / "both", monkeypatch) as served:
        sampler, scores = served.client().create_sampling_client(base_model="teacher"), []
        same(reference, steps(served, lambda: scores.append(sampler.compute_logprobs(PROMPT).result())))
        assert all(one == expected for one in scores)
        assert served.loads.count("student") >= 6, "it has left each time"
        assert len(served.service.bases._open) == 1
        models = served.client().get_server_capabilities().supported_models
        assert {"student", "teacher"} <= {model.model_name for model in models}


def test_a_base_model_that_does_not_fit_is_a_sentence_to_who_asks(bench, teacher, tmp_path, monkeypatch):
    with both(bench, teacher, tmp_path, monkeypatch, idle_s=3600.0, tenants=tenants_of("ada", "bob")) as served:
        trainer = served.client("tml-ada").create_lora_training_client(base_model="student", rank=4).result()
        client = served.client("tml-bob")
        with pytest.raises(tinker.BadRequestError, match=r"does not fit with .*, in use now"):
            client.create_lora_training_client(base_model="teacher", rank=4).result()
        with pytest.raises(tinker.BadRequestError, match=r"does not fit with .*, in use now"):
            client.create_sampling_client(base_model="teacher").compute_logprobs(PROMPT).result()
        trainer.forward_backward([datum(0)], "cross_entropy").result()
        assert trainer.optim_step(ADAM).result().metrics["grad_norm"] > 0
        assert served.loads == ["student"]
        served.client("tml-ada").create_sampling_client(base_model="teacher").compute_logprobs(PROMPT).result()
        assert served.loads == ["student", "teacher"], "a tenant uses its own in turns"


def test_adapters_stay_with_their_base_model(bench, teacher, tmp_path, monkeypatch):
    with both(bench, teacher, tmp_path, monkeypatch, trains=False) as served:
        path = steps(served)[2]
        with pytest.raises(tinker.BadRequestError, match=r"was trained on .*llama, not on .*teacher"):
            served.client().create_sampling_client(model_path=path, base_model="teacher").sample(
                PROMPT, 1, types.SamplingParams(max_tokens=1)
            ).result()
        with pytest.raises(tinker.BadRequestError, match="only samples on this server"):
            served.client().create_lora_training_client(base_model="teacher", rank=4).result()
        with pytest.raises(tinker.BadRequestError, match="There is no base model 'other' here"):
            served.client().create_lora_training_client(base_model="other", rank=4).result()
        trainable = {m.model_name: m.trainable for m in served.client().get_server_capabilities().supported_models}
        assert trainable["student"]
        assert not trainable["teacher"]


def test_a_restart_loads_only_what_is_asked_for(bench, teacher, tmp_path, monkeypatch, caplog):
    with both(bench, teacher, tmp_path, monkeypatch) as served:
        first, second = (
            served.client().create_lora_training_client(base_model=base, rank=4, seed=1).result()
            for base in ("student", "teacher")
        )
        for trainer in (first, second):
            trainer.forward_backward([datum(0)], "cross_entropy").result()
            trainer.optim_step(ADAM).result()
        served.client().create_sampling_client(base_model="teacher").compute_logprobs(PROMPT).result()
        assert served.service.models[first.model_id].state_seq == 2, "its state was saved when its base model left"
        models = [first.model_id, second.model_id]
        expected = first.save_state("a").result().path
        expected = served.service.checkpoints.load(expected, optimizer=False).weights.tensors
        # another client, of the other base model: the first one leaves again
        served.client().create_sampling_client(base_model="teacher").compute_logprobs(PROMPT).result()
        served.close()
    with caplog.at_level(logging.WARNING), both(bench, teacher, tmp_path, monkeypatch) as served:
        assert set(models) <= set(served.service.models)
        assert "student" not in served.loads
        weights = served.service.bases.bench(served.service.bases.named("student")).training.adapters[models[0]].weights
        for name, tensor in expected.items():
            assert torch.equal(tensor, weights.tensors[name])


def test_a_base_model_that_is_served_no_more_is_a_sentence_and_its_state_stays(bench, teacher, tmp_path, monkeypatch):
    with both(bench, teacher, tmp_path, monkeypatch) as served:
        trainer = served.client().create_lora_training_client(base_model="teacher", rank=4, seed=1).result()
        trainer.forward_backward([datum(0)], "cross_entropy").result()
        trainer.optim_step(ADAM).result()
        served.client().create_sampling_client(base_model="student").compute_logprobs(PROMPT).result()
        assert served.service.models[trainer.model_id].state_seq == 2
        path = trainer.save_state("a").result().path
    with running(bench, tmp_path) as served:
        assert trainer.model_id not in served.service.models
        with pytest.raises(tinker.BadRequestError, match="There is no base model .* here"):
            served.client().create_sampling_client(model_path=path).compute_logprobs(PROMPT).result()
        assert served.service.checkpoints.newest_state(trainer.model_id) is not None
    with both(bench, teacher, tmp_path, monkeypatch) as served:
        client = served.client().create_training_client_from_state_with_optimizer(path)
        client.forward_backward([datum(1)], "cross_entropy").result()
        assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_tokens_are_checked_against_their_own_base_model(bench, tmp_path, monkeypatch):
    large = Workbench(
        serving_config(str(make_tiny_model(tmp_path / "large", "llama", vocab_size=400)), [FLOAT], rank=8)
    )
    beyond = types.ModelInput.from_ints([3, 300])
    with both(bench, large, tmp_path / "service", monkeypatch) as served:
        served.client().create_sampling_client(base_model="teacher").compute_logprobs(beyond).result()
        with pytest.raises(tinker.BadRequestError, match="none of the model's 264 tokens"):
            served.client().create_sampling_client(base_model="student").compute_logprobs(beyond).result()


DAMAGED = ["", "[]", "{}", '{"computing": 1, "deaths": {}}', '{"computing": [], "deaths": {"a": "b"}}', "\0" * 99]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_record_of_work_blames_nobody(tmp_path, caplog, text):
    (tmp_path / "in_work.json").write_text(text)
    work = InWork(tmp_path)
    assert not work.deaths
    assert "it is not known what ended the server" in caplog.text
    with pytest.raises(KeyError), work.computing(["a"]):
        raise KeyError
    assert json.loads((tmp_path / "in_work.json").read_text()) == {"computing": [], "deaths": {}}


def test_a_folder_keeps_its_base_models(tmp_path):
    from verl.errors import CheckpointError
    from verl.tinker.journal import RequestJournal

    paths = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"name": "{name}"}}')
        paths.append(str(tmp_path / name))
    RequestJournal(tmp_path / "service", *paths[:2]).close()
    RequestJournal(tmp_path / "service", *reversed(paths)).close()
    (tmp_path / "b").rename(tmp_path / "moved")
    journal = RequestJournal(tmp_path / "service", paths[0], str(tmp_path / "moved"))
    assert journal.aliases[paths[1]] == str(tmp_path / "moved")
    journal.close()
    with pytest.raises(CheckpointError, match="belongs to a service of"):
        RequestJournal(tmp_path / "service", paths[2])
    (tmp_path / "c/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="whose files differ"):
        RequestJournal(tmp_path / "service", paths[0], paths[2])


def test_a_base_model_that_leaves_gives_its_memory_back(teacher, tiny_llama):
    paths = [str(tiny_llama), str(teacher.engine._trained.base)]
    entries = [BaseEntry(serving_config(path, [FLOAT], rank=8)) for path in paths]
    sizes = [module.described_base(entry).num_bytes for entry in entries]
    with Bases.opened(entries, max(sizes)) as held:
        tokenizer = weakref.ref(held.bench(held.bases[0]).tokenizer)
        embedding = weakref.ref(held.loaded(held.bases[0]).training)
        module.IDLE_S, before = 0.0, module.IDLE_S
        try:
            held.admit(held.bases[1], "ada")
        finally:
            module.IDLE_S = before
        held.bench(held.bases[1])
        assert held.loaded(held.bases[0]) is None
        assert tokenizer() is None
        assert embedding() is None
    with pytest.raises(ConfigError, match="kB of memory="), Bases.opened(entries, min(sizes) - 1):
        pass
    placed = [
        BaseEntry(serving_config(path, [FLOAT, "trainer.placement={actor:[0],rollout:[1]}"], rank=8)) for path in paths
    ]
    with pytest.raises(ConfigError, match="Several base models share one process"), Bases.opened(placed):
        pass


def test_base_models_are_described_from_their_files(bench, teacher, tiny_llama):
    entries = [BaseEntry(serving_config(str(tiny_llama), [FLOAT], rank=8), ["base"])]
    held = Bases([module.described_base(entry) for entry in entries])
    assert held.bases[0].facts == base_of(bench, ["x"]).facts
    assert held.bases[0].num_bytes > 0
    assert held.bases[0].names[-1] == "base"
