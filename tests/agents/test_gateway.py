"""The endpoint for agents: formats, continuation on the very tokens, branches, rewards, refusals, strangers."""

import asyncio
import itertools
import json
import os
import socket
import sys
import threading
from dataclasses import replace

import httpx
import numpy as np
import psutil
import pytest
import torch

from tests.agents.agents_of_users import SCHEMAS
from tests.agents.test_exactness import Scripted, objects
from tests.data.conversations.templates import tokenizer_of
from tests.processes import wait_until
from verl.agents.agents import Agents
from verl.agents.gateway import app, runner
from verl.agents.gateway.sessions import RequestError, read_body
from verl.config import load_config
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.programs.specs import agent_spec
from verl.rewards.sandbox import launch
from verl.rewards.sandbox.launch import namespace_command
from verl.tracking import logs

pytest.importorskip("starlette", reason="needs the extra agents")
pytest.importorskip("uvicorn", reason="needs the extra agents")

ROLLOUT = "actor_rollout_ref.rollout"
ASK = [{"role": "user", "content": "Go."}]
AGENTS = {}  # name -> function; `run` of this file is the runner


def run(task, base_url, api_key):
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=120) as client:
        return AGENTS[task["data_source"]](client, task)


@pytest.fixture
def play(tmp_path):
    """play(function, n=1) -> (results, engine): episodes; their agent is the function of a client and the row."""

    built = []

    def start(function, n=1, *changes, source="test"):
        AGENTS[source] = function
        config = load_config(
            [
                "actor_rollout_ref.model.path=model",
                "data.train_files=x.jsonl",
                "data.max_prompt_length=700",
                "data.max_response_length=900",
                f"trainer.default_local_dir={tmp_path}",
                f"{ROLLOUT}.agent.runner={__file__}:run",
                *changes,
            ]  # fmt: skip
        ).config
        tokenizer = tokenizer_of("qwen2.5")
        engine = Scripted(tokenizer)
        agents = Agents(agent_spec(config), tokenizer, engine, stop_token_ids=[tokenizer.eos_token_id])
        built.append(agents)
        if not isinstance(agents.context.runner, list):
            # of this module object, not of a second import of its file
            agents.context = replace(agents.context, runner=run)
        columns = {
            "ordinal": torch.arange(1),
            "prompt_token_ids": objects([agents.context.continuity.prompt(ASK)]),
            "raw_prompt": objects([ASK]),
            "data_source": objects([source]),
        }
        rows, params = DataProto.from_single_dict(columns), SamplingParams(n=n, max_new_tokens=900)
        return agents.generate(rows, params, step=1, split="train", dtype=np.float64, on_finish=lambda r: None), engine

    yield start
    for agents in built:
        agents.close()


