"""Plans can be started: the checks before a run starts accept the overrides of a plan."""

import json
import math

import pytest

from verl.config import load_config
from verl.config.sections.megatron import MegatronConfig
from verl.engines.megatron.model_checks import check_model
from verl.errors import ConfigError
from verl.models.load import load_model_config
from verl.models.parallel.tensor import check_divisible
from verl.planner import known_shape, search
from verl.planner.overrides import overrides
from verl.planner.request import PlanRequest, cluster_of, dataflow_of, engine_of, rules_of, workload_of
from verl.programs.ppo_roles import ppo_roles
from verl.runtime.rank import RankContext

DENSE = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


def folder_of(name, kind, folder):
    """A folder with the config of a published model."""
    shape = known_shape(name)
    sizes = {
        "num_hidden_layers": shape.num_layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab, "max_position_embeddings": 32768,
    }  # fmt: skip
    if shape.is_mixture:
        sizes |= {"num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
        sizes |= {"moe_intermediate_size": shape.expert_intermediate}
    (folder / "config.json").write_text(json.dumps({**kind, **sizes}))
    return folder


def planned(keys, plan_keys):
    """The config of a run that starts with the plan."""
    loaded, request = load_config(keys, check=False), PlanRequest.parse(plan_keys)
    flow = dataflow_of(loaded.config)
    rules = rules_of(request, loaded.config, flow.roles)
    plan = search(flow, cluster_of(request.cluster, loaded), workload_of(loaded.config, request.workload), rules)[0]
    return load_config([*keys, *overrides(plan, engine_of(request, loaded.config), loaded.config)]).config


@pytest.mark.parametrize(
    ("name", "kind", "estimator", "rollout", "plan_keys"),
    [
        ("Qwen3-235B-A22B", MIXTURE, "grpo", "vllm", ["plan.engine=megatron", "plan.cluster.nodes=16"]),
        ("Qwen3-30B-A3B", MIXTURE, "gae", "native", ["plan.engine=megatron", "plan.cluster.nodes=4"]),
        ("Qwen2.5-32B", DENSE, "gae", "vllm", ["plan.engine=megatron", "plan.cluster.nodes=8"]),
        ("Qwen2.5-7B", DENSE, "gae", "native", ["plan.cluster={gpu: a100_sxm, nodes: 3}"]),
        ("Qwen2.5-7B", DENSE, "grpo", "vllm", ["plan.async=on", "plan.cluster.nodes=2"]),
        ("Qwen3-30B-A3B", MIXTURE, "grpo", "vllm", ["plan.cluster={gpu: h200_sxm, nodes: 4}", "plan.async=off"]),
    ],
)
def test_a_run_accepts_its_plan(name, kind, estimator, rollout, plan_keys, tmp_path):
    path = folder_of(name, kind, tmp_path)
    keys = [f"actor_rollout_ref.model.path={path}", f"critic.model.path={path}", f"algorithm.adv_estimator={estimator}",
           f"actor_rollout_ref.rollout.name={rollout}", "actor_rollout_ref.rollout.n=4", "data.train_files=rows.parquet",
           "data.train_batch_size=768", "actor_rollout_ref.actor.use_kl_loss=True",
           "actor_rollout_ref.actor.ppo_mini_batch_size=768"]  # fmt: skip
    config = planned(keys, plan_keys)
    specs, model = ppo_roles(config), load_model_config(str(path), False, {})
    placement = specs.place(None)
    context = RankContext(specs, placement, 0, None, 1, [])
    for spec in specs.models:
        assert context.mesh(spec.name) is not None
        if isinstance(spec.settings, MegatronConfig):
            assert placement.devices[spec.name] == tuple(range(placement.num_devices))
            check_model(spec.settings, model)
            for other in specs.models:
                spec.settings.check_groups(other.settings)
        else:
            check_divisible(model, spec.engine.tensor_parallel_size)
            ranks = len(placement.devices[spec.name]) // spec.engine.tensor_parallel_size
            assert math.gcd(ranks, spec.engine.expert_parallel_size) == spec.engine.expert_parallel_size
    if rollout == "native":
        check_divisible(model, config.actor_rollout_ref.rollout.tensor_model_parallel_size)
    assert context.engine_plan.replicas


def test_megatron_does_not_leave_devices_to_a_rollout():
    request = PlanRequest.parse(["plan.engine=megatron", "plan.async=on"])
    with pytest.raises(ConfigError, match="strategy=megatron takes all devices of a run"):
        rules_of(request, load_config([], check=False).config, ("actor",))
