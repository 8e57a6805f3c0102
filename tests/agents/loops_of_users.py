"""Agents as users of the existing verl write them, by its import paths."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.interactions.base import BaseInteraction


class EchoTwice(AgentLoopBase):
    def __init__(self, *args, suffix="", **kwargs):
        super().__init__(*args, **kwargs)
        self.suffix_text = suffix
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params, **kwargs):
        request_id = uuid4().hex
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params={**sampling_params, "max_tokens": 30}
        )
        response, mask = list(output.token_ids), [1] * len(output.token_ids)
        added = await self.apply_chat_template(
            [{"role": "user", "content": "again" + self.suffix_text}], remove_system_prompt=True
        )
        response, mask = response + added, mask + [0] * len(added)
        output = await self.server_manager.generate(
            request_id=request_id, prompt_ids=prompt_ids + response, sampling_params=sampling_params
        )
        response, mask = response + output.token_ids, mask + [1] * len(output.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response[: self.response_length],
            response_mask=mask[: self.response_length],
            reward_score=0.5 ** (1 + int(output.token_ids[0]) % 1 + self._sample()),
            num_turns=4,
            metrics={},
        )

    @staticmethod
    def _sample():
        from verl.agents.episode import CURRENT

        return CURRENT.get().task.sample


class TwoConversations(AgentLoopBase):
    """Three conversations, of which two train."""

    async def run(self, sampling_params, **kwargs):
        outputs = []
        for text, limit in (("one", 8), ("two", 12), ("three", 4)):
            ids = await self.apply_chat_template([{"role": "user", "content": text}])
            done = await self.server_manager.generate(
                request_id=text, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": limit}
            )
            tokens = list(done.token_ids)
            outputs.append(AgentLoopOutput(ids, tokens, [1] * len(tokens), reward_score=0.1 * len(tokens), num_turns=2))
        return outputs[:2]


class Judge(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.turns = {}

    async def start_interaction(self, instance_id=None, want="", **kwargs):
        self.turns[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        assert messages[-1]["role"] == "assistant"
        self.turns[instance_id] += 1
        done = self.turns[instance_id] >= self.config["patience"]
        return done, f"not yet {kwargs['want']}", 0.25, {"asked": self.turns[instance_id]}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        del self.turns[instance_id]
