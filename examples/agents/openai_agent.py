"""An agent that knows only OpenAI's client: python openai_agent.py "What is (3 + 4) * 5?"

It runs against any service, and trains without a change, as a command of the run:

    verl train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=MODEL data.train_files=ROWS data.val_files=[] \
        "actor_rollout_ref.rollout.agent.runner=command:python examples/agents/openai_agent.py {prompt}" \
        reward.custom_reward_function.path=examples/agents/tool.py

verl sets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and puts the row's last message in place of {prompt}.
"""

import json
import os
import sys

from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def main(question):
    """Answer a question in at most four turns."""
    client, model = OpenAI(), os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        reply = client.chat.completions.create(model=model, messages=messages, tools=[MULTIPLY], max_tokens=16)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
                result = str(arguments["a"] * arguments["b"])
            except (ValueError, KeyError, TypeError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


if __name__ == "__main__":
    print(main(sys.argv[1]))
