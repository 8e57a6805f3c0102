"""Whatever lies where a file is named, its reader says so in one sentence, at once, whichever key names it."""

import os
import signal
import socket

import pytest

from verl.agents.environments import load_environments
from verl.agents.gateway.runner import load_runner
from verl.agents.interactions import load_interactions
from verl.agents.loops import load_loops
from verl.compat.search import bm25_index
from verl.config import DataConfig, ModelConfig, RewardConfig, load_config
from verl.config.sections.deepspeed import read_ds_config
from verl.data.dataset import dataset_class
from verl.data.files import read_rows
from verl.data.order import load_sampler
from verl.errors import VerlError
from verl.models.load import load_external, load_tokenizer
from verl.models.tiny import make_tiny_model
from verl.planner.request import read_lengths
from verl.programs.stages import _make as make_stage
from verl.registry import Registry, load_module
from verl.rewards.functions import RewardFunctionSpec, load_reward_function
from verl.rewards.managers.build import manager_class
from verl.roles.reward_model import read_template
from verl.roles.verdicts import read_rubric
from verl.tools.mcp_client import load_servers
from verl.tools.tool_registry import load_all_tools

LIMIT_S = 20  # of a reader that waits


def custom_class(path):
    return dataset_class(DataConfig(custom_cls=DataConfig().custom_cls.__class__(path=path, name="Rows")))


def manager(path):
    section = RewardConfig().reward_manager
    module = section.module.__class__(path=path)
    return manager_class(RewardConfig(reward_manager=section.__class__(source="importlib", name="Own", module=module)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("regular") / "model")


READERS = {  # key -> (suffix of its files, reader)
    "reward.custom_reward_function.path": (".py", lambda path: load_reward_function(RewardFunctionSpec(path))),
    "reward.reward_manager.module.path": (".py", manager),
    "reward.reward_model.judge_template": (".txt", read_template),
    "reward.reward_model.rubric": (".yaml", read_rubric),
    "multi_turn.tool_config_path": (".yaml", lambda path: load_all_tools(path or "./", None)),
    "multi_turn.function_tool_path": (".py", lambda path: load_all_tools(None, path or "./")),
    "multi_turn.interaction_config_path": (".yaml", lambda path: load_interactions(path or "./")),
    "mcp_servers_config_path": (".json", load_servers),
    "agent.agent_loop_config_path": (".yaml", lambda path: load_loops(path or "./")),
    "agent.environment": (".py", lambda path: load_environments(f"{path}:Own")),
    "agent.runner": (".py", lambda path: load_runner(f"{path}:run")),
    "corpus of the search tool": (".jsonl", bm25_index),
    "algorithm.stages": (".py", lambda path: make_stage(f"{path}:stage", {})),
    "policy_loss.loss_mode": (".py", lambda path: Registry("policy loss").get(f"{path}:loss")),
    "data.custom_cls.path": (".py", lambda path: custom_class(path or "./")),
    "data.sampler.class_path": (".py", lambda path: load_sampler(path, "Order", [], None)),
    "data.train_files": (".jsonl", read_rows),
    "model.external_lib": (".py", lambda path: load_external([path])),
    "engine.deepspeed.config": (".json", read_ds_config),
    "--config-path": (".yaml", lambda path: load_config([], path)),
    "plan.workload.samples": (".jsonl", lambda path: read_lengths(path)),
    "a module": (".py", load_module),
}
KINDS = {  # what lies there -> words of the sentence
    "link loop": "a link to itself",
    "pipe": "a pipe",
    "socket": "a socket",
    "folder": "a folder",
    "device": "a device",
    "missing": "does not exist",
    "empty": " ",
}


@pytest.fixture
def alarm():
    def late(number, frame):
        raise TimeoutError("the reader waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(kind, path):
    if kind == "link loop":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.chdir(path.parent)  # its name may have 107 bytes
        socket.socket(socket.AF_UNIX).bind(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    return "" if kind == "empty" else str(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", READERS)
def test_what_is_no_regular_file_is_a_sentence(tmp_path, monkeypatch, alarm, key, kind):
    suffix, read = READERS[key]
    monkeypatch.chdir(tmp_path)
    path = put(kind, tmp_path / f"it{suffix}")
    with pytest.raises(VerlError) as caught:
        read(path)
    sentence = str(caught.value)
    assert KINDS[kind] in sentence, sentence
    assert len(sentence.splitlines()) == 1
    if path:
        assert "it" + suffix in sentence


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_template_is_read_in_the_same_way(tmp_path, monkeypatch, alarm, model, kind):
    monkeypatch.chdir(tmp_path)
    path = put(kind, tmp_path / "chat.jinja") or "./"
    with pytest.raises(VerlError, match=KINDS[kind]):
        load_tokenizer(ModelConfig(path=str(model), custom_chat_template=path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_path_without_a_name_says_what_lies_there(tmp_path, monkeypatch, alarm, kind):
    monkeypatch.chdir(tmp_path)
    path = put(kind, tmp_path / "conf") or ""
    words = {"missing": "not the name of a YAML file", "empty": "an empty name"}.get(kind, KINDS[kind])
    with pytest.raises(VerlError, match=words):
        load_config([], path)
