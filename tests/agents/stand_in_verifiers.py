"""The interface of the package `verifiers` that verl uses, as its documentation has it, without the package."""

import contextlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

HARNESSES = "verifiers.v1.harnesses"


class AgentConfig:
    harness, model_fields_set = None, frozenset()


class Harness:
    def __class_getitem__(cls, config):
        return cls

    def __init__(self, config):
        self.config = config

    def resolve_prompt(self, data):
        return data.system_prompt, data.prompt


class Trace(SimpleNamespace):
    def stop(self, condition):
        self.is_truncated, self.stop_condition = True, condition


def trace_of(task):
    return Trace(
        rewards={}, metrics={}, errors=[], is_truncated=False, agent=SimpleNamespace(trainable=True), reward=0.0
    )


class Env:
    """Plays a task for as many turns as its taskset says; its tool `echo` is a server of its own."""

    num_serving = 0

    def __init__(self, table):
        self.table, self.name = table, table["taskset"]["id"]
        if self.name == "missing":
            raise ModuleNotFoundError("taskset 'missing' not found")
        self.taskset = self._tasks()

    def _tasks(self):
        for idx in range(self.table["taskset"].get("num_tasks", 6)):
            data = SimpleNamespace(idx=idx, name=f"{self.name}#{idx}", prompt=f"Task {idx}", system_prompt="Be short.")
            yield SimpleNamespace(data=data)

    @contextlib.asynccontextmanager
    async def serving(self):
        if self.name == "unserved":
            raise OSError("no port is free")
        Env.num_serving += 1
        yield
        Env.num_serving -= 1

    async def run_episode(self, task, context):
        assert self.table["agent"]["runtime"] == {"type": "subprocess"}
        assert Env.num_serving == 1
        trace = trace_of(task)
        episode = SimpleNamespace(traces=[trace], errors=[], ok=True)
        if self.name == "broken":
            trace.errors, episode.ok = [SimpleNamespace(type="TaskError", message="the board is gone")], False
            return episode
        plugin = sys.modules[f"{HARNESSES}.{self.table['agent']['harness']['id']}"]
        harness = getattr(plugin, plugin.__all__[0])(SimpleNamespace(tool_timeout=5.0))
        urls = {"tools": "http://tools"} if self.name == "tools" else {}
        key = os.environ[context.client.api_key_var]
        for _ in range(3 if self.name == "turns" else 1):
            result = await harness.launch(context, trace, None, context.client.base_url, key, urls, task.data)
            assert result.exit_code == 0, result.stderr
        trace.rewards = {"half": SimpleNamespace(value=0.5), "by_index": SimpleNamespace(value=task.data.idx / 2)}
        trace.metrics, trace.reward = {"seen": 1.0}, 0.5 + task.data.idx / 2
        return episode


CALLS = []


async def connect_mcp(config, stack):
    if not config["mcpServers"]:
        return [], {}, {}
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "echo", "description": "", "parameters": parameters}}
    return [tool], {"echo": ("tools", "echo")}, {"tools": None}


async def call_mcp(servers, names, name, arguments):
    CALLS.append((names[name], arguments))
    return f"heard {arguments['text']}"


class Old:
    """An environment of the releases before 0.4."""

    def __init__(self, num_turns):
        self.num_turns = num_turns

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": f"Row {i}"}], "example_id": i} for i in range(4)]

    get_eval_dataset = get_dataset

    async def run_rollout(self, input, client, model, sampling_args):
        from openai import AsyncOpenAI

        messages = list(input["prompt"])
        key = os.environ[client.api_key_var]
        async with AsyncOpenAI(base_url=client.api_base_url, api_key=key, max_retries=client.max_retries) as openai:
            for _ in range(self.num_turns):
                reply = await openai.chat.completions.create(model=model, messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": "And?"}]
        metrics = {"turns": self.num_turns}
        return {"reward": float(self.num_turns), "metrics": metrics, "error": None, "is_truncated": False}


def modules():
    """Name -> module, for sys.modules."""
    contents = {
        "verifiers": {},
        "verifiers.types": {"ClientConfig": SimpleNamespace},
        "verifiers.v1": {
            "AgentConfig": AgentConfig, "EvalClientConfig": SimpleNamespace, "ModelContext": SimpleNamespace,
            "Harness": Harness, "HarnessConfig": object, "ProgramResult": SimpleNamespace,
        },
        "verifiers.v1.utils": {},
        "verifiers.v1.utils.loaders": {
            "env_config_type": lambda taskset, env: SimpleNamespace(
                model_fields={"agent": SimpleNamespace(default=AgentConfig()), "retries": SimpleNamespace(default=3)}
            ),
            "default_harness_id": lambda taskset: "bash",
            "resolve_env_config": dict, "load_environment": Env,
        },
        "verifiers.v1.dialects": {}, "verifiers.v1.dialects.chat": {"message_to_wire": dict},
        HARNESSES: {}, f"{HARNESSES}.utils": {},
        f"{HARNESSES}.utils.mcp": {"connect_mcp": connect_mcp, "call_mcp": call_mcp},
        "old_package": {"load_environment": lambda num_turns=2: Old(num_turns)},
    }  # fmt: skip
    named = {}
    for name, content in contents.items():
        named[name] = ModuleType(name)
        named[name].__dict__.update(content, __spec__=ModuleSpec(name, None))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(named[parent], last, named[name])
    return named
