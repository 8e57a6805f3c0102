"""Environments as agents: a class with one object for each episode, named by `rollout.agent.environment`.

Two kinds are understood, and games of several players (verl/agents/matches.py).

Gymnasium's: the model's text is the action. `reset(seed=None, **row)` returns (observation, info), and `step(text)` returns
(observation, reward, terminated, truncated, info).

TRL's: `reset(**row)`; the other public methods are tools, and the episode ends when the model calls none. `get_reward()` may
return its reward.

The environment is in the process of the run, each call on a thread with multi_turn.tool_timeout_s. A step that is taken again
after a kill makes its environments again and takes the same actions, so an environment must be a function of its seed.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl.agents.continuity import Content, joined_contents
from verl.agents.episode import CURRENT, EpisodeError, EpisodeTask
from verl.agents.images import message_content, text_and_images
from verl.agents.journal import Journal
from verl.agents.loops import AgentLoopOutput
from verl.agents.matches import Match, num_players
from verl.agents.openenv import OpenEnv
from verl.agents.tool_agent import AgentData, ToolAgentLoop
from verl.agents.tool_calls import ToolCalls, ToolResult, bounded, truncated
from verl.config import full_key
from verl.data.schema import Messages
from verl.data_proto.media import Media, images_in
from verl.errors import ConfigError, DataError
from verl.families import ENVIRONMENT_PACKAGES
from verl.registry import load_object
from verl.specs import AgentSpec
from verl.tools.function_tool import FunctionTool
from verl.user_objects import require_call

_ROLLOUT = full_key("rollout")
OPENENV = "openenv:"  # and the address of a server
_OWN = ("reset", "step", "close", "render", "get_reward")


def load_environments(path: str | None) -> dict[str, Callable[..., Any]]:
    """Name -> class: of `file.py:Class` and of `openenv:URL` under the name "", or of a dict in that file; none for an
    environment of a package: it is a runner. Raises ConfigError."""
    if path is None or path.partition(":")[0] in ENVIRONMENT_PACKAGES:
        return {}
    server = path.removeprefix(OPENENV)
    try:
        loaded = load_object(path) if server == path else OpenEnv(server)
    except ConfigError as error:
        raise ConfigError(f"{_ROLLOUT}.agent.environment: {error}") from error
    classes = dict(loaded) if isinstance(loaded, Mapping) else {"": loaded}
    for name, cls in classes.items():
        label = f"{path}, entry {name!r}," if name else path
        if not callable(cls) or (isinstance(cls, type) and not callable(getattr(cls, "reset", None))):
            raise ConfigError(
                f"{label} is no environment: give a class with a method reset, or a function that makes one."
            )
        require_call(f"The environment {label}", cls)
    return classes


def players_of_games(spec: AgentSpec, environments: Mapping[str, object]) -> int:
    """The most players of one game. Raises ConfigError if games of several players could not begin."""
    rollout, count = spec.rollout, max(map(num_players, environments.values()), default=1)
    if count == 1:
        return count
    samples = {"n": rollout.n} | ({"val_kwargs.n": rollout.val_kwargs.n} if spec.data.val_files else {})
    for key, num_samples in samples.items():
        if num_samples % count:
            raise ConfigError(
                f"{_ROLLOUT}.agent.environment has games of {count} players, each a sample of one prompt, and "
                f"{_ROLLOUT}.{key}={num_samples}. Set it to a multiple of {count}."
            )
    if rollout.partial_rollout and rollout.prefetch_num:
        raise ConfigError(
            f"{_ROLLOUT}.partial_rollout=True pauses single episodes, and games of {count} players need all of theirs. Set "
            "it to False."
        )
    if (rollout.agent.max_episodes or count) < count:
        raise ConfigError(
            f"{_ROLLOUT}.agent.max_episodes={rollout.agent.max_episodes} is less than the {count} players of a game."
        )
    return count


class EnvironmentAgentLoop(ToolAgentLoop):
    """The loop `environment_agent`, see above. The reward of an episode is the sum of its turns' rewards, each discounted by
    turn_discount, or the result of get_reward. Without either, the reward function scores the episode."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        make = self._class(kwargs)
        row = {k: v for k, v in kwargs.items() if k not in ("raw_prompt", "agent_name")}
        if num_players(make) > 1:
            return await self._play_match(make, row, sampling_params, kwargs["raw_prompt"])
        environment = make()
        try:
            if callable(getattr(environment, "step", None)):
                return await self._play(environment, row, sampling_params, kwargs["raw_prompt"])
            return await self._with_tools(environment, row, sampling_params, kwargs)
        finally:
            if callable(getattr(environment, "close", None)):
                await self._bounded(environment.close)

    def _class(self, row: Mapping[str, Any]) -> Callable[..., Any]:
        extra = row.get("extra_info") or {}
        name, environments = row.get("environment") or extra.get("environment") or "", self.context.environments
        if len(environments) == 1 and not name:
            name = next(iter(environments))
        if name not in environments:
            names = ", ".join(map(repr, environments)) or "none"
            raise EpisodeError(f"its row names the environment {name!r}; rollout.agent.environment has {names}")
        return environments[name]

    async def _with_tools(
        self, environment: Any, row: dict[str, object], sampling_params: dict[str, object], kwargs: dict[str, Any]
    ) -> AgentLoopOutput:
        """TRL's kind."""
        first = await self._bounded(environment.reset, **row)
        # results change with the state of the environment, so that none can stand for a call: no journal
        classes = [cls for cls in reversed(type(environment).__mro__) if cls is not object]
        names = dict.fromkeys(name for cls in classes for name, value in vars(cls).items() if callable(value))
        tools = [FunctionTool(getattr(environment, n)) for n in names if not n.startswith("_") and n not in _OWN]
        settings, images = self.tool_calls.settings, self.tool_calls.images
        self.tool_calls = ToolCalls(tools, settings, Journal(None), images=images)
        data = await self._begun(kwargs["raw_prompt"], first, self.tool_calls.schemas())
        await self._turns(data, sampling_params, None, None, {})
        output = self._output(data)
        if callable(getattr(environment, "get_reward", None)):
            output.reward_score = float(await self._bounded(environment.get_reward))
        return output

    async def _play(
        self, environment: Any, row: dict[str, object], sampling_params: dict[str, object], prompt: Messages
    ) -> AgentLoopOutput:
        """Gymnasium's kind."""
        episode, discount = CURRENT.get(), self.rollout_config.agent.turn_discount
        first = await self._bounded(environment.reset, **_seeded(environment, row, episode.task))
        data = await self._begun(prompt, first[0] if isinstance(first, tuple) else first)
        messages = data.messages
        while await self._turn(data, sampling_params, None) and not self._is_cut(data):
            started_at = time.perf_counter()
            outcome = await self._bounded(environment.step, str(messages[-1]["content"]))
            observation, reward, terminated, is_truncated, info = _five(outcome)
            seconds = time.perf_counter() - started_at
            data.metrics.tool_calls += seconds
            answer, media = await self._answer(observation)
            data.turn_rewards[-1] = reward * discount ** len(data.turn_scores)
            data.turn_scores.append(reward)
            data.is_finished = terminated
            data.extra_fields.update(info if isinstance(info, dict) else {})
            episode.tool_results.append(ToolResult("step", answer, media, reward, seconds=seconds))
            if terminated or is_truncated or not self._may_continue(data):
                break
            if not self._append(data, [{"role": "user", "content": message_content(answer, media)}], media):
                break
        output = self._output(data)
        output.reward_score = sum(data.turn_rewards)
        return output

    async def _play_match(
        self, make: Callable[..., Any], row: dict[str, object], sampling_params: dict[str, object], prompt: Messages
    ) -> AgentLoopOutput:
        """One player of a game of several players, see verl/agents/matches.py."""
        task, count = CURRENT.get().task, num_players(make)

        def begin() -> Match:
            game = make()
            return Match(game, self._bounded, partial(game.reset, **_seeded(game, row, task)))

        match, player = self.context.matches.join(task, count, begin)
        try:
            data = await self._moves(match, player, sampling_params, prompt)
            reward = await match.reward(player)
        finally:
            if self.context.matches.leave(task, count) and callable(getattr(match.game, "close", None)):
                await self._bounded(match.game.close)
        data.is_finished = not match.is_cut
        data.extra_fields["player"] = player  # by whom advantages are compared
        data.turn_rewards[-1] = reward * self.rollout_config.agent.turn_discount ** (data.assistant_turns - 1)
        data.turn_scores = [0.0] * (data.assistant_turns - 1) + [reward]
        output = self._output(data)
        output.reward_score = sum(data.turn_rewards)
        return output

    async def _moves(
        self, match: Match, player: int, sampling_params: dict[str, object], prompt: list[dict[str, object]]
    ) -> AgentData:
        """The turns of a player. Raises EpisodeError when the game ends before the first."""
        data: AgentData | None = None
        while (observation := await match.turn(player)) is not None:
            if data is None:
                data = await self._begun(prompt, observation)
            else:
                text, media = await self._answer(observation)
                answer: dict[str, object] = {"role": "user", "content": message_content(text, media)}
                if not self._may_continue(data) or not self._append(data, [answer], media):
                    match.cut()
                    break
            if not await self._turn(data, sampling_params, None) or self._is_cut(data):
                match.cut()
                break
            started_at = time.perf_counter()
            await match.act(str(data.messages[-1]["content"]))
            data.metrics.tool_calls += time.perf_counter() - started_at
        if data is None or not data.assistant_turns:
            raise EpisodeError("its game ended before its first turn")
        return data

    async def _begun(
        self, prompt: list[dict[str, object]], observation: object, tools: list[dict[str, object]] | None = None
    ) -> AgentData:
        """The conversation that begins with the prompt, and the first observation behind its last message."""
        episode = CURRENT.get()
        text, media = await self._observed(observation)
        messages = _with_observation(prompt, message_content(text, media))
        data = AgentData(messages, episode.task.name, media=[*images_in(episode.task.media), *media])
        episode.messages = messages
        data.prompt_ids = await self.apply_chat_template(messages, tools, data.media)
        return data

    async def _answer(self, observation: object) -> tuple[str, list[Media]]:
        limits = self.tool_calls.settings
        text, media = await self._observed(observation)
        return truncated(text, limits.max_length, limits.side, "An environment"), media

    async def _observed(self, observation: object) -> tuple[str, list[Media]]:
        try:
            text, sources = text_and_images("" if observation is None else observation)
            return text, await self.tool_calls.images.read(sources, "an observation of its environment")
        except (DataError, ValueError) as error:
            raise EpisodeError(str(error).removesuffix(".")) from error

    async def _bounded(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        return await bounded(function, self.rollout_config.multi_turn.tool_timeout_s, *args, **kwargs)


def _seeded(environment: Any, row: dict[str, Any], task: EpisodeTask) -> dict[str, object]:
    """The arguments that `reset` takes: all of them if it has **kwargs. The samples of a prompt play one game. Its seed is the
    row's, else the prompt's number."""
    arguments = {**row, "seed": (row.get("extra_info") or {}).get("seed", task.ordinal)}
    parameters = inspect.signature(environment.reset).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _with_observation(prompt: Messages, observation: Content) -> Messages:
    """The prompt with what `reset` returned behind its last message."""
    messages = [dict(message) for message in prompt]
    if not observation:
        return messages
    if messages and messages[-1]["role"] == "user":
        content = messages[-1].get("content") or ""
        messages[-1]["content"] = joined_contents(content, "\n\n", observation) if content else observation
    else:
        messages.append({"role": "user", "content": observation})
    return messages


def _five(outcome: object) -> tuple[object, float, bool, bool, object]:
    if not isinstance(outcome, tuple) or len(outcome) not in (3, 4, 5):
        raise EpisodeError("its environment's step must return (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, *more = outcome
    is_truncated, info = (more[0], more[1]) if len(more) == 2 else (False, more[0] if more else {})
    return observation, float(reward), bool(terminated), bool(is_truncated), info
