"""The Megatron engine: sizes that are refused, and on two and four ranks the losses, norms and states of one device."""

from types import SimpleNamespace

import pytest

from tests.engines.ranks import results_once
from verl.config import FSDPConfig, OptimConfig, SFTModelConfig
from verl.config.sections.megatron import MegatronConfig
from verl.engines.megatron.engine import MegatronEngine
from verl.engines.megatron.model_checks import check_model
from verl.errors import ConfigError

pytestmark = pytest.mark.seed("B3")

CHECKPOINTS = (
    "check_checkpoint",
    "check_checkpoint_of_muon",
    "check_checkpoint_of_adapters",
    "check_checkpoint_of_dora",
)
OTHER = {"check_rounding", "check_declared_weights", "check_refused_steps", "check_groups", *CHECKPOINTS}


def model(**changes):
    return SimpleNamespace(
        **{
            "model_type": "qwen3_moe",
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_experts": 6,
            "num_hidden_layers": 6,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ({"tensor_model_parallel_size": 3}, {}, "does not divide the model's 8 attention heads"),
        ({"tensor_model_parallel_size": 8}, {}, "does not divide the model's 4 key-value heads"),
        ({"pipeline_model_parallel_size": 4}, {}, "does not divide the model's 6 layers"),
        ({"expert_model_parallel_size": 4}, {}, "does not divide the model's 6 experts"),
        ({"expert_model_parallel_size": 2}, {"num_experts": None, "model_type": "qwen3"}, "qwen3 has no experts"),
        ({"expert_tensor_parallel_size": 3}, {}, "does not divide the 16 columns of an expert"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": False}, {}, "Megatron needs it for experts"),
        ({}, {"model_type": "gemma"}, "no name map for gemma"),
    ],
)
def test_sizes_that_a_model_forbids_are_refused(section, changes, words):
    with pytest.raises(ConfigError, match=words):
        check_model(MegatronConfig(**section), model(**changes))


def test_stages_of_unequal_layers():
    uneven = {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}
    section = MegatronConfig(pipeline_model_parallel_size=4, override_transformer_config=uneven)
    check_model(section, model())
    assert section.layers_per_stage(6) == (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("section", "num_ranks", "words"),
    [
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 6, "6 devices do not divide"),
        ({"expert_model_parallel_size": 3}, 4, "does not divide the 4 devices of a stage"),
    ],
)
def test_sizes_that_do_not_divide_the_devices_are_refused(section, num_ranks, words):
    with pytest.raises(ConfigError, match=words):
        MegatronConfig(**section).sizes(num_ranks)


def test_settings_of_layers_that_do_not_act_are_named():
    def unread(**settings):
        return MegatronConfig(override_transformer_config=settings).unread_settings()

    assert unread(hidden_size=4, recompute_granularity="full", moe_aux_loss_coeff=0.1) == [
        "hidden_size",
        "moe_aux_loss_coeff",
    ]
    assert not unread(recompute_granularity="full", apply_rope_fusion=True, moe_aux_loss_coeff=0.0)
    assert "needs pipeline" in next(MegatronConfig(virtual_pipeline_model_parallel_size=2).contradictions())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"neftune_alpha": 5.0}}, r"model\.neftune_alpha is not available"),
        ({"engine": {"adapt_micro_batches": True}}, "adapt_micro_batches is not available"),
        ({"engine": {"use_3d_hybrid": True}}, "use_3d_hybrid is of strategy=fsdp2"),
        ({"optim": {"optimizer": "Adafactor"}}, "optimizer=Adafactor may look at whole matrices"),
        ({"section": {"tensor_model_parallel_size": 8}}, "2 devices do not divide"),
        ({"section": {"expert_model_parallel_size": 2}}, "llama has no experts"),
    ],
)
def test_roles_that_the_engine_cannot_have_are_refused(tiny_llama, changes, words):
    model = SFTModelConfig(path=str(tiny_llama), **changes.get("model", {}))
    optim, section = OptimConfig(**changes.get("optim", {})), MegatronConfig(**changes.get("section", {}))
    with pytest.raises(ConfigError, match=words):
        MegatronEngine.check_role(model, FSDPConfig(**changes.get("engine", {})), optim, section, 2)


def test_roles_share_the_sizes_of_their_groups():
    actor, critic = MegatronConfig(pipeline_model_parallel_size=2), MegatronConfig(tensor_model_parallel_size=2)
    actor.check_groups(MegatronConfig(pipeline_model_parallel_size=2, use_distributed_optimizer=False))
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=1 and 2, pipeline_model_parallel_size=2 and 1"):
        actor.check_groups(critic)


@pytest.fixture(scope="module")
def checks_of(tmp_path_factory, worker_id):
    pytest.importorskip("megatron.core", reason="needs the extra megatron")
    return lambda num_ranks: results_once(
        "tests.engines.megatron_checks", num_ranks, tmp_path_factory, worker_id, 480.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_several_ranks_equal_one_device(checks_of, num_ranks):
    gaps = {check: gaps for check, gaps in checks_of(num_ranks).items() if check not in OTHER}
    assert len(gaps) == {2: 42, 4: 14}[num_ranks]
    assert {(check, n): gap for check, row in gaps.items() for n, gap in row.items() if gap > 1e-5} == {}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rounding_and_parts_match_every_engine(checks_of, num_ranks):
    for check in ("check_rounding", "check_declared_weights"):
        assert {name: n for name, n in checks_of(num_ranks)[check].items() if n} == {}, check


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_groups_of_equal_ranks_are_one(checks_of, num_ranks):
    groups = checks_of(num_ranks)["check_groups"]["groups"]
    assert len(groups) == len({tuple(ranks) for ranks in groups})
    assert num_ranks == 4 or groups == [[0], [0, 1]], "two, and not 18"


@pytest.mark.slow
def test_refused_steps_leave_no_trace(checks_of):
    assert set(checks_of(2)["check_refused_steps"].values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKPOINTS)
def test_checkpoints_continue_bit_for_bit_and_with_other_engines(checks_of, check):
    results = checks_of(2)[check]
    assert {name: n for name, n in results.items() if n and "gap" not in name} == {}
    assert all(gap < 1e-5 for name, gap in results.items() if "gap" in name)
