"""Backends of a judge: a chat service with recorded answers, vLLM's engine without vLLM, and batches of either.

python -m pytest -m slow -p no:xdist tests/roles/test_judges.py      # with vLLM itself
"""

import importlib.util

import numpy as np
import pytest
import torch

from tests.roles.test_reward_model import PROMPTS, RESPONSES, batch_of, make_classifier, settings
from tests.rollout.service import running
from tests.rollout.test_http_real import TOKEN, folder, server  # noqa: F401 - fixtures
from tests.rollout.test_vllm import FakeCore
from verl.config.sections.reward import JudgeServiceConfig
from verl.errors import ConfigError, MissingExtraError, ModelError, UnreachableError
from verl.models.load import load_tokenizer
from verl.models.tiny import make_tiny_model, make_tokenizer
from verl.roles import reward_model
from verl.roles.reward import RewardWorker
from verl.roles.reward_model import JudgeWorker, build_reward_model
from verl.rollout.vllm import core, engine

CPU = torch.device("cpu")
MODELS = {"data": [{"id": "a/judge"}]}
TEMPLATE = "Rate {response}"


def chat(body):
    """A reply that follows from the question."""
    question = body["messages"][0]["content"]
    return {"choices": [{"message": {"content": f"{len(question)}"}, "finish_reason": "stop"}]}


def ask(url, *, name="http", path="", batch_size=None, **service):
    service = JudgeServiceConfig(**{"url": url, "timeout_s": 5.0, "num_retries": 0, **service})
    config = settings(
        path, judge_template=TEMPLATE, reward_batch_size=batch_size,
        rollout={"name": name, "service": service, "response_length": 8},
    )  # fmt: skip
    return build_reward_model(config, make_tokenizer(), CPU)


def replies(worker, responses=RESPONSES):
    return list(worker.score(batch_of(PROMPTS, responses)).non_tensor_batch["reward_model_reply"])


@pytest.mark.parametrize("name", ["http", "sglang"])
def test_a_service_judges_in_words(name):
    """No folder of the judge is needed; equal questions are one request; each row has the reply to its own question."""
    responses = [*RESPONSES[:-1], RESPONSES[0]]
    texts = [make_tokenizer().decode(r) for r in responses]
    with running({"/v1/models": MODELS, "/v1/chat/completions": chat}) as service:
        worker = ask(f"{service.url}/v1", name=name)
        assert replies(worker, responses) == [str(len(f"Rate {text}")) for text in texts]
        worker.close()
        bodies = service.bodies("/v1/chat/completions")
    assert sorted(b["messages"][0]["content"] for b in bodies) == sorted({f"Rate {text}" for text in texts})
    assert all((b["model"], b["temperature"], b["max_tokens"]) == ("a/judge", 0.0, 8) for b in bodies)


