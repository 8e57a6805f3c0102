"""A service that is killed and started again: clients of the SDK notice nothing, and train to the same bits."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from safetensors.torch import load_file  # noqa: E402
from tinker import types  # noqa: E402

from tests.tinker.data import datum  # noqa: E402
from tests.tinker.lives import DEADLY, MOMENTS, lives  # noqa: E402
from verl.models.tiny import make_tiny_model  # noqa: E402
from verl.tracking.files import read_metrics  # noqa: E402
from verl.tracking.progress import read_progress  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)
RANK = 4
SAMPLING = types.SamplingParams(max_tokens=5, seed=3, stop=[])


def run(url, num_steps, base="base", key="tml-test"):
    """A run that trains, samples from snapshots, saves and loads: its last sample, and the address of its last state."""
    client = tinker.ServiceClient(base_url=url, api_key=key)
    trainer = client.create_lora_training_client(base_model=base, rank=RANK, seed=1).result()
    prompt = types.ModelInput.from_ints([3, 4, 5, 6])
    first = None
    for step in range(num_steps):
        rows = [datum(step * 10 + number) for number in range(3)]
        futures = [
            trainer.forward_backward(rows[:2], "cross_entropy"),
            trainer.forward_backward(rows[2:], "cross_entropy"),
        ]
        futures.append(trainer.optim_step(ADAM))
        if step == 0:
            first = trainer.save_weights_and_get_sampling_client().result()
        futures.append(first.sample(prompt, 2, SAMPLING))
        last = [future.result() for future in futures][-1]
        if step == num_steps // 2:
            trainer.load_state_with_optimizer(trainer.save_state("half").result().path).result()
    return [list(sequence.tokens) for sequence in last.sequences], trainer.save_state("last").result().path


def tensors(folder, path):
    model, kind, name = path.removeprefix("tinker://").split("/")
    saved = folder / "models" / model / kind / name
    return {file.name: load_file(file) for file in saved.glob("*.safetensors")}


def steps(folder, path):
    """The metrics of a model's steps, without times: what `verl show` and `verl view` read."""
    model = folder / "models" / path.split("/")[2]
    assert read_progress(model).step == len(list(read_metrics(model / "metrics.jsonl")))
    return [
        {name: value for name, value in row.items() if not name.startswith("tim")}
        for row in read_metrics(model / "metrics.jsonl")
    ]


def compare(folder, first, second, weights="adapter_model.safetensors"):
    assert first[0] == second[0]
    first_rows, second_rows = (steps(folder, path) for _, path in (first, second))
    assert first_rows == second_rows
    assert [row["step"] for row in first_rows] == list(range(1, len(first_rows) + 1))
    one, other = (tensors(folder, path) for _, path in (first, second))
    assert set(one) == {weights, "optimizer.safetensors"}
    for file, values in one.items():
        for name, value in values.items():
            assert np.array_equal(value.numpy(), other[file][name].numpy()), (file, name)


def test_a_service_killed_around_its_commits_continues_under_its_client(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with lives(tiny_llama, tmp_path, [(5, "before"), (7, "after")]) as served:
        killed = run(served.url, 2)
        assert served.kills == 2
        compare(tmp_path, killed, run(served.url, 2))


def test_a_request_that_ends_the_process_is_given_up_after_its_second_death(tiny_llama, tmp_path, monkeypatch):
    """Others wait meanwhile, and notice nothing else; neither do other requests of the batch."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    deadly = types.Datum(types.ModelInput.from_ints([DEADLY] * 4), datum(0, length=4).loss_fn_inputs)
    with lives(tiny_llama, tmp_path, most_deaths=2) as served:
        hostile, other = (tinker.ServiceClient(base_url=served.url, api_key="tml-test") for _ in range(2))
        trainers = [
            client.create_lora_training_client(base_model="base", rank=4, seed=1).result()
            for client in (hostile, other)
        ]
        first = trainers[0].forward_backward([deadly], "cross_entropy")
        steps = [trainers[1].forward_backward([datum(1)], "cross_entropy"), trainers[1].optim_step(ADAM)]
        with pytest.raises(tinker.RequestFailedError, match="process ended 2 times"):
            first.result()
        assert steps[1].result().metrics["grad_norm"] > 0
        with pytest.raises(tinker.RequestFailedError, match="so no step was taken"):
            trainers[0].optim_step(ADAM).result()
        assert trainers[0].forward_backward([datum(1)], "cross_entropy").result().metrics == steps[0].result().metrics
        assert served.kills == 2
        samplers = [client.create_sampling_client(base_model="base") for client in (hostile, other)]
        prompts = [types.ModelInput.from_ints([3, token]) for token in (DEADLY, 4)]
        samples = [sampler.sample(prompt, 2, SAMPLING) for sampler, prompt in zip(samplers, prompts, strict=True)]
        assert len(samples[1].result().sequences) == 2
        with pytest.raises(tinker.RequestFailedError, match="process ended 2 times"):
            samples[0].result()
        assert served.kills == 4
    with (tmp_path / "in_work.json").open() as file:
        assert json.load(file) == {"computing": [], "deaths": {}}


@contextmanager
def killing(served, count, chance, least):
    """Inside, the service is killed `count` times, at least `least` seconds apart."""
    ended = threading.Event()

    def kill():
        while served.kills < count and not ended.wait(least * (1 + 2 * chance.random())):
            served.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(120)
    assert served.kills >= count, "the run was too short"


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_bit(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    chance = random.Random(0)
    deaths = [(chance.randint(3, 12), chance.choice(MOMENTS)) for _ in range(10)]
    with lives(tiny_llama, tmp_path, deaths) as served:
        with killing(served, 20, chance, 0.2):
            killed = run(served.url, 40)
        compare(tmp_path, killed, run(served.url, 40))


@pytest.mark.slow
def test_twenty_four_kills_of_several_models_tenants_and_samplers_change_no_bit(tiny_llama, tmp_path, monkeypatch):
    """Three tenants train at once on two base models, each with a sampler."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    other = make_tiny_model(tmp_path / "other", "qwen2")
    chance = random.Random(60)
    deaths = [(chance.randint(3, 20), chance.choice(MOMENTS)) for _ in range(12)]
    plan = [("base", "tml-test"), ("other", "tml-ada"), ("base", "tml-bob")]
    with lives(tiny_llama, tmp_path / "service", deaths, 1000, other) as served, ThreadPoolExecutor(3) as pool:
        with killing(served, 24, chance, 0.3):
            killed = list(pool.map(lambda one: run(served.url, 30, *one), plan))
        for result, one in zip(killed, plan, strict=True):
            compare(tmp_path / "service", result, run(served.url, 30, *one))
