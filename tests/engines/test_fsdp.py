"""Engines of several ranks against one device: the same losses, norms and weights, whatever the arrangement.

The checks themselves are in parallel_checks.py; all of one number of ranks run in one launch, since starting costs more.
"""

import pytest

from tests.engines import parallel_checks
from tests.engines.ranks import results_once
from verl.config import FSDPConfig
from verl.engines.groups import mesh_of
from verl.errors import ConfigError
from verl.models.parallel.experts import check_experts
from verl.models.parallel.sequence import check_heads
from verl.models.parallel.tensor import check_divisible

pytestmark = pytest.mark.seed("B2", "B7")

CHECKS = {n: f for n, f in vars(parallel_checks).items() if hasattr(f, "ranks")}
SINGLE = {"check_fsdp_float32", "check_muon_float32", "check_bfloat16", "check_float16", "check_padded_family"}
OTHER = {n for n in CHECKS if "checkpoint_of" in n} | {"check_checkpoint", "check_failure_on_the_first_rank"}
OTHER |= {"check_change_while_training", "check_calls_of_modules", "check_groups"}
OTHER |= {"check_memory_of_the_host", "check_weights_are_one_copy"}


@pytest.fixture(scope="module")
def one(tmp_path_factory, worker_id):
    return results_once(parallel_checks.__name__, 1, tmp_path_factory, worker_id)


@pytest.fixture(scope="module")
def two(tmp_path_factory, worker_id):
    return results_once(parallel_checks.__name__, 2, tmp_path_factory, worker_id, timeout_s=300.0)


@pytest.fixture(scope="module")
def four(tmp_path_factory, worker_id, two):  # continues from a checkpoint that two ranks saved
    return results_once(parallel_checks.__name__, 4, tmp_path_factory, worker_id)


def rows(num_ranks, skip=()):
    return sorted(n for n, f in CHECKS.items() if num_ranks in f.ranks and n not in skip)


def assert_equal_in_float64(gaps):
    assert gaps["loss"] < 1e-10
    assert gaps["grad_norm"] < 1e-10
    assert gaps["outputs"] < 1e-10
    assert gaps["weights"] < 1e-10


@pytest.mark.parametrize("check", rows(2, SINGLE | OTHER))
def test_two_ranks_equal_one_device(two, check):
    assert_equal_in_float64(two[check])


@pytest.mark.parametrize("check", rows(4, OTHER))
@pytest.mark.slow
def test_four_ranks_equal_one_device(four, check):
    assert_equal_in_float64(four[check])


@pytest.mark.parametrize(
    ("ranks", "num_divided"), [("one", 0), pytest.param("four", 15 + 9 + 3, marks=pytest.mark.slow)]
)
def test_families_with_a_decoder_call_no_module_of_transformers(request, ranks, num_divided):
    counts = request.getfixturevalue(ranks)["check_calls_of_modules"]
    assert counts == dict.fromkeys(counts, 0)
    assert len(counts) == 4 * 15 + 2 * num_divided, (
        "15 families with adapters or not, and those that divide tokens, tensors or experts, on a CPU and a GPU"
    )


def test_groups_of_equal_ranks_are_one(two):
    counts = two["check_groups"]
    assert counts in [{"groups": [[0], [0, 1]], "threads": n, "num_engines": 3} for n in (2, 0)]  # 0 in PyTorch 2.9


def test_a_rank_without_a_row_to_compute_stays_in_step(two):
    assert two["check_left_out_rows"]["num_steps"] == 0


@pytest.mark.seed("C7")
def test_float32_and_bfloat16(two):
    assert all(gap < 1e-5 for gap in two["check_fsdp_float32"].values())
    gaps = two["check_padded_family"]  # the bias of its keys has a gradient of nothing but rounding
    assert max(gaps["loss"], gaps["grad_norm"], gaps["outputs"]) < 1e-4
    gaps = two["check_bfloat16"]
    assert gaps["loss"] < 0.05
    assert gaps["grad_norm"] < 0.05
    assert gaps["weights"] < 0.05


def test_muon_makes_matrices_orthogonal_in_bfloat16_on_a_gpu(two):
    gaps = two["check_muon_float32"]
    assert gaps["loss"] < 1e-4
    assert gaps["weights"] < 5e-3


def test_float16_skips_a_step_on_all_ranks_if_one_overflows(two):
    gaps, (first, last) = two["check_float16"]["gaps"], two["check_float16"]["scales"]
    assert max(gaps["loss"], gaps["grad_norm"], gaps["weights"]) < 0.01
    assert first == last
    assert [scale for scale, _ in first[:3]] == [2.0**15, 2.0**14, 2.0**13]
    assert first[-1] == [2.0 ** (17 - len(first)), 0.0]  # the last step is taken


