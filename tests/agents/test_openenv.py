"""Environments of an OpenEnv server: by a stand-in of the client, and by the package and a server if it is installed."""

import importlib.util
import json
import sys
import threading
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import httpx
import pytest

from tests.agents.test_runs import ENDS, ROLLOUT, episodes
from tests.processes import wait_until
from verl.agents.openenv import OpenEnv
from verl.errors import ConfigError, MissingExtraError

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra agents")
TEXT = {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}
FIELDS = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}, "required": ["row", "column"]}
OPEN = []  # sessions of the stand-in


@contextmanager
def served(app):
    """The address of an application."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, 30)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


class Client:
    """The interface of `openenv.GenericEnvClient`: two right answers end the episode."""

    def __init__(self, base_url):
        self.base_url, self.turns = base_url, 0

    def sync(self):
        return self

    def connect(self):
        OPEN.append(self)

    def reset(self, seed=None, level="easy"):
        self.seed = seed
        return SimpleNamespace(observation={"prompt": f"Game {seed}, {level}.", "done": False, "reward": None})

    def step(self, action):
        assert set(action) in ({"message"}, {"row", "column"})
        self.turns += 1
        return SimpleNamespace(observation={"prompt": "More.", "turn": self.turns}, reward=0.5, done=self.turns == 2)

    def close(self):
        OPEN.remove(self)


@pytest.fixture
def server(monkeypatch):
    """server(schema) -> the address of a stand-in with actions of that schema."""
    package = ModuleType("openenv")
    package.GenericEnvClient = Client
    monkeypatch.setitem(sys.modules, "openenv", package)

    def serve(schema):
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"action": schema}))
        monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Client(transport=transport).get(url))
        return "http://game:8000/"

    return serve


def play(agent_run, url, *changes):
    return agent_run(
        ENDS, f"{ROLLOUT}.agent.environment=openenv:{url}", f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.multi_turn.function_tool_path=null", f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
        f"{ROLLOUT}.multi_turn.max_tool_response_length=2000", "data.max_prompt_length=400",
        "data.max_response_length=700", "trainer.total_training_steps=1", *changes,
    )  # fmt: skip


def test_a_text_is_the_only_field_of_an_action(server, agent_run, changed_rows):
    rows = changed_rows(lambda number, row: row["extra_info"].update(reset={"level": "hard"}))
    run = play(agent_run, server(TEXT), f"data.train_files={rows}")
    (row,) = run.training_rows()
    assert (row["rollout/num_failed_episodes"], row["critic/score/mean"]) == (0, 1.0)
    for episode in episodes(run):
        first, observation = episode["messages"][0]["content"], episode["messages"][2]["content"]
        assert first.endswith(", hard.")
        assert json.loads(observation) == {"prompt": "More.", "turn": 1}
    assert not OPEN


def test_a_text_that_is_no_action_is_answered_with_the_form(server, agent_run):
    run = play(agent_run, server(FIELDS))
    (row,) = run.training_rows()
    assert row["critic/score/mean"] == 0
    played = episodes(run)
    assert all('"row": {"type": "integer"}' in e["messages"][0]["content"] for e in played)
    assert all(e["messages"][2]["content"].startswith("This is no action.") for e in played)


def test_an_action_of_several_fields(server):
    episode = OpenEnv(server(FIELDS))()
    episode.reset(seed=1)
    assert episode.step('```json\n{"row": 1, "column": 2}\n```')[1:] == (0.5, False, False, {})
    assert episode.step('{"row": 1, "column": 0}')[2]
    episode.close()


@pytest.mark.parametrize(
    ("url", "reason"), [("http://127.0.0.1:9", "ConnectError"), ("nowhere", "UnsupportedProtocol")]
)
def test_without_a_server(server, monkeypatch, agent_run, url, reason):
    get = httpx.get
    server(TEXT)
    monkeypatch.setattr(httpx, "get", get)
    with pytest.raises(
        ConfigError, match=f"environment=openenv:{url}: no OpenEnv server tells its schema there .{reason}"
    ):
        play(agent_run, url)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(MissingExtraError, match="openenv:http://a needs the package 'openenv', which is not installed"):
        OpenEnv("http://a")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="the extra 'openenv' is not installed")
def test_a_server_of_the_package(agent_run):
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.turns = 0
            return Heard(text=f"Game {seed}.")

        def step(self, action, timeout_s=None, **kwargs):
            self.turns += 1
            return Heard(text=f"{len(action.message)} letters.", reward=0.25, done=self.turns == 2)

        @property
        def state(self):
            return State(step_count=self.turns)

    with served(create_fastapi_app(Game, Say, Heard, max_concurrent_envs=16)) as url:
        run = play(agent_run, url)
    (row,) = run.training_rows()
    assert (row["rollout/num_episodes"], row["rollout/num_failed_episodes"]) == (8, 0)
    assert row["critic/score/mean"] == 0.5
    assert {e["messages"][2]["content"].rpartition(" ")[2] for e in episodes(run)} == {"letters."}
