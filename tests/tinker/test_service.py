"""The service, driven by the official SDK on a tiny model."""

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import httpx
import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402

from tests.processes import wait_until  # noqa: E402
from tests.tinker.data import array, datum, tensor  # noqa: E402
from tests.tinker.served import running  # noqa: E402
from verl.tinker import routes  # noqa: E402
from verl.tinker.queues import RequestFuture  # noqa: E402

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])


def train(trainer, seeds, loss="cross_entropy", num_rows=3):
    """One step for each seed, all posted before the first result is read."""
    futures = []
    for seed in seeds:
        rows = [datum(seed * 10 + row, policy=loss != "cross_entropy") for row in range(num_rows)]
        futures += [trainer.forward_backward(rows, loss), trainer.optim_step(ADAM)]
    return [future.result() for future in futures]


def equal(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_training_lowers_the_loss_and_forward_leaves_no_gradient(served):
    trainer = served.trainer()
    rows = [datum(seed) for seed in range(4)]
    losses = []
    for _ in range(6):
        losses.append(trainer.forward(rows, "cross_entropy").result().metrics["loss:sum"])
        trainer.forward_backward(rows, "cross_entropy").result()
        trainer.optim_step(ADAM).result()
    assert losses[-1] < 0.7 * losses[0]
    trainer.forward(rows, "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="no gradients"):
        trainer.optim_step(ADAM).result()


def test_several_calls_before_a_step_are_one_batch(served):
    rows = [datum(seed) for seed in range(6)]
    joined, parts = served.trainer(), served.trainer()
    joined.forward_backward(rows, "cross_entropy").result()
    for start in range(0, 6, 2):
        parts.forward_backward(rows[start : start + 2], "cross_entropy")
    norms = [trainer.optim_step(ADAM).result().metrics["grad_norm"] for trainer in (joined, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    one, other = (served.tensors(trainer) for trainer in (joined, parts))
    assert all((tensor - other[name]).abs().max() < 1e-6 for name, tensor in one.items())


def test_a_custom_loss_of_the_client_has_the_gradient_of_autograd(served):
    rows = [datum(seed) for seed in range(3)]
    weights = [torch.from_numpy(array(row.loss_fn_inputs["weights"])) for row in rows]

    def weighted(data, log_probs):
        return -sum((lp * w).sum() for lp, w in zip(log_probs, weights, strict=True)), {}

    custom, built_in = served.trainer(), served.trainer()
    plain = [
        types.Datum(model_input=r.model_input, loss_fn_inputs={"target_tokens": r.loss_fn_inputs["target_tokens"]})
        for r in rows
    ]
    custom.forward_backward_custom(plain, weighted).result()
    built_in.forward_backward(rows, "cross_entropy").result()
    gradients = [
        served.service.bases.bench().training.adapters[trainer.model_id].gradients for trainer in (custom, built_in)
    ]
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max()


def body(model_id, seq_id):
    rows = types.ForwardBackwardInput(data=[datum(seq_id)], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=rows, model_id=model_id, seq_id=seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


def post(served, route, content, media="application/json"):
    return httpx.post(f"{served.url}/api/v1/{route}", content=content, headers={"content-type": media}, timeout=120)


def result(served, future):
    return post(served, "retrieve_future", types.FutureRetrieveRequest(request_id=future).model_dump_json())


def test_requests_of_a_model_run_by_number_in_whatever_order_they_come(served):
    weights = []
    for order in itertools.permutations((1, 2, 3)):
        trainer = served.trainer()
        futures = {}
        for number in order:
            for _ in range(2):  # a repeated request gets the future of the first
                answer = post(served, "forward_backward", body(trainer.model_id, number), "application/x-protobuf")
                assert answer.status_code == 200
                assert futures.setdefault(number, answer.json()["request_id"]) == answer.json()["request_id"]
        step = types.OptimStepRequest(model_id=trainer.model_id, seq_id=4, adam_params=ADAM).model_dump_json()
        done = post(served, "optim_step", step).json()["request_id"]
        assert "grad_norm" in result(served, done).json()["metrics"]
        weights.append(served.tensors(trainer))
    assert all(equal(weights[0], other) for other in weights[1:])
    other = post(served, "forward_backward", body(trainer.model_id, 2) + b"\x28\x01", "application/x-protobuf")
    assert other.status_code == 400
    snapshot = {"model_id": trainer.model_id, "seq_id": 5}  # the SDK repeats it with another number of the sampler
    bodies = [json.dumps({**snapshot, "sampling_session_seq_id": number}) for number in (1, 2)]
    assert len({post(served, "save_weights_for_sampler", b).json()["request_id"] for b in bodies}) == 1


def test_a_result_that_is_not_there_yet_is_asked_for_again(served, monkeypatch):
    monkeypatch.setattr(routes, "POLL_S", 0.05)
    trainer = served.trainer()
    early = post(served, "forward_backward", body(trainer.model_id, 2), "application/x-protobuf").json()["request_id"]
    waits = result(served, early)
    assert waits.status_code == 408
    why = "Request 1 of this model has not come, and later ones wait for it."
    waiting = {"type": "try_again", "request_id": early}
    assert waits.json() == {**waiting, "queue_state": "paused_capacity", "queue_state_reason": why}


@pytest.mark.parametrize("num_steps", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_a_clean_run_and_one_with_lost_answers_train_to_the_same_bits(served, num_steps):
    """A step is two requests; 5% of them, and of the questions for results, are answered 408, 429 or 500."""
    clean, faulty = served.trainer(), served.trainer()
    train(clean, range(num_steps), num_rows=1)
    served.faults.share, before = 0.05, served.faults.count
    try:
        train(faulty, range(num_steps), num_rows=1)
    finally:
        served.faults.share = 0.0
    assert served.faults.count > before
    assert equal(served.tensors(clean), served.tensors(faulty))


def test_a_snapshot_stays_as_it_is_while_training_goes_on(served):
    trainer = served.trainer()
    train(trainer, range(2))
    sampler = trainer.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(PROMPT).result()
    sampling = types.SamplingParams(max_tokens=6, seed=5)
    sampled = [sampler.sample(PROMPT, 2, sampling).result() for _ in range(2)]
    train(trainer, range(4))
    later = trainer.save_weights_and_get_sampling_client().result()
    assert later.compute_logprobs(PROMPT).result() != before
    assert sampler.compute_logprobs(PROMPT).result() == before
    sampled.append(sampler.sample(PROMPT, 2, sampling).result())
    tokens = [[list(sequence.tokens) for sequence in answer.sequences] for answer in sampled]
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[0][0] != tokens[0][1]


@pytest.fixture
def patient(served, around):
    """The number of weights at each turn of a lane, and `expected`: turns take one step, and the next one waits for that many
    requests."""
    service, turns, expected = served.service, [], []

    def sampled(sample, lane, longest, requests, weights, tokens):
        if expected:
            lanes, count = service._sample_lanes[0], expected.pop() - len(requests)
            wait_until(
                lambda: sum(map(len, chain(*(s.lanes.copy().values() for s in lanes._shares.copy().values())))) >= count
            )
        return sample(lane, longest, requests, weights, 1)

    def advanced(advance, lane, tokens):
        turns.append(len(lane.weights()))
        return advance(lane, tokens)

    around(service.bases.bench().samplers[0], "sample", sampled)
    around(service.bases.bench().samplers[0].bench, "advance", advanced)
    return turns, expected


def samplers_of(served):
    """Samplers of two models, which differ, and of the base model."""
    trainers = [served.trainer(seed=seed) for seed in (3, 4)]
    for seed, trainer in enumerate(trainers):
        train(trainer, [seed])
    return [
        *(trainer.save_weights_and_get_sampling_client().result() for trainer in trainers),
        served.client().create_sampling_client(base_model=served.service.bases.names[0]),
    ], trainers


def sampled(future):
    return [(list(sequence.tokens), list(sequence.logprobs)) for sequence in future.result().sequences]


def test_samplers_of_several_models_decode_together_and_each_has_its_samples(served, patient):
    (samplers, _), (turns, expected) = samplers_of(served), patient
    params = types.SamplingParams(max_tokens=6, seed=5, stop=[])
    apart = [sampled(sampler.sample(PROMPT, 2, params)) for sampler in samplers]
    assert set(turns) == {1}
    expected.append(3)
    futures = [sampler.sample(PROMPT, 2, params) for sampler in samplers]
    assert [sampled(future) for future in futures] == apart
    assert max(turns) == 3
    assert len(set(map(str, apart))) == 3


def test_broken_weights_fail_their_own_samples_only(served, patient):
    ((fine, *_), (_, broken)), (turns, expected) = samplers_of(served), patient
    for name, weight in served.tensors(broken).items():
        weight.fill_(float("nan") if name.endswith("lora_B") else 1.0)
    params, failing = (
        types.SamplingParams(max_tokens=2, stop=[]),
        broken.save_weights_and_get_sampling_client().result(),
    )
    expected.append(2)
    futures = [sampler.sample(PROMPT, 1, params) for sampler in (fine, failing)]
    assert len(futures[0].result().sequences[0].tokens) <= 2
    with pytest.raises(tinker.RequestFailedError, match="not finite"):
        futures[1].result()
    assert max(turns) == 2


def test_log_probs_of_samples_equal_the_log_probs_of_training(served):
    trainer = served.trainer()
    train(trainer, range(3))
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, seed=1, stop=[])
    answer = sampler.sample(PROMPT, 64, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert answer.prompt_logprobs[0] is None
    assert len(answer.topk_prompt_logprobs) == 4
    differences = []
    for sequence in answer.sequences:
        ids = [*PROMPT.to_ints(), *sequence.tokens]
        inputs = {"target_tokens": tensor(np.array(ids[1:])), "weights": tensor(np.ones(len(ids) - 1, np.float32))}
        row = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
        trained = array(trainer.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"])
        differences += np.abs(trained[3:] - np.array(sequence.logprobs)).tolist()
        assert trained[:3] == pytest.approx(answer.prompt_logprobs[1:], abs=1e-4)
    assert len(answer.sequences[0].tokens) == 8
    assert np.mean(differences) < 1e-4


def test_a_loaded_checkpoint_goes_on_bit_for_bit(served):
    straight = served.trainer()
    train(straight, range(3))
    path = straight.save_state("third").result().path
    train(straight, range(3, 6))
    client = served.client()
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    train(resumed, range(3, 6))
    assert equal(served.tensors(straight), served.tensors(resumed))
    fresh = client.create_training_client_from_state(path).result()
    train(fresh, range(3, 6))
    assert not equal(served.tensors(straight), served.tensors(fresh))
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        straight.save_state("third").result()
    with pytest.raises(tinker.BadRequestError, match="the model has rank 2 on"):
        served.trainer(rank=2).load_state(path).result()
    rest = client.create_rest_client()
    run = rest.get_training_run(straight.model_id).result()
    assert run.last_checkpoint.tinker_path == path
    assert [c.checkpoint_id for c in rest.list_checkpoints(straight.model_id).result().checkpoints] == ["weights/third"]
    sampler = client.create_sampling_client(
        model_path=straight.save_weights_for_sampler("final").result().path
    ).result()
    assert sampler.compute_logprobs(PROMPT).result()[1] < 0


RANKS = (2, 3, 4, 8)


def test_models_in_turn_train_to_the_bits_that_each_gets_by_itself(served):
    apart = [served.trainer(rank=rank, seed=rank) for rank in RANKS]
    for trainer in apart:
        train(trainer, range(4))
    together = [served.trainer(rank=rank, seed=rank) for rank in RANKS]
    futures = []
    for seed in range(4):
        for trainer in together:
            rows = [datum(seed * 10 + row) for row in range(3)]
            futures += [trainer.forward_backward(rows, "cross_entropy"), trainer.optim_step(ADAM)]
    for future in futures:
        future.result()
    for one, other in zip(apart, together, strict=True):
        assert equal(served.tensors(one), served.tensors(other))


def test_a_refused_batch_takes_no_number_away_and_a_failed_one_no_step(served):
    trainer = served.trainer()
    with pytest.raises(tinker.BadRequestError, match="no loss"):
        trainer.forward_backward([datum(0, policy=True)], "gspo").result()
    train(trainer, range(1))
    before = {name: value.clone() for name, value in served.tensors(trainer).items()}
    overflow = datum(0, logprobs=np.full(4, -3e38, np.float32), advantages=np.ones(4, np.float32), length=4)
    failed = trainer.forward_backward([overflow], "importance_sampling")
    step = trainer.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match="loss is"):
        failed.result()
    with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
        step.result()
    assert equal(before, served.tensors(trainer))
    train(trainer, range(1))


def test_clients_that_wait_when_the_server_ends_are_told_to_ask_again(bench, tmp_path, around, caplog):
    waits, release = threading.Event(), threading.Event()

    def wait(wait, future, timeout_s):
        waits.set()
        return wait(future, timeout_s)

    around(RequestFuture, "wait", wait)
    around(bench, "advance", lambda advance, *arguments: (release.wait(60), advance(*arguments))[1])
    with running(bench, tmp_path) as served, ThreadPoolExecutor() as pool:
        http = httpx.Client(base_url=f"{served.url}/api/v1", headers={"x-api-key": "tml-test"}, timeout=60)
        session = http.post("create_session", json={"tags": [], "user_metadata": None, "sdk_version": "0"}).json()
        body = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": "base"}
        sampler = http.post("create_sampling_session", json=body).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}]}
        sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
        request_id = http.post("asample", json=sample).json()["request_id"]
        answer = pool.submit(http.post, "retrieve_future", json={"request_id": request_id})
        assert waits.wait(60)
        served.end()
        assert answer.result(60).status_code == 408
        release.set()
    assert "Exception in ASGI application" not in caplog.text
