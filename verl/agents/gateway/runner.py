"""The loop `endpoint_agent`: an agent that knows only an endpoint, as a function or as a command.

    async def run(task: dict, base_url: str, api_key: str) -> float | dict | None

`task` is the row; `prompt` and `raw_prompt` are its messages. The reward is the returned number, or the entry "reward" or
"score" of a dict, else the posted reward. Without any, the reward function scores the longest conversation. A command gets
OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and VERL_TASK (the row as JSON) in its environment; {prompt} in it becomes the
row's last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shlex
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.agents.episode import CURRENT, AgentKilled, Branch, Episode, EpisodeError
from verl.agents.gateway import loopback
from verl.agents.gateway.formats import MODEL
from verl.agents.gateway.sessions import EndpointSession, prefixes
from verl.agents.images import content_text
from verl.agents.loops import AgentLoopBase, AgentLoopOutput, Runner
from verl.agents.parsers import ToolParser
from verl.agents.tool_calls import on_thread
from verl.config import RewardConfig, full_key
from verl.errors import ConfigError
from verl.families import ENVIRONMENT_PACKAGES
from verl.foreign_text import clean
from verl.registry import load_object
from verl.rewards.sandbox.launch import Sandbox, namespace_command, perhaps_from_outside
from verl.rewards.sandbox.limits import Limits
from verl.user_objects import require_call

if TYPE_CHECKING:
    from verl.agents.gateway.app import Gateway

log = logging.getLogger(__name__)

COMMAND, PROMPT = "command:", "{prompt}"
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "HF_HOME", "HF_HUB_OFFLINE")
OUTPUT_BYTES = 4000  # of a command's prints, in the error


def load_runner(runner: str | None) -> Runner | None:
    """The function, the arguments of a command, or the runner of an environment of a package. Raises ConfigError."""
    if runner is None:
        return None
    if runner.startswith(COMMAND):
        words = shlex.split(runner.removeprefix(COMMAND))
        if not words:
            raise ConfigError(f"{full_key('rollout.agent.runner')}=command: names no command.")
        return words
    kind, _, name = runner.partition(":")
    if kind in ENVIRONMENT_PACKAGES:
        return ENVIRONMENT_PACKAGES.get(kind)(name)  # type: ignore[no-any-return]
    loaded = load_object(runner)
    if not callable(loaded):
        raise ConfigError(f"{full_key('rollout.agent.runner')}={runner} is not a function.")
    require_call(f"{full_key('rollout.agent.runner')}={runner}", loaded, "task", "base_url", "api_key")
    return loaded  # type: ignore[no-any-return]


class EndpointAgentLoop(AgentLoopBase):
    """See above."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        episode, runner = CURRENT.get(), self.context.runner
        assert runner is not None
        parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)
        kwargs_of_row = {k: v for k, v in (kwargs.get("template_kwargs") or {}).items() if k != "tools"}
        continuity = self.context.continuity.of_row(kwargs_of_row)  # requests bring their tools
        first = prefixes([dict(message) for message in kwargs["raw_prompt"]], [])[-1]
        session = EndpointSession(
            secrets.token_urlsafe(16), episode, continuity, parser, self.stop_token_ids, first,
            self.tool_calls.images, self.context.limits_requests,
        )  # fmt: skip
        row = {name: value for name, value in kwargs.items() if name != "agent_name"}
        task = plain({**row, "prompt": row["raw_prompt"]})
        returned: object = None
        self.gateway.sessions[session.id] = session
        try:
            if isinstance(runner, list):
                said = content_text(kwargs["raw_prompt"][-1].get("content"))
                words = [word.replace(PROMPT, said) for word in runner]
                await self._command(words, task, session)
            else:
                returned = await on_thread(runner, task, self.gateway.base_url(session), self.gateway.token)
        finally:
            self.gateway.sessions.pop(session.id, None)
        return self._output(episode, session, returned)

    @property
    def gateway(self) -> Gateway:
        assert self.context.gateway is not None
        return self.context.gateway

    @property
    def limits(self) -> Limits:
        assert self.context.limits is not None
        return self.context.limits

    def _output(self, episode: Episode, session: EndpointSession, returned: object) -> AgentLoopOutput:
        reward, info = _reward(returned, session)
        unread = session.unread()
        branch = longest(episode, unread)
        episode.unread, episode.messages = unread, episode.conversations.get(branch.number, [])
        start, end = branch.num_prompt, unread.get(branch.number, len(branch.tokens))
        return AgentLoopOutput(
            branch.tokens[:start],
            branch.tokens[start:end],
            [int(sampled) for sampled in branch.sampled[start:end]],
            reward_score=reward,
            num_turns=session.num_turns[branch.number] - 2 * (branch.number in unread),
            metrics={},
            extra_fields={**info, "num_branches": len(episode.branches)},
        )

    async def _command(self, words: list[str], task: dict[str, object], session: EndpointSession) -> None:
        """Run the command in a sandbox, without agent.runner_network on a separate network if the kernel grants it."""
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env |= {"OPENAI_API_KEY": self.gateway.token, "OPENAI_MODEL": MODEL, "VERL_TASK": json.dumps(task)}
        if self.limits.network:
            await on_thread(self._run, words, {**env, "OPENAI_BASE_URL": self.gateway.base_url(session)})
            return
        env["OPENAI_BASE_URL"] = self.gateway.base_url(session, loopback.ADDRESS)
        run_end, sandbox_end = socket.socketpair()
        with run_end:
            running = asyncio.ensure_future(on_thread(self._run, words, env, sandbox_end))
            listening = await on_thread(loopback.received, run_end, self.rollout_config.agent.episode_timeout_s)
        async with contextlib.nullcontext() if listening is None else self.gateway.serving(listening):
            await running

    def _run(self, words: list[str], env: dict[str, str], way: socket.socket | None = None) -> None:
        limit_s = self.rollout_config.agent.episode_timeout_s
        with tempfile.TemporaryFile() as output:
            fd = output.fileno() if way is None else way.fileno()
            first = () if way is None else loopback.command(fd, self.gateway.port)
            try:
                sandbox = Sandbox(
                    words, self.limits, fd=fd, output=output.fileno(), env=env, needed=[str(Path.cwd())], first=first
                )
            finally:
                if way is not None:
                    way.close()  # who waits at its other end learns that nothing will come
            try:
                how = sandbox.how_it_ended(limit_s)
            finally:
                sandbox.end()
            output.seek(0, os.SEEK_END)
            output.seek(max(0, output.tell() - OUTPUT_BYTES))
            said = output.read().decode("utf-8", "replace")
        if how is None:
            raise EpisodeError(f"its command took longer than {limit_s:g} s")
        if perhaps_from_outside(how, said.rstrip().rpartition("\n")[2]):
            raise AgentKilled(f"its command {how}")
        if how != "ended its process with exit code 0":
            raise EpisodeError(f"its command {how}: {clean(said[-300:], 300)}")


