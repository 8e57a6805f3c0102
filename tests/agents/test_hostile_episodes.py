"""Rewards without bound and texts without end, from everything that an episode asks: each costs its own episode."""

import collections
import json
import math
import random
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from tests.agents import episode_rewards
from tests.agents.test_exactness import Scripted, objects
from tests.data.conversations.templates import tokenizer_of
from verl.agents.agents import Agents
from verl.agents.interactions import BaseInteraction
from verl.agents.loops import AgentLoopBase, AgentLoopOutput
from verl.agents.tool_calls import ToolCalls
from verl.config import load_config
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import SamplingParams
from verl.programs.specs import agent_spec
from verl.tools.function_tool import FunctionTool

ROLLOUT = "actor_rollout_ref.rollout"
SETTINGS = {}  # settings of the hostile row: "reward", "text" and "at" (reset or step)
PROMPT, RESPONSE = 700, 900  # tokens
LONG = "x" * 3_000_000
REWARDS = [1e39, 3e38, -1e300, 1.1e12, math.inf, math.nan]


def chosen(row, name, usual):
    return SETTINGS.get(name, usual) if row["data_source"] == "hostile" else usual


class Game:
    def reset(self, data_source, **row):
        self.row = {"data_source": data_source}
        return chosen(self.row, "reset", "Begin.")

    def step(self, text):
        return chosen(self.row, "step", "Next."), chosen(self.row, "reward", 0.5), True, False, {}


class Counter:
    def reset(self, data_source, **row):
        self.row = {"data_source": data_source}

    def echo(self, text: str) -> str:
        """Say a text again.

        Args:
            text: the text
        """
        return text

    def get_reward(self):
        return chosen(self.row, "reward", 0.5)


class User(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, chosen(kwargs, "text", "Go on."), chosen(kwargs, "reward", 0.5), {}


def echo(text: str) -> str:
    """Say a text again.

    Args:
        text: the text
    """
    return text, SETTINGS["reward"], {}


def returns(task, base_url, api_key):
    ask(task, base_url, api_key)
    return chosen(task, "reward", 0.5)


def returns_dict(task, base_url, api_key):
    ask(task, base_url, api_key)
    return {"reward": chosen(task, "reward", 0.5)}


def posts(task, base_url, api_key):
    ask(task, base_url, api_key, "reward", {"reward": chosen(task, "reward", 0.5)})


def asks(task, base_url, api_key):
    SETTINGS[task["data_source"]] = ask(
        task, base_url, api_key, "chat/completions", {"messages": said(chosen(task, "text", "Go on."))}
    )


def completes(task, base_url, api_key):
    SETTINGS[task["data_source"]] = ask(
        task, base_url, api_key, "completions", {"prompt": chosen(task, "text", "Go on.")}
    )


def said(text):
    return [{"role": "user", "content": text}]


def ask(task, base_url, api_key, path="chat/completions", body=None):
    """A turn, then a request of the agent; returns its status."""
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=120) as client:
        client.post("/chat/completions", json={"messages": said("Go."), "max_tokens": 5}).raise_for_status()
        return client.post(f"/{path}", content=json.dumps(body)).status_code if body else 200


class Loop(AgentLoopBase):
    async def run(self, sampling_params, **row):
        ids = await self.apply_chat_template([{"role": "user", "content": chosen(row, "text", "Go.")}])
        out = await self.server_manager.generate(prompt_ids=ids, sampling_params={"max_tokens": 5})
        reward = chosen(row, "reward", 0.5)
        fields = {"turn_rewards": [reward]} if SETTINGS.get("by_turn") else {}
        return AgentLoopOutput(
            ids, out.token_ids, [1] * len(out.token_ids), reward_score=None if fields else reward, extra_fields=fields
        )


ENVIRONMENT, RUNNER = f"{ROLLOUT}.agent.environment={__file__}:Game", f"{ROLLOUT}.agent.runner={__file__}:returns"
TURNS = (
    f"{ROLLOUT}.multi_turn.enable=True",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
)


def change(agents, **parts):
    agents.context = replace(agents.context, **parts)