def test_a_service_of_other_models_is_refused(monkeypatch):
    several = {"data": [{"id": "a"}, {"id": "b"}]}
    with running({"/v1/models": several, "/v1/chat/completions": chat}) as service:
        with pytest.raises(ConfigError, match="serves a, b, not one model.*service.served_model_name"):
            ask(service.url)
        with pytest.raises(ConfigError, match="not c"):
            ask(service.url, served_model_name="c")
        assert replies(ask(service.url, path="b"))
        assert {b["model"] for b in service.bodies("/v1/chat/completions")} == {"b"}
    with pytest.raises(UnreachableError, match=r"reward\.reward_model\.rollout\.service\.url"):
        ask(service.url)
    monkeypatch.delenv("VERL_REWARD_MODEL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="VERL_REWARD_MODEL_TOKEN"):
        ask("https://judge.example")


@pytest.mark.parametrize(
    ("answer", "says"),
    [((400, "too long"), "too long"), ({"text": "4"}, "has no choices"), ({"choices": []}, "has no choices")],
    ids=["refusal", "other", "none"],
)
def test_a_service_that_does_not_reply_ends_the_step(answer, says):
    with running({"/v1/models": MODELS, "/v1/chat/completions": answer}) as service:
        worker = ask(service.url)
        with pytest.raises(ModelError, match=f"response_length=8.*{says}"):
            replies(worker)


class Recorder:
    def __init__(self):
        self.batches, self.ends = [], []

    def replies(self, questions):
        self.batches.append(list(questions))
        return [question.upper() for question in questions]

    def release(self):
        self.ends.append("release")

    def close(self):
        self.ends.append("close")


@pytest.mark.parametrize(("size", "expected"), [(None, [6]), (1, [1] * 6), (4, [4, 2]), (9, [6])])
def test_a_judge_is_asked_in_batches(size, expected):
    judge, config = Recorder(), settings("", judge_template=TEMPLATE, reward_batch_size=size)
    worker = JudgeWorker(judge, make_tokenizer(), config, template=TEMPLATE)
    assert replies(worker) == [f"RATE {make_tokenizer().decode(r).upper()}" for r in RESPONSES]
    assert [len(questions) for questions in judge.batches] == expected
    RewardWorker(type("Manager", (), {"close": lambda self: None})(), worker).close()
    assert judge.ends == ["release", "close"]


def test_a_classifier_reads_in_batches(tmp_path, around):
    path, sizes = make_classifier(tmp_path), []
    around(reward_model, "sequence_scores", lambda of, m, rows, **k: sizes.append(len(rows)) or of(m, rows, **k))
    batch, scores = batch_of(PROMPTS, RESPONSES), {}
    for size in (None, 4):
        worker = build_reward_model(settings(path, reward_batch_size=size), load_tokenizer(path), CPU)
        scores[size] = worker.score(batch).batch["reward_model_score"]
    assert sizes == [6, 4, 2]
    torch.testing.assert_close(scores[4], scores[None], rtol=1e-5, atol=1e-6)


def test_a_judge_on_vllm_has_the_weights_of_its_files(tmp_path, monkeypatch):
    cores = []

    class Process(FakeCore):
        def __init__(self, setup, *, start_timeout_s, call_timeout_s, factory):
            super().__init__(setup)
            self.setup = setup
            self.waits = (start_timeout_s, call_timeout_s)
            cores.append(self)

    monkeypatch.setattr(engine, "RemoteCore", Process)
    monkeypatch.setattr(engine, "require_vllm", lambda key: None)
    path = make_tiny_model(tmp_path / "judge")
    rollout = {"name": "vllm", "response_length": 8, "max_num_seqs": 3, "engine_kwargs": {"vllm": {"block_size": 32}}}
    config = settings(path, judge_template=TEMPLATE, reward_batch_size=4, rollout=rollout)
    worker = build_reward_model(config, make_tokenizer(), CPU, start_timeout_s=7.0, call_timeout_s=9.0)
    (core,) = cores
    assert core.waits == (7.0, 9.0)
    arguments = core.setup.llm
    assert (arguments["model"], arguments["dtype"], arguments["max_model_len"]) == (str(path), "float32", 1024)
    assert (arguments["max_num_seqs"], arguments["block_size"]) == (3, 32)
    last = worker.judge.tokenizer("<|im_start|>assistant\n")["input_ids"][-1]
    assert set(replies(worker)) == {worker.judge.tokenizer.decode([last, 0], skip_special_tokens=True)}
    assert core.calls[-1] == "sleep"  # after its replies
    with pytest.raises(ModelError, match="does not update"):
        worker.judge.engine.load([])
    worker.close()
    assert core.has_ended


def test_vllm_that_is_not_installed_is_named_by_the_judges_key(tmp_path, monkeypatch):
    monkeypatch.setattr(core.importlib.util, "find_spec", lambda name: None)
    config = settings(make_tiny_model(tmp_path / "judge"), judge_template=TEMPLATE, rollout={"name": "vllm"})
    with pytest.raises(MissingExtraError, match=r"reward\.reward_model\.rollout\.name=vllm"):
        build_reward_model(config, make_tokenizer(), CPU)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_judge_on_vllm_replies_as_the_native_one(tmp_path):
    """In its own process, twice, so that it wakes up again; ordinary weights make replies of several tokens."""
    path = make_tiny_model(tmp_path / "judge", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    by_name = {}
    for name in ("native", "vllm"):
        rollout = {"name": name, "response_length": 12, "max_num_seqs": 4}
        config = settings(path, judge_template=TEMPLATE, reward_batch_size=4, rollout=rollout)
        worker = build_reward_model(config, make_tokenizer(), CPU)
        try:
            by_name[name] = replies(worker)
            assert replies(worker) == by_name[name]
        finally:
            worker.close()
    assert by_name["vllm"] == by_name["native"]
    assert len(np.unique(by_name["native"])) > 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_judge_at_vllms_server_replies_as_the_native_one(folder, server, monkeypatch):  # noqa: F811
    """The server writes the conversation with its own chat template, and finds the same question. It leaves out a character
    that is cut off at the end of a reply, which decoding shows as replacement characters."""
    monkeypatch.setenv("VERL_REWARD_MODEL_TOKEN", TOKEN)
    url, _ = server
    config = settings(folder, judge_template=TEMPLATE, rollout={"response_length": 8})
    expected = replies(build_reward_model(config, make_tokenizer(), CPU))
    answers = replies(ask(url, timeout_s=60.0))
    assert [reply.rstrip("\ufffd") for reply in answers] == [reply.rstrip("\ufffd") for reply in expected]
    assert len(set(answers)) > 1
    monkeypatch.setenv("VERL_REWARD_MODEL_TOKEN", "another")
    with pytest.raises(ConfigError, match="VERL_REWARD_MODEL_TOKEN"):
        ask(url)
