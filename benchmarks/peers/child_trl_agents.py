"""The measured process of TRL with an environment: a GRPOTrainer with `environment_factory`. Every turn calls its tool."""

from __future__ import annotations

from typing import Any

import child_trl
from agents_task import ARGUMENTS, TEMPLATE, TOOL, TURN_TOKENS, TURNS, Library, setting
from child import Channel, run_held
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOTrainer
from workload import Workload, reward_of


def reward(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    return [reward_of("".join(str(m["content"]) for m in messages)) for messages in completions]


class TimedAgents(child_trl.TimedTrainer):
    """A GRPOTrainer whose samples are episodes."""

    def _make(self, work: Workload, micro_batch: int, settings: dict[str, Any], folder: str) -> GRPOTrainer:
        tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
        tokenizer.chat_template = TEMPLATE
        tokenizer.response_schema = {"type": "object"}  # TRL knows none for this template; its parser is replaced below

        def parse_response(ids: list[int], **_: Any) -> dict[str, Any]:
            call = {"type": "function", "function": {"name": TOOL, "arguments": dict(ARGUMENTS)}}
            return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [call]}

        tokenizer.parse_response = parse_response
        num_turns, turn_tokens = int(setting(TURNS)), int(setting(TURN_TOKENS))
        config = child_trl.config_of(work, micro_batch, settings, folder)
        config.max_tool_calling_iterations = num_turns - 1
        config.generation_kwargs = {"max_new_tokens": turn_tokens}
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in work.prompts]
        return GRPOTrainer(
            model=work.model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            environment_factory=Library,
        )

    def _note(self, generated: Any) -> None:
        self.prompts = [list(ids) for ids in generated[0]]
        self.lengths = [sum(mask) for mask in generated[2]]  # of sampled tokens


def train(channel: Channel, work: dict[str, Any], **settings: Any) -> None:
    timed = TimedAgents(channel, Workload.from_json(work), **settings)
    channel.reply(child_trl.facts(timed.trainer))
    timed.trainer.train()


if __name__ == "__main__":
    run_held(train)
