"""Environments of the package `verifiers`, as agents: `rollout.agent.environment=verifiers:NAME`.

NAME is an installed environment, as the package's commands take it (`name`, or `owner/name` of the hub). Or it is a .toml file
with the package's table `env` (`taskset`, seats, settings). An environment of the releases before 0.4 has `load_environment`;
a file for it has `id` and `args`.

The row's `extra_info.index` is the number of the task. The environment plays it at the run's endpoint and brings the reward. A
seat without a harness runs the chat below in this process; the package would start a program through uv. A seat without
a runtime runs on this machine.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from verl.agents.episode import EpisodeError
from verl.agents.gateway.sessions import ContextFullError
from verl.config import full_key
from verl.data.files import write_parquet
from verl.errors import ConfigError, DataError, MissingExtraError
from verl.foreign_text import clean
from verl.regular_files import read_text, require_regular

Foreign: TypeAlias = Any  # an object of the package; no types of it are here
_KEY = "VERL_AGENT_KEY"  # the variable that has the endpoint's key: the package takes keys from the environment alone
_CHAT = "verifiers.v1.harnesses.verl"


class Verifiers:
    """The runner of one environment, see above. Raises MissingExtraError and ConfigError."""

    def __init__(self, name: str):
        self.label = f"{full_key('rollout.agent.environment')}=verifiers:{name}"
        if importlib.util.find_spec("verifiers") is None:
            raise MissingExtraError(self.label, "verifiers", "verifiers")
        try:
            self.environment = self._opened(name)
        except ConfigError:
            raise
        except Exception as error:  # packages of others raise anything
            version = getattr(sys.modules.get("verifiers"), "__version__", "of this environment")
            raise ConfigError(
                f"{self.label} cannot be loaded with verifiers {version}: {type(error).__name__}: {clean(error, 300)}"
            ) from error

    async def __call__(self, task: Mapping[str, Foreign], base_url: str, api_key: str) -> dict[str, object]:
        """Play the row's task; its reward and the parts of it."""
        extra = task.get("extra_info") or {}
        if not isinstance(index := extra.get("index"), int):
            raise EpisodeError(
                "its row has no extra_info.index, the number of its task; `verl data verifiers` writes it"
            )
        os.environ[_KEY] = api_key
        root, _, session = base_url.removesuffix("/v1").partition("/s/")
        reply = await self.environment.play(index, str(extra.get("split") or "train"), f"{root}/v1", session)
        return {name: value for name, value in reply.items() if value is not None}

    async def aclose(self) -> None:
        """End the servers of the environment."""
        await self.environment.aclose()

    def _opened(self, name: str) -> _Tasks | _Classic:
        table: dict[str, Foreign] = {"id": name}
        if name.endswith(".toml"):
            import tomllib

            table = tomllib.loads(read_text(require_regular(name, "The file of an environment")))
            table = table.get("env", table)
        module = str(table.get("id") or "").rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
        if module and "taskset" not in table:
            if importlib.util.find_spec(module) is not None:
                loader = getattr(importlib.import_module(module), "load_environment", None)
                if loader is not None:
                    return _Classic(loader(**table.get("args") or {}))
            table = {"taskset": {"id": table["id"]}}
        return _Tasks(table)


