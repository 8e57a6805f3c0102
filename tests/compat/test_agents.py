"""Names of the existing verl's agents that no other test imports."""

import asyncio
import functools
import inspect
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests.compat.test_own_fit import OneStep, tree_of
from verl.compat.python import load_class_from_fqn as get_class
from verl.errors import ConfigError
from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker, utils
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopOutput,
    AgentLoopWorkerBase,
    get_trajectory_info,
)
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.models.tiny import make_tokenizer
from verl.tools.geo3k_tool import Geo3kTool
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolCall,
    ToolResponse,
)
from verl.utils.transferqueue_utils import tqbridge

STOPS = [chr(code) for code in range(33, 127)]


class StoppingWorker(AgentLoopWorkerBase):
    """As a recipe has it: the same sampling but for texts that end a turn."""

    params: dict[str, object] = {"stop": STOPS, "include_stop_str_in_output": True}

    @tqbridge()
    async def generate_sequences(self, batch):
        rollout = self.config.actor_rollout_ref.rollout
        params = {"temperature": rollout.temperature, "top_p": rollout.top_p, "repetition_penalty": 1.0, **self.params}
        (row,) = await get_trajectory_info(batch.meta_info.get("global_steps", -1), [0], False)
        return await asyncio.gather(
            self._run_agent_loop(params, row, raw_prompt=batch.non_tensor_batch["raw_prompt"][0])
        )


def remote(cls):
    """As `ray.remote` has it: a subclass whose methods wrap all that `cls` inherits."""

    def wrap(method):
        return functools.wraps(method)(lambda *arguments, **named: method(*arguments, **named))

    methods = {name: wrap(method) for name, method in inspect.getmembers(cls, inspect.isfunction)}
    return SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=type(cls.__name__, (cls,), methods)))


class StoppingManager(AgentLoopManager):
    def __init__(self, config, worker_group=None, rm_wg=None):
        self.agent_loop_workers_class = remote(StoppingWorker)
        super().__init__(config, worker_group, rm_wg)


class PreparedLoop(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if not cls._class_initialized:
            cls._class_initialized, cls.room = True, config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params, **kwargs):
        ids = self.tokenizer.apply_chat_template(kwargs["raw_prompt"], add_generation_prompt=True, tokenize=True)
        output = await self.server_manager.generate("", prompt_ids=ids, sampling_params={"max_tokens": self.room})
        return AgentLoopOutput(prompt_ids=ids, response_ids=output.token_ids, response_mask=[1] * len(output.token_ids))


class ChoosingTrainer(OneStep):
    """Some of the prompts of a batch train, and the trainer has its own manager of agents, as SPO's has."""

    def init_workers(self):
        self.sizes, self.texts = [], []
        self.actor_rollout_wg.init_model()
        self.async_rollout_manager = StoppingManager(config=self.config, worker_group=self.actor_rollout_wg)

    def one_step(self, prompts):
        self.sizes.append(len(prompts))
        chosen = prompts[list(range(0, len(prompts), 2))]
        batch = self.credited(chosen, self.generated(chosen))
        batch, metrics = self.compute_rollout_importance_weights_and_add_to_batch(batch)
        self.texts += [read(row["responses"][row["response_mask"].bool()]) for row in batch.batch]
        self._update_actor(batch)
        assert metrics == {}


def read(ids):
    return make_tokenizer().decode(ids, skip_special_tokens=True)


def test_a_manager_of_agents_ends_turns_by_its_own_texts(tiny_llama, tmp_path):
    tree = tree_of(tiny_llama, tmp_path)
    (tmp_path / "loops.yaml").write_text(f"- {{name: prepared, _target_: {__name__}.PreparedLoop}}\n")
    tree["algorithm"] = {"adv_estimator": "grpo"}
    tree["data"] |= {"gen_batch_size": 6, "max_response_length": 20}
    agent = {"agent_loop_config_path": f"{tmp_path}/loops.yaml", "default_agent_loop": "prepared"}
    tree["actor_rollout_ref"]["rollout"] |= {"multi_turn": {"enable": True}, "agent": agent}
    tree["trainer"] |= {"total_training_steps": None, "total_epochs": 1, "save_freq": -1}
    trainer = ChoosingTrainer(OmegaConf.create(tree))
    trainer.init_workers()
    assert trainer.total_training_steps == 40 // 6
    trainer.fit()
    trainer._opened = None
    assert (set(trainer.sizes), trainer.config.data.train_batch_size) == ({6}, 3)
    assert sum(text[-1:] in STOPS for text in trainer.texts) > len(trainer.texts) / 2
    assert not any(set(text[:-1]) & set(STOPS) for text in trainer.texts)


