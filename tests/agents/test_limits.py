"""Rules of a request of an agent for its turn: stop texts, a JSON schema, several choices."""

import contextlib
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.agents.test_gateway import ASK, ROLLOUT, chat, play  # noqa: F401  (a fixture)
from verl.data_proto.samples import PromptRequest, SamplingParams, TurnRequest
from verl.errors import ModelError
from verl.models.load import load_model
from verl.rollout.native.engine import NativeRollout

pytest.importorskip("starlette", reason="needs the extra agents")
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 3}, "n": {"enum": [1, 2]}},
    "required": ["name", "n"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_llama):
    from verl.config import RolloutConfig

    module, tokenizer = load_model(tiny_llama).eval(), AutoTokenizer.from_pretrained(tiny_llama)
    return NativeRollout(module, tokenizer, RolloutConfig(), eos_token_ids=(tokenizer.eos_token_id,))


def sampled(generation, *requests):
    for request in requests:
        generation.add(request)
    done = []
    while more := generation.poll():
        done += more
    return done


def test_stop_texts_of_one_request_end_no_other(engine):
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    generation = engine.open(params, step=1, keep=True)
    free = PromptRequest(0, (5, 6), num_samples=1)
    (plain,) = sampled(generation, free)
    stop = engine.tokenizer.decode(plain.token_ids[3:4])
    generation.close()
    generation = engine.open(params, step=1, keep=True)
    both = sampled(
        generation, PromptRequest(0, (5, 6), num_samples=1, stop=(stop,)), PromptRequest(1, (5, 6), num_samples=1)
    )
    ended = {done.ordinal: done for done in both}
    assert (ended[0].finish_reason, ended[1].finish_reason) == ("stop", "length")
    text = engine.tokenizer.decode(ended[0].token_ids)
    assert text.endswith(stop) or stop in text
    assert ended[0].token_ids == plain.token_ids[: len(ended[0].token_ids)], "the same random numbers"
    (turn,) = sampled(generation, TurnRequest(0, 0, (7,), 3))
    assert turn.finish_reason == "length", "a stop text belongs to its turn"
    generation.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_follow_a_schema_and_others_do_not_see_it(engine, tiny_llama, temperature):
    pytest.importorskip("xgrammar", reason="needs the extra schemas")
    oracle = AutoModelForCausalLM.from_pretrained(tiny_llama, torch_dtype=torch.float32)
    params = SamplingParams(max_new_tokens=60, temperature=temperature)
    generation = engine.open(params, step=1, keep=True)
    requests = [
        PromptRequest(0, (5, 6), num_samples=4, grammar=json.dumps(SCHEMA)),
        PromptRequest(1, (5, 6), num_samples=2),
    ]
    done = sampled(generation, *requests)
    free = sorted((d.sample, d.token_ids) for d in done if d.ordinal == 1)
    bound = [d for d in done if d.ordinal == 0]
    for one in bound:
        value = json.loads(engine.tokenizer.decode(one.token_ids, skip_special_tokens=True))
        assert set(value) == {"name", "n"}
        assert value["n"] in (1, 2)
        ids = torch.tensor([[5, 6, *one.token_ids]])
        logits = oracle(input_ids=ids).logits[0, 1:-1]
        expected = torch.log_softmax(logits.float(), -1).gather(1, ids[0, 2:, None])[:, 0]
        np.testing.assert_allclose(one.log_probs, expected.detach().numpy(), atol=1e-4)
    with pytest.raises(ModelError, match="cannot be used"):
        generation.add(PromptRequest(9, (5, 6), num_samples=1, grammar='{"type": "nonsense"}'))
    (turn,) = sampled(generation, TurnRequest(1, 0, (7,), 40, grammar=json.dumps(SCHEMA)))
    assert json.loads(engine.tokenizer.decode(turn.token_ids, skip_special_tokens=True))["n"] in (1, 2)
    generation.close()
    generation = engine.open(params, step=1, keep=True)
    assert sorted((d.sample, d.token_ids) for d in sampled(generation, requests[1])) == free
    generation.close()


