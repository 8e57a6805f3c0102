"""An environment of verifiers before 0.4: several turns, and a rubric of two functions."""

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "No. Guess again."}]


def turns(state):
    return float(len(state["trajectory"]))


def vowels(completion):
    text = "".join(message.content or "" for message in completion if message.role == "assistant")
    return float(any(c in "aeiou" for c in text))


def load_environment(max_turns=3):
    rows = [{"question": f"Guess number {i}.", "answer": str(i)} for i in range(10)]
    return Guess(
        dataset=Dataset.from_list(rows[:8]), eval_dataset=Dataset.from_list(rows[8:]), max_turns=max_turns,
        rubric=vf.Rubric(funcs=[turns, vowels], weights=[1.0, 0.5]),
    )  # fmt: skip