def longest(episode: Episode, unread: Mapping[int, int]) -> Branch:
    """The branch that trains: the branch with the most sampled tokens, of equal ones the first. `unread` has the lengths of
    branches with a last answer that does not count. Raises EpisodeError without one."""
    counts = {branch: sum(branch.sampled[: unread.get(branch.number)]) for branch in episode.branches}
    if not any(counts.values()):
        raise EpisodeError("its agent asked the policy for nothing, or has read no answer")
    # by content if lengths are equal, since the order of the calls may depend on time
    return max(episode.branches, key=lambda b: (counts[b], [-token for token in b.tokens]))


def _reward(returned: object, session: EndpointSession) -> tuple[float | None, dict[str, object]]:
    info = dict(session.info)
    if isinstance(returned, Mapping):
        name = "reward" if "reward" in returned else "score"  # as reward functions call it
        info |= {k: v for k, v in returned.items() if k != name}
        returned = returned.get(name)
    if returned is None:
        return session.reward, info
    if isinstance(returned, bool | np.bool_):
        returned = float(returned)
    if not isinstance(returned, int | float | np.number):
        raise EpisodeError(f"its runner returned {clean(returned, 100)}, which is no number")
    return float(returned), info


def plain(value: object) -> Any:
    """A value as JSON can hold it."""
    return json.loads(json.dumps(value, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v)))


def command_limits(reward: RewardConfig, network: bool) -> Limits:
    """The limits of a command: the limits of reward functions except memory and processor time. If the kernel grants no
    separate network, the command has the machine's, and a warning is logged."""
    limits = Limits(
        memory_mb=None,
        cpu_s=None,
        max_file_mb=reward.max_file_mb,
        max_open_files=reward.max_open_files,
        max_processes=reward.max_processes,
        network=network,
    )
    if not network and not namespace_command(False, ()):
        log.warning(
            f"The kernel grants no network namespace, so the command of {full_key('rollout.agent.runner')} reaches the "
            "whole network and not only the endpoint."
        )
        return replace(limits, network=True)
    return limits
