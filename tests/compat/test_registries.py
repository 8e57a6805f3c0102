"""Registries of other releases are the registries that runs read: register, run, replace, clear, look up."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.json_lines import read_lines
from verl.base_config import BaseConfig
from verl.config import load_config
from verl.errors import ConfigError
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.families import ADVANTAGES, AGENT_LOOPS, POLICY_LOSSES, REWARD_MANAGERS, TOOL_PARSERS
from verl.registry import load_module, load_object
from verl.single_controller.base import decorator
from verl.single_controller.base.decorator import Dispatch
from verl.tools.utils.tool_registry import get_tool_class
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_adv_est
from verl.utils.import_utils import load_class_from_fqn, load_extern_type
from verl.utils.reward_score import rlla
from verl.workers.reward_manager import get_reward_manager_cls, register

REGISTRIES = (ADVANTAGES, POLICY_LOSSES, REWARD_MANAGERS, TOOL_PARSERS, AGENT_LOOPS)

USER_FILE = """
from pathlib import Path

import torch

from verl.experimental.agent_loop.agent_loop import register as register_loop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.workers.reward_manager import register as register_manager
from verl.workers.reward_manager.abstract import AbstractRewardManager


def note(name):
    with Path(__file__).with_suffix(".calls").open("a") as file:
        file.write(name + "\\n")


@register_adv_est("mine")
def advantage(token_level_rewards, response_mask, index, config=None, **kwargs):
    note("advantage")
    scores = token_level_rewards.sum(-1, keepdim=True)
    return (scores - scores.mean()) * response_mask, scores * response_mask


@register_policy_loss("mine")
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
         rollout_is_weights=None):
    note("loss")
    return agg_loss(-advantages * (log_prob - old_log_prob).exp(), response_mask, loss_agg_mode), {}


@register_manager("mine")
class Manager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", weight=1.0):
        self.tokenizer, self.compute_score, self.weight = tokenizer, compute_score, weight

    def __call__(self, data, return_dict=False):
        note("manager")
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        width, lengths = data.batch["prompts"].shape[1], []
        for row in range(len(data)):
            item = data[row]
            length = int(item.batch["attention_mask"][width:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length])
            answer = item.non_tensor_batch["reward_model"]["ground_truth"]
            rewards[row, length - 1] = self.weight * self.compute_score("", text, answer)
            lengths.append(length)
        return {"reward_tensor": rewards, "reward_extra_info": {"length": lengths}}


@register_loop("mine")
class Loop(ToolAgentLoop):
    async def run(self, sampling_params, **kwargs):
        note("agent loop")
        return await super().run(sampling_params, **kwargs)


@ToolParser.register("mine")
class Parser(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        note("parser")
        return "", [FunctionCall(name="say", arguments="{}")]


class Tool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        note("tool")
        return ToolResponse(text="ok"), 0.0, {}
"""
TOOLS = """
tools:
  - class_name: names_of_a_user.Tool
    config: {type: native}
    tool_schema:
      type: function
      function: {name: say, description: Speak., parameters: {type: object, properties: {}, required: []}}
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Afterwards registries have the rows of other test files again."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_rows", dict(registry._rows))


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """A module of the user's that registers each kind of object, in a folder on the path; imported by no one yet."""
    import sys

    file = tmp_path / "names_of_a_user.py"
    file.write_text(USER_FILE)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "names_of_a_user", raising=False)
    yield file
    sys.modules.pop("names_of_a_user", None)


def calls(file):
    return set(file.with_suffix(".calls").read_text().split("\n")) - {""}


def two_steps(tree, **changes):
    tree["trainer"]["total_training_steps"] = 2
    config = OmegaConf.create(tree)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    run_ppo(config)
    rows = read_lines(Path(tree["trainer"]["default_local_dir"]) / "metrics.jsonl")
    assert [row["step"] for row in rows if "actor/pg_loss" in row] == [1, 2]


ON_RAY = {"trainer__n_gpus_per_node": 2, "reward__debug": False}


