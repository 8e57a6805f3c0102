"""verl.base_config, verl.utils.config, verl.workers.config, verl.trainer.constants_ppo: configs as Python objects."""

import dataclasses
import json
from dataclasses import FrozenInstanceError, dataclass, field

import pytest
from omegaconf import OmegaConf

import verl.config
from verl.base_config import BaseConfig
from verl.compat.sections import loaded_config
from verl.config import load_config
from verl.errors import ConfigError
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    HFModelConfig,
    RolloutConfig,
)


@dataclass
class Inner:
    size: int = 1


@dataclass
class Outer:
    name: str = "x"
    inner: Inner = field(default_factory=Inner)
    names: list[str] = field(default_factory=list)


class TestBaseConfig:
    def test_a_frozen_mapping(self):
        @dataclass
        class Mine(BaseConfig):
            _mutable_fields = {"free"}
            lr: float = 0.1
            free: int = 1

        config = Mine(lr=0.5)
        assert (config.lr, config["lr"], config.get("lr"), config.get("nothing", 3)) == (0.5, 0.5, 0.5, 3)
        assert dict(config) == {"_target_": "", "lr": 0.5, "free": 1}
        assert "lr" in config
        assert len(config) == 3
        config.free = 2
        with pytest.raises(FrozenInstanceError, match="'lr' of Mine is frozen"):
            config.lr = 1.0
        with pytest.raises(KeyError):
            config["nothing"]


class TestToDataclass:
    def test_nested(self):
        config = OmegaConf.create(
            {"size": 3, "name": "y", "inner": {"_target_": "x.Y", "size": "${size}"}, "names": ["a"]}
        )
        del config["size"]
        config.inner.size = 3
        converted = omega_conf_to_dataclass(config, Outer)
        assert converted == Outer("y", Inner(3), ["a"])
        assert isinstance(converted.inner, Inner)
        assert omega_conf_to_dataclass({"name": "z"}, Outer) == Outer("z")
        assert omega_conf_to_dataclass(converted, Outer) is converted
        assert omega_conf_to_dataclass({}, Outer) == omega_conf_to_dataclass(None, Outer) == Outer()

    def test_by_target(self):
        section = {"_target_": "verl.workers.config.FSDPActorConfig", "ppo_epochs": 3, "optim": {"lr": 1e-5}}
        converted = omega_conf_to_dataclass(OmegaConf.create(section))
        assert FSDPActorConfig is ActorConfig
        assert isinstance(converted, ActorConfig)
        assert (converted.ppo_epochs, converted.optim.lr, converted.clip_ratio) == (
            3,
            1e-5,
            verl.config.ActorConfig().clip_ratio,
        )

    def test_what_does_not_fit(self):
        with pytest.raises(ConfigError, match=r"does not fit Outer.*'nam'"):
            omega_conf_to_dataclass({"nam": "y"}, Outer)
        with pytest.raises(ConfigError, match="does not fit Inner"):
            omega_conf_to_dataclass({"size": "many"}, Inner)
        with pytest.raises(ValueError, match="is not a dataclass"):
            omega_conf_to_dataclass({"a": 1}, dict)
        with pytest.raises(ValueError, match="_target_"):
            omega_conf_to_dataclass({"a": 1})


class TestSections:
    def test_existing_names_are_accepted(self):
        assert FSDPEngineConfig(param_offload=True, fsdp_size=2, model_dtype="bf16").fsdp_size == 2
        actor = ActorConfig(
            ppo_mini_batch_size=8, use_kl_loss=True, clip_ratio_high=0.28, fsdp_config=FSDPEngineConfig(fsdp_size=4)
        )
        assert actor.fsdp_config["fsdp_size"] == 4
        assert actor.get("clip_ratio_high") == 0.28
        rollout = RolloutConfig(name="native", temperature=0.5, tensor_model_parallel_size=2, n=4)
        assert (rollout.temperature, rollout.n, rollout.val_kwargs.n) == (0.5, 4, 1)
        assert CriticConfig(ppo_epochs=2).ppo_epochs == 2

    def test_every_leaf_of_ours_is_a_field(self):
        for cls, ours in (
            (ActorConfig, verl.config.ActorConfig),
            (FSDPEngineConfig, verl.config.FSDPConfig),
            (HFModelConfig, verl.config.ModelConfig),
            (RolloutConfig, verl.config.RolloutConfig),
        ):
            assert issubclass(cls, ours)
            assert [f.name for f in dataclasses.fields(cls)] == [f.name for f in dataclasses.fields(ours)]

    def test_a_model_and_what_its_folder_holds(self, tiny_llama):
        section = OmegaConf.create({"path": str(tiny_llama), "override_config": {"rms_norm_eps": 0.5}, "lora_rank": 4})
        model = omega_conf_to_dataclass(section, dataclass_type=HFModelConfig)
        assert model.local_path == str(tiny_llama)
        assert model.hf_config.rms_norm_eps == 0.5
        assert model.tokenizer.pad_token_id == 256
        assert model.tokenizer is model.tokenizer
        assert model.processor is None
        assert model.get_processor() is model.tokenizer
        assert model.generation_config.eos_token_id == 258
        assert model.architectures == ["LlamaForCausalLM"]
        assert model.lora_rank == 4


