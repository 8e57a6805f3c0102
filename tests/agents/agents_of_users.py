"""The agent of echo_tools.py in two more ways: as an environment of TRL's kind and as a plain OpenAI client."""

import json

from tests.agents import echo_tools
from verl.tools.function_tool import MARK

TOOLS = [getattr(f, MARK) for f in (echo_tools.echo, echo_tools.break_things)]
SCHEMAS = [tool.tool_schema.for_template() for tool in TOOLS]


class Echo:
    """TRL's kind of environment."""

    def reset(self, **row):
        assert row["data_source"] == "letters"

    def echo(self, text: str) -> str:
        """Say a text again.

        Args:
            text: the text
        """
        return echo_tools.echo(text)

    def break_things(self, how: str) -> str:
        """Fail.

        Args:
            how: the way
        """
        return echo_tools.break_things(how)


class Letters:
    """Gymnasium's kind: the reward of a turn is whether it has a vowel."""

    def reset(self, seed=None, **row):
        self.turns, self.seed = 0, seed
        return f"Game {seed}.", {}

    def step(self, text):
        self.turns += 1
        reward = float(any(c in "aeiou" for c in text))
        return f"{self.turns} so far", reward, self.turns == 3, False, {"seed": self.seed}


class Duel:
    """Two players name a letter each in turn, the first player twice; the player with more vowels wins."""

    num_players = 2
    length = 3

    def reset(self, seed=None, **row):
        self.said, self.seed = [], seed

    def observe(self):
        return len(self.said) % 2, f"Game {self.seed}, move {len(self.said)}."

    def step(self, text):
        self.said.append(text)
        return len(self.said) == self.length

    def rewards(self):
        count = [sum(c in "aeiou" for text in self.said[player::2] for c in text) for player in (0, 1)]
        return {0: float(count[0] > count[1]), 1: float(count[1] > count[0])}


class BrokenDuel(Duel):
    def step(self, text):
        if len(self.said) == 1 and self.seed % 2:
            raise RuntimeError("the game is gone")
        return super().step(text)


class Retry:
    def reset(self, **row):
        return "Again."

    def step(self, text):
        raise RuntimeError("the game is gone")


GAMES = {"letters": Letters, "retry": Retry}


def answer(call):
    name = call.function.name
    if name != "echo":
        return f"Unknown function '{name}'. Available tools: [echo, break_things]"
    try:
        return echo_tools.echo(**json.loads(call.function.arguments))
    except ValueError as error:
        return f"Invalid JSON in arguments for '{name}': {error}"


def run(task, base_url, api_key):
    """An agent that knows nothing of the run."""
    import openai

    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [dict(message) for message in task["raw_prompt"]]
    try:
        while True:
            reply = client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return
            for call in reply.tool_calls[:2]:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer(call)})
    except openai.BadRequestError as error:
        if "is full" not in str(error):
            raise
