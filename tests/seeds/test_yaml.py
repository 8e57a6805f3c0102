"""YAML of the seed documents, as written: only model, data, devices and sizes are changed. Each trains two steps."""

import pytest

from tests.letters_task import write_task
from verl.config import load_config

pytestmark = pytest.mark.seed("E7")

# name -> (text of the document, changes for one CPU and a tiny model, keys and the values that they must have)
DOCUMENTS = {
    "001 4.1": (
        """
actor_rollout_ref:
  model:
    path: meta-llama/Llama-3-8b
    enable_gradient_checkpointing: true
    use_remove_padding: true
  actor:
    fsdp_config:
      fsdp_size: -1
      param_offload: true
      wrap_policy:
        transformer_layer_cls_to_wrap: [LlamaDecoderLayer]
  rollout:
    name: vllm
    tensor_model_parallel_size: 2
""",
        ["actor_rollout_ref.rollout.name=native", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"],
        {
            "actor_rollout_ref.model.enable_gradient_checkpointing": True,
            "actor_rollout_ref.actor.fsdp_config.param_offload": True,
            "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    ),
    "001 5.3": (
        """
mixed_precision:
  param_dtype: bf16
  reduce_dtype: fp32
  buffer_dtype: fp32
ulysses_sequence_parallel_size: 4
""",
        ["ulysses_sequence_parallel_size=1", "actor_rollout_ref.rollout.name=native"],
        {
            "actor_rollout_ref.actor.fsdp_config.dtype": "bf16",
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": "fp32",
        },
    ),
    "001 6.1 and 6.2": (
        """
fsdp_config:
  param_offload: true
  optimizer_offload: true
  reshard_after_forward: false
  forward_prefetch: true
model:
  use_fused_kernels: true
  fused_kernel_options:
    impl_backend: xformers
""",
        ["actor_rollout_ref.rollout.name=native"],
        {
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
            "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False,
            "actor_rollout_ref.actor.fsdp_config.forward_prefetch": True,
            "actor_rollout_ref.model.use_fused_kernels": True,
        },
    ),
    "002": (
        """
trainer:
  n_gpus_per_node: 8
  nnodes: 2
actor_rollout_ref:
  actor:
    strategy: fsdp
    fsdp_config:
      forward_prefetch: true
      param_offload: true
  ref:
    strategy: fsdp
reward_model:
  strategy: fsdp
algorithm:
  kl_coef: 0.02
  cliprange: 0.2
""",
        ["trainer.n_gpus_per_node=1", "trainer.nnodes=1", "actor_rollout_ref.rollout.name=native"],
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.02,
            "actor_rollout_ref.actor.clip_ratio": 0.2,
        },
    ),
    "002, the list": (
        """
actor_rollout_ref:
  model:
    use_remove_padding: true
  actor:
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 3072
    fsdp_config:
      fsdp_size: -1
      forward_prefetch: true
      cpu_offload: true
      wrap_policy:
        min_num_params: 0
""",
        ["actor_rollout_ref.rollout.name=native"],
        {
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 3072,
            "actor_rollout_ref.actor.fsdp_config.param_offload": True,
        },
    ),
    "000 3.2 and 3.3": (
        """
rollout_config:
  prefetch_num: 2
reward_batch_size: 4
max_prompt_length: 96
""",
        ["actor_rollout_ref.rollout.name=native", "trainer.n_gpus_per_node=1"],
        {"actor_rollout_ref.rollout.prefetch_num": 2, "data.max_prompt_length": 96},
    ),
    "000 4.2": (
        """
actor_model:
  fsdp_config:
    use_3d_hybrid: true
    layer_per_group: 2
    enable_chunked_attention: true
    chunk_size: 512
    batch_group_size: 4
""",
        ["actor_rollout_ref.rollout.name=native"],
        {
            "actor_rollout_ref.actor.fsdp_config.use_3d_hybrid": True,
            "actor_rollout_ref.actor.fsdp_config.layer_per_group": 2,
            "actor_rollout_ref.actor.fsdp_config.chunk_size": 512,
        },
    ),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_yaml_as_written(document, task, tiny_llama, tmp_path):
    from verl.run.host import train

    text, changes, expected = DOCUMENTS[document]
    (tmp_path / "train_config.yaml").write_text(text)
    sizes = [
        f"actor_rollout_ref.model.path={tiny_llama}",
        f"data.train_files={task}/train.jsonl",
        f"data.val_files={task}/val.jsonl",
        "data.train_batch_size=4",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={task}/reward.py",
        "reward.debug=True",
        "trainer.logger=[file]",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    loaded = load_config([*sizes, *changes], str(tmp_path / "train_config.yaml"))
    for key, value in expected.items():
        node = loaded.config
        for name in key.split("."):
            node = node[name] if isinstance(node, dict) else getattr(node, name)
        assert node == value, key
    assert train(loaded) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
