"""Names of the existing verl's agent loops that have no counterpart: here each rank's rollout worker runs its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from verl.agents.parsers import QwenCoderToolParser
from verl.agents.tools.python import program_output
from verl.compat.task_runner import INSTEAD, refuse_overrides, undecorated
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError
from verl.families import AGENT_LOOPS
from verl.registry import RegistryMapping, user_file
from verl.rewards.programs import ProgramLimits
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import FunctionCall, OpenAIFunctionToolSchema, ToolResponse, text_tool
from verl.tools.tool_registry import load_class

if TYPE_CHECKING:
    from verl.compat.llm_server import Sampler
    from verl.compat.task_runner import Tree

T = TypeVar("T")
_EPISODES = (
    "the rollout worker of each rank runs its episodes. Subclass AgentLoopBase and declare it in "
    "rollout.agent.agent_loop_config_path, or set rollout.agent.runner."
)
_WORKER_HOOKS = ("_run_agent_loop", "_agent_loop_postprocess", "_postprocess", "_compute_score")
_KEPT = {"logprobs", "include_stop_str_in_output"}  # a run has the log-probs, and keeps the text that ends a turn


class AgentLoopWorker:
    """Sampling of a script's agents: `generate_sequences` of a subclass gives its `sampling_params` to `_run_agent_loop`. The
    rollout worker of each rank runs the episodes."""

    def __init__(
        self, config: Tree | None = None, server_handles: object = (), reward_router_address: object = None, **_: object
    ):
        if unwrap(type(self).generate_sequences) is AgentLoopWorker.generate_sequences:
            raise ConfigError(f"{type(self).__name__} is not used in this version: {_EPISODES}")
        refuse_overrides(self, AgentLoopWorker, _WORKER_HOOKS)
        self.config = config

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        raise NotImplementedError

    async def _run_agent_loop(self, sampling_params: Mapping[str, object], *_: object, **__: object) -> None:
        raise _Sampling(sampling_params)


class _Sampling(Exception):
    """The parameters that a worker samples by."""

    def __init__(self, params: Mapping[str, object]):
        super().__init__()
        self.params = dict(params)


class AgentLoopManager:
    """The sampler of a trainer, whose `actor_rollout_wg` is `worker_group`. Texts `stop` of a subclass's
    `agent_loop_workers_class` end turns, also in validation. Raises ConfigError without such a group, and for other sampling
    than the config's. `create` gives a manager to scripts that sample by `llm_client` themselves."""

    agent_loop_workers_class: object = None

    @classmethod
    def create(cls, config: Tree | None = None, llm_client: object = None, **_: object) -> AgentLoopManager:
        manager = cls(config) if cls is not AgentLoopManager else object.__new__(cls)
        manager.generate_sequences = cls
        return manager

    def __init__(self, config: Tree | None = None, worker_group: object = None, rm_wg: object = None, **_: object):
        sampler: Sampler | None = getattr(worker_group, "sampler", None)
        if sampler is None:
            raise ConfigError(f"{type(self).__name__} is not used in this version: {_EPISODES}")
        if self.agent_loop_workers_class is not None and config is not None:
            worker = undecorated(self.agent_loop_workers_class)(config, ())
            sampler.until(_stops(worker, config))
        self.generate_sequences: Callable[..., object] = getattr(worker_group, "generate_sequences", list)


def _stops(worker: AgentLoopWorker, config: Tree) -> tuple[str, ...]:
    """The texts that end a turn of a worker. Raises ConfigError for other parameters than the config's."""
    name, rollout = type(worker).__name__, config.actor_rollout_ref.rollout
    row = DataProto.from_dict({"dummy_tensor": torch.zeros(1, 1)}, {"raw_prompt": object_array([[]])})
    try:
        asyncio.run(worker.generate_sequences(row))
    except _Sampling as sampling:
        params = sampling.params
    else:
        raise ConfigError(
            f"{name}.generate_sequences would not be called: it has no call of _run_agent_loop. {INSTEAD}"
        )
    stop = cast("str | Sequence[str]", params.pop("stop", None) or ())
    for key in params.keys() - _KEPT:
        if params[key] != rollout.get(key, 1.0):
            raise ConfigError(
                f"{name} samples by {key}={params[key]}, and the run by its config. Set actor_rollout_ref.rollout.{key}."
            )
    return (stop,) if isinstance(stop, str) else tuple(stop)


