"""Answers of services that are late, without end, or of another shape: refused with a sentence, within the deadline."""

import random
import threading
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.foreign_text import texts
from tests.processes import wait_until
from tests.rollout.damaged_answers import KINDS, PARAMS, answers_of, dripped, endless, outcome, places, use, with_value
from tests.rollout.service import Raw, running
from verl.errors import ConfigError, DeadlineError, ModelError, VerlError
from verl.rollout.http.answers import Answer, SampleRequest
from verl.rollout.http.client import Client
from verl.rollout.http.dialects import DIALECTS, served_model
from verl.rollout.requests import vocab_size

VOCABULARY = 300
SAMPLE = SampleRequest((1, 2), PARAMS, [], key=1, num_drawn=0, vocab_size=VOCABULARY, name="sample 0 of prompt 1")
SAMPLES = {"openai": "/v1/completions", "vllm": "/v1/completions", "sglang": "/generate"}

numbers = st.integers() | st.floats() | st.sampled_from([10**9, 10**400, 5.0, -1e39, 0, -0.5])
scalars = st.none() | st.booleans() | numbers | texts | st.sampled_from(["stop", "length"])
values = st.recursive(
    scalars,
    lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(max_size=9), some, max_size=4),
    max_leaves=9,
)


class Recorded:
    """A client whose service gives one answer."""

    keys, url = "actor_rollout_ref.rollout.service", "http://127.0.0.1:1"

    def __init__(self, value):
        self.value = value

    def get(self, path, *, may_lack=False):
        return Answer(self.url, f"GET {path}", self.value)

    def command(self, path, body, *, may_lack=False):
        pass

    def post(self, path, body, *, num_tokens=0, may_lack=False):
        return Answer(self.url, f"POST {path}", self.value)


@st.composite
def damaged(draw, answer):
    """`answer` with another value in one place."""
    return with_value(answer, draw(st.sampled_from(list(places(answer)))), draw(values))


def refusal(call):
    """The error of a call, or "" if it succeeded."""
    try:
        call()
    except VerlError as error:
        str(error).encode()
        return str(error)
    return ""


@pytest.mark.parametrize("kind", SAMPLES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_sample_is_one_or_is_refused(kind, data):
    answer = data.draw(damaged(answers_of(kind, VOCABULARY)[SAMPLES[kind]]))
    try:
        reply = DIALECTS[kind]().sample(Recorded(answer), SAMPLE)
    except ModelError as error:
        str(error).encode()
        return
    assert 1 <= len(reply.token_ids) == len(reply.log_probs) <= PARAMS.max_new_tokens
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in reply.token_ids)
    assert all(type(value) is float and value <= 0 for value in reply.log_probs)  # -inf is refused where a sample ends
    assert reply.finish_reason in ("stop", "length")
    assert reply.version is None or reply.version.isprintable()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_other_answer_is_read_or_refused(data):
    kind = data.draw(st.sampled_from(["vllm", "sglang"]))
    right = data.draw(st.sampled_from(sorted(answers_of(kind, VOCABULARY).items())))[1]
    client, dialect = Recorded(data.draw(damaged(right))), DIALECTS[kind]()
    description = {"folder": "somewhere", "number": 1, "entries": []}
    refusal(lambda: served_model(client, None, "somewhere/model"))
    refusal(lambda: dialect.check(client, "somewhere/model", None, VOCABULARY))
    refusal(lambda: dialect.update(client, [description], "reader"))
    refusal(lambda: dialect.version(client))
    refusal(lambda: dialect.label(client, 3))


@pytest.mark.parametrize("kind", ["openai", "sglang"])
@pytest.mark.parametrize(
    ("token", "log_prob", "words"),
    [
        (10**9, -0.5, "1000000000 as a token id for sample 0 of prompt 1; the model knows 300 tokens"),
        (-1, -0.5, "-1 as a token id"),
        (5.0, -0.5, "5.0 as a token id"),
        (True, -0.5, "true as a token id"),
        (10**400, -0.5, "0x.* as a token id"),
        (5, 5.0, "5.0 as a log-probability for sample 0 of prompt 1; those are numbers of at most 0"),
        (5, "-1", '"-1" as a log-probability'),
        (5, None, "null as a log-probability"),
        (5, 10**400, "as a log-probability"),
    ],
)
def test_tokens_and_log_probs_that_cannot_be(kind, token, log_prob, words):
    answer = answers_of(kind, VOCABULARY)[SAMPLES[kind]]
    if kind == "sglang":
        answer["meta_info"]["output_token_logprobs"][0] = [log_prob, token, None]
    else:
        answer["choices"][0]["token_ids"][0] = token
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = log_prob
    with pytest.raises(ModelError, match=words):
        DIALECTS[kind]().sample(Recorded(answer), SAMPLE)


