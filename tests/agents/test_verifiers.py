"""Environments of the package verifiers: by a stand-in of its interface, and by the package if it is installed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.agents import stand_in_verifiers
from tests.agents.test_openenv import served
from tests.agents.test_runs import ENDS, ROLLOUT, episodes
from tests.json_lines import write_lines
from verl.agents.verifiers import Verifiers
from verl.cli.main import main
from verl.errors import ConfigError, MissingExtraError, RewardError

pytest.importorskip("openai", reason="the package verifiers brings it")

PACKAGES = Path(__file__).parent / "packages"
HAS = importlib.util.find_spec("verifiers") is not None
IS_OLD = HAS and importlib.util.find_spec("verifiers.envs") is not None
real = pytest.mark.skipif(not HAS or IS_OLD, reason="verifiers 0.4 is not installed")
real_old = pytest.mark.skipif(not IS_OLD, reason="verifiers before 0.4 is not installed")


@pytest.fixture
def stand_in(monkeypatch):
    for name, module in stand_in_verifiers.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "verifiers.v1.harnesses.verl", None)  # verl sets it
    monkeypatch.setattr(stand_in_verifiers.Env, "num_serving", 0)
    monkeypatch.setattr(stand_in_verifiers, "CALLS", [])


@pytest.fixture
def play(agent_run, tmp_path, capsys):
    """play(NAME, *changes) -> the Run of one step on the rows that `verl data verifiers` writes."""

    def start(name, *changes):
        assert main(["data", "verifiers", name, "--output", f"{tmp_path}/rows", "--train", "4", "--test", "2"]) == 0
        assert "4 rows" in capsys.readouterr().out
        return agent_run(
            ENDS, f"data.train_files={tmp_path}/rows/train.parquet", f"{ROLLOUT}.agent.environment=verifiers:{name}",
            f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.multi_turn.function_tool_path=null", f"{ROLLOUT}.n=2",
            "reward.custom_reward_function.path=null", "data.max_prompt_length=200", "data.max_response_length=200",
            "trainer.total_training_steps=1", *changes,
        )  # fmt: skip

    return start


@pytest.mark.parametrize(("name", "num_turns"), [("single", 2), ("turns", 2), ("tools", None)])
def test_an_environment_of_the_package_plays_and_brings_its_reward(stand_in, play, name, num_turns):
    run = play(name)
    (row,) = run.training_rows()
    assert (row["rollout/num_episodes"], row["rollout/num_failed_episodes"]) == (8, 0)
    assert row["training/rollout_probs_diff_max"] < 1e-5
    assert (row["critic/score/min"], row["critic/score/max"]) == (0.5, 2.0)  # of the tasks 0 to 3
    played = episodes(run)
    assert {e["extra"]["by_index"] for e in played} == {0.0, 0.5, 1.0, 1.5}
    assert {e["extra"]["finished"] for e in played} <= {True, False}
    assert all(e["messages"][0] == {"role": "system", "content": "Be short."} for e in played)
    assert {e["num_turns"] for e in played} == {num_turns} or name == "tools"  # "turns" plays three conversations
    if name == "tools":
        texts = [arguments["text"] for _, arguments in stand_in_verifiers.CALLS]
        said = [m["content"] for e in played for m in e["messages"] if m["role"] == "tool"]
        assert texts
        assert any(text.startswith("heard ") for text in said)
        assert any("no tool 'nothing'" in text or "arguments are not JSON" in text for text in said)
    assert stand_in_verifiers.Env.num_serving == 0  # what it serves has ended with the run


def test_an_environment_of_an_older_release(stand_in, play, tmp_path):
    file = tmp_path / "old.toml"
    file.write_text('[env]\nid = "owner/old-package@1.2"\nargs = {num_turns = 3}\n')
    run = play(str(file))
    (row,) = run.training_rows()
    assert row["critic/score/mean"] == 3
    assert {(e["num_turns"], e["extra"]["turns"]) for e in episodes(run)} == {(6, 3)}
    assert {json.dumps(e["messages"][0]["content"]) for e in episodes(run)} == {f'"Row {i}"' for i in range(4)}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "missing",
            "verifiers:missing cannot be loaded with verifiers .*: ModuleNotFoundError: taskset 'missing' not found",
        ),
        ("none.toml", "The file of an environment none.toml does not exist"),
    ],
)
def test_an_environment_that_cannot_be_loaded_stops_before_the_run(stand_in, agent_run, name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        agent_run(f"{ROLLOUT}.agent.environment=verifiers:{name}", f"{ROLLOUT}.multi_turn.enable=False")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", "its environment failed: TaskError: the board is gone"),
        ("unserved", "its environment could not start: OSError: no port is free"),
    ],
)
def test_an_environment_that_fails_says_why(stand_in, play, name, sentence):
    with pytest.raises(RewardError, match=f"none of the 8 samples could be scored. The first: .*{sentence}"):
        play(name)


def test_rows_of_another_environment(stand_in, play, tmp_path, caplog):
    file = tmp_path / "two.toml"
    file.write_text('taskset = {id = "single", num_tasks = 2}\n')
    run = play("single", f"{ROLLOUT}.agent.environment=verifiers:{file}")
    assert run.training_rows()[0]["rollout/num_failed_episodes"] == 4
    assert "its row names task 3, and its environment has 2" in caplog.text


def test_without_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match="environment=verifiers:a needs the package 'verifiers', which is not inst"
    ):
        Verifiers("a")


@pytest.mark.slow
@real
@pytest.mark.parametrize(
    ("name", "parts"), [("reverse-words", "exact vowels"), ("guess_game", "turns"), ("echo-words", "calls")]
)
def test_the_package_itself(play, monkeypatch, name, parts):
    """Rewards of a rubric, several turns, and tools of a server."""
    monkeypatch.syspath_prepend(PACKAGES)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))  # of servers of tools
    run = play(name)
    (row,) = run.training_rows()
    assert (row["rollout/num_episodes"], row["rollout/num_failed_episodes"]) == (8, 0)
    assert row["training/rollout_probs_diff_max"] < 1e-5
    played = episodes(run)
    assert all(set(parts.split()) <= set(e["extra"]) for e in played)
    if name == "reverse-words":
        assert all(e["reward"] == pytest.approx(e["extra"]["exact"] + 0.5 * e["extra"]["vowels"]) for e in played)
    elif name == "guess_game":
        assert max(e["num_turns"] for e in played) == 6
    else:
        answers = [m["content"] for e in played for m in e["messages"] if m["role"] == "tool"]
        assert 0 < sum(text.startswith("You said") for text in answers) <= sum(e["reward"] for e in played)


@pytest.mark.slow
@real_old
def test_an_older_release_itself(play, monkeypatch):
    monkeypatch.syspath_prepend(PACKAGES)
    run = play("old-guess")
    (row,) = run.training_rows()
    played = [e for e in episodes(run) if e["error"] is None]  # the package takes no empty turn
    assert len(played) == 8 - row["rollout/num_failed_episodes"] > 3
    assert {e["num_turns"] for e in played} == {6}
    assert all(e["reward"] == 3 + 0.5 * e["extra"]["vowels"] for e in played)
    assert all("EmptyModelResponseError" in e["error"] for e in episodes(run) if e["error"])


@pytest.mark.slow
@real
def test_a_server_of_nemo_gym(play, tmp_path):
    """Its HTTP form: a session, tools by name, a verdict on the whole response."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    requests = []

    async def answer(request):
        body = await request.json()
        requests.append((request.url.path, body))
        if request.url.path == "/verify":
            calls = sum(item["type"] == "function_call" for item in body["response"]["output"])
            return JSONResponse({**body, "reward": calls / 2, "num_calls": calls})
        return JSONResponse({"heard": body.get("text")})

    tool = {"type": "function", "name": "echo", "description": "Say a text again.", "strict": None,
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}  # fmt: skip
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"Echo {i}."}], "tools": [tool]},
            "wanted": i,
        }
        for i in range(6)
    ]
    write_lines(tmp_path / "rows.jsonl", rows)
    paths = ("/seed_session", "/echo", "/verify")
    with served(Starlette(routes=[Route(path, answer, methods=["POST"]) for path in paths])) as url:
        file = tmp_path / "gym.toml"
        file.write_text(
            f'[taskset]\nid = "nemo_gym"\ndataset = "{tmp_path}/rows.jsonl"\ntask = {{resources_url = "{url}"}}\n'
        )
        run = play(str(file))
    (row,) = run.training_rows()
    assert (row["rollout/num_episodes"], row["rollout/num_failed_episodes"]) == (8, 0)
    assert {body["wanted"] for path, body in requests if path == "/verify"} <= set(range(6))
    assert sum(path == "/seed_session" for path, _ in requests) == sum(path == "/verify" for path, _ in requests) == 8
    assert any(path == "/echo" for path, _ in requests)
    assert all(e["reward"] == e["extra"]["num_calls"] / 2 for e in episodes(run))
