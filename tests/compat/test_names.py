"""Names that tests of existing releases and outside projects import: what they compute, and sentences for the others."""

import importlib
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl import DataProto
from verl.compat.replaced import SENTENCES, ReplacedModuleError, ReplacedNameError
from verl.errors import ConfigError, VerlError


class TestReplaced:
    @pytest.mark.parametrize("name", [name for name in SENTENCES if not name.endswith(":")])
    def test_a_module_says_what_replaces_it(self, name):
        if importlib.import_module("verl.compat.finder").IS_PACKAGE.get(name) is not None:
            pytest.skip("some of its names are here")
        with pytest.raises(ReplacedModuleError, match=f"There is no {name} here") as caught:
            importlib.import_module(name)
        assert caught.value.name == name
        assert isinstance(caught.value, ModuleNotFoundError)

    def test_a_name_says_what_replaces_it(self):
        with pytest.raises(ReplacedNameError, match="write an engine"):
            from verl.utils.fsdp_utils import apply_fsdp2  # noqa: F401
        with pytest.raises(ImportError, match="write an engine"):
            from verl.workers import actor  # noqa: F401
        with pytest.raises(VerlError, match="own fit runs"):
            from verl.trainer.ppo.v1 import trainer_base  # noqa: F401
        with pytest.raises(ImportError, match="cannot import name 'nothing'"):
            from verl.utils.fs import nothing  # noqa: F401
        assert not hasattr(importlib.import_module("verl.utils.fs"), "nothing")

    def test_a_module_without_a_file_is_pickled_as_its_name(self):
        module = importlib.import_module("verl.utils.seqlen_balancing")
        assert pickle.loads(pickle.dumps(module)) is module

    def test_a_file_here_has_further_names(self):
        from verl.tools import function_tool

        assert function_tool.normalize_function_tool_return(("a", 2))[1] == 2.0
        assert function_tool.FunctionTool.__module__ == "verl.tools.function_tool"
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = function_tool.nothing


class TestFunctionTools:
    def test_tools_of_a_file(self, tmp_path, caplog):
        from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, load_function_tools_from_path

        file = tmp_path / "my_tools.py"
        file.write_text(
            "from verl.tools.function_tool import function_tool\n@function_tool\ndef twice_of(a: int):\n"
            '    """Twice.\n\n    Args:\n        a: a number\n    """\n    return 2 * a\n'
        )
        (tool,) = load_function_tools_from_path(str(file))
        assert FUNCTION_TOOL_REGISTRY["twice_of"] is tool is load_function_tools_from_path(str(file))[0]
        (tmp_path / "none.py").write_text("x = 1")
        assert load_function_tools_from_path(str(tmp_path / "none.py")) == []
        assert "no @function_tool decorators" in caplog.text
        with pytest.raises(FileNotFoundError, match="function_tool_path does not exist"):
            load_function_tools_from_path(str(tmp_path / "absent.py"))

    def test_what_a_function_returns(self):
        from verl.tools.function_tool import normalize_function_tool_return as normal

        class Thing:
            def __str__(self):
                return "THING"

        assert [normal(value)[0].text for value in ("a", {"b": 1}, [1], Thing())] == ["a", '{"b": 1}', "[1]", "THING"]
        with pytest.raises(TypeError, match="length 1, 2, or 3"):
            normal(())


def test_a_value_loss_with_the_totals_of_its_mini_batch():
    from verl.trainer.ppo.core_algos import compute_value_loss

    values, returns = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.float64)
    loss, _ = compute_value_loss(values, returns, values, mask, 0.5)
    parts = [
        compute_value_loss(
            values[i : i + 2], returns[i : i + 2], values[i : i + 2], mask[i : i + 2], 0.5, batch_num_tokens=8
        )[0]
        for i in (0, 2)
    ]
    torch.testing.assert_close(sum(parts), loss)


def test_star_imports_bring_the_modules_that_scripts_use():
    names = {}
    exec("from verl.trainer.ppo.core_algos import *", names)
    assert names["torch"] is torch
    assert names["np"] is np
    assert names["verl_F"].masked_mean(torch.tensor([1.0, 3.0]), torch.tensor([1, 1])) == 2


class TestNested:
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])

    def batch(self):
        from verl.utils import tensordict_utils as tu

        ids = torch.arange(12).view(2, 6)
        responses = torch.nested.as_nested_tensor([ids[0, 3:5], ids[1, 3:]], layout=torch.jagged)
        columns = {"input_ids": ids, "position_ids": ids, "attention_mask": self.mask, "responses": responses}
        return tu.get_tensordict({**columns, "response_mask": torch.ones(2, 3)})

    def test_padding_and_back(self):
        from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

        data = left_right_2_no_padding(self.batch())
        assert [row.tolist() for row in data["input_ids"].unbind()] == [[1, 2, 3, 4], [6, 7, 8, 9, 10, 11]]
        # the output at a place is of the next token
        assert no_padding_2_padding(data["input_ids"], data).tolist() == [[2, 3, 0], [8, 9, 10]]

    def test_positions_of_several_components_and_equal_lengths(self):
        """As images have them; torch would take the components for the sequence (a public report of September 2026)."""
        from verl.workers.utils.padding import left_right_2_no_padding

        data = self.batch()
        data["attention_mask"] = torch.ones(2, 6)
        data["position_ids"] = torch.arange(6).expand(2, 4, 6)
        positions = left_right_2_no_padding(data)["position_ids"]
        assert positions._ragged_idx == 2
        assert [row.shape for row in positions.unbind()] == [(4, 6)] * 2

    def test_rows_of_any_ragged_axis(self):
        from verl.utils import tensordict_utils as tu

        rows = [torch.arange(n * 2).view(n, 2) for n in (3, 1, 1, 2)]
        for axis, parts in ((1, rows), (2, [row.T for row in rows])):
            column = tu.nested_tensor_from_tensor_list(parts)
            selected = tu.index_select_tensor_dict(tu.get_tensordict({"x": column}), [1, 2])["x"]
            assert selected._ragged_idx == axis
            assert torch.equal(selected.unbind()[1], parts[2])
            assert len(tu.concat_nested_tensors([column, selected]).unbind()) == 6


