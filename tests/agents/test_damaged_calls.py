"""Damaged calls in episodes: a sentence for the model, a further turn, a metric, and an answer for each call of a turn."""

import collections
import json
import random

import numpy as np
import pytest
import torch

from tests.agents import damaged_calls
from tests.agents.test_exactness import Scripted, objects
from tests.data.conversations.templates import tokenizer_of
from verl.agents.agents import Agents
from verl.agents.episode import Episode, EpisodeTask
from verl.agents.gateway.formats import anthropic_events, chat_chunks, chat_response
from verl.agents.gateway.sessions import EndpointSession, TurnRules
from verl.agents.images import EpisodeImages
from verl.agents.parsers import ToolParser
from verl.config import load_config
from verl.data_proto.proto import DataProto
from verl.data_proto.samples import Completion, SamplingParams
from verl.programs.specs import agent_spec

ROLLOUT = "actor_rollout_ref.rollout"
ASK = [{"role": "user", "content": "Go."}]
GOOD = '<tool_call>{"name": "echo", "arguments": {"text": "yes"}}</tool_call>'
BAD = '<tool_call>{"name": "echo", "arguments": {"text": "line1\nline2"}}</tool_call>'


class Turns(Scripted):
    """Each sample takes `turns`."""

    def __init__(self, tokenizer, turns):
        super().__init__(tokenizer)
        self.turns = turns

    def poll(self, timeout_s=None):
        if not self._queue:
            return []
        key, _ = self._queue.pop(0)
        ids = [*self.tokenizer.encode(self.turns[len(self.sampled[key])]), self.tokenizer.eos_token_id]
        self.sampled[key].append((len(self._kept[key]), ids, [-1.0] * len(ids)))
        self._kept[key] += ids
        return [Completion(*key, ids, [-1.0] * len(ids), "stop", 4)]


@pytest.fixture
def play(tmp_path):
    """play(turns, *changes) -> (result, agents): one episode; the model says `turns`."""
    built = []

    def start(turns, *changes, prompt=ASK, **columns):
        config = load_config(
            [
                "actor_rollout_ref.model.path=model", "data.train_files=x.jsonl", "data.max_prompt_length=900",
                "data.max_response_length=2000", f"trainer.default_local_dir={tmp_path}",
                f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.function_tool_path=tests/agents/echo_tools.py",
                f"{ROLLOUT}.multi_turn.tool_sandbox=False", f"{ROLLOUT}.agent.default_agent_loop=tool_agent", *changes,
            ]
        ).config  # fmt: skip
        tokenizer = tokenizer_of("qwen2.5")
        agents = Agents(agent_spec(config), tokenizer, Turns(tokenizer, turns), stop_token_ids=[tokenizer.eos_token_id])
        built.append(agents)
        continuity = agents.context.continuity.of_row(columns.get("template_kwargs") or {})
        columns = {
            "ordinal": torch.arange(1),
            "prompt_token_ids": objects([continuity.prompt(prompt)]),
            "raw_prompt": objects([prompt]),
            "data_source": objects(["test"]),
            **{name: objects([value]) for name, value in columns.items()},
        }
        rows, params = DataProto.from_single_dict(columns), SamplingParams(n=1, max_new_tokens=2000)
        (result,) = agents.generate(
            rows, params, step=1, split="train", dtype=np.float64, on_finish=lambda r: None, limit=2000
        )
        return result, agents

    yield start
    for agents in built:
        agents.close()


def answers(result):
    return [message["content"] for message in result.trajectory.messages if message["role"] == "tool"]


def test_the_model_reads_a_sentence_about_a_damaged_call_and_goes_on(play):
    result, agents = play([BAD, GOOD, "done"])
    bad, good = answers(result)
    assert bad.startswith("Invalid tool call: Invalid control character")
    assert good == "heard yes"
    stats = agents.metrics()
    assert (stats["num_unreadable_tool_calls"], stats["num_failed_tool_calls"], stats["num_tool_calls"]) == (1, 1, 2)


def test_the_good_call_beside_a_damaged_one_runs(play):
    result, _ = play([BAD + GOOD, "done"])
    assert [text.partition(":")[0] for text in answers(result)] == ["Invalid tool call", "heard yes"]


def test_each_call_beyond_the_limit_has_an_answer(play):
    result, agents = play([GOOD * 3, "done"])
    assert answers(result) == ["heard yes", *["Not run: of the calls of one turn, at most 1 run. Call it again."] * 2]
    assert agents.metrics()["num_tool_calls_not_run"] == 2
    assert result.extra["rollout_reward_scores"] == {"tool_rewards": [0.0]}


def test_a_call_in_thoughts_does_not_run(play):
    result, _ = play([f"<think>Perhaps {GOOD.replace('yes', 'no')}</think>{GOOD}", f"<think>{GOOD}"])
    assert answers(result) == ["heard yes"]


def test_a_call_may_begin_in_the_prompt(play):
    begun = [*ASK, {"role": "assistant", "content": f"So {GOOD[:20]}"}]
    result, _ = play([GOOD[20:], "done"], prompt=begun, template_kwargs={"continue_final_message": True})
    assert answers(result) == ["heard yes"]
    assert [m["role"] for m in result.trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    row = result.trajectory.to_row()
    text = tokenizer_of("qwen2.5").decode(row.prompt_ids)
    assert text.endswith(f"<|im_start|>assistant\nSo {GOOD[:20]}")
    assert tokenizer_of("qwen2.5").decode(row.response_ids).startswith(GOOD[20:])


def test_a_program_behind_the_endpoint_gets_a_damaged_call_as_one_whose_arguments_are_no_json(play):
    tokenizer = tokenizer_of("qwen2.5")
    _, agents = play(["done"])
    tools = [{"type": "function", "function": {"name": "echo", "parameters": {}}}]

    def turn_of(text, reason="stop"):
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]

        async def submit(episode, request):
            return Completion(0, 0, ids, [-1.0] * len(ids), reason, 4)

        episode = Episode(EpisodeTask(0, 0, 1, "train", (1,), {}, 2000, 900), submit)
        session = EndpointSession(
            "s", episode, agents.context.continuity, ToolParser.get_tool_parser("hermes", tokenizer),
            frozenset([tokenizer.eos_token_id]), "", EpisodeImages(None, None),
        )  # fmt: skip
        max_tokens = len(ids) if reason == "length" else None
        (answer,) = agents.events.start(session.chat(ASK, tools, TurnRules(max_tokens))).result(timeout=120)
        return answer, episode

    answer, episode = turn_of(BAD)
    assert episode.faults["unreadable"] == 1
    for message in (
        chat_response([answer], {})["choices"][0]["message"],
        chat_chunks([answer], {})[0]["choices"][0]["delta"],
    ):
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "echo"
        assert call["id"]
        with pytest.raises(ValueError):
            json.loads(call["function"]["arguments"])
    assert any(e.get("content_block", {}).get("name") == "echo" for e in anthropic_events(answer, {}))
    answer, _ = turn_of('<tool_call>{"nam": 1}</tool_call>')
    assert (answer.calls[0].name, answer.finish_reason) == ("unreadable_call", "tool_calls")
    answer, _ = turn_of(f"<think>{GOOD}</think>No.")
    assert (answer.calls, answer.finish_reason) == ([], "stop")
    answer, _ = turn_of(GOOD[:30], "length")  # cut by the limit of the request
    assert (answer.calls, answer.finish_reason) == ([], "length")


def test_fuzz_tool_calls(tmp_path):
    outcomes = collections.Counter(damaged_calls.cases(random.Random(0), 300, tmp_path))
    assert sum(outcomes.values()) == 300
