"""A reward model that the run serves to a reward function that asks it itself: fapo's way of judging, in small."""

import json
import threading
import urllib.error
import urllib.request

import pytest
import torch

from tests.run import conftest as runs
from verl.config import RewardModelConfig
from verl.config.sections.reward import RewardModelRolloutConfig
from verl.roles.judge_server import JudgeServer
from verl.roles.judges import build_judge

tiny_task, tiny_overrides, tiny_run = runs.tiny_task, runs.tiny_overrides, runs.tiny_run

FUNCTION = """
import json
import urllib.request


async def compute_score(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    question = [{"role": "user", "content": "Is it right? " + solution_str[:4]}]
    ids = reward_model_tokenizer.apply_chat_template(question, tokenize=True, add_generation_prompt=True)
    body = json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 5}}).encode()
    request = urllib.request.Request(f"http://{reward_router_address}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        answer = json.loads(reply.read())
    text = reward_model_tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    return {"score": float(len(text) % 3), "num_tokens": len(answer["output_ids"])}
"""


@pytest.fixture
def server(tiny_llama):
    rollout = RewardModelRolloutConfig(dtype="float32", response_length=6)
    config = RewardModelConfig(enable=True, model_path=str(tiny_llama), rollout=rollout)
    server = JudgeServer(build_judge(config, torch.device("cpu"), start_timeout_s=60, call_timeout_s=60))
    yield server
    server.close()


def ask(server, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.address}{path}", content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_request_that_cannot_be_served_fails_no_other(server):
    question = {"messages": [{"role": "user", "content": "Right?"}], "max_tokens": 3}
    for more in ({"n": 2}, {"stream": True}, {"logprobs": True}, {"temperature": -1}):
        status, body = ask(server, "/v1/chat/completions", question | more)
        assert (status, next(iter(more)) in body["error"]["message"]) == (400, True)
    too_long = {"messages": [{"role": "user", "content": "x" * 3000}], "max_tokens": 3}
    results = {}
    bodies = {"good": question, "long": too_long, "other": question | {"messages": [{"role": "user", "content": "?"}]}}
    threads = [
        threading.Thread(target=lambda n=name, b=body: results.update({n: ask(server, "/v1/chat/completions", b)[0]}))
        for name, body in bodies.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"good": 200, "long": 400, "other": 200}


def test_a_reply_is_the_judges_by_either_path(server):
    (expected,) = server.judge.replies(["Right?"])
    question = [{"role": "user", "content": "Right?"}]
    status, body = ask(server, "/v1/chat/completions", {"messages": question, "temperature": 0})
    assert (status, body["choices"][0]["message"]["content"]) == (200, expected)
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert ask(server, "/v1/chat/completions", {"messages": parts})[0] == 400
    ids = server.judge.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    status, body = ask(server, "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 100}})
    assert (status, body["text"]) == (200, expected)
    assert len(body["output_ids"]) <= 6  # response_length
    _, short = ask(server, "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}})
    assert short["output_ids"] == body["output_ids"][:2]


def test_requests_at_once_have_the_replies_of_single_ones(server):
    bodies = [{"input_ids": [10 + n, 20], "sampling_params": {"temperature": 1.0 * (n % 2)}} for n in range(8)]
    alone = [ask(server, "/generate", body)[1]["output_ids"] for body in bodies]
    together = [None] * len(bodies)

    def one(place):
        together[place] = ask(server, "/generate", bodies[place])[1]["output_ids"]

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


@pytest.mark.parametrize(
    "body", [b"{", b"[]", {}, {"input_ids": ["x"]}, {"input_ids": [10**9]}, {"input_ids": [1] * 5000}]
)
def test_a_bad_request_gets_an_error_and_the_next_one_a_reply(server, body):
    status, reply = ask(server, "/generate", body)
    assert status in (400, 500)
    assert reply["error"]["message"]
    assert ask(server, "/generate", {"input_ids": [1, 2]})[0] == 200
    assert ask(server, "/other", {})[0] == 404


def test_a_run_serves_its_judge_and_ends_it(tiny_run, tiny_llama, tmp_path):
    file = tmp_path / "asks.py"
    file.write_text(FUNCTION)
    judge = ("enable=True", f"model_path={tiny_llama}", "rollout.name=sglang", "rollout.response_length=16")
    run = tiny_run(
        f"reward.custom_reward_function.path={file}", *(f"reward.reward_model.{key}" for key in judge),
        "reward.reward_model.rollout.dtype=float32",
    )  # fmt: skip
    assert [row["step"] for row in run.training_rows()] == [1, 2]
    scores = {sample["score"] for sample in run.samples_of(1)}
    assert scores <= {0.0, 1.0, 2.0}
    assert not any(thread.name.startswith("judge-") for thread in threading.enumerate())
