"""Snippets of seed document 001 (quick deployment), as written but for model, data, devices and counts.

Its YAML (4.1, 5.3, 6.1, 6.2) is in test_yaml.py, its commands (2.3, 4.2) are in tests/runtime/test_example.py.
"""

import importlib
import sys

import pytest
import torch

from verl.config import FSDPConfig
from verl.engines.sharding import _chosen_by
from verl.models.load import load_model
from verl.worker import ActorRolloutRefWorker, init_context

MY_MODELS = """
from transformers import LlamaConfig, LlamaForCausalLM


class CustomConfig(LlamaConfig):
    pass


class CustomModel(LlamaForCausalLM):
    config_class = CustomConfig
"""
# 5.2: as written, in a file that the config names
WRAP = """
import functools

from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

CustomTransformerBlock, CustomAttention = LlamaDecoderLayer, LlamaAttention


def get_custom_wrap_policy():
    custom_cls = {CustomTransformerBlock, CustomAttention}
    return functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls=custom_cls
    )
"""


@pytest.fixture
def my_models(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(MY_MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_models", None)


@pytest.fixture
def my_custom_model(tiny_llama, tmp_path):
    (tmp_path / "my_custom_model").symlink_to(tiny_llama)
    return str(tmp_path / "my_custom_model")


@pytest.mark.seed("E2")
def test_3_2_a_worker(tiny_llama):
    worker = ActorRolloutRefWorker(
        model_path=str(tiny_llama), tensor_parallel_size=1, max_batch_size=32, rollout_backend="native"
    )  # fmt: skip
    try:
        assert worker.config.actor_rollout_ref.rollout.max_num_seqs == 32
        assert len(worker.generate_sequences("2 + 2?", n=2)) == 2
    finally:
        worker.close()


@pytest.mark.seed("A4")
def test_3_3_a_dataflow():
    from verl import Controller

    class Group:
        def __init__(self, factor):
            self.factor = factor

    controller = Controller(rollout_group=Group(2), update_group=Group(10))
    prompts = [1, 2, 3]

    def responses(group, batch):
        return [group.factor * x for x in batch]

    def experience(batch):
        return [x + 1 for x in batch]

    def advantages(batch):
        return [x - sum(batch) / len(batch) for x in batch]

    def updates(group, batch):
        return [group.factor * x for x in batch]

    data_flow = (
        controller
        .broadcast(prompts)
        .scatter(responses, worker_group="rollout_group")
        .gather(experience)
        .all_reduce(advantages)
        .scatter(updates, worker_group="update_group")
        .sync()
    )  # fmt: skip
    assert data_flow == [-20.0, 0.0, 20.0]


@pytest.mark.seed("B11", "G7")
def test_5_1_a_model_of_ones_own(my_models, my_custom_model, tiny_llama):
    from transformers import AutoModelForCausalLM

    built = []

    class CustomWorker(ActorRolloutRefWorker):
        def _build_model_optimizer(self, model_path, fsdp_config, optim_config, override_model_config, role="actor"):
            built.append((role, optim_config is not None))
            if "my_custom_model" in model_path:
                from my_models import CustomConfig, CustomModel

                config = CustomConfig.from_pretrained(model_path)
                config.update(override_model_config)
                with init_context():
                    model = CustomModel.from_pretrained(
                        model_path, torch_dtype=torch.bfloat16, config=config, trust_remote_code=True
                    )
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    model_path, torch_dtype=torch.bfloat16, trust_remote_code=True
                )
            return model

    overrides = [
        "actor_rollout_ref.actor.fsdp_config.dtype=float32", "data.max_response_length=4",
        "actor_rollout_ref.model.override_config={rms_norm_eps: 0.1}",
    ]  # fmt: skip
    with CustomWorker(my_custom_model, overrides=overrides) as worker:
        module = worker.actor.engine.module
        assert isinstance(module, importlib.import_module("my_models").CustomModel)
        assert module.config.rms_norm_eps == 0.1
        assert built == [("actor", True), ("ref", False)]
        assert module.dtype == torch.float32
        batch = worker.generate_sequences("2 + 2?", n=2)
        assert len(batch) == 2
        old, mask = worker.compute_log_prob(batch).batch["old_log_probs"], batch.batch["response_mask"]
        assert torch.allclose(old[mask], batch.batch["rollout_log_probs"][mask], atol=1e-4)
    with CustomWorker(str(tiny_llama), overrides=overrides) as worker:
        assert type(worker.actor.engine.module).__name__ == "LlamaForCausalLM"


@pytest.mark.seed("B11")
def test_5_2_a_wrap_policy(tiny_llama, tmp_path):
    (tmp_path / "wrap.py").write_text(WRAP)
    config = FSDPConfig(wrap_policy_fn=f"{tmp_path}/wrap.py:get_custom_wrap_policy")
    module = load_model(tiny_llama)
    chosen = _chosen_by(config.wrap_policy_fn, list(module.modules()))
    assert {type(part).__name__ for part in chosen} == {"LlamaDecoderLayer", "LlamaAttention"}
