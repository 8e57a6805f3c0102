"""A program behind the endpoint, for agents under attack: three turns and a reward. It imports only the standard library."""

import json
import os
import time
import urllib.request
from typing import Any


def converse(task: dict[str, Any], base_url: str, key: str) -> None:
    """Three turns by the endpoint, and a reward."""
    messages = list(task["raw_prompt"])
    said = ""
    for _ in range(3):
        reply = _post(f"{base_url}/chat/completions", key, {"messages": messages, "max_tokens": 8})
        said = str(reply["choices"][0]["message"]["content"] or "")
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        time.sleep(0.02)
    _post(f"{base_url}/reward", key, {"reward": sum(map(str.isalpha, said)) / 8 + len(said) / 50})


def _post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        content: dict[str, Any] = json.loads(answer.read())
    return content


if __name__ == "__main__":
    converse(json.loads(os.environ["VERL_TASK"]), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
