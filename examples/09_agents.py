"""Agents: the same policy trains with a tool, in an environment, or behind an endpoint that a plain OpenAI client calls.

    python examples/09_agents.py                # an environment
    python examples/09_agents.py tool
    python examples/09_agents.py endpoint       # needs: pip install 'verl[agents]' openai

The tiny random model writes no calls, so with the tool it learns from its reward function alone; see docs/agents.md.
"""

import sys
from pathlib import Path

from verl.tools.function_tool import function_tool

HERE = Path("outputs/example_09")
ROLLOUT = "actor_rollout_ref.rollout"


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
    """An agent that knows an endpoint alone; a script that you have already needs no other change."""
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
    "environment": [f"{ROLLOUT}.agent.environment={__file__}:Vowels"],
    "tool": [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.multi_turn.function_tool_path={__file__}"],
    "endpoint": [f"{ROLLOUT}.agent.runner={__file__}:run"],
}

if __name__ == "__main__":
    import runpy

    from verl.cli.main import main
    from verl.models.tiny import make_tiny_model

    HERE.mkdir(parents=True, exist_ok=True)
    example = runpy.run_path(str(Path(__file__).with_name("01_first_grpo_run.py")))
    example["write_rows"](HERE / "train.jsonl", range(160))
    raise SystemExit(
        main(
            [
                "train",
                "algorithm.adv_estimator=grpo",
                f"actor_rollout_ref.model.path={make_tiny_model(HERE / 'model')}",
                f"data.train_files={HERE}/train.jsonl",
                "data.val_files=[]",
                "data.train_batch_size=16",
                "data.max_prompt_length=96",
                "data.max_response_length=64",
                f"{ROLLOUT}.n=4",
                f"{ROLLOUT}.stop=['\\n']",
                "actor_rollout_ref.actor.ppo_mini_batch_size=16",
                "actor_rollout_ref.actor.optim.lr=0.003",
                f"reward.custom_reward_function.path={__file__}",
                "trainer.total_training_steps=10",
                f"trainer.default_local_dir={HERE}/run",
                "trainer.resume_mode=disable",
                *KINDS[sys.argv[1] if len(sys.argv) > 1 else "environment"],
            ]
        )
    )