# source -> (keys, change to the agents)
SOURCES = {
    "step": ((ENVIRONMENT,), lambda agents: agents.context.environments.update({"": Game})),
    "get_reward": ((ENVIRONMENT,), lambda agents: agents.context.environments.update({"": Counter})),
    "user": (TURNS, lambda agents: agents.context.interactions.update(user=User({}))),
    "runner": ((RUNNER,), lambda agents: change(agents, runner=returns)),
    "dict of a runner": ((RUNNER,), lambda agents: change(agents, runner=returns_dict)),
    "post": ((RUNNER,), lambda agents: change(agents, runner=posts)),
    "messages": ((RUNNER,), lambda agents: change(agents, runner=asks)),
    "completions": ((RUNNER,), lambda agents: change(agents, runner=completes)),
    "loop": (
        (f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"),
        lambda agents: agents.loops.update(single_turn_agent=(Loop, {})),
    ),
}


def make_agents(source, folder):
    """Agents with rewards and texts from `source`."""
    keys, prepare = SOURCES[source]
    files = ("actor_rollout_ref.model.path=model", "data.train_files=x.jsonl")
    lengths = (f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}")
    config = load_config([*files, *lengths, f"trainer.default_local_dir={folder}", *keys], check=False).config
    tokenizer = tokenizer_of("qwen2.5")
    agents = Agents(agent_spec(config), tokenizer, Scripted(tokenizer), stop_token_ids=[tokenizer.eos_token_id])
    prepare(agents)
    return agents


def play_rows(agents, first_ordinal=0):
    """The results of a hostile row and of another."""
    names = ["hostile", "usual"]
    columns = {
        "ordinal": torch.arange(first_ordinal, first_ordinal + 2),
        "prompt_token_ids": objects([agents.context.continuity.prompt(said("Go."))] * 2),
        "raw_prompt": objects([said("Go.")] * 2),
        "data_source": objects(names),
        "extra_info": objects([{"interaction_kwargs": {"name": "user", "data_source": name}} for name in names]),
    }
    rows, params = DataProto.from_single_dict(columns), SamplingParams(n=1, max_new_tokens=RESPONSE)
    return agents.generate(rows, params, step=1, split="train", dtype=np.float64, on_finish=lambda r: None)


@pytest.fixture
def play(tmp_path):
    """play(source, **given) -> the results of a hostile row and of another, and the characters that were encoded."""
    built = []

    def start(source, **values):
        SETTINGS.clear()
        SETTINGS.update(values)
        agents = make_agents(source, tmp_path)
        built.append(agents)
        tokenizer = agents.tokenizer
        encode, num_chars = tokenizer.encode, []
        tokenizer.encode = lambda text, **settings: num_chars.append(len(text)) or encode(text, **settings)
        return *play_rows(agents), sum(num_chars)

    yield start
    for agents in built:
        agents.close()


@pytest.mark.parametrize("by_turn", [False, True])
@pytest.mark.parametrize("source", ["step", "get_reward", "user", "runner", "dict of a runner", "post", "loop"])
def test_a_reward_without_bound_costs_its_own_episode(play, source, by_turn):
    if by_turn and source != "loop":
        pytest.skip("only a loop gives rewards of turns as a list")
    for value in REWARDS:
        hostile, usual, _ = play(source, reward=value, by_turn=by_turn)
        assert usual.error is None
        if source == "post" and not math.isfinite(value):
            assert hostile.reward is None  # the request was refused
            continue
        assert "reward.max_abs_score=1e+12" in hostile.error or "not a finite number" in hostile.error, (source, value)
        assert hostile.reward is None
    assert play(source, reward=3e11, by_turn=by_turn)[0].error is None


def test_a_tool_reward_without_bound_costs_its_own_episode(play):
    for value in REWARDS:
        SOURCES["tool"] = (
            TURNS,
            lambda agents: change(
                agents, tool_calls=ToolCalls([FunctionTool(echo)], agents.context.tool_calls.settings)
            ),
        )
        results = play("tool", reward=value)[:2]
        called = [result for result in results if "'turn_rewards'" in (result.error or "")]
        assert all(result.error is None or result in called for result in results)
        assert called


@pytest.mark.parametrize(
    ("source", "place"), [("step", "reset"), ("step", "step"), ("user", "text"), ("loop", "text"), ("messages", "text"),
                          ("completions", "text")],
)  # fmt: skip
def test_a_text_without_end_is_not_encoded(play, source, place):
    """In the event loop: all episodes wait on it. Only so much of it is encoded as shows that it is too long."""
    hostile, usual, num_chars = play(source, **{place: LONG})
    assert usual.error is None
    assert num_chars < 300_000
    if source in ("messages", "completions"):
        assert (SETTINGS["hostile"], SETTINGS["usual"]) == (400, 200)
    elif place == "step":
        assert hostile.error is None  # cut at multi_turn.max_tool_response_length
    else:
        assert "a text of 3,000,0" in hostile.error
        assert "data.max_prompt_length" in hostile.error


@pytest.mark.parametrize("num_chars", [100, 70_000, 140_000])
def test_a_text_that_may_fit_is_encoded_whole(play, num_chars):
    """A text of spaces, 1000 to a token: the limit is on tokens, not on characters."""
    from verl.agents.continuity import ChatContinuity

    class Spaces:
        chat_template, all_special_ids, all_special_tokens = "x", [], []

        def get_vocab(self):
            return {" " * 1000: 0}

        def encode(self, text, **settings):
            return [0] * (-(-len(text) // 1000))

        def apply_chat_template(self, messages, **kwargs):
            return "\n".join(str(m["content"]) for m in messages)

        def convert_ids_to_tokens(self, token):
            return ""

    continuity = ChatContinuity(Spaces(), max_tokens=200)
    assert len(continuity.encode(" " * num_chars)) == -(-num_chars // 1000)


def test_rewards_of_any_kind_are_numbers_or_cost_their_own_episode(tmp_path):
    outcomes = collections.Counter(episode_rewards.cases(random.Random(0), 60, tmp_path))
    assert {"refused", "a number"} <= {what for _, what in outcomes}, outcomes