def chat(client, messages, **more):
    answer = client.post("/chat/completions", json={"model": "policy", "messages": messages, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def impatient(around):
    """A POST; its client closes the connection before the policy has sampled."""
    may_sample = threading.Event()
    around(Scripted, "poll", lambda poll, *args: poll(*args) if may_sample.wait(0.01) else [])

    def post(client, body):
        with pytest.raises(httpx.ReadTimeout):
            client.post("/chat/completions", json=body, timeout=0.2)
        may_sample.set()

    return post


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_sent_again_gets_its_first_answer(play, impatient, stream):
    """As clients of OpenAI do after a timeout: nothing is sampled twice."""

    def agent(client, task):
        body = {"model": "policy", "messages": ASK, "stream": stream}
        impatient(client, body)
        answer = client.post("/chat/completions", json=body)
        again = client.post("/chat/completions", json=body)  # after an answer: another sample
        assert (answer.status_code, again.status_code) == (200, 200)
        return 1.0

    (result,), engine = play(agent)
    assert (result.error, result.num_turns) == (None, 2)  # of the conversation that trains
    assert [len(turns) for turns in engine.sampled.values()] == [1, 1]


def test_an_answer_that_nobody_has_read_does_not_train(play, impatient):
    """The agent gives up waiting, and continues with less."""
    read = []

    def agent(client, task):
        impatient(client, {"model": "policy", "messages": ASK})
        read.extend(chat(client, ASK, max_tokens=2)["choices"][0]["token_ids"])
        return 1.0

    (result,), engine = play(agent)
    (unread,), (answer,) = engine.sampled.values()
    assert len(unread[1]) > len(answer[1]) == 2
    assert (result.num_turns, [*result.trajectory.response_ids]) == (2, read)


def test_a_long_conversation_is_looked_up_once(play, around):
    from verl.agents.gateway import sessions

    counted = []
    around(sessions, "prefixes", lambda prefixes, *a: counted.append(1) or prefixes(*a))
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 20] + ASK
    (result,), _ = play(lambda client, task: float(bool(chat(client, turns))))
    assert result.reward == 1.0
    assert len(counted) == 3


def test_a_conversation_continues_on_its_tokens(play):
    replies = []

    def agent(client, task):
        messages = list(task["prompt"])
        for _ in range(3):
            reply = chat(client, messages, tools=SCHEMAS, logprobs=True)
            replies.append(reply)
            message = reply["choices"][0]["message"]
            # as a program may send it back: other ids, other blanks in JSON, no content
            for i, call in enumerate(message.get("tool_calls") or []):
                call["id"] = f"mine{i}"
                try:
                    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
                except ValueError:
                    pass
            messages.append(message)
            if message.get("tool_calls"):
                messages += [{"role": "tool", "tool_call_id": c["id"], "content": "5"} for c in message["tool_calls"]]
            else:
                messages.append({"role": "user", "content": "And?"})
        return {"score": 2.5, "kind": "x"}

    (result,), engine = play(agent)
    assert result.error is None
    assert (result.reward, result.extra["kind"], result.extra["num_branches"]) == (2.5, "x", 1)
    turns = engine.sampled[0, 0]  # the random numbers of the sample itself
    assert len(turns) == 3
    for reply, (start, ids, log_probs) in zip(replies, turns, strict=True):
        choice = reply["choices"][0]
        assert choice["token_ids"] == ids
        assert len(reply["prompt_token_ids"]) == start
        assert [c["logprob"] for c in choice["logprobs"]["content"]] == log_probs
    assert replies[1]["prompt_token_ids"][: len(replies[0]["prompt_token_ids"])] == replies[0]["prompt_token_ids"]
    assert result.trajectory.to_row().response_mask.sum() == sum(len(ids) for _, ids, _ in turns)


def test_a_rewritten_history_is_a_branch_and_the_longest_trains(play):
    def agent(client, task):
        first = chat(client, ASK)["choices"][0]["message"]
        chat(client, [*ASK, first, {"role": "user", "content": "more"}])
        chat(
            client,
            [*ASK, {"role": "assistant", "content": "not what was sampled"}, {"role": "user", "content": "more"}],
        )
        chat(client, [{"role": "system", "content": "You sum up."}, {"role": "user", "content": "Sum up."}])
        client.post("/reward", json={"reward": 0.75, "info": {"solved": True}}).raise_for_status()

    (result,), engine = play(agent)
    assert result.error is None
    assert (result.reward, result.extra["num_branches"], result.extra["solved"]) == (0.75, 3, True)
    sizes = [sum(len(ids) for _, ids, _ in turns) for turns in engine.sampled.values()]
    assert len(engine.sampled[0, 0]) == 2  # the first conversation continued
    assert result.trajectory.to_row().response_mask.sum() == max(sizes)


def test_a_full_conversation_is_told_by_its_code_and_one_address_serves_all(play):
    refusals = []

    def agent(client, task):
        session = client.base_url.path.split("/")[2]
        root = str(client.base_url).partition("/s/")[0]
        said = [*ASK]
        while not refusals:
            body = {"model": session, "messages": said}
            answer = client.post(f"{root}/v1/chat/completions", json=body)
            if answer.status_code == 200:
                said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And? " * 40}]
            else:
                refusals.append((answer.status_code, answer.json()["error"]["code"]))
        refusals.append(client.post(f"{root}/v1/chat/completions", json={"messages": ASK}).status_code)
        return 1.0

    (result,), _ = play(agent)
    assert result.error is None
    assert refusals == [(400, "context_length_exceeded"), 404]


def test_every_format_gives_the_same_turn(play):
    replies = {}

    def agent(client, task):
        replies["completion"] = client.post(
            "/completions", json={"prompt": [1, 2, 3], "max_tokens": 4, "logprobs": 0}
        ).json()
        replies["models"] = client.get("/models").json()
        tool = SCHEMAS[0]["function"]
        replies["responses"] = client.post(
            "/responses", json={"input": "Go.", "tools": [{"type": "function", **tool}], "instructions": "Be good."}
        ).json()
        replies["anthropic"] = client.post(
            "/messages",
            json={"messages": [{"role": "user", "content": [{"type": "text", "text": "Go."}]}], "max_tokens": 500,
                  "tools": [{"name": "echo", "input_schema": tool["parameters"]}]},
        ).json()  # fmt: skip
        with client.stream(
            "POST", "/chat/completions", json={"messages": ASK, "tools": SCHEMAS, "stream": True, "logprobs": True}
        ) as answer:
            replies["stream"] = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        with client.stream("POST", "/messages", json={"messages": ASK, "max_tokens": 9, "stream": True}) as answer:
            replies["events"] = [line for line in answer.iter_lines() if line.startswith("event: ")]

    (result,), _ = play(agent)
    assert result.error is None
    assert len(replies["completion"]["choices"][0]["token_ids"]) <= 4
    assert replies["models"]["data"][0]["id"] == "policy"
    assert replies["responses"]["output"][0]["type"] in ("message", "function_call")
    assert replies["anthropic"]["stop_reason"] in ("tool_use", "end_turn", "max_tokens")
    assert replies["stream"][-1] == "[DONE]"
    (first,) = json.loads(replies["stream"][0])["choices"]
    assert len(first["logprobs"]["content"]) == len(first["token_ids"]) > 0
    assert json.loads(replies["stream"][-2])["choices"][0]["finish_reason"] in ("tool_calls", "stop")
    assert replies["events"][0] == "event: message_start"
    assert replies["events"][-1] == "event: message_stop"


@pytest.mark.parametrize("kind", ["messages", "responses"])
def test_a_conversation_in_another_format_continues_on_its_tokens(play, kind):
    """Calls come back as objects; malformed ones among them."""
    tool, malformed = SCHEMAS[0]["function"], []

    def anthropic(client, said):
        tools = [{"name": "echo", "input_schema": tool["parameters"]}]
        body = {"messages": said, "max_tokens": 500, "tools": tools}
        content = client.post("/messages", json=body).raise_for_status().json()["content"]
        calls = [block for block in content if block["type"] == "tool_use"]
        malformed.extend(call for call in calls if call["input"] == {"arguments": "{oops"})
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "5"} for call in calls]
        answer = {"role": "user", "content": results or [{"type": "text", "text": "And?"}]}
        return [*said, {"role": "assistant", "content": content}, answer]

    def responses(client, said):
        body = {"input": said, "tools": [{"type": "function", **tool}]}
        output = client.post("/responses", json=body).raise_for_status().json()["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        malformed.extend(call for call in calls if call["arguments"] == "{oops")
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "5"} for call in calls]
        return [*said, *output, *(results or [{"role": "user", "content": "And?"}])]

    def agent(client, task):
        said = list(task["prompt"])
        for _ in range(3):
            said = (anthropic if kind == "messages" else responses)(client, said)
        return 1.0

    played, engine = play(agent, 8)
    assert [(result.error, result.extra["num_branches"]) for result in played] == [(None, 1)] * 8
    assert sum(len(turns) for turns in engine.sampled.values()) == 24
    assert malformed


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": ASK, "best_of": 2}, "best_of must be 1"),
        ({"messages": ASK, "logit_bias": {"5": 1}}, "logit_bias is not available"),
        ({"messages": ASK, "tools": SCHEMAS, "tool_choice": "required"}, "tool_choice can be auto or none"),
        ({"messages": []}, "`messages` must be a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
        ({"messages": ASK, "tools": [1]}, "`tools` must be a list"),
        ({"messages": ASK, "tools": [{"function": {"name": "f", "parameters": "x"}}]}, "`tools` must be a list"),
        ({"messages": ASK, "max_tokens": 0}, "at least 1"),
        ({"messages": [{"role": "user", "content": "x" * 8000}]}, "more than data.max_prompt_length=700"),
        ([1], "not a JSON object"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(play, body, sentence):
    replies = []

    def agent(client, task):
        replies.append(client.post("/chat/completions", json=body))
        chat(client, ASK)

    (result,), _ = play(agent)
    assert result.error is None
    assert replies[0].status_code == 400
    assert sentence in replies[0].json()["error"]["message"]


def test_half_a_character_is_refused_where_a_request_is_read():
    """A stop text with one ended the run: the engine compares bytes."""
    for content in (rb'{"stop": "\ud800"}', rb'{"tools": [{"a": ["x\udfff"]}]}', rb'{"\ud83d": 1}'):
        with pytest.raises(RequestError, match="half a character"):
            read_body(content)
    assert read_body(json.dumps({"stop": "\U0001f600"}).encode()) == {"stop": "\U0001f600"}


def test_equal_requests_at_once_have_an_answer_each():
    """A client whose answer was read counts as gone; another request took its answer, and one more status 500."""
    session, numbers = app.EndpointSession("", *[None] * 6), itertools.count()

    async def handle():
        await asyncio.sleep(0.002)
        return next(numbers)

    async def ask(number):
        departure = asyncio.Event()

        async def is_gone():
            await asyncio.sleep(0.001)
            return departure.is_set()

        await asyncio.sleep(number * 0.0003)
        reply = await session.answered("equal", handle, is_gone)
        departure.set()
        return reply

    async def replies():
        return await asyncio.gather(*map(ask, range(60)))

    assert sorted(asyncio.run(replies())) == list(range(60))
    assert session._calls == {"equal": []}


def test_a_request_of_any_form_is_refused_with_a_sentence(play):
    nan = b'{"model": NaN, "messages": [{"role": "user", "content": "Go."}]}'
    half = nan.replace(b"NaN", b'"\\ud800"')
    image = [{"role": "user", "content": [{"type": "text", "text": "Go."}, {"type": "image", "source": {}}]}]
    any_tool, one_tool, text = {"type": "any"}, {"type": "tool", "name": "add"}, [{"role": "user", "content": 5}]
    bodies_by_path = {
        "messages": [
            *[{"messages": said} for said in (5, {"role": "user"}, text, [{"content": "Go."}], image)],
            *[{"messages": ASK, "tool_choice": choice} for choice in (any_tool, one_tool)],
            *[{"messages": ASK, "tools": 5}, nan],
        ],
        "responses": [{"input": 5}, {"input": "Go.", "tools": 5}, {"input": "Go.", "instructions": 5}],
        "completions": [{"prompt": 5}],
        "chat/completions": [nan, half, {"messages": ASK, "tools": "x"}],
    }
    replies, streamed = [], []

    def agent(client, task):
        for path, bodies in bodies_by_path.items():
            for body in bodies:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                answer = client.post(f"/{path}", content=content)
                replies.append((path, body, answer.status_code, answer.text))
        odd = {"messages": ASK, "stream": True, "stream_options": 7}
        streamed.append(client.post("/chat/completions", json=odd).text)
        chat(client, ASK)

    (result,), _ = play(agent)
    assert result.error is None
    assert [one for one in replies if one[2] != 400 or "message" not in one[3]] == []
    assert streamed[0].endswith("[DONE]\n\n")


def test_strangers_are_refused(play):
    codes = []

    def agent(client, task):
        chat(client, ASK)
        base = str(client.base_url)
        for url, key in ((base, "wrong"), (base, "x"), (base.replace("/s/", "/s/x"), None)):
            headers = client.headers if key is None else {"Authorization": f"Bearer {key}"}
            codes.append(httpx.post(f"{url}chat/completions", json={"messages": ASK}, headers=headers).status_code)

    (result,), _ = play(agent)
    assert result.error is None
    assert codes == [401, 401, 404]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda client, task: 1 / 0, "raised ZeroDivisionError"),
        (lambda client, task: 1.0, "asked the policy for nothing"),
        (lambda client, task: chat(client, ASK) and float("nan"), "not a finite number"),
    ],
)
def test_an_agent_that_fails_is_left_out(play, function, sentence):
    (result,), _ = play(function)
    assert sentence in result.error


