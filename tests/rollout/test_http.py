"""Service engines against recorded answers: tokens in and out, retries, versions, weights by file, refusals."""

import copy
import json
import math
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.service import MODELS, Raw, choice, running
from tests.rollout.simulated import send, vllm_server
from tests.rollout.test_vllm import weights_of
from verl.cli.supervise import _ending
from verl.config import RolloutConfig
from verl.config.sections.rollout import ServiceConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError, DeadlineError, ModelError, NumericsError, UnreachableError
from verl.reshard.link import read_link
from verl.rollout.api import RolloutEngine
from verl.rollout.http import client
from verl.rollout.http.engine import HTTPRollout
from verl.rollout.uniforms import sample_keys
from verl.rollout.vllm.sample import draw_arguments
from verl.rollout.vllm.weights import LINK_READER

pytestmark = pytest.mark.seed("B5")

VOCABULARY = 264
PARAMS = SamplingParams(n=2, temperature=0.8, top_k=5, max_new_tokens=2, stop=("x",), stop_token_ids=(9,))


@pytest.fixture
def make(connect, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_WAIT_S", 0.001)
    monkeypatch.delenv("VERL_ROLLOUT_TOKEN", raising=False)
    return connect


def completion(body):
    """As vLLM's server answers: two tokens that follow from the prompt."""
    first = body["prompt"][-1]
    return choice([first, first + 1], [-0.5, -0.25])


def sglang(body):
    first, num_new = body["input_ids"][-1], body["sampling_params"]["max_new_tokens"]
    rows = [[-0.5, first, None], [-0.25, 9, None]] if num_new > 1 else [[-math.log(VOCABULARY), first, None]]
    meta = {"finish_reason": {"type": "stop", "matched": 9}, "output_token_logprobs": rows, "weight_version": "3"}
    return {"text": "", "meta_info": meta}


def test_tokens_in_and_tokens_out(make):
    with running({"/v1/models": MODELS, "/v1/completions": completion}) as service:
        engine, ended = make(service.url), []
        assert isinstance(engine, RolloutEngine)
        prompts = make_prompts([3, 6, 2])
        completions = engine.generate(prompts, PARAMS, step=4, on_finish=ended.append)
    assert [(c.ordinal, c.sample) for c in completions] == [(i, n) for i in range(3) for n in range(2)]
    assert sorted((c.ordinal, c.sample) for c in ended) == [(c.ordinal, c.sample) for c in completions]
    assert [c.token_ids[0] for c in completions[::2]] == [p.token_ids[-1] for p in prompts]
    assert completions[0].log_probs == [-0.5, -0.25]
    bodies = service.bodies("/v1/completions")
    assert all((b["model"], b["temperature"], b["top_k"], b["stop"]) == ("served", 0.8, 5, ["x"]) for b in bodies)
    assert all(b["return_token_ids"] and b["stop_token_ids"] == [9, EOS] for b in bodies)
    assert len({b["seed"] for b in bodies}) == 6
    assert engine.stats()["num_generated_tokens"] == 12


def test_a_repeated_request_is_one_sample(make):
    """Refused once, broken off once, then answered: each sample is there once, and the same request was repeated."""
    failures = {}
    lock = threading.Lock()

    def flaky(body):
        with lock:
            count = failures[body["seed"]] = failures.get(body["seed"], 0) + 1
        return ((503, "busy"), None, completion(body))[min(count, 3) - 1]

    with running({"/v1/models": MODELS, "/v1/completions": flaky}) as service:
        ended = []
        completions = make(service.url).generate(make_prompts([3, 4]), PARAMS, step=0, on_finish=ended.append)
    assert len(completions) == len(ended) == 4
    assert set(failures.values()) == {3}
    bodies = service.bodies("/v1/completions")
    assert len({json.dumps(b, sort_keys=True) for b in bodies}) == 4


def test_a_service_says_when_to_ask_again(make, monkeypatch):
    """Retry-After, in seconds, up to half a minute; a date is not read."""
    waits, headers = [], iter(["2", "9999", "Sun, 06 Nov 1994 08:49:37 GMT"])
    monkeypatch.setattr(client.time, "sleep", waits.append)

    def busy(body):
        if wait := next(headers, None):
            return Raw(lambda: [f"HTTP/1.1 429 Busy\r\nRetry-After: {wait}\r\nConnection: close\r\n\r\n".encode()])
        return completion(body)

    with running({"/v1/models": MODELS, "/v1/completions": busy}) as service:
        params = replace(PARAMS, n=1)
        assert len(make(service.url, num_retries=3).generate(make_prompts([3]), params, step=0)) == 1
    assert waits == [2.0, 30.0, 0.004]


def test_a_service_that_stays_away_is_named(make):
    with running({"/v1/models": MODELS, "/v1/completions": lambda body: None}) as service:
        engine = make(service.url)
        with pytest.raises(UnreachableError, match="tried 3 times"):
            engine.generate(make_prompts([3]), PARAMS, step=0)
    with pytest.raises(UnreachableError, match="cannot be reached"):
        make(service.url)


def test_a_service_that_takes_no_connection_is_named_at_once(make, monkeypatch):
    """The service answers nothing at all, as behind a firewall: its queue of connections is full."""
    monkeypatch.setattr(client, "_CONNECT_S", 0.3)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        with pytest.raises(UnreachableError, match=f"http://127.0.0.1:{address[1]} cannot be reached"):
            make(f"http://127.0.0.1:{address[1]}", timeout_s=600.0)
        for one in waiting:
            one.close()


def test_a_service_out_of_reach_does_not_start_the_run_again():
    ending = _ending(
        UnreachableError.exit_code, {"error": "UnreachableError", "text": "The service is away. Start it."}, None
    )
    assert ending.final, "the supervisor starts crashes again, and nothing else"


def test_silence_has_a_deadline(make):
    ended = threading.Event()
    with running({"/v1/models": MODELS, "/v1/completions": lambda body: ended.wait(120)}) as service:
        engine = make(service.url, num_retries=1)
        engine.client.timeout_s = 0.1
        with pytest.raises(DeadlineError, match="not answered within 0.1 s, 2 times"):
            engine.generate(make_prompts([3]), PARAMS, step=0)
        ended.set()


def test_the_token_is_sent_and_never_said(make, monkeypatch):
    with running({"/v1/models": MODELS}) as service:
        monkeypatch.setenv("VERL_ROLLOUT_TOKEN", "open sesame")
        make(service.url)
        assert service.headers[0]["Authorization"] == "Bearer open sesame"
    with running({"/v1/models": (401, "who are you")}) as service:
        with pytest.raises(ConfigError, match="VERL_ROLLOUT_TOKEN") as caught:
            make(service.url)
        assert "sesame" not in str(caught.value)
    monkeypatch.delenv("VERL_ROLLOUT_TOKEN")
    with pytest.raises(ConfigError, match="another machine"):
        make("http://192.0.2.1:8000")
    with pytest.raises(ConfigError, match="not an address"):
        make("localhost:8000")


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"data": [{"id": "one"}, {"id": "two"}]}, "serves one, two, not a/model"),
        ({"data": [{"id": "one", "root": "another"}]}, "serves another, but this run trains"),
    ],
)
def test_another_model_is_refused(models, words, make):
    with running({"/v1/models": models}) as service, pytest.raises(ConfigError, match=words):
        make(service.url)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"token_ids": None}, ModelError, "no token ids"),
        ({"token_ids": [1]}, ModelError, "1 tokens and 2 log-probs for sample . of prompt 0"),
        ({"finish_reason": "abort"}, ModelError, "by itself"),
        ({"prompt_token_ids": [1, 2]}, ModelError, "of another prompt than the 3 tokens sent for sample . of prompt 0"),
        ({"logprobs": {"token_logprobs": [-0.5, -math.inf]}}, NumericsError, "not finite"),
        ({"logprobs": {"token_logprobs": [-0.5, -1e39]}}, NumericsError, "not finite"),  # in float32
    ],
)
def test_answers_that_cannot_train_are_refused(change, error, words, make):
    def broken(body):
        answer = completion(body)
        answer["choices"][0] |= change
        return answer

    with running({"/v1/models": MODELS, "/v1/completions": broken}) as service, pytest.raises(error, match=words):
        make(service.url).generate(make_prompts([3]), PARAMS, step=0)