async def unused(self, batch):
    return batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"temperature": 0.3}}, "samples by temperature=0.3.*Set actor_rollout_ref.rollout.temperature"),
        ({"_postprocess": lambda self, outputs: outputs}, "Changed._postprocess would not be called"),
        ({"generate_sequences": unused}, "generate_sequences would not be called"),
    ],
)
def test_sampling_of_a_manager_that_would_not_be_used_is_refused(change, message):
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0, "top_p": 1.0}}})
    group = SimpleNamespace(sampler=SimpleNamespace(until=list), generate_sequences=list)
    worker = type("Changed", (StoppingWorker,), change)
    with pytest.raises(ConfigError, match=message):
        type("Manager", (AgentLoopManager,), {"agent_loop_workers_class": worker})(config, group)


@pytest.mark.parametrize("base", [AgentLoopManager, AgentLoopWorker])
def test_managers_of_users_are_refused_with_the_way_that_there_is(base):
    class Mine(base):
        pass

    with pytest.raises(ConfigError, match=r"Mine is not used in this version.*agent_loop_config_path"):
        Mine(None, worker_group=None)


def test_trajectories_are_numbered_within_their_prompt():
    rows = asyncio.run(get_trajectory_info(3, [7, 7, 8], validate=False))
    assert [(row["sample_index"], row["rollout_n"]) for row in rows] == [(7, 0), (7, 1), (8, 0)]
    assert {(row["step"], row["validate"]) for row in rows} == {(3, False)}


def test_calls_of_openai_are_read():
    def read(arguments):
        return OpenAIFunctionCallSchema.from_openai_function_parsed_schema(OpenAIFunctionParsedSchema("f", arguments))

    assert read('{"a": 1}') == (OpenAIFunctionCallSchema("f", {"a": 1}), False)
    assert read("{oops") == read("[1]") == (OpenAIFunctionCallSchema("f", {}), True)
    call = OpenAIFunctionToolCall.model_validate({"id": "x", "function": {"name": "f", "arguments": {"a": 1}}})
    assert call.function.arguments == {"a": 1}
    assert call.model_dump()["type"] == "function"


def test_classes_by_name():
    assert get_class("verl.tools.gsm8k_tool.Gsm8kTool") is Gsm8kTool
    assert get_class("verl.interactions.gsm8k_interaction.Gsm8kInteraction") is Gsm8kInteraction


def test_programs_run_here_in_place_of_a_service():
    class Mine(SandboxFusionTool):
        async def execute(self, instance_id, parameters, **kwargs):
            code, timeout = parameters["code"], self.default_timeout
            text = await self.execution_pool.execute.remote(
                self.execute_code, instance_id, code, timeout, self.default_language
            )
            return ToolResponse(text=text), None, None

    config = {"sandbox_fusion_url": "https://x/run_code", "num_workers": 2, "default_timeout": 5}
    for tool in (SandboxFusionTool(config), Mine(config)):
        answer, *_ = asyncio.run(tool.execute("1", {"code": "print(6 * 7)"}))
        assert answer.text.strip() == "42"
    assert "ZeroDivisionError" in tool.execute_code("1", "1 / 0")
    with pytest.raises(ValueError, match="programs are Python here"):
        tool.execute_code("1", "", language="bash")


def test_answers_of_geometry_are_scored_as_calls():
    tool = Geo3kTool({})
    assert tool.name == "calc_geo3k_reward"
    instance, _ = asyncio.run(tool.create(create_kwargs={"ground_truth": "\\frac{1}{2}"}))
    assert [asyncio.run(tool.execute(instance, {"answer": answer}))[1] for answer in ("3", "0.5")] == [-0.05, 0.0]
    assert asyncio.run(tool.calc_reward(instance)) == 1.0


def test_texts_of_gpt_oss_and_paths(tmp_path):
    answer = utils.format_gpt_oss_tool_response_manually("4", "add")
    assert utils.add_generation_prompt_for_gpt_oss(answer) == (
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    )
    (tmp_path / "agents.yaml").write_text("")
    assert utils.resolve_config_path(f"{tmp_path}/agents.yaml") == f"{tmp_path}/agents.yaml"
    with pytest.raises(FileNotFoundError, match="no_agents.yaml"):
        utils.resolve_config_path("no_agents.yaml")