class TestRuns:
    def test_functions_and_a_manager_of_external_lib(self, tiny_tree, user_file):
        tiny_tree["actor_rollout_ref"]["model"]["external_lib"] = "names_of_a_user"
        tiny_tree["algorithm"]["adv_estimator"] = "mine"
        tiny_tree["actor_rollout_ref"]["actor"]["policy_loss"] = {"loss_mode": "mine"}
        tiny_tree["reward"] |= {"reward_manager": {"name": "mine"}, "reward_kwargs": {"weight": 2.0}}
        two_steps(tiny_tree)
        assert {"advantage", "loss", "manager"} <= calls(user_file)
        folder = Path(tiny_tree["trainer"]["default_local_dir"])
        for sample in read_lines(folder / "samples/train/step_000001.jsonl"):
            text = sample["response"] if "response" in sample else sample["output"]
            assert sample["score"] == pytest.approx(2 * sum(map(str.isalpha, text)) / max(len(text), 1))

    @pytest.mark.parametrize(
        ("changes", "called"),
        [
            pytest.param({}, {"advantage", "loss"}, id="here"),
            pytest.param(ON_RAY, {"loss"}, marks=pytest.mark.slow, id="on ranks of Ray"),
        ],
    )
    def test_names_that_a_script_has_registered_itself(self, tiny_tree, user_file, changes, called):
        if changes:
            pytest.importorskip("ray")
        __import__("names_of_a_user")
        mine = {"algorithm__adv_estimator": "mine", "actor_rollout_ref__actor__policy_loss__loss_mode": "mine"}
        two_steps(tiny_tree, **mine, **changes)
        assert called <= calls(user_file)

    def test_agents(self, tiny_tree, user_file):
        rollout = tiny_tree["actor_rollout_ref"]["rollout"]
        tiny_tree["actor_rollout_ref"]["model"]["external_lib"] = "names_of_a_user"
        rollout["agent"] = {"default_agent_loop": "mine"}
        rollout["multi_turn"] = {
            "enable": True, "format": "mine", "tool_config_path": f"{user_file.parent}/tools.yaml", "max_assistant_turns": 2,
        }  # fmt: skip
        tiny_tree["data"] |= {"max_response_length": 96, "val_files": []}
        two_steps(tiny_tree)
        assert calls(user_file) == {"agent loop", "parser", "tool"}


class TestMappings:
    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"),
            ("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
            ("verl.workers.reward_manager.registry", "REWARD_MANAGER_REGISTRY"),
        ],
    )
    def test_clear_assign_and_give_back(self, module, name):
        import importlib
        from unittest import mock

        holder = importlib.import_module(module)
        mapping = getattr(holder, name)
        names = set(mapping)
        with mock.patch.dict(mapping, clear=True):
            assert len(mapping) == 0
            mapping["other"] = print
        assert set(mapping) == names
        with mock.patch.object(holder, name, {"other": print}):
            assert getattr(holder, name) is mapping
            assert dict(mapping) == {"other": print}
        assert set(mapping) == names
        mapping.clear()
        setattr(holder, name, {"gae": print})
        assert mapping["gae"] is print
        with pytest.raises(KeyError):
            mapping["naive"]

    def test_functions_of_the_package_need_no_registry(self):
        core_algos.ADV_ESTIMATOR_REGISTRY.clear()
        core_algos.POLICY_LOSS_REGISTRY.clear()
        rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.ones(2, 2)
        advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, index=["a", "a"])
        assert advantages[:, 0].tolist() == pytest.approx([-(2**-0.5), 2**-0.5], abs=1e-5)
        loss, _ = core_algos.compute_policy_loss_vanilla(mask, mask, advantages, mask, config={"clip_ratio": 0.2})
        assert loss.item() == pytest.approx(0, abs=1e-6)
        with pytest.raises(ValueError, match="There is no advantage estimator 'grpo'"):
            core_algos.get_adv_estimator_fn("grpo")

    def test_a_replaced_built_in_may_read_anything(self):
        assert not ADVANTAGES.may_read("grpo", "values")
        core_algos.ADV_ESTIMATOR_REGISTRY["grpo"] = lambda **columns: None
        assert ADVANTAGES.may_read("grpo", "values")
        assert "grpo" not in ADVANTAGES.reading("index")

    def test_losses_replace_one_another(self):
        core_algos.register_policy_loss("clip_cov")(print)
        assert core_algos.get_policy_loss_fn("clip_cov") is print

    def test_agent_loops(self):
        registry = agent_loop._agent_loop_registry
        assert registry["single_turn_agent"] == {"_target_": "verl.agents.loops.SingleTurnAgentLoop"}
        registry["alias"] = {"_target_": "verl.agents.loops.SingleTurnAgentLoop"}
        assert AGENT_LOOPS.get("alias") is SingleTurnAgentLoop
        registry["with_more"] = row = {"_target_": "verl.agents.loops.SingleTurnAgentLoop", "hf_model_type": "x"}
        assert registry["with_more"] == row
        with pytest.raises(AttributeError, match="SingleTurnLoop"):
            registry["wrong"] = {"_target_": "verl.agents.loops.SingleTurnLoop"}