HOSTILE = [
    {"$ref": "#"}, {"enum": []}, {"type": "string", "minLength": 10**9}, {"type": "string", "pattern": "(a+)+$"}, False, {},
    {"const": "a\nb\u0000"}, {"type": "array", "items": {"$ref": "#/$defs/no"}},
    {"allOf": [{"type": "string"}, {"type": "number"}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "integer", "minimum": 5, "maximum": 3},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_schema_that_nothing_satisfies_ends_by_its_limit_or_is_refused(engine, number):
    pytest.importorskip("xgrammar", reason="needs the extra schemas")
    generation = engine.open(SamplingParams(max_new_tokens=24), step=1, keep=True)
    done = []
    with contextlib.suppress(ModelError):
        done = sampled(generation, PromptRequest(0, (5, 6), num_samples=2, grammar=json.dumps(HOSTILE[number])))
    assert all(0 < len(one.token_ids) <= 24 for one in done)
    (other,) = sampled(generation, PromptRequest(1, (5, 6), num_samples=1))
    assert np.isfinite(other.log_probs).all()
    generation.close()


TEXT = {"type": "string"}
PASSED_OVER = [
    ({"type": "string", "not": {"const": "a"}}, "`not`"),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, "`uniqueItems`"),
    ({"anyOf": [{"if": {"type": "string"}, "then": {"maxLength": 1}}]}, "`if`"), ({"allOf": [TEXT, TEXT]}, "`allOf`"),
    ({"type": "string", "pattern": "a+", "maxLength": 2}, "`pattern` with a length"),
    ({"type": "number", "multipleOf": 5}, "`multipleOf`"), ({"$ref": "http://x/y"}, "another document"),
    ({"type": "object", "properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}]}, "beside `properties`"),
    ({"type": "object", "properties": {"a": TEXT}, "required": ["b"]}, "a name of `required`"),
    ({"type": "object", "properties": {f"k{n}": {} for n in range(600)}}, "more than 500 parts"),
    (json.loads('{"items":' * 100 + "{}" + "}" * 100), "64 levels"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "sentence"), PASSED_OVER)
def test_a_schema_that_would_not_be_kept_or_takes_long_is_refused(engine, schema, sentence):
    """xgrammar passes over these keywords: what breaks them would have probability."""
    pytest.importorskip("xgrammar", reason="needs the extra schemas")
    generation = engine.open(SamplingParams(max_new_tokens=4), step=1, keep=True)
    with pytest.raises(ModelError, match=sentence):
        generation.add(PromptRequest(0, (5, 6), num_samples=1, grammar=json.dumps(schema)))
    names = {"not": TEXT, "if": {"enum": [{"not": 1}]}, "pattern": {"anyOf": [TEXT, {"type": "null"}]}}
    schema = {"type": "object", "properties": names, "required": ["not"], "additionalProperties": False}
    generation.add(PromptRequest(1, (5, 6), num_samples=1, grammar=json.dumps(schema)))
    generation.close()


def test_several_choices_are_conversations_that_can_continue(play):  # noqa: F811
    replies = []

    def agent(client, task):
        answer = chat(client, ASK, n=3)
        replies.append(answer)
        said = [*ASK, answer["choices"][2]["message"], {"role": "user", "content": "more"}]
        replies.append(chat(client, said))
        return 1.0

    (result,), engine = play(agent, 1, f"{ROLLOUT}.agent.branches=all", "algorithm.adv_estimator=grpo")
    assert result.error is None
    assert [choice["index"] for choice in replies[0]["choices"]] == [0, 1, 2]
    ids = [choice["token_ids"] for choice in replies[0]["choices"]]
    prompt = replies[0]["prompt_token_ids"]
    assert replies[1]["prompt_token_ids"][: len(prompt) + len(ids[2])] == [*prompt, *ids[2]], "its very tokens"
    assert replies[0]["usage"]["completion_tokens"] == sum(map(len, ids))
    assert len(engine.sampled) == 3
    assert len(result.branches) == 2


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"n": 65}, "at most 64 choices"), ({"n": 0}, "n must be a whole number"), ({"stop": 3}, "`stop` must be"),
        ({"stop": ["a"] * 17}, "at most 16 texts"), ({"response_format": {"type": "grammar"}}, "response_format can be"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format can be"),
        ({"stop": ["", "a"]}, "rollout.name=native"), ({"stop": "a" * 1001}, "more than 1000 letters"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "b" * 70000}}}}, "at most 65536"),
        ({"response_format": {"type": "json_object"}}, "rollout.name=native"),
    ],
)  # fmt: skip
def test_wrong_limits_are_sentences(play, body, sentence):  # noqa: F811
    told = []

    def agent(client, task):
        answer = client.post("/chat/completions", json={"messages": ASK, **body})
        told.append((answer.status_code, answer.json()["error"]["message"]))
        chat(client, ASK)
        return 1.0

    (result,), _ = play(agent)
    assert result.error is None
    assert told[0][0] == 400
    assert sentence in told[0][1]


RUNNER = """
import json
import httpx

def run(task, base_url, api_key):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=120) as client:
        def ask(said, **more):
            answer = client.post("/chat/completions", json={"messages": said, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]
        said = [dict(message) for message in task["prompt"]]
        thought = ask(said, stop=["a", "b", "c", "d", "e"], max_tokens=24)
        if thought["finish_reason"] == "stop":
            assert not set(thought["message"]["content"]) & set("abcde")
        said += [thought["message"], {"role": "user", "content": "Now as JSON."}]
        value = json.loads(ask(said, response_format=form)["message"]["content"])
        return float(value["n"] == 1)
"""


def test_a_run_of_an_agent_with_stop_and_schema(agent_run, tmp_path):
    pytest.importorskip("xgrammar", reason="needs the extra schemas")
    (tmp_path / "agent.py").write_text(RUNNER.replace("SCHEMA", repr(SCHEMA)))
    run = agent_run(
        f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.multi_turn.function_tool_path=null",
        f"{ROLLOUT}.agent.runner={tmp_path}/agent.py:run", "trainer.total_training_steps=2",
    )  # fmt: skip
    for row in run.training_rows():
        assert row["rollout/num_failed_episodes"] == 0
        assert row["training/rollout_probs_diff_max"] < 1e-5
