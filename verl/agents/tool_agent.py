"""The loop `tool_agent`: the model calls tools, or answers a user, until it does neither.

PENDING ─► GENERATING ─► calls? ─► PROCESSING_TOOLS ─► GENERATING ─► ... ─► TERMINATED
                      └► a user? ─► INTERACTING ─────► GENERATING
"""

import asyncio
import enum
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agents.episode import CURRENT, EpisodeError
from verl.agents.images import message_content
from verl.agents.interactions import BaseInteraction
from verl.agents.loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.agents.parsers import ToolParser
from verl.agents.tool_calls import not_run, on_thread
from verl.data.prompts import answer_prefix
from verl.data.schema import Messages
from verl.data_proto.media import Media, images_in
from verl.tools.schemas import FunctionCall


class AgentState(enum.Enum):
    """The phase of an episode."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


@dataclass
class AgentData:
    """An episode, for tools: `execute` gets it as agent_data."""

    messages: Messages
    request_id: str
    tools_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)  # of each turn of the model, by tools, user or game
    is_finished: bool = False  # the agent has ended, and no limit has cut it
    extra_fields: dict[str, Any] = field(default_factory=dict)
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    media: list[Media] = field(default_factory=list)  # all images of the messages, in order


class ToolAgentLoop(AgentLoopBase):
    """See above."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        episode = CURRENT.get()
        extra = kwargs.get("extra_info") or {}
        selection = extra.get("tool_selection")
        names = None if selection is None else list(selection)
        data = AgentData(
            [dict(m) for m in kwargs["raw_prompt"]],
            episode.task.name,
            dict(extra.get("tools_kwargs") or {}),
            media=images_in(episode.task.media),
        )
        episode.messages = data.messages
        data.prompt_ids = list(episode.task.prompt_ids)
        if names is not None:
            data.prompt_ids = await self.apply_chat_template(data.messages, self.tool_calls.schemas(names))
        user, user_kwargs = self._user(extra)
        if user is not None:
            await on_thread(user.start_interaction, data.request_id, **user_kwargs)
        try:
            await self._turns(data, sampling_params, names, user, user_kwargs)
        finally:
            if user is not None:
                await on_thread(user.finalize_interaction, data.request_id)
        return self._output(data)

    async def _turns(
        self,
        data: AgentData,
        sampling_params: dict[str, object],
        names: list[str] | None,
        user: BaseInteraction | None,
        user_kwargs: dict[str, object],
    ) -> None:
        while await self._turn(data, sampling_params, names):
            if not data.tool_calls and user is None:
                data.is_finished = not self._is_cut(data)
                return
            if not self._may_continue(data):
                return
            if data.tool_calls:
                answers, media = await self._call_tools(data, names)
            else:
                assert user is not None
                media = []
                answers, data.is_finished = await self._ask_user(data, user, user_kwargs)
            if not self._append(data, answers, media) or data.is_finished:
                return

    async def _turn(self, data: AgentData, sampling_params: dict[str, object], names: list[str] | None) -> bool:
        """Sample a turn and read it; False when the response is full."""
        context = [*data.prompt_ids, *data.response_ids]
        output = await self.server_manager.generate(
            data.request_id, prompt_ids=context, sampling_params=sampling_params, image_data=data.media
        )
        if not output.token_ids:
            return False
        data.response_ids += output.token_ids
        data.response_mask += [1] * len(output.token_ids)
        data.assistant_turns += 1
        data.turn_rewards.append(0.0)
        first = data.assistant_turns == 1
        prefix = answer_prefix(data.messages, self.continuity.template_kwargs) if first else None
        schemas = self.tool_calls.schemas(names)
        text, data.tool_calls = await self._parser.of_turn(context, output.token_ids, schemas, prefix or "")
        if prefix is not None:
            data.messages.pop()
            text = prefix + text
        calls = {"tool_calls": [call.in_message() for call in data.tool_calls]} if data.tool_calls else {}
        data.messages.append({"role": "assistant", "content": text, **calls})
        return True

    def _may_continue(self, data: AgentData) -> bool:
        settings = self.rollout_config.multi_turn
        return not (
            len(data.response_ids) >= self.response_length
            or _reached(data.assistant_turns, settings.max_assistant_turns)
            or _reached(data.user_turns, settings.max_user_turns)
        )

    def _is_cut(self, data: AgentData) -> bool:
        """Whether the response was full before the model had ended its turn, so that it is no action."""
        return len(data.response_ids) >= self.response_length and data.response_ids[-1] not in self.stop_token_ids

    def _append(self, data: AgentData, answers: list[dict[str, object]], media: Sequence[Media] = ()) -> bool:
        """Append messages with their images; False when no turn could follow them: then they are left out."""
        suffix = self.suffix(answers, data.response_ids[-1], media)
        data.user_turns += 1
        data.messages += answers
        if len(data.response_ids) + len(suffix) >= self.response_length:
            return False
        data.response_ids += suffix
        data.response_mask += [0] * len(suffix)
        data.media += media
        return True

    def _output(self, data: AgentData) -> AgentLoopOutput:
        data.metrics.generate_sequences = CURRENT.get().generate_s
        fields: dict[str, object] = {"turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards}
        fields["finished"] = data.is_finished
        if any(data.turn_rewards):
            fields["turn_rewards"] = data.turn_rewards
        return AgentLoopOutput(
            data.prompt_ids,
            data.response_ids,
            data.response_mask,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=data.metrics,
            extra_fields={**fields, **data.extra_fields},
        )

    @property
    def _parser(self) -> ToolParser:
        return ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)

    async def _call_tools(self, data: AgentData, names: list[str] | None) -> tuple[list[dict[str, Any]], list[Media]]:
        """The messages of the tools, and their images. The first max_parallel_calls calls run at the same time, and each call
        of the turn has an answer."""
        limit, started_at = self.rollout_config.multi_turn.max_parallel_calls, time.perf_counter()
        calls, episode = data.tool_calls, CURRENT.get()
        num_before = itertools.accumulate((call.error is None for call in calls), initial=0)
        runs = [call.error is not None or before < limit for call, before in zip(calls, num_before, strict=False)]
        results = await asyncio.gather(
            *(
                self.tool_calls.call(
                    episode, call, names=names, kwargs=data.tools_kwargs.get(call.name), agent_data=data
                )
                for call in itertools.compress(calls, runs)
            )
        )
        episode.faults["not_run"] += len(calls) - len(results)
        episode.faults["unreadable"] += sum(call.fault() is not None for call in itertools.compress(calls, runs))
        data.metrics.tool_calls += time.perf_counter() - started_at
        data.tool_rewards += [result.reward for result in results]
        data.turn_rewards[-1] += sum(result.reward for result in results)
        episode.tool_results += results
        done = iter(results)
        results = [next(done) if run else not_run(call, limit) for call, run in zip(calls, runs, strict=True)]
        answers = [
            {
                "role": "tool",
                "content": message_content(result.text, result.media),
                **({"tool_call_id": call.id, "name": call.name} if call.id else {}),
            }
            for call, result in zip(calls, results, strict=True)
        ]
        return answers, [images for result in results for images in result.media]

    def _user(self, extra: dict[str, Any]) -> tuple[BaseInteraction | None, dict[str, object]]:
        """The interaction that the row names, and its arguments."""
        interactions = self.context.interactions
        kwargs = dict(extra.get("interaction_kwargs") or {})
        if not interactions or not kwargs:
            return None, {}
        name = kwargs.get("name")
        if name is None and len(interactions) == 1:
            name = next(iter(interactions))
        if name not in interactions:
            names = ", ".join(interactions)
            raise EpisodeError(
                f"extra_info.interaction_kwargs.name is {name!r}; interaction_config_path declares {names}"
            )
        return interactions[name], kwargs

    async def _ask_user(
        self, data: AgentData, user: BaseInteraction, kwargs: dict[str, object]
    ) -> tuple[list[dict[str, object]], bool]:
        started_at = time.perf_counter()
        ends, text, score, more = await on_thread(user.generate_response, data.request_id, data.messages, **kwargs)
        data.metrics.tool_calls += time.perf_counter() - started_at
        data.turn_scores.append(float(score))
        data.turn_rewards[-1] += float(score)
        data.extra_fields.update(more or {})
        return [{"role": "user", "content": str(text)}], bool(ends)


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit
