"""Agent loops: the contract of the existing verl, the registry, and the loop of one turn.

@register_agent_loop("my_loop")
class MyLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        output = await self.server_manager.generate("id", prompt_ids=prompt_ids, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=output.token_ids,
                               response_mask=[1] * len(output.token_ids), num_turns=2)
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from verl.agents.episode import CURRENT
from verl.agents.images import EpisodeImages
from verl.agents.parsers import Schemas
from verl.data.schema import Messages
from verl.data_proto.media import Media, VideoSource, images_in, texts_of
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, nearest
from verl.families import AGENT_LOOPS
from verl.tools.schemas import Record
from verl.tools.tool_registry import load_class, read_list

if TYPE_CHECKING:
    from verl.agents.continuity import ChatContinuity
    from verl.agents.gateway.app import Gateway
    from verl.agents.interactions import BaseInteraction
    from verl.agents.matches import Matches
    from verl.agents.tool_calls import ToolCalls
    from verl.rewards.sandbox.limits import Limits
    from verl.specs import AgentSpec


Runner: TypeAlias = "Callable[..., Any] | list[str]"  # a function of the user's, or the words of a command


@dataclass(frozen=True)
class AgentContext:
    """The parts that all episodes of a rank share; `environments` and `interactions` by name. `gateway` and `runner` are set
    if agents talk to an endpoint, `limits` if such an agent is a command."""

    spec: AgentSpec
    continuity: ChatContinuity
    tool_calls: ToolCalls
    stop_token_ids: frozenset[int]
    matches: Matches
    environments: dict[str, Callable[..., object]]
    interactions: dict[str, BaseInteraction]
    gateway: Gateway | None
    runner: Runner | None
    limits: Limits | None
    limits_requests: bool = False  # whether the engine takes stop strings and schemas of a request


log = logging.getLogger(__name__)


@dataclass
class AgentLoopMetrics(Record):
    """Seconds that an episode spent on each activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput(Record):
    """The result of a loop. `response_mask` is 1 on tokens that the policy sampled, 0 on further ones. Log-probs are from
    sampling; `response_logprobs` is not read. `reward_score` None: the reward function scores it.
    `extra_fields` reach the reward function; `turn_rewards` there has a number for each turn, and `finished` says whether the
    episode has ended without a limit."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: object = None
    multi_modal_data: dict[str, object] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics | dict[str, Any] = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, object] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, object] | None = None
    mm_processor_output: object = None

    def as_dict(self) -> dict[str, object]:
        """The fields; `teacher_ids` and `teacher_logprobs` of `extra_fields` are fields too."""
        extra = dict(self.extra_fields)
        teacher: dict[str, object] = {
            name: extra.pop(name) for name in ("teacher_ids", "teacher_logprobs") if name in extra
        }
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, **teacher, "extra_fields": extra}


def checked_output(output: object) -> AgentLoopOutput:
    """The result of a loop, which may be a dict, or an object of another class with the same fields."""
    if not isinstance(output, AgentLoopOutput | dict):
        names = AgentLoopOutput.__dataclass_fields__
        output = {name: getattr(output, name) for name in names if hasattr(output, name)}
    return AgentLoopOutput.model_validate(output)


@dataclass
class TokenOutput(Record):
    """Sampled tokens. `stop_reason`: "stop", or "length" if the episode's response was full."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: object = None
    stop_reason: str | None = None
    num_preempted: int = -1
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class DictConfigWrap:
    """A config as an argument of loops. The run's also carries their context, since loops written for other releases pass
    only the arguments that they know."""

    config: object
    context: AgentContext | None = None


class AsyncLLMServerManager:
    """The policy, for loops. Tokens depend only on the episode and its tokens so far; `request_id` is ignored."""

    def __init__(self, images: EpisodeImages):
        self.images = images

    async def generate(
        self,
        request_id: object = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any] | None = None,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[object] | None = None,
        **_: object,
    ) -> TokenOutput:
        """The tokens after `prompt_ids`, sampled as the run samples; of `sampling_params` only max_tokens or max_new_tokens
        counts. `image_data` are all images of the prompt in order, first the row's, and `video_data` its videos. These come
        after the images of later turns. Empty when the response of the episode is full."""
        params = dict(sampling_params or {})
        max_tokens = params.get("max_tokens", params.get("max_new_tokens"))
        done = await CURRENT.get().generate(
            prompt_ids, max_tokens, media=await read_images(self.images, image_data, video_data)
        )
        if done is None:
            return TokenOutput([], [], stop_reason="length")
        return TokenOutput(done.token_ids, done.log_probs, stop_reason=done.finish_reason)


async def read_images(
    images: EpisodeImages, sources: Sequence[object] | None, videos: Sequence[object] | None = None
) -> list[Media]:
    """All images of a conversation of this episode: the row's, and behind them the further ones of `sources` and `videos`."""
    row = images_in(CURRENT.get().task.media)
    if sources is not None and list(sources[: len(row)]) == row:
        return await images.read([*sources, *map(VideoSource, videos or ())], "an episode")
    row_kinds = [kind for media in row for kind in media.kinds]
    num_images, num_videos = row_kinds.count("image"), row_kinds.count("video")
    later = [*(sources or ())[num_images:], *map(VideoSource, (videos or ())[num_videos:])]
    return [*row, *await images.read(later, "an episode")]


class AgentLoopBase(ABC):
    """An agent: one object for each episode. `self.config` is the config of the run, `self.server_manager` samples."""

    _class_initialized = False  # a loop of an earlier release sets it in `init_class`

    @classmethod  # noqa: B027 - few loops prepare their class
    def init_class(cls, **kwargs: object) -> None: ...

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: AsyncLLMServerManager,
        tokenizer: Tokenizer,
        processor: Any = None,
        dataset_cls: object = None,
        data_config: DictConfigWrap | None = None,
        hf_model_type: str | None = None,
        **kwargs: object,
    ):
        assert trainer_config.context is not None, "loops are made by a run"
        self.config, self.context = trainer_config.config, trainer_config.context
        self.init_class(config=self.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.tool_calls, self.stop_token_ids = self.context.tool_calls, self.context.stop_token_ids
        self.rollout_config = self.context.spec.rollout
        self.data_config = self.context.spec.data if data_config is None else data_config.config
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls, self.hf_model_type = dataset_cls, hf_model_type
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = CURRENT.get().task.limit
        self.loop = asyncio.get_running_loop()
        self.continuity = self.context.continuity.of_row(CURRENT.get().task.row.get("template_kwargs") or {})

    async def apply_chat_template(
        self,
        messages: Messages,
        tools: Schemas | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[object] | None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Token ids of messages up to the next turn of the model, with `images` and `videos` (None: the row's) for their parts.
        With `remove_system_prompt`, the token ids that follow a sampled turn, see ChatContinuity.suffix."""
        if remove_system_prompt:
            branches = CURRENT.get().branches
            last = branches[-1].tokens[-1] if branches and branches[-1].tokens else None
            media = await self.tool_calls.images.read([*(images or ()), *map(VideoSource, videos or ())], "an episode")
            return self.suffix(messages, last, media)
        media = await read_images(self.tool_calls.images, images, videos)
        return self.continuity.prompt(messages, tools, texts_of(media))

    def suffix(self, messages: Messages, last_token: int | None, media: Sequence[Media] = ()) -> list[int]:
        """Token ids of messages with their images behind a sampled turn; control tokens in their texts are broken."""
        return self.continuity.suffix(messages, last_token, self.stop_token_ids, texts_of(media))

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: object) -> AgentLoopOutput:
        """Take the turns of an episode. kwargs has the row's fields, and raw_prompt, its messages."""
        raise NotImplementedError


def register_agent_loop(agent_name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Decorator: a loop under a name that rows (agent_name) and agent.default_agent_loop can give."""

    def add(loop: type[AgentLoopBase]) -> type[AgentLoopBase]:
        AGENT_LOOPS.set(agent_name, loop)
        return loop

    return add


def load_loops(config_path: str | None) -> dict[str, tuple[type[AgentLoopBase], dict[str, Any]]]:
    """Name -> (class, further arguments) of this package's loops, of registered loops, and of the loops in the YAML file
    `config_path`. Raises ConfigError for a file that cannot be used."""
    loops = {}
    for number, row in enumerate(read_list(config_path, "") if config_path else ()):
        place = f"{config_path}, agent loop {number} (counted from 0)"
        name = row.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{place} has no name.")
        cls = load_class(row.get("_target_"), place)
        if not callable(getattr(cls, "run", None)):
            raise ConfigError(f"{place}: {row['_target_']} has no method run; subclass AgentLoopBase.")
        loops[name] = (cls, {k: v for k, v in row.items() if k not in ("name", "_target_")})
    return {**{name: (AGENT_LOOPS.get(name), {}) for name in AGENT_LOOPS}, **loops}


def loop_named(
    loops: dict[str, tuple[type[AgentLoopBase], dict[str, Any]]], name: str, key: str
) -> tuple[type[AgentLoopBase], dict[str, Any]]:
    """The loop of a name. Raises ConfigError for an unknown one."""
    if name not in loops:
        raise ConfigError(
            f"{key}={name} is no agent loop{nearest(name, loops) or '; there are ' + ', '.join(loops) + '.'}"
        )
    return loops[name]


class SingleTurnAgentLoop(AgentLoopBase):
    """One turn of the model, as without agents."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: object) -> AgentLoopOutput:
        prompt_ids = list(CURRENT.get().task.prompt_ids)
        output = await self.server_manager.generate(prompt_ids=prompt_ids, sampling_params=sampling_params)
        ids = output.token_ids
        return AgentLoopOutput(prompt_ids, ids, [1] * len(ids), output.log_probs, num_turns=2)
