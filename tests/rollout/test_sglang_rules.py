"""Services with rules of their own about ends, lengths and names: a run gets the samples that its config describes."""

import math
import resource
from pathlib import Path

import pytest

from tests.rollout.conftest import EOS, make_prompts
from tests.rollout.service import MODELS, choice, running
from tests.rollout.sglang_service import SimulatedSGLang
from tests.rollout.simulated import Model, send
from verl.config import RolloutConfig
from verl.data_proto.samples import SamplingParams
from verl.errors import ConfigError
from verl.parallel.framing import most_connections
from verl.rollout.api import ENGINES

VOCABULARY = 264
SCRIPT = (10, 11, 12, 13, 14, 15, 16, 17)  # the greedy response of the scripted services
GREEDY = SamplingParams(temperature=0, max_new_tokens=6)


def scripted(ids, position, params):
    return SCRIPT[len(ids) % len(SCRIPT)], -0.5


@pytest.fixture
def make(connect):
    return lambda service, name="sglang", **config: connect(service.url, name, **config)


def sglang(next_token=scripted, **rules):
    return SimulatedSGLang("a/model", next_token, VOCABULARY, **rules)


@pytest.mark.parametrize("further_eos", [(), (EOS,), (EOS, 101, 40, 7)])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_samples_end_where_the_native_ones_do(ignore_eos, further_eos, make, load, tokenizer):
    """Whichever tokens SGLang takes for ends besides. Greedy responses hold a stop token and tokens that only it knows."""
    model = Model(load("llama"))
    server = sglang(lambda ids, position, params: model.next_token(ids, 1, position, params), eos_token_ids=further_eos)
    prompts = make_prompts([3, 9, 17])
    native = ENGINES.get("native")(load("llama"), tokenizer, RolloutConfig(), eos_token_ids=[EOS])
    text = [c.token_ids for c in native.generate(prompts, SamplingParams(temperature=0, max_new_tokens=16), step=0)]
    server.eos_token_ids = (*further_eos, *(tokens[1] for tokens in text[:1] if further_eos))
    for stops in ((), (text[1][3],), (EOS,)):
        params = SamplingParams(temperature=0, max_new_tokens=16, stop_token_ids=stops, ignore_eos=ignore_eos)
        with running(server.answers) as service:
            completions = make(service).generate(prompts, params, step=0)
        expected = native.generate(prompts, params, step=0)
        nothing_ends = ignore_eos and not stops
        assert {b["sampling_params"]["ignore_eos"] for b in service.bodies("/generate")[1:]} == {nothing_ends}
        assert [(c.token_ids, c.finish_reason) for c in completions] == [
            (c.token_ids, c.finish_reason) for c in expected
        ], stops


def test_a_limit_of_tokens_for_a_request_is_none_for_a_sample(make):
    with running(sglang(most_new=4).answers) as service:
        (sample,) = make(service).generate(make_prompts([8]), GREEDY, step=0)
    assert (sample.token_ids, sample.finish_reason) == ([10, 11, 12, 13, 14, 15], "length")


def test_the_end_of_the_context_is_reached(make):
    """With the margin that a server of the run has."""
    with running(sglang(context_length=64 + 8).answers) as service:
        engine = make(service, max_model_len=64, response_length=7)
        for length in (57, 58, 60, 63):
            params = SamplingParams(temperature=0, max_new_tokens=64 - length)
            (sample,) = engine.generate(make_prompts([length]), params, step=0)
            assert (len(sample.token_ids), sample.finish_reason) == (64 - length, "length")


def test_a_context_that_is_too_short_is_refused_before_the_run(make):
    with running(sglang(context_length=64).answers) as service:
        with pytest.raises(
            ConfigError, match=r"58 tokens in a sequence, and this run has up to 64.*--context-length 64 \+ 8"
        ):
            make(service, max_model_len=64)
        make(service, max_model_len=58)
    models = {"data": [{"id": "served", "root": "a/model", "max_model_len": 63}]}
    with (
        running({"/v1/models": models}) as service,
        pytest.raises(ConfigError, match="63 tokens .* --max-model-len 64"),
    ):
        make(service, "http", max_model_len=64)


