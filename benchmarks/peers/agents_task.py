"""The environment that both sides of agents_peers.py play, in TRL's form: every turn of the model calls its one tool.

Imports only the standard library, since TRL's environment reads it too; agents_turns.py has the further parts of our side.
"""

from __future__ import annotations

import os
import time

TURNS, TURN_TOKENS, LATENCY_S = "AGENTS_TURNS", "AGENTS_TURN_TOKENS", "AGENTS_LATENCY_S"  # in the environment of both
TOOL, ARGUMENTS = "look_up", {"query": "a word"}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ANSWER = "The word stands for a thing that is small and old, and some say that it is the oldest of all."


def setting(name: str) -> float:
    """A number that agents_peers.py has set."""
    return float(os.environ[name])


class Library:
    """An episode. The public method is the tool."""

    def reset(self, **row: object) -> None:
        """Begin; the prompt is the row's prompt."""

    def look_up(self, query: str) -> str:
        """Look a word up.

        Args:
            query: the word

        Returns:
            The meaning of the word.
        """
        time.sleep(setting(LATENCY_S))
        return _ANSWER