@pytest.mark.parametrize(
    ("num_made", "text", "ending", "num_asked"),
    [
        (5, "abcdxyz", ("abcdx", "stop"), 1),  # where our rule ends it too
        (2, "abcdxyz", ("abcdx", "stop"), 2),  # before there is one: sampled again
        (6, "abcdxyz", ("abcdx", "stop"), 1),
        (7, "abcdxyz", ("abcdx", "stop"), 1),  # not found at all
        (2, "abcdefg", ("abcdefg", "length"), 2),
        (2, "abcd\tefg", ("abcd\t", "stop"), 2),  # sampled again to a stop token
    ],
)
def test_stop_strings_are_looked_for_here(num_made, text, ending, num_asked, make, tokenizer):
    def ids(words):
        return tokenizer.encode(words, add_special_tokens=False)

    prompt, script, stop_token = make_prompts([3])[0], ids(text), ids("\t")[0]

    def answer(body):
        tokens = script[len(body["prompt"]) - 3 :]
        tokens = tokens[:num_made] if body["stop"] else tokens
        tokens = tokens[: tokens.index(stop_token) + 1] if stop_token in tokens else tokens
        by_length = len(tokens) == len(script) or (not body["stop"] and tokens[-1] != stop_token)
        return choice(tokens, [-0.5] * len(tokens), "length" if by_length else "stop")

    params = SamplingParams(max_new_tokens=len(script), stop=("x",), stop_token_ids=(stop_token,))
    with running({"/v1/models": MODELS, "/v1/completions": answer}) as service:
        (completions,) = make(service.url).generate([prompt], params, step=0)
    bodies = service.bodies("/v1/completions")
    assert (tokenizer.decode(completions.token_ids), completions.finish_reason, len(bodies)) == (*ending, num_asked)
    assert len(completions.log_probs) == len(completions.token_ids)
    assert len({b["seed"] for b in bodies}) == num_asked
    assert [b["stop"] for b in bodies[1:]] == [[]] * (num_asked - 1)