def test_a_context_of_unknown_length_ends_a_sample_and_not_the_run(make, caplog):
    server = sglang(context_length=64)
    del server.answers["/server_info"]
    with running(server.answers) as service:
        (sample,) = make(service, max_model_len=64).generate(make_prompts([56]), GREEDY, step=0)
    assert len(sample.token_ids) == 6
    assert "refused" not in caplog.text
    server.context_length = 63
    with running(server.answers) as service:
        (sample,) = make(service, max_model_len=64).generate(make_prompts([56]), GREEDY, step=0)
    assert (len(sample.token_ids), sample.finish_reason) == (5, "length")
    assert "refused further tokens of 1 samples, which end before their limit of tokens" in caplog.text


def test_a_second_run_on_the_same_server(make, load, tmp_path):
    """After an update SGLang names the folder of the weights as its model."""
    server = sglang()
    with running(server.answers) as service:
        first = make(service, weights_dir=str(tmp_path))
        send(first, load("llama"), 1)
        assert Path(server.model_path).name == "version-1"
        make(service)
        server.tokenizer_path = "another"
        with pytest.raises(ConfigError, match="serves .*version-1, but this run trains a/model"):
            make(service)


def test_log_probs_of_another_temperature_are_refused(make):
    with (
        running(sglang(original=True).answers) as service,
        pytest.raises(ConfigError, match="not at the sampling temperature. Start it without SGLANG_RETURN_ORIGINAL"),
    ):
        make(service)


@pytest.mark.parametrize(
    ("log_probs", "is_right"),
    [((-1.0, -1.0), False), ((-1.0, -2.5), True), ((0.0, 0.0), True)],  # at 1 and 2; with the filter, a token has all
)
def test_log_probs_of_a_service_are_at_the_sampling_temperature(log_probs, is_right, make):
    def likeliest(body):
        assert body["temperature"] <= 2, "vLLM takes no more"
        return choice([5], [log_probs[int(body["temperature"] > 1)]])

    answers = {"/v1/models": MODELS, "/v1/completions": likeliest}
    with running(answers) as service:
        make(service, "http", temperature=1.0)
        if is_right:
            make(service, "http", temperature=0.7)
            return
        with pytest.raises(
            ConfigError, match="whatever the sampling temperature is. Start it with --logprobs-mode proc"
        ):
            make(service, "http", temperature=0.7)


def test_no_default_of_a_service_is_left(make):
    """Of the model's generation_config.json: vLLM's server takes it for values that a request lacks."""
    flat = choice([5], [-math.log(VOCABULARY)])
    answers = {"/v1/models": {"data": [{"id": "served"}]}, "/v1/completions": flat, **sglang().answers}
    one = SamplingParams(max_new_tokens=1, stop=("", "x", *map(str, range(40))))
    with running(answers) as service:
        for name in ("http", "sglang"):
            make(service, name).generate(make_prompts([3]), one, step=0)
        bodies = [service.bodies("/v1/completions")[-1], service.bodies("/generate")[-1]["sampling_params"]]
    neutral = {
        "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip
    for body in bodies:
        assert {name: body.get(name) for name in neutral} == neutral
        assert len(body["stop"]) == 32, "SGLang takes no more"
        assert "" not in body["stop"]


def test_requests_side_by_side_are_as_many_as_configured(make, monkeypatch):
    with running(sglang().answers) as service:
        engine = make(service, max_num_seqs=300)
        engine.generate(make_prompts([3] * 280), SamplingParams(max_new_tokens=1), step=0)
    assert engine.stats()["max_running"] == 280
    for limit, num_connections in ((1024, 768), (64, 16)):
        monkeypatch.setattr(resource, "getrlimit", lambda name, limit=limit: (limit, limit))
        assert most_connections() == num_connections
