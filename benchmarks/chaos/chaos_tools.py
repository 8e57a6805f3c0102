"""A tool with a side effect, for agents under attack: it appends a line to the run folder's calls.txt after each call.
Every turn of the model is taken for a call, since a tiny random model writes none."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from verl.agents.parsers import ToolParser
from verl.tools.function_tool import function_tool
from verl.tools.schemas import FunctionCall

CALLS = "calls.txt"
MARK = "VERL_CHAOS_RUN"  # in the environment of every process of a run: its folder
_SECONDS = 0.02  # of a call: long enough to be killed in


@function_tool
def note(text: str) -> str:
    """Write a text down.

    Args:
        text: the text
    """
    time.sleep(_SECONDS)
    with (Path(os.environ.get(MARK, os.devnull)) / CALLS).open("a") as file:
        file.write(f"{text}\n")
    return f"noted {text}"


@ToolParser.register("chaos")
class EveryTurn(ToolParser):
    """Every turn calls `note` with a digest of its text."""

    def parse(self, text: str, tools: Any) -> tuple[str, list[FunctionCall]]:
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]
        return text, [FunctionCall("note", json.dumps({"text": digest}))]
