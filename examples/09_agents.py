"""Agents: the same policy trains with a tool, in an environment, or behind an endpoint that a plain OpenAI client calls.

    python examples/09_agents.py                # an environment
    python examples/09_agents.py tool
    python examples/09_agents.py endpoint       # needs: pip install openai

The tiny random model writes no calls, so with the tool it learns only from its reward function; see docs/agents.md.
"""

import sys

import verl
from verl.models.tiny import make_tiny_model
from verl.tools.function_tool import function_tool

HERE = "outputs/example_09"


@function_tool
def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


class Vowels:
    """Three turns; the reward of each is the share of vowels in what the model says."""

    def reset(self, seed=None, **row):
        self.turns = 0
        return "Say vowels.", {}

    def step(self, text):
        self.turns += 1
        share = sum(c in "aeiou" for c in text) / max(len(text), 1)
        return "More.", share / 3, self.turns == 3, False, {}


def run(task, base_url, api_key):
    """An agent that knows only an endpoint; a script that you have already needs no other change."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["raw_prompt"])
    for _ in range(2):
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8).choices[0].message
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "More."}]
    return sum(c in "aeiou" for c in reply.content or "") / 8


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The reward where the agent brings none: with the tool."""
    return sum(c in "aeiou" for c in solution_str) / max(len(solution_str), 1)


KINDS = {
    "environment": {"agent": {"environment": Vowels}},
    "tool": {"multi_turn": {"enable": True, "function_tool_path": __file__}},
    "endpoint": {"agent": {"runner": run}},
}

if __name__ == "__main__":
    kind = sys.argv[1] if len(sys.argv) > 1 else "environment"
    verl.train(
        make_tiny_model(f"{HERE}/model"), [{"prompt": f"Say {n % 10}."} for n in range(160)],
        compute_score if kind == "tool" else None, output_dir=f"{HERE}/run",
        config={"data": {"train_batch_size": 16, "max_prompt_length": 96, "max_response_length": 64}},
        actor_rollout_ref={
            "rollout": {"n": 4, "stop": ["\n"], **KINDS[kind]},
            "actor": {"ppo_mini_batch_size": 16, "optim": {"lr": 0.003}},
        },
        trainer={"total_training_steps": 10, "resume_mode": "disable"},
    )  # fmt: skip