class TestWholeTrees:
    def test_a_tree_is_read_like_a_command_line(self, tiny_tree):
        def overrides(tree, prefix=""):
            for name, value in tree.items():
                if isinstance(value, dict):
                    yield from overrides(value, f"{prefix}{name}.")
                else:
                    yield f"{prefix}{name}={value if not isinstance(value, list) else '[' + ','.join(value) + ']'}"

        loaded = loaded_config(OmegaConf.create(tiny_tree))
        assert loaded.config == load_config(list(overrides(tiny_tree))).config
        assert loaded_config(loaded) is loaded

    def test_a_composed_tree_has_every_key(self, tiny_tree):
        """A tree as Hydra passes it: all keys, at their defaults unless a script set them, with `_target_`s."""
        plain = loaded_config(tiny_tree).config
        tree = dataclasses.asdict(verl.config.PPOConfig())
        merged = OmegaConf.merge(tree, tiny_tree)
        merged.actor_rollout_ref.actor["_target_"] = "verl.workers.config.FSDPActorConfig"
        for path in ("actor_rollout_ref.rollout.prompt_length", "actor_rollout_ref.rollout.response_length"):
            OmegaConf.update(merged, path, "${oc.select:data.max_" + path.rpartition(".")[2] + "}")
        merged.trainer.resume_from_path = ""  # of a variable without a value: nothing
        merged.trainer.default_local_dir = tiny_tree["trainer"]["default_local_dir"]
        composed = loaded_config(merged).config
        assert composed.data == plain.data
        assert composed.reward == plain.reward
        assert composed.actor_rollout_ref.rollout == plain.actor_rollout_ref.rollout
        assert loaded_config(plain).config.data == plain.data

    def test_problems_match_a_run(self, tiny_tree):
        assert validate_config(OmegaConf.create(tiny_tree), use_reference_policy=False, use_critic=False) is None
        tiny_tree["data"]["train_batch_" + "sise"] = 3  # a name in this file would be its trainer's
        with pytest.raises(ConfigError, match=r"train_batch_sise.*did you mean"):
            validate_config(OmegaConf.create(tiny_tree), False, False)

    def test_a_module_that_the_program_imports_later_registers_names(self, tiny_tree):
        """As async_flow's agent loop, and SPO's format of calls."""
        agent, turns = (
            {"default_agent_loop": "a_loop_of_a_recipe"},
            {"enable": True, "format": "spo", "tool_config_path": "t.yaml"},
        )
        tiny_tree["actor_rollout_ref"]["rollout"] |= {"agent": agent, "multi_turn": turns}
        rollout = loaded_config(tiny_tree).config.actor_rollout_ref.rollout
        assert (rollout.agent.default_agent_loop, rollout.multi_turn.format) == ("a_loop_of_a_recipe", "spo")
        turns["format"] = agent["default_agent_loop"] = "tool_agent"
        with pytest.raises(ConfigError, match="there is no tool parser 'tool_agent'"):
            load_config([f"actor_rollout_ref.rollout.multi_turn.{name}={value}" for name, value in turns.items()])


def test_the_environment_for_ray(monkeypatch):
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    runtime_env = get_ppo_ray_runtime_env()
    assert runtime_env["env_vars"]["NCCL_DEBUG"] == "WARN"
    assert "TOKENIZERS_PARALLELISM" not in runtime_env["env_vars"]  # this process has set it: Ray passes that on
    assert runtime_env["working_dir"] is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"working_dir": "/x"}}))
    assert "working_dir" not in get_ppo_ray_runtime_env()