@pytest.mark.parametrize("kind", SAMPLES)
def test_tokens_after_a_stop_token_are_dropped(kind):
    """A service may continue, as SGLang does with ignore_eos."""
    answer, tokens = answers_of(kind, VOCABULARY)[SAMPLES[kind]], [5, 9, 6, 9]
    if kind == "sglang":
        answer["meta_info"]["output_token_logprobs"] = [[-token, token, None] for token in tokens]
    else:
        answer["choices"][0] |= {"token_ids": tokens, "logprobs": {"token_logprobs": [-token for token in tokens]}}
        answer["choices"][0]["finish_reason"] = "length"
    reply = DIALECTS[kind]().sample(Recorded(answer), replace(SAMPLE, stop_token_ids=[9, 2]))
    assert (reply.token_ids, reply.log_probs, reply.finish_reason) == ([5, 9], [-5.0, -9.0], "stop")


def test_rounding_above_0_is_not_an_error():
    answer = answers_of("openai", VOCABULARY)["/v1/completions"]
    answer["choices"][0]["logprobs"]["token_logprobs"] = [1e-4, 0]
    assert DIALECTS["openai"]().sample(Recorded(answer), SAMPLE).log_probs == [0.0, 0.0]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("damage", [dripped, endless])
def test_the_deadline_is_of_the_whole_answer(path, damage, load, tmp_path):
    """Bytes that come all the time, in the head or in the body, do not begin it again."""
    kind, module = "judge" if "chat" in path else "openai", load("llama")
    answers = answers_of(kind, vocab_size(module))
    for seed in range(2):  # the head, the body
        answers[path] = damage(random.Random(seed), answers[path])
        with (
            running(answers) as service,
            pytest.raises((DeadlineError, ModelError), match="within 0.2 s|more than .* bytes"),
        ):
            use(kind, service.url, module, tmp_path)


def test_an_answer_without_end_is_not_read_whole():
    num_sent = 0

    def parts():
        nonlocal num_sent
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        while num_sent < 1 << 27:
            num_sent += 1 << 16
            yield b" " * (1 << 16)

    with running({"/v1/models": Raw(parts)}) as service:
        client = Client(service.url, token_env="", timeout_s=30.0, num_retries=0)
        with pytest.raises(ModelError, match="GET /v1/models with more than 4,194,304 bytes"):
            client.get("/v1/models")
    assert num_sent < 1 << 25, "sockets hold a few megabytes of what nobody reads"


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_are_used(kind, load, tmp_path):
    module = load("llama")
    with running(answers_of(kind, vocab_size(module))) as service:
        use(kind, service.url, module, tmp_path, timeout_s=10.0)


def test_damaged_answers(load, tmp_path):
    """A part of `benchmarks/fuzz.py answers`."""
    rng, module = random.Random(0), load("llama")
    counts = Counter(outcome(rng, module, tmp_path)[1] for _ in range(30))
    assert {"used", "ModelError"} <= set(counts) <= {
        "used", "ModelError", "ConfigError", "NumericsError", "DeadlineError", "UnreachableError",
    }, counts  # fmt: skip


def test_a_reply_with_half_a_character_can_be_written(load, tmp_path):
    answers = answers_of("judge", VOCABULARY)
    answers["/v1/chat/completions"]["choices"][0]["message"]["content"] = "\ud800 of 5"
    with running(answers) as service:
        use("judge", service.url, load("llama"), tmp_path, timeout_s=10.0)


def test_terminal_escapes_of_a_service_are_not_printed():
    with running({"/v1/models": (500, "\x1b[2J\x1b]0;owned\x07 no")}) as service:
        client = Client(service.url, token_env="", timeout_s=5.0, num_retries=0)
        with pytest.raises(ModelError) as caught:
            client.get("/v1/models")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "url",
    ["http://", "ftp://here", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://a\nb", "\ud800"],
)
def test_addresses_that_are_none(url):
    with pytest.raises(ConfigError, match="is not an address like"):
        Client(url, token_env="", timeout_s=1.0, num_retries=0)


def test_a_token_that_is_none_is_not_shown(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "open\nsesame")
    with pytest.raises(ConfigError, match="A_TOKEN has characters") as caught:
        Client("http://127.0.0.1:1", token_env="A_TOKEN", timeout_s=1.0, num_retries=0)
    assert "sesame" not in str(caught.value)


def test_requests_under_way_are_dropped_when_a_generation_closes():
    """Their threads would hold up the end of the process for as long as the service is silent."""
    silent = threading.Event()
    with running({"/v1/models": lambda body: silent.wait(120)}) as service:
        client, outcomes = Client(service.url, token_env="", timeout_s=60.0, num_retries=3), []

        def ask():
            with pytest.raises(CancelledError):
                client.get("/v1/models")
            outcomes.append("cancelled")

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert wait_until(lambda: service.requests)
        client.cancel()
        thread.join(120)
        silent.set()
        assert outcomes == ["cancelled"]
