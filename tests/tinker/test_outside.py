"""Samples of a service that holds adapters by their names: a stand-in of SGLang, and of vLLM's server."""

import math
import threading

import pytest
from safetensors.torch import load_file

tinker = pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types  # noqa: E402

from tests.rollout.service import choice  # noqa: E402
from tests.rollout.service import running as answering  # noqa: E402
from tests.tinker.data import datum  # noqa: E402
from tests.tinker.served import running  # noqa: E402
from verl.cli.serve import serving_config  # noqa: E402
from verl.errors import ConfigError  # noqa: E402
from verl.models.adapter_weights import AdapterWeights  # noqa: E402
from verl.models.lora import own_names  # noqa: E402
from verl.tinker.workbench import Workbench  # noqa: E402
from verl.tinker.worker import check_service  # noqa: E402

FLOAT = "actor_rollout_ref.actor.fsdp_config.dtype=float32"
ADAM = types.AdamParams(learning_rate=3e-2, eps=1e-8)
PROMPT = types.ModelInput.from_ints([3, 4, 5, 6])
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
FLAT = 1e6  # at this temperature all tokens are equally likely


class StandIn:
    """Greedy samples of the model at `path`, under the adapters that were loaded, as both servers answer."""

    def __init__(self, path):
        self.path, self.bench = path, Workbench(serving_config(str(path), [FLOAT], rank=8))
        self.adapters, self.most_adapters, self.lock, self.refuses = {}, 0, threading.Lock(), False
        self.answers = {
            "/model_info": lambda body: {
                "model_path": str(path),
                "tokenizer_path": str(path),
                "weight_version": "default",
            },
            "/server_info": {"max_req_input_len": 1024},
            "/continue_generation": {},
            "/generate": self.generate,
            "/load_lora_adapter": lambda body: self.load(body) or {"success": True},
            "/unload_lora_adapter": lambda body: self.unload(body) or {"success": True},
            "/v1/models": {"data": [{"id": "base", "root": str(path), "max_model_len": 1024}]},
            "/v1/completions": self.complete,
            "/v1/load_lora_adapter": lambda body: self.load(body) or (200, "Success"),
            "/v1/unload_lora_adapter": lambda body: self.unload(body) or (200, "Success"),
        }

    def load(self, body):
        if self.refuses:
            return (400, "lm_head is not a target module here")
        tensors = own_names(load_file(f"{body['lora_path']}/adapter_model.safetensors"))
        rank = next(t.shape[0] for n, t in tensors.items() if n.endswith("lora_A"))
        assert body["lora_name"] not in self.adapters
        self.adapters[body["lora_name"]] = AdapterWeights(rank, tensors)
        self.most_adapters = max(self.most_adapters, len(self.adapters))
        return None

    def unload(self, body):
        del self.adapters[body["lora_name"]]

    def greedy(self, ids, count, name):
        tokens, scores = [], []
        with self.lock:
            self.bench.engine.show(None if name is None else self.adapters[name])
            for _ in range(count):
                _, top = self.bench._scores([*ids, *tokens], [0], 1)
                tokens.append(int(top.ids[0, 0]))
                scores.append(float(top.log_probs[0, 0]))
        return tokens, scores

    def generate(self, body):
        count, flat = body["sampling_params"]["max_new_tokens"], body["sampling_params"]["temperature"] == FLAT
        tokens, scores = self.greedy(body["input_ids"], count, body.get("lora_path"))
        scores = [-math.log(self.bench.vocabulary)] * count if flat else scores
        rows = [[score, token, None] for token, score in zip(tokens, scores, strict=True)]
        return {
            "meta_info": {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": rows,
                "weight_version": "default",
            }
        }

    def complete(self, body):
        name, ((_, _, temperature, *_),) = (
            None if body["model"] == "base" else body["model"],
            body["vllm_xargs"].values(),
        )
        tokens, scores = self.greedy(body["prompt"], body["max_tokens"], name)
        return choice(tokens, [-math.log(self.bench.vocabulary)] * len(tokens) if temperature == FLAT else scores)


KINDS = {"sglang": ["rollout.name=sglang"], "vllm": ["rollout.name=http", "rollout.service.api=vllm"]}