class TestErrors:
    """A lookup error is one of ours, and of the types that existing scripts catch."""

    @pytest.mark.parametrize("kind", [ConfigError, ValueError, KeyError])
    def test_unknown_names(self, kind):
        with pytest.raises(kind, match="There is no policy loss 'vanila'; did you mean 'vanilla'"):
            get_policy_loss_fn("vanila")
        with pytest.raises(kind, match="reward manager"):
            get_reward_manager_cls("nothing")
        with pytest.raises(kind, match="tool parser"):
            ToolParser.get_tool_parser("nothing", None)

    @pytest.mark.parametrize("kind", [ConfigError, AttributeError])
    def test_missing_classes(self, kind):
        with pytest.raises(kind, match="Gsm8kTol"):
            get_tool_class("verl.tools.gsm8k_tool.Gsm8kTol")
        with pytest.raises(kind, match="OrderedDct"):
            load_class_from_fqn("collections.OrderedDct")

    def test_files_and_imports(self, tmp_path):
        (tmp_path / "broken.py").write_text("def f(:\n")
        for name, kind in (("missing", FileNotFoundError), ("broken", RuntimeError)):
            for caught in (ConfigError, kind):
                with pytest.raises(caught, match=name):
                    load_extern_type(f"{tmp_path}/{name}.py", "X")

    def test_a_scorer_in_a_checkout_that_is_not_there(self):
        for path in ("verl/utils/reward_score/rlla.py", "/no/such/place/verl/verl/utils/reward_score/rlla.py"):
            assert load_module(path) is rlla

    def test_fields_of_a_config(self):
        from dataclasses import dataclass

        @dataclass
        class Mine(BaseConfig):
            size: int = 1

        config = Mine()
        config.further = 2
        assert (config["size"], config["further"], "other" in config, 3 in config) == (1, 2, False, False)
        for kind in (KeyError, AttributeError):
            with pytest.raises(kind, match="Mine has no field 'sizes'; did you mean 'size'"):
                config["sizes"]
        with pytest.raises(TypeError):
            config[3]

    def test_a_reference_from_another_process_is_the_object_itself(self, user_file):
        reference = f"{user_file.resolve()}:advantage"
        ADVANTAGES.set("mine", reference)
        assert ADVANTAGES.get("mine") is load_object(reference)
        assert ADVANTAGES.own_rows() == {"mine": reference}

    def test_taken_names(self):
        with pytest.raises(ValueError, match="'grpo' is registered already"):
            register_adv_est("grpo")(print)
        with pytest.raises(ValueError, match="'naive' is registered already"):
            register("naive")(dict)


class TestDispatchModes:
    def test_functions_are_read_when_a_group_is_called(self):
        before = decorator.DISPATCH_MODE_FN_REGISTRY.copy()

        def dispatch(group, *args, **kwargs):
            return args, kwargs

        mode = decorator.register_dispatch_mode("OF_A_TEST", dispatch, print)
        try:
            assert (mode.dispatch_fn, mode.collect_fn) == (dispatch, print)
            decorator.update_dispatch_mode(Dispatch.OF_A_TEST, print, dispatch)
            assert (mode.dispatch_fn, mode.collect_fn) == (print, dispatch)
            decorator.update_dispatch_mode(Dispatch.ONE_TO_ALL, dispatch, print)
            assert Dispatch.ONE_TO_ALL.dispatch_fn is dispatch
        finally:
            Dispatch.remove("OF_A_TEST")
            decorator.DISPATCH_MODE_FN_REGISTRY.clear()
            decorator.DISPATCH_MODE_FN_REGISTRY.update(before)
        assert Dispatch.ONE_TO_ALL.dispatch_fn is None
        assert mode not in list(Dispatch)


def test_a_run_imports_a_file_again_that_was_edited(tmp_path):
    for value in (1, 2):  # the same name at another line, and in another function
        lines = ["from verl.trainer.ppo.core_algos import register_adv_est"] * value
        lines += ['@register_adv_est("edited")', f"def mine_{value}(): return {value}"]
        (tmp_path / "mine.py").write_text("\n".join(lines))
        load_config([], check=False)
        load_module(f"{tmp_path}/mine.py")
        assert ADVANTAGES.get("edited")() == value
    # a module that it imports, and its import
    for value in (3, 33):
        (tmp_path / "inner_of_mine.py").write_text(f"VALUE = {value}")
        (tmp_path / "other_of_mine.py").write_text("from inner_of_mine import VALUE")
        (tmp_path / "mine.py").write_text("def value():\n    from other_of_mine import VALUE\n    return VALUE")
        load_config([], check=False)
        assert load_module(f"{tmp_path}/mine.py").value() == value
    (tmp_path / "twice.py").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="registered already"):
        load_module(f"{tmp_path}/twice.py")
    ADVANTAGES.remove("edited")