class TestAggregation:
    def test_metrics_of_the_updates_of_a_step(self):
        from verl.trainer.ppo.v1.utils import MetricsAggregator

        metrics = MetricsAggregator()
        metrics.add_step_metrics({"actor/kl": 2.0, "grad/max": 1.0, "timing_s/gen": 1.0, "on": True}, sample_count=1)
        metrics.add_step_metrics({"actor/kl": 4.0, "grad/max": 5.0, "timing_s/gen": 2.0}, sample_count=3)
        assert metrics.get_aggregated_metrics() == {"actor/kl": 3.5, "grad/max": 5.0, "timing_s/gen": 3.0}

    def test_advantages_of_samples_with_several_rows(self):
        from verl.trainer.ppo.v1.utils import compute_advantage, compute_advantage_for_multi_trajectories

        rewards = torch.tensor([[5.0, 0.0], [1.0, 0.0], [3.0, 0.0]])
        columns = {"token_level_rewards": rewards, "response_mask": torch.ones(3, 2)}
        batch = DataProto.from_dict(columns, {"uid": np.array(["p"] * 3, dtype=object)})
        alone = compute_advantage(batch.select_idxs([1, 2]), "grpo").batch["advantages"]
        both = compute_advantage_for_multi_trajectories(batch, ["p_0_0", "p_0_1", "p_1_0"], adv_estimator="grpo")
        assert torch.equal(both.batch["advantages"], alone[[0, 0, 1]])

    def test_drafts(self):
        from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

        counts = [np.array(values) for values in ([3, 3], [3, 0], [1, 1])]
        assert compute_spec_decode_metrics(*counts) == {
            "rollout/spec_accept_rate": 0.5, "rollout/spec_accept_length": 2.5,
        }  # fmt: skip
        assert compute_spec_decode_metrics(*counts, non_padding_mask=np.array([False, False])) == {}


def test_a_checkpoint_manager_of_a_script(tmp_path):
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    manager = BaseCheckpointManager(None, checkpoint_config={"save_contents": ["model"], "save_lora_only": True})
    assert (manager.should_save_model, manager.should_save_optimizer, manager.should_load_optimizer) == (
        True,
        False,
        True,
    )
    assert manager.should_save_lora_only
    assert manager.is_lora_only_state_dict({"a.lora_A.weight": 1})
    assert not manager.is_lora_only_state_dict({"a.lora_A.weight": 1, "b": 2})
    with pytest.raises(NotImplementedError, match="defines no save_checkpoint"):
        manager.save_checkpoint("x")
    manager.remove_previous_save_local_path(manager.local_mkdir(str(tmp_path / "a" / "b")))
    assert os.listdir(tmp_path / "a") == []


def test_helpers(monkeypatch):
    from verl.trainer.constants_ppo import NVTX_INJECTION_ENV, get_ppo_ray_runtime_env
    from verl.utils.net_utils import get_free_port
    from verl.utils.py_functional import temp_env_var
    from verl.utils.seqlen_balancing import calculate_workload, get_group_balanced_partitions

    with temp_env_var(NVTX_INJECTION_ENV, "libcupti.so"):
        profiled = {"global_profiler": {"tool": "torch"}}
        assert get_ppo_ray_runtime_env(profiled)["env_vars"][NVTX_INJECTION_ENV] == os.devnull
        assert NVTX_INJECTION_ENV not in get_ppo_ray_runtime_env()["env_vars"]
    assert NVTX_INJECTION_ENV not in os.environ
    port, held = get_free_port(with_alive_sock=True)
    assert held.getsockname()[1] == port
    held.close()
    assert calculate_workload([1, 2]).tolist() == [24577, 49156]
    assert get_group_balanced_partitions([9, 9, 1, 1], ["a", "b", "a", "b"], 2) in ([[0, 2], [1, 3]], [[1, 3], [0, 2]])


def test_a_tool_parser_without_a_tokenizer():
    from verl.experimental.agent_loop.tool_parser import Qwen3XMLToolParser

    parser = Qwen3XMLToolParser(tokenizer=None)
    call = parser._parse_xml_function_call("f><parameter=a>1</parameter>", None)
    assert (call.name, call.arguments) == ("f", '{"a": 1}')
    assert parser._parse_xml_function_call("f", []) is None


def test_variables_of_workers_that_the_group_sets():
    pytest.importorskip("ray")
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

    pool = SimpleNamespace(world_size=1)
    with pytest.raises(ConfigError, match="worker_env sets WORLD_SIZE"):
        RayWorkerGroup(pool, RayClassWithInitArgs(object), worker_env={"WORLD_SIZE": "2"})