def outside_keys(kind, url, folder):
    keys = [*KINDS[kind], f"rollout.service.url={url}", f"rollout.service.weights_dir={folder}"]
    return [FLOAT, *(f"actor_rollout_ref.{key}" for key in keys)]


@pytest.fixture(scope="module", params=KINDS)
def outside(request, tiny_llama, tmp_path_factory):
    folder, stand_in = tmp_path_factory.mktemp(request.param), StandIn(tiny_llama)
    with pytest.MonkeyPatch.context() as patch, answering(stand_in.answers) as service:
        patch.setenv("TINKER_TELEMETRY", "0")
        config = serving_config(str(tiny_llama), outside_keys(request.param, service.url, folder / "adapters"), rank=8)
        check_service(config)
        with running(Workbench(config), folder / "service") as served:
            served.stand_in, served.adapters_folder = stand_in, folder / "adapters"
            yield served


def sampled(client):
    (sequence,) = client.sample(PROMPT, 1, GREEDY).result().sequences
    return list(sequence.tokens), list(sequence.logprobs)


def test_each_sampler_has_its_adapter_at_the_service(outside, bench, tmp_path):
    trainers = [outside.trainer(seed=seed) for seed in (1, 2)]
    for number, trainer in enumerate(trainers):
        for step in range(4):
            trainer.forward_backward([datum(10 * number + step)], "cross_entropy")
            trainer.optim_step(ADAM).result()
    samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in trainers]
    samplers.append(outside.client().create_sampling_client(base_model="base").result())
    futures = [client.sample(PROMPT, 1, GREEDY) for client in (*samplers, *samplers)]
    drawn = [list(one.result().sequences[0].tokens) for one in futures]
    assert drawn[:3] == drawn[3:]
    assert len({tuple(tokens) for tokens in drawn}) > 1
    for client, trainer in zip(samplers, [*trainers, None], strict=True):
        tokens, scores = sampled(client)
        scored = types.ModelInput.from_ints([3, 4, 5, 6, *tokens])
        assert client.compute_logprobs(scored).result()[4:] == pytest.approx(scores, abs=1e-4), trainer
    assert outside.stand_in.most_adapters >= 1
    assert not outside.stand_in.adapters, "the service forgets what no request has"
    assert not list(outside.adapters_folder.iterdir())


def test_a_service_that_takes_no_adapter_is_a_sentence_and_others_go_on(outside):
    trainer, base = outside.trainer(), outside.client().create_sampling_client(base_model="base").result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    outside.stand_in.refuses = True
    try:
        with pytest.raises(tinker.RequestFailedError, match="lm_head"):
            sampled(sampler)
    finally:
        outside.stand_in.refuses = False
    assert len(sampled(base)[0]) == len(sampled(sampler)[0]) == 6


def test_a_service_that_is_gone_is_a_sentence_and_training_goes_on(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setattr("verl.rollout.http.client._CONNECT_S", 0.2)
    with answering(StandIn(tiny_llama).answers) as service:
        bench = Workbench(serving_config(str(tiny_llama), outside_keys("sglang", service.url, tmp_path / "a"), rank=8))
    with running(bench, tmp_path / "service") as served:
        trainer, base = served.trainer(), served.client().create_sampling_client(base_model="base").result()
        with pytest.raises(tinker.RequestFailedError, match="cannot be reached"):
            sampled(base)
        trainer.forward_backward([datum(1)], "cross_entropy")
        assert trainer.optim_step(ADAM).result().metrics["grad_norm"] > 0


@pytest.mark.parametrize(("keys", "sentence"), [
    (["rollout.name=sglang"], "service.url"),
    (["rollout.name=http", "rollout.service.url=http://127.0.0.1:1"], "weights_dir"),
    ([*KINDS["vllm"][:1], "rollout.service.url=http://127.0.0.1:1", "rollout.service.weights_dir=/a",
      "rollout.service.api=openai"], "no adapters by name"),
])  # fmt: skip
def test_a_service_without_adapters_by_name_is_refused(tiny_llama, keys, sentence):
    config = serving_config(str(tiny_llama), [f"actor_rollout_ref.{key}" for key in keys], rank=8)
    with pytest.raises(ConfigError, match=sentence):
        check_service(config)