class _Tasks:
    """An environment of verifiers 0.4: a set of tasks, and seats that play one."""

    def __init__(self, table: dict[str, Foreign]):
        from verifiers.v1 import AgentConfig
        from verifiers.v1.utils import loaders

        sys.modules[_CHAT] = _chat_harness()
        taskset = table["taskset"]["id"]
        fields = loaders.env_config_type(taskset, table.get("id") or "").model_fields
        has_harness = loaders.default_harness_id(taskset) == taskset
        for name, field in fields.items():
            if isinstance(seat := field.default, AgentConfig):
                table[name] = dict(table.get(name) or {})
                if seat.harness is None and not has_harness:
                    table[name].setdefault("harness", {"id": "verl"})
                if "runtime" not in seat.model_fields_set:
                    table[name].setdefault("runtime", {"type": "subprocess"})
        self.env: Foreign = loaders.load_environment(loaders.resolve_env_config(table))
        self._tasks: list[Foreign] = []
        self._source: Iterator[Foreign] = iter(self.env.taskset)
        self._served: asyncio.Task[None] | None = None

    def rows(self, num_train: int, num_test: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """The last tasks of the first num_train + num_test are for the test, at most a third of them."""
        rows = [_row(task.data.prompt, task.data.name, "train") for task in islice(self._source, num_train + num_test)]
        for index, row in enumerate(rows):
            row["extra_info"] |= {"index": index}
        cut = len(rows) - min(num_test, len(rows) // 3)
        return rows[:cut], rows[cut:]

    async def play(self, index: int, split: str, address: str, session: str) -> dict[str, object]:
        from verifiers.v1 import EvalClientConfig, ModelContext

        await self._serve()
        client = EvalClientConfig(base_url=address, api_key_var=_KEY)
        episode = await self.env.run_episode(self._task(index), ModelContext(model=session, client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            raise EpisodeError(f"its environment failed: {_said(errors)}")
        trace = next((t for t in episode.traces if t.agent.trainable), episode.traces[0])
        parts = {name: reward and reward.value for name, reward in trace.rewards.items()}
        return {**trace.metrics, **parts, "reward": trace.reward, "finished": not trace.is_truncated}

    def _task(self, index: int) -> Foreign:
        while len(self._tasks) <= index:
            if (task := next(self._source, None)) is None:
                raise EpisodeError(f"its row names task {index}, and its environment has {len(self._tasks)}")
            self._tasks.append(task)
        return self._tasks[index]

    async def _serve(self) -> None:
        """Start what all episodes share, in a task of its own: what it opens wants to be closed by the same."""
        if self._served is None:
            self._stop, self._ready = asyncio.Event(), asyncio.get_running_loop().create_future()
            self._served = asyncio.create_task(self._hold())
        await asyncio.shield(self._ready)

    async def _hold(self) -> None:
        try:
            async with self.env.serving():
                self._ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if self._ready.done():
                raise
            self._ready.set_exception(EpisodeError(f"its environment could not start: {_said([error])}"))

    async def aclose(self) -> None:
        if self._served is not None:
            self._stop.set()
            await asyncio.wait([self._served], timeout=10.0)


class _Classic:
    """An environment of verifiers before 0.4: a data set, a way to play a row of it, and a rubric."""

    def __init__(self, env: Foreign):
        self.env, self._client, self._data = env, None, dict[str, Foreign]()

    def rows(self, num_train: int, num_test: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
        """Of its data set and of its set for evaluations."""
        parts = []
        for split, count in (("train", num_train), ("test", num_test)):
            data = self._dataset(split)
            parts.append([_row(data[i]["prompt"], None, split, i) for i in range(min(count, len(data)))])
        return parts[0], parts[1]

    async def play(self, index: int, split: str, address: str, session: str) -> dict[str, object]:
        from verifiers.types import ClientConfig

        data = self._dataset(split)
        if index >= len(data):
            raise EpisodeError(f"its row names row {index} of {split}, and its environment has {len(data)}")
        client = ClientConfig(api_key_var=_KEY, api_base_url=address, max_retries=0)
        state = await self.env.run_rollout(data[index], client, session, {})
        if state.get("error"):
            raise EpisodeError(f"its environment failed: {_said([state['error']])}")
        return {**(state["metrics"] or {}), "reward": state["reward"], "finished": not state["is_truncated"]}

    def _dataset(self, split: str) -> Foreign:
        if split not in self._data:
            self._data[split] = self.env.get_dataset() if split == "train" else self.env.get_eval_dataset()
        return self._data[split]

    async def aclose(self) -> None:
        pass


def prepare(name: str, output: Path, num_train: int, num_test: int) -> list[str]:
    """Write `output`/{train,test}.parquet with a row for each task; a sentence for each file."""
    train, test = Verifiers(name).environment.rows(num_train, num_test)
    if not train:
        raise DataError(f"verifiers:{name} has no tasks.")
    lines = []
    for split, rows in (("train", train), ("test", test)):
        if rows:
            write_parquet(output / f"{split}.parquet", rows)
        lines.append(f"{output / f'{split}.parquet'}: {len(rows)} rows{'' if rows else ', not written'}")
    return lines


def _row(prompt: Foreign, name: str | None, split: str, index: int = 0) -> dict[str, Foreign]:
    """The messages are for people and for limits of length: the environment asks its questions itself."""
    if not isinstance(prompt, str):
        texts = [message.get("content") if isinstance(message, dict) else message.content for message in prompt or ()]
        prompt = "\n\n".join(text for text in texts if isinstance(text, str))
    return {
        "data_source": "verifiers",
        "prompt": [{"role": "user", "content": prompt or name or "Begin."}],
        "reward_model": {"style": "environment", "ground_truth": ""},
        "extra_info": {"index": index, "split": split},
    }


def _said(errors: list[Foreign]) -> str:
    """The first of the errors of an episode, in the forms of several releases."""
    if not errors:
        return "an agent did not end"
    if isinstance(error := errors[0], dict):
        return clean(error.get("error_chain_repr") or error, 300)
    return f"{getattr(error, 'type', None) or type(error).__name__}: {clean(getattr(error, 'message', None) or error, 300)}"


def _chat_harness() -> ModuleType:
    """The plug-in `verl` of the package: a chat with tools in this process, to the first answer without a call."""
    from openai import APIStatusError, AsyncOpenAI
    from verifiers import v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    class Chat(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Foreign,
            trace: Foreign,
            runtime: Foreign,
            endpoint: str,
            secret: str,
            mcp_urls: Foreign,
            data: Foreign,
        ) -> Foreign:
            system, prompt = self.resolve_prompt(data)
            messages: list[Foreign] = [{"role": "system", "content": system}] if system else []
            messages += (
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
            )
            async with (
                AsyncExitStack() as stack,
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client,
            ):
                servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
                tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
                more = {"tools": tools} if tools else {}
                while True:
                    try:
                        reply = await client.chat.completions.create(model=ctx.model, messages=messages, **more)
                    except APIStatusError as error:
                        if ContextFullError.code not in f"{error} {error.body}":
                            return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
                        trace.stop("max_total_tokens")
                        break
                    message = reply.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        answer = await _called(call_mcp, getattr(call, "function", None), names, connections)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType(_CHAT)
    module.__dict__.update(__spec__=ModuleSpec(_CHAT, None), __all__=["Chat"], Chat=Chat)
    return module


async def _called(call_mcp: Foreign, function: Foreign, names: Mapping[str, object], connections: object) -> Foreign:
    """The answer to a call, for the model."""
    if function is None or function.name not in names:
        return f"error: there is no tool {getattr(function, 'name', '')!r}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(connections, names, function.name, arguments)