@pytest.mark.parametrize("check", ["check_checkpoint", "check_checkpoint_of_experts", "check_checkpoint_of_adapters"])
def test_a_checkpoint_of_two_ranks_is_loaded_bit_for_bit(two, check):
    gaps = two[check]
    assert not any(gaps["different"])
    assert gaps["grad_norm"] < 1e-5
    assert gaps["weights"] < 1e-5
    assert gaps.get("reference", 0.0) < 1e-5
    assert gaps.get("stale", 0.0) < 1e-5


@pytest.mark.slow
def test_a_checkpoint_moves_to_other_arrangements_and_back(four):
    gaps = four["check_checkpoint_of_two_ranks"]
    assert not any(gaps["different"])
    assert gaps["grad_norm"] < 1e-5
    assert gaps["weights"] < 1e-5


@pytest.mark.seed("C5", "G4")
def test_groups_and_chunks_change_while_training(two):
    """Micro-batches of a group share gathers and sums, chunks hold less memory; losses and gradients are the same."""
    steps = two["check_change_while_training"]["steps"]
    num_bytes = 8 * two["check_change_while_training"]["num_parameters"]
    (plain1, ours1), (plain2, grouped), (plain3, chunked) = steps[0:2], steps[2:4], steps[4:6]
    for plain, ours in ((plain1, ours1), (plain2, grouped), (plain3, chunked)):
        assert ours[0] == pytest.approx(plain[0], rel=1e-10)
        assert ours[1] == pytest.approx(plain[1], rel=1e-10)
    sent, peak = 2, 3
    assert ours1[sent] == plain1[sent]
    # half of the model goes out in a gather, half in a sum; at most a few numbers of padding
    assert num_bytes <= grouped[sent] < 1.01 * num_bytes
    assert plain2[sent] > 4 * grouped[sent]
    assert chunked[sent] == plain3[sent]
    assert chunked[peak] < 0.7 * plain3[peak]


def test_ranks_of_a_host_exchange_only_sums_of_gradients(two):
    """A sum of two numbers has one order; with messages the weights travel too, twice."""
    row = two["check_memory_of_the_host"]
    in_memory, in_messages = row["bytes"]
    assert row["differ"] == []
    assert 2 * row["num_parameters"] <= in_memory < 2.1 * row["num_parameters"], "half of the gradients, 4 bytes each"
    assert in_messages > 2 * in_memory


def test_ranks_of_a_host_read_one_copy_of_the_weights(two):
    assert two["check_weights_are_one_copy"] == {"values": [0.5, 0.5], "groups": 0}


def test_all_ranks_hear_of_a_failure_on_the_first(two):
    assert "damaged" in two["check_failure_on_the_first_rank"]["error"]


class _Config:
    """A transformers config, as far as the checks look."""

    def __init__(self, **fields):
        self.__dict__.update(
            {
                "model_type": "llama",
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
                **fields,
            }
        )

    def get_text_config(self):
        return self


@pytest.mark.parametrize(
    ("check", "size", "fields", "message"),
    [
        (check_divisible, 4, {}, "6 attention heads"),
        (check_divisible, 3, {}, "2 key-value heads"),
        (check_divisible, 2, {"intermediate_size": 63}, "63 MLP columns"),
        (check_divisible, 2, {"model_type": "phi3"}, "not phi3"),
        (check_heads, 4, {"sliding_window": 8}, "6 attention heads .*no sliding_window=8"),
        (check_heads, 3, {"attn_logit_softcapping": 50.0}, "2 key-value heads.*attn_logit_softcapping=50"),
        (check_experts, 2, {}, "mixture-of-experts"),
        (check_experts, 3, {"model_type": "mixtral", "num_local_experts": 4}, "4 experts"),
    ],
)
def test_what_a_model_cannot_be_divided_into_is_refused(check, size, fields, message):
    with pytest.raises(ConfigError, match=message):
        check(_Config(**fields), size)


@pytest.mark.parametrize("size", [1, 2])
def test_what_divides_is_not_refused(size):
    config = _Config(model_type="qwen3_moe", num_experts=4)
    for check in (check_divisible, check_heads, check_experts):
        check(config, size)
    check_heads(_Config(num_attention_heads=8, sliding_window=8), 4)  # a multiple of the key-value heads
    check_heads(_Config(), 4)  # by ring attention
    check_heads(_Config(sliding_window=8, use_sliding_window=False), 4)


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    assert mesh_of(FSDPConfig(fsdp_size=2, tensor_parallel_size=2), 8).dp_size == 4
    with pytest.raises(ConfigError, match="3 devices do not divide"):
        mesh_of(FSDPConfig(tensor_parallel_size=2), 3)
    with pytest.raises(ConfigError, match="fsdp_size=3"):
        mesh_of(FSDPConfig(fsdp_size=3), 4)
