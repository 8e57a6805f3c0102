"""Agents with several conversations, stop texts and JSON schemas; each learns on a tiny random model in under a minute.

    python examples/agents/conversations.py helper      # a sub-agent learns from the reward of its episode
    python examples/agents/conversations.py drafts      # several drafts, and a judge that chooses one
    python examples/agents/conversations.py react       # a loop of thoughts and observations, with `stop`
    python examples/agents/conversations.py schema      # answers in JSON, with `response_format` (extra `schemas`)

Needs: pip install openai. On your own model, name the function in actor_rollout_ref.rollout.agent.runner.
"""

import json
import sys

from openai import OpenAI

import verl
from verl.models.tiny import make_tiny_model

HERE = "outputs/conversations"
COLOURS = {"type": "json_schema", "json_schema": {"name": "colour", "schema": {
    "type": "object", "properties": {"colour": {"enum": ["red", "green", "blue", "grey"]}}, "required": ["colour"],
    "additionalProperties": False,
}}}  # fmt: skip


def vowels(text):
    """The share of vowels."""
    return sum(c in "aeiou" for c in text) / max(len(text), 1)


def asker(base_url, api_key):
    """ask(text, **settings) -> the choices of a conversation that begins with `text`."""
    client = OpenAI(base_url=base_url, api_key=api_key)

    def ask(text, **settings):
        messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
        return client.chat.completions.create(model="policy", messages=messages, **settings).choices

    return ask


def helper(task, base_url, api_key):
    """The main conversation is longer, and the reward is of the helper's: it trains by agent.branches=all."""
    ask = asker(base_url, api_key)
    (hint,) = ask("Help.", max_tokens=6)
    ask(f"Say {hint.message.content}.", max_tokens=12)
    return vowels(hint.message.content or "")


def drafts(task, base_url, api_key):
    """Four drafts, and a judge whose first letter chooses one. The reward is of the chosen draft."""
    ask = asker(base_url, api_key)
    texts = [draft.message.content or "" for draft in ask("Write.", n=4, max_tokens=6)]
    (verdict,) = ask("Which?", max_tokens=1)
    return vowels(texts[ord((verdict.message.content or "a")[0]) % 4])


def react(task, base_url, api_key):
    """A thought ends where the model writes a full stop; the observation says how good it was. Thoughts without an end fail."""
    ask = asker(base_url, api_key)
    messages, reward = [{"role": "user", "content": "Think."}], 0.0
    for _ in range(2):
        (thought,) = ask(messages, stop=["."], max_tokens=8)
        text = thought.message.content or ""
        reward += (thought.finish_reason == "stop") / 4 + vowels(text) / 4
        observation = {"role": "user", "content": f"Observation: {vowels(text):.1f}"}
        messages += [{"role": "assistant", "content": text}, observation]
    return reward


def schema(task, base_url, api_key):
    """The answer is always JSON of one form; which colour it names is learned."""
    (answer,) = asker(base_url, api_key)("Which colour?", response_format=COLOURS, max_tokens=40)
    return float(json.loads(answer.message.content)["colour"] == "green")


AGENTS = {"helper": helper, "drafts": drafts, "react": react, "schema": schema}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "helper"
    branches = sys.argv[2] if len(sys.argv) > 2 else "all"
    verl.train(
        make_tiny_model(f"{HERE}/model"), [{"prompt": f"Task {n % 10}."} for n in range(320)],
        output_dir=f"{HERE}/{name}_{branches}",
        config={"data": {"train_batch_size": 16, "max_prompt_length": 96, "max_response_length": 64}},
        actor_rollout_ref={
            "rollout": {"n": 8, "agent": {"runner": AGENTS[name], "branches": branches}},
            "actor": {"ppo_mini_batch_size": 16, "optim": {"lr": 0.003}},
        },
        trainer={"total_training_steps": 20, "resume_mode": "disable"},
    )  # fmt: skip