def test_log_probs_of_what_a_filter_left_are_refused(make):
    with pytest.raises(ConfigError, match="cannot be compared with the trained model's"):
        make("http://127.0.0.1:1", top_p=0.9)


def test_no_way_for_weights_is_said(make, load, tmp_path):
    with running({"/v1/models": MODELS, "/v1/completions": completion}) as service:
        with pytest.raises(ConfigError, match="weights_dir"):
            make(service.url).load(weights_of(load("llama")))
        engine = make(service.url, weights_dir=str(tmp_path))
        with pytest.raises(ModelError, match="service.api to vllm or sglang"):
            engine.load(weights_of(load("llama")))
        with pytest.raises(ModelError, match="did not end well"):
            engine.generate(make_prompts([3]), PARAMS, step=0)


def test_vllms_server_draws_as_we_do_and_takes_weights(make, load, tmp_path):
    module = load("llama")
    served = copy.deepcopy(module)
    with torch.no_grad():
        served.model.norm.weight.mul_(1.1)
    answers = vllm_server(served)
    with running(answers) as service:
        engine = make(service.url, api="vllm", weights_dir=str(tmp_path))
        send(engine, module, 5)
        completions = engine.generate(make_prompts([3]), PARAMS, step=2)
        assert {c.weight_version for c in completions} == {5}
        answers["/weight_info"] = {"weight_version": "4"}  # another client's update
        with pytest.raises(ModelError, match="version 4, but version 5-.* was published"):
            engine.generate(make_prompts([3]), PARAMS, step=2)
        answers["/v1/completions"] = choice([1], [-0.7])  # sampled by the server itself
        with pytest.raises(ConfigError, match="does not sample as this run asks"):
            make(service.url, api="vllm")
    assert all(torch.equal(served.get_parameter(name), p) for name, p in weights_of(module))
    assert not list(tmp_path.iterdir())  # what has been read is removed
    keys = sample_keys(PARAMS.seed, 2, torch.tensor([0, 0]), torch.tensor([0, 1])).tolist()
    bodies = [b for b in service.bodies("/v1/completions") if b["max_tokens"] == PARAMS.max_new_tokens]
    assert sorted(b["vllm_xargs"]["verl_draw"] for b in bodies) == sorted(
        draw_arguments(key, 0, PARAMS)["verl_draw"] for key in keys
    )
    assert all(b["temperature"] == 0.0 for b in bodies)


@pytest.mark.parametrize("broken", ["verl_load", "verl_finish"])
def test_what_went_wrong_first_is_said(broken, make, load):
    answers = vllm_server(copy.deepcopy(load("llama")))
    on_workers = answers["/collective_rpc"]

    def failing(body):
        return (500, f"no {body['method']}") if body["method"] in (broken, "verl_abandon") else on_workers(body)

    answers["/collective_rpc"] = failing
    with running(answers) as service:
        engine = make(service.url, api="vllm")
        with pytest.raises(ModelError, match=f"no {broken}"):
            send(engine, load("llama"), 1)
        assert answers["/weight_info"]({}) == {"weight_version": "unfinished"}