COMMAND = """
import json, os, urllib.request
def post(path, body):
    headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}
    url = os.environ['OPENAI_BASE_URL'] + path
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
task = json.loads(os.environ['VERL_TASK'])
reply = post('/chat/completions', {'model': os.environ['OPENAI_MODEL'], 'messages': task['raw_prompt']})
post('/reward', {'reward': len(reply['choices'])})
"""


def test_a_client_that_hangs_up_leaves_no_traceback(play, caplog, capfd):
    def agent(client, task):
        chat(client, ASK)
        key = client.headers["authorization"]
        path, port = client.base_url.path, client.base_url.port
        lines = [f"POST {path}chat/completions HTTP/1.1", "Host: x", f"Authorization: {key}", "Content-Length: 100000"]
        for body in ["", "{", '{"messages": \x1b[31m']:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall("\r\n".join([*lines, "", body]).encode())
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"\x1b]0;ERROR: forged\x07\xff\r\n\r\n")
        return float(chat(client, ASK)["object"] == "chat.completion")

    logs._ADOPTING._counts.clear()
    (result,), _ = play(agent)
    assert result.reward == 1.0
    assert "".join(capfd.readouterr()) == ""
    assert len(caplog.records) <= logs.MAX_ADOPTED
    assert all(record.getMessage().isprintable() and not record.exc_info for record in caplog.records)


