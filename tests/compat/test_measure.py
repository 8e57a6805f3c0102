"""The measurements that users call: their tables and their results."""

import pytest

from verl.compat.measure import AllGatherTime, benchmark_nccl, benchmark_throughput
from verl.errors import DeadlineError, ModelError

pytestmark = pytest.mark.seed("E6")


def test_the_rate_is_of_what_a_device_receives():
    assert AllGatherTime("gloo", num_ranks=4, num_bytes=400, seconds=0.5).bytes_per_s == 600


@pytest.mark.slow
def test_all_gathers_of_a_models_units(tiny_llama, capsys):
    gathers = benchmark_nccl(str(tiny_llama), num_repeats=1, timeout_s=120.0)
    assert [(g.backend, g.num_ranks) for g in gathers] == [("gloo", 2)] * 2
    assert all(g.seconds > 0 for g in gathers)
    printed = capsys.readouterr().out
    assert "all-gather by gloo" in printed
    assert "devices of a copy" in printed
    with pytest.raises(DeadlineError, match="more than timeout_s=0.01 s"):
        benchmark_nccl(str(tiny_llama), timeout_s=0.01)


@pytest.mark.slow
def test_every_way_to_share_a_copy(capsys):
    from verl.utils import benchmark_nccl as by_its_path

    gathers = by_its_path(num_ranks=4, num_repeats=2)
    assert [(g.num_ranks, g.num_bytes >> 20) for g in gathers] == [(n, size) for n in (2, 4) for size in (1, 16, 128)]
    assert len(capsys.readouterr().out.splitlines()) > 6


@pytest.mark.slow
def test_the_throughput_of_a_config(capsys):
    from verl.utils import benchmark_throughput as by_its_path

    throughput = by_its_path(["data.max_response_length=8"], num_steps=3)
    assert throughput["tokens_per_s"] > 0
    assert throughput["step_s"] > 0
    assert sum(throughput["shares"].values()) == pytest.approx(1.0, abs=0.02)
    assert "tokens per second and device, median of 2 steps" in capsys.readouterr().out
    with pytest.raises(ModelError, match="did you mean 'data.max_response_length'"):
        benchmark_throughput(["data.max_respone_length=8"])