def tqbridge(*_: object, **__: object) -> Callable[[T], T]:
    """A decorator that changes nothing: batches are passed as they are."""
    return lambda function: function


class RolloutSkip:
    """Samples of an earlier run in place of new ones; making one raises ConfigError."""

    def __init__(self, *args: object, **kwargs: object):
        raise ConfigError(
            "RolloutSkip is not available: samples of other weights would train. Remove it, and set "
            "actor_rollout_ref.rollout.skip_rollout to False."
        )


class AsyncLLMServerManager(AgentLoopManager):
    """The same of earlier releases, with rollout.mode=async."""


class Qwen3XMLToolParser(QwenCoderToolParser):
    """The parser of Qwen3-Coder, with the method that reads one call without its marks."""

    def _parse_xml_function_call(self, function_call_str: str, tools: Sequence[Any] | None) -> FunctionCall | None:
        """The call "name><parameter=a>1</parameter>..."; None if it cannot be read."""
        schemas = [tool if isinstance(tool, dict) else tool.for_template() for tool in tools or ()]
        try:
            return self.read(
                f"<function={function_call_str.removesuffix('</function>')}</function>", schemas, ends=True
            )[0]
        except ValueError:
            return None


class SandboxFusionTool(BaseTool):
    """Python programs as calls of a model, in processes of this machine with limits (verl/rewards/programs.py). Of `config`,
    default_timeout (seconds), default_language and memory_limit_mb (MiB) act. Subclasses call `await
    self.execution_pool.execute.remote(function, *arguments)`; a thread runs it."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        about = "Runs a Python program and returns what it prints."
        super().__init__(config, tool_schema or text_tool("code_interpreter", about, "code", "the program"))
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.memory_limit_mb = int(config.get("memory_limit_mb", 1024))
        self.execution_pool = SimpleNamespace(execute=SimpleNamespace(remote=asyncio.to_thread))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: object
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        text = await asyncio.to_thread(
            self.execute_code, instance_id, str(parameters.get("code", "")), timeout, language
        )
        return ToolResponse(text=text), 0.0, {}

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """Prints and errors of the program. `timeout`: seconds. Raises ValueError for another language than Python."""
        if language != "python":
            raise ValueError(f"the language is {language}, and programs are Python here")
        return program_output(code, ProgramLimits(time_s=float(timeout), memory_mb=self.memory_limit_mb))


async def get_trajectory_info(step: int, index: list[object], validate: bool) -> list[dict[str, Any]]:
    """For each row: step, sample index, number among the rows of its index, and whether it validates."""
    numbers: dict[object, int] = {}
    rows = []
    for value in index:
        numbers[value] = numbers.get(value, -1) + 1
        rows.append({"step": step, "sample_index": value, "rollout_n": numbers[value], "validate": validate})
    return rows


class LoopMapping(RegistryMapping):
    """Name -> {"_target_": "package.module.Class", further arguments} of the agent loops that runs know."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        loop = super().__getitem__(name)
        cls = getattr(loop, "func", loop)
        return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **getattr(loop, "keywords", {})}

    def __setitem__(self, name: str, row: dict[str, Any]) -> None:
        """Raises NameConfigError for a class that is not there."""
        settings = {key: value for key, value in row.items() if key != "_target_"}
        cls = load_class(row["_target_"], f"The agent loop {name}")
        super().__setitem__(name, partial(cls, **settings) if settings else cls)

    def copy(self) -> dict[str, Any]:
        return {name: self[name] for name in self}


agent_loop_registry = LoopMapping(AGENT_LOOPS)


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """The answer of a tool as gpt-oss reads it."""
    return f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>{tool_response}<|end|>"


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """A text of gpt-oss up to the next turn of the model."""
    return f"{message_content}<|start|>assistant"


def resolve_config_path(config_path: str) -> str:
    """A path as it is, or if there is no such file in this package. Raises FileNotFoundError."""
    file = user_file(config_path)
    if not file.exists():
        raise FileNotFoundError(f"There is no file {config_path}. Name it from the working directory {Path.cwd()}.")
    return str(file)
