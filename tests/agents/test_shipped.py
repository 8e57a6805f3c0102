"""Tools and environments that come with the package."""

import asyncio
import json
import ssl

import pytest

from tests.json_lines import write_lines
from tests.rollout.service import running
from verl.agents import games
from verl.agents.tool_agent import AgentData
from verl.agents.tools.calculator import calculated
from verl.compat.gsm8k import Gsm8kInteraction, Gsm8kTool
from verl.compat.search import SearchTool
from verl.errors import ConfigError

DOCUMENTS = ["Paris is the capital of France", "Rome is the capital of Italy", "Cats sleep a lot"]


@pytest.mark.parametrize(
    ("expression", "value"), [("(3+4)*5", "35"), ("7/2", "3.5"), ("-2*-3", "6"), ("7//2 + 7%4", "6"), (" 1e3 ", "1000")]
)
def test_the_calculator_calculates(expression, value):
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "9**9**9", "1/0", "a", "(" * 150, "1" * 300, "True+1", "'a'*3", "1e15*1e15", ""]
)
def test_the_calculator_refuses_the_rest(expression):
    with pytest.raises(ValueError):
        calculated(expression)


def test_search_in_a_file(tmp_path):
    pytest.importorskip("bm25s", reason="needs the extra search")
    corpus = tmp_path / "corpus.jsonl"
    write_lines(corpus, ({"contents": text} for text in DOCUMENTS))
    tool = SearchTool({"corpus": str(corpus), "topk": 2})
    response, reward, _ = asyncio.run(tool.execute("", {"query_list": ["capital Italy", "cats", "zzz"]}))
    documents = json.loads(response.text)["result"].split("\n---\n")
    assert documents[0].startswith("Doc 1: Rome")
    assert documents[1] == "Doc 1: Cats sleep a lot"
    assert documents[2] == ""
    assert reward == 0.0
    with pytest.raises(ValueError, match="list of texts"):
        asyncio.run(tool.execute("", {"query_list": "cats"}))


def test_search_by_a_service(around):
    read = []
    around(ssl, "create_default_context", lambda create, **places: read.append(places) or create(**places))
    result = [{"document": {"contents": text}, "score": 1.0} for text in DOCUMENTS[:2]]
    with running({"/retrieve": {"result": [result]}}) as service:
        tool = SearchTool({"retrieval_service_url": f"{service.url}/retrieve", "topk": 2})
        for _ in range(2):
            response, _, _ = asyncio.run(tool.execute("", {"query_list": ["capitals"]}))
    assert "Doc 2: Rome" in response.text
    assert service.bodies("/retrieve") == 2 * [{"queries": ["capitals"], "topk": 2, "return_scores": True}]
    assert len(read) <= 1, "a process reads its certificates once"


def test_a_search_tool_without_a_source_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="either retrieval_service_url or corpus"):
        SearchTool({})
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ConfigError, match="cannot be used"):
        SearchTool({"corpus": str(tmp_path / "bad.jsonl")})


def test_the_gsm8k_tool_rewards_better_answers():
    async def episode():
        tool, data, answers = Gsm8kTool({}), AgentData([], "e"), []
        for answer in ("3", "4", "4"):
            instance, _ = await tool.create(create_kwargs={"ground_truth": "4"})
            response, reward, _ = await tool.execute(instance, {"answer": answer}, agent_data=data)
            answers.append((response.text, reward))
            await tool.release(instance)
        return answers

    assert [reward for _, reward in asyncio.run(episode())] == [-0.05, 0.0, -0.05]


def test_the_gsm8k_user_asks_again():
    async def episode():
        user = Gsm8kInteraction({"name": "gsm8k"})
        await user.start_interaction("e", ground_truth="4", query="2+2?")
        wrong = await user.generate_response("e", [{"role": "assistant", "content": "#### 5"}])
        right = await user.generate_response("e", [{"role": "assistant", "content": "#### 4"}])
        await user.finalize_interaction("e")
        return wrong, right

    wrong, right = asyncio.run(episode())
    assert wrong[0] is False
    assert "incorrect" in wrong[1]
    assert (right[0], right[2]) == (True, 1.0)


def test_games_of_gymnasium():
    pytest.importorskip("gymnasium", reason="needs the extra environments")
    lake = games.FrozenLake()
    first, _ = lake.reset(seed=1)
    assert "[S]FFF" in first
    assert lake.step("I do not know")[0].startswith("Say one of")
    way = ["down", "down", "right", "right", "down", "I go right."]
    steps = [lake.step(word) for word in way]
    assert [reward for _, reward, *_ in steps] == [0, 0, 0, 0, 0, 1]
    assert steps[-1][2] is True
    lakes = games.FrozenLakes()
    maps = [lakes.reset(seed=seed)[0] for seed in (3, 4, 3)]
    assert maps[0] == maps[2] != maps[1]
    jack = games.Blackjack()
    assert jack.reset(seed=1)[0] == jack.reset(seed=1)[0]
    assert jack.step("stick")[2] is True
    taxi = games.Taxi()
    assert "The passenger is at" in taxi.reset(seed=1)[0]
    assert taxi.step("dropoff")[1] == -10


def test_games_of_textarena():
    pytest.importorskip("textarena", reason="needs the extra environments", exc_type=ImportError)
    game = games.TextArena()
    first, _ = game.reset(seed=1, game="GuessTheNumber-v0")
    assert "number" in first
    done, rewards = False, []
    for guess in range(1, 21):
        text, reward, done, *_ = game.step(f"[{guess}]")
        rewards.append(reward)
        if done:
            break
    assert done
    with pytest.raises(ValueError, match="names no game"):
        game.reset(seed=1)


def test_wrong_try_again():
    game = games.TryAgain()
    game.reset(data_source="openai/gsm8k", reward_model={"ground_truth": "72"})
    assert game.step("#### 71")[:3] == ("That is wrong. Try again.", 0.0, False)
    assert game.step("#### 72")[1:3] == (1.0, True)