def test_two_runs_of_one_service_notice_each_other(make, load):
    """At the same version too: neither samples from the weights of the other one."""
    with running(vllm_server(copy.deepcopy(load("llama")))) as service:
        first, second = (make(service.url, api="vllm") for _ in range(2))
        for engine in (first, second):
            send(engine, load("llama"), 5)
        with pytest.raises(
            ModelError, match="version 5-.*, but version 5-.* was published. Another client changes them"
        ):
            first.generate(make_prompts([3]), PARAMS, step=2)
        assert second.generate(make_prompts([3]), PARAMS, step=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"url": "http://198.51.100.7:8000", "api": "vllm"},
            "must ask for a token: set the environment variable VERL_",
        ),
        ({"url": "http://127.0.0.1:8000", "api": "openai"}, "service.api=openai takes no weights"),
        ({"url": "127.0.0.1", "api": "vllm"}, "is not an address like"),
    ],
)
def test_keys_that_no_service_can_follow_are_known_before_a_model_loads(settings, words, monkeypatch):
    monkeypatch.delenv("VERL_ROLLOUT_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=words):
        HTTPRollout.require_package(RolloutConfig(name="http", service=ServiceConfig(**settings)))


def test_a_service_on_another_host_fetches_the_weights(make, load, tmp_path):
    module = load("llama")
    served = copy.deepcopy(module)
    with torch.no_grad():
        served.model.norm.weight.mul_(1.1)
    with running(vllm_server(served, reads_memory=False, fetches=True)) as service:
        engine = make(service.url, api="vllm", weights_dir=str(tmp_path))
        assert engine.weights_way() == f"TCP to {service.url}"
        send(engine, module, 5)
        assert all(torch.equal(served.get_parameter(name), p) for name, p in weights_of(module))
        messages = [body for body in service.bodies("/collective_rpc") if body["method"] == "verl_load"]
        assert {json.loads(body["args"][0])["reader"] for body in messages} == {LINK_READER}
        assert not list(tmp_path.iterdir())
        assert engine.num_fetched_bytes == sum(parameter.nbytes for parameter in module.parameters())
        engine.close()
        with pytest.raises(ModelError, match="cannot be fetched from 127.0.0.1"):
            list(read_link(json.loads(messages[-1]["args"][0])["bucket"]))


def test_a_restart_within_a_step_is_noticed(make, load, tmp_path):
    """vLLM's answers do not say which weights they are of, and a server that starts again has the first ones."""
    module = load("llama")
    answers = vllm_server(copy.deepcopy(module))
    complete = answers["/v1/completions"]

    def restarted(body):
        answers["/weight_info"] = {"weight_version": "default"}
        return complete(body)

    with running(answers) as service:
        engine = make(service.url, api="vllm", weights_dir=str(tmp_path))
        send(engine, module, 5)
        answers["/v1/completions"] = restarted  # after `open`
        with pytest.raises(ModelError, match="version default, but version 5-.* was published"):
            engine.generate(make_prompts([3]), PARAMS, step=2)


def test_sglang_says_how_long_a_prompt_it_has_read(make):
    def cut(body):
        answer = sglang(body)
        answer["meta_info"]["prompt_tokens"] = min(2, len(body["input_ids"]))
        return answer

    with running({"/model_info": {"model_path": "a/model", "weight_version": "3"}, "/generate": cut}) as service:
        with pytest.raises(ModelError, match="of another prompt than the 3 tokens sent for sample . of prompt 0"):
            make(service.url, name="sglang").generate(make_prompts([3]), PARAMS, step=0)


def test_a_server_without_versions_of_its_weights_is_used_with_a_warning(make, load, tmp_path, caplog):
    """vLLM before 0.32."""
    module = load("llama")
    answers = vllm_server(copy.deepcopy(module))
    for route in ("/update_weight_version", "/weight_info"):
        del answers[route]
    with running(answers) as service:
        engine = make(service.url, api="vllm", weights_dir=str(tmp_path))
        assert "keeps no version of its weights, as vLLM does from 0.32 on" in caplog.text
        send(engine, module, 5)
        assert {c.weight_version for c in engine.generate(make_prompts([3]), PARAMS, step=2)} == {5}


@pytest.mark.parametrize("route", ["/model_info", "/get_model_info"])
def test_sglang_has_its_own_routes(route, make, load, tmp_path):
    taken = []

    def update(body):
        taken.append(sorted(p.name for p in Path(body["model_path"]).iterdir()))
        return {"success": len(taken) == 1, "message": "no room"}

    def generate(body):
        answer = sglang(body)
        answer["meta_info"]["weight_version"] = "3-run"
        return answer

    answers = {
        route: {"model_path": "where/it/lies/model", "weight_version": "3-run"},
        "/generate": generate,
        "/update_weights_from_disk": update,
        "/update_weight_version": {"success": True},
    }
    with running(answers) as service:
        engine = make(service.url, name="sglang", weights_dir=str(tmp_path))
        engine.run_name = "run"
        send(engine, load("llama"), 3)
        completions = engine.generate(make_prompts([3]), PARAMS, step=0)
        assert [(c.token_ids[1], c.log_probs, c.finish_reason) for c in completions] == [(9, [-0.5, -0.25], "stop")] * 2
        assert "model.safetensors.index.json" in taken[0]
        sampling = service.bodies("/generate")[-1]["sampling_params"]
        assert (sampling["max_new_tokens"], sampling["stop_token_ids"], sampling["no_stop_trim"]) == (2, [9, EOS], True)
        with pytest.raises(ModelError, match="did not take the new weights"):
            engine.load(weights_of(load("llama")))
        answers[route] = {"model_path": "another"}
        with pytest.raises(ConfigError, match="serves another"):
            make(service.url, name="sglang")