def test_an_agent_may_be_a_command(play, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(COMMAND)
    results, _ = play(None, 2, f"{ROLLOUT}.agent.runner='command:{sys.executable} {script}'")
    assert [(result.error, result.reward) for result in results] == [(None, 1.0)] * 2
    script.write_text(script.read_text() + "import sys\nif sys.argv[1:] != ['Go.']: raise SystemExit(str(sys.argv))\n")
    (result,), _ = play(None, 1, f"{ROLLOUT}.agent.runner='command:{sys.executable} {script} {{prompt}}'")
    assert result.error is None  # a script that takes its question as an argument
    script.write_text("raise SystemExit('no key')\n")
    (result,), _ = play(None, 1, f"{ROLLOUT}.agent.runner='command:{sys.executable} {script}'")
    assert "its command ended its process with exit code 1: no key" in result.error


REACH = """
import os, socket
try:
    socket.create_connection(('127.0.0.1', int(os.environ['VERL_TASK'].split('port ')[1].split('"')[0])), 5)
    reached = 1
except OSError:
    reached = 0
post('/reward', {'reward': reached})
"""


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.skipif(not namespace_command(False, ()), reason="this system grants no network namespaces")
def test_a_command_reaches_only_the_endpoint(play, tmp_path, network):
    (tmp_path / "agent.py").write_text(COMMAND + REACH)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (result,), _ = play(
            None, 1, f"{ROLLOUT}.agent.runner='command:{sys.executable} {tmp_path}/agent.py'",
            f"{ROLLOUT}.agent.runner_network={network}", source=f"port {server.getsockname()[1]}",
        )  # fmt: skip
    assert (result.error, result.reward) == (None, float(network))


def test_a_command_has_the_network_where_it_cannot_be_taken_away(play, tmp_path, monkeypatch, caplog):
    for module in (launch, runner):
        monkeypatch.setattr(module, "namespace_command", lambda *_: ())
    (tmp_path / "agent.py").write_text(COMMAND)
    (result,), _ = play(None, 1, f"{ROLLOUT}.agent.runner='command:{sys.executable} {tmp_path}/agent.py'")
    assert (result.error, result.reward) == (None, 1.0)
    assert "reaches the whole network and not only the endpoint" in caplog.text


def test_addresses_can_be_used():
    """Of an endpoint that listens everywhere, and of one of IPv6."""
    gateway = app.Gateway("0.0.0.0", 0)
    session = type("Session", (), {"id": "x"})()
    try:
        assert "0.0.0.0" not in gateway.base_url(session)
        assert gateway.base_url(session, "::1") == f"http://[::1]:{gateway.port}/s/x/v1"
    finally:
        gateway._socket.close()


@pytest.mark.parametrize("place", [0, 1, 2], ids=["program", "process 1", "unshare"])
def test_a_command_that_is_killed_from_outside_is_run_again(play, tmp_path, place):
    script, begun = tmp_path / "agent.py", tmp_path / "begun"
    wait = f"import pathlib, time\nbegun = pathlib.Path({str(begun)!r})\nif not begun.exists(): begun.touch(); time.sleep(60)\n"
    script.write_text(wait + COMMAND)

    def kill():
        wait_until(begun.exists)
        below = psutil.Process().children(recursive=True)
        below = [p for p in below if p.status() != psutil.STATUS_ZOMBIE]  # of tests before; it has no command line
        (program,) = [p for p in below if p.cmdline()[1:] == [str(script)]]  # the others have more words
        chain = [program, *itertools.takewhile(lambda p: p.pid != os.getpid(), program.parents())]
        chain[min(place, len(chain) - 1)].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    (result,), _ = play(None, 1, f"{ROLLOUT}.agent.runner='command:{sys.executable} {script}'")
    killer.join(120)
    assert (result.error, result.reward) == (None, 1.0)
