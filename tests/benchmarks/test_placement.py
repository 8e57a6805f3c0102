"""The sides of benchmarks/placement.py: their keys, their equal work, and the conclusions from their metrics."""

import argparse

import placement
import pytest
from placement import PLACEMENTS, Side, difference, fill, launch, micro_batch_sides, overrides, texts_of, uneven_lengths
from report import Report

from verl.config import load_config
from verl.parallel.placement import Placement

pytestmark = pytest.mark.seed("D1", "D3")


def metrics(step_s, num_steps=4, **changes):
    """Rows of a run whose every step takes `step_s`, half of it in the updates."""
    same = {"perf/total_num_tokens": 100, "critic/score/mean": 0.5, "actor/grad_norm": 2.0, "critic/grad_norm": 3.0}
    spans = {"timing_s/update_actor": step_s / 4, "timing_s/update_critic": step_s / 4}
    return [{"step": n, "time": 50 + n * step_s, **same, **spans, **changes} for n in range(1, num_steps + 1)]


@pytest.fixture(scope="module")
def common(tiny_llama, tmp_path_factory):
    lengths = [uneven_lengths(5, 4, 40, step) for step in range(2)]
    return overrides(tiny_llama, tmp_path_factory.mktemp("work") / "uneven", lengths, 6)


def test_the_first_sides_differ_in_their_devices_alone(common):
    found = {}
    for side in PLACEMENTS:
        config = load_config([*common, *placement.by_tokens(64), *side.changes, *launch(side, "ray")[1]]).config
        found[side.name] = Placement.of(config).sentence()
        assert config.critic.ppo_max_token_len_per_gpu == config.critic.forward_max_token_len_per_gpu == 64
    assert found == {
        "one device, serial": "actor, rollout, reference, critic, reward on 0",
        "device groups": "actor, rollout, reward on 0; reference, critic on 1",
        "every role on both": "actor, rollout, reference, critic, reward on 0-1",
        "one process, two threads": "actor, rollout, reference, critic, reward on 0",
    }


def test_rows_and_tokens_fill_the_same_memory(common):
    rows, tokens = micro_batch_sides(100, 46)
    assert (rows.name, tokens.name) == ("2 rows", "100 tokens")
    fixed, dynamic = (load_config([*common, *side.changes]).config for side in (rows, tokens))
    for section in (fixed.actor_rollout_ref.actor, fixed.critic):
        assert section.ppo_micro_batch_size_per_gpu == 2
        assert not section.use_dynamic_bsz
    for section in (dynamic.actor_rollout_ref.actor, dynamic.critic):
        assert section.ppo_max_token_len_per_gpu == 100
        assert section.use_dynamic_bsz
    assert dynamic.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 100
    assert micro_batch_sides(30, 46)[0].name == "1 rows"


def test_prompts_have_the_asked_lengths_and_are_all_different(common):
    from verl.programs.ppo_data import load_data

    loader = load_data(load_config(common).config).train
    for step in range(2):
        prompts = [tuple(ids) for ids in loader.take(5 * step, 5).non_tensor_batch["prompt_token_ids"]]
        assert [len(ids) for ids in prompts] == uneven_lengths(5, 4, 40, step)
        assert len(set(prompts)) == 5


def test_every_step_gets_the_same_lengths_in_another_order():
    first, second = (uneven_lengths(24, 16, 256, seed) for seed in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert (min(first), max(first)) == (16, 256)
    assert sum(length < 64 for length in first) == 12
    assert uneven_lengths(1, 16, 256, 0) == [16]
    assert [len(text) for text in texts_of([3, 0, 7])] == [3, 0, 7]


def test_processes_are_started_by_ray_or_by_torchrun():
    two = Side("two", 2)
    assert launch(Side("one"), "torchrun") == ((), ())
    assert launch(two, "ray") == ((), ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2"))
    launcher, changes = launch(two, "torchrun")
    assert launcher[:2] == ("-m", "torch.distributed.run")
    assert "--nproc_per_node=2" in launcher
    assert changes == ("trainer.n_gpus_per_node=2",)


def test_the_same_work_may_differ_by_rounding():
    assert difference(metrics(1.0), metrics(0.5, **{"actor/grad_norm": 2.0001})) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"perf/total_num_tokens": 99}, r"\[99, 99, 99, 99\] tokens in the steps, not \[100, 100, 100, 100\]"),
        ({"num_steps": 3}, "tokens in the steps"),
        ({"critic/score/mean": 0.6}, "critic/score/mean of the first step is 0.6, not 0.5"),
        ({"actor/grad_norm": float("nan")}, "actor/grad_norm of the first step is nan, not 2"),
    ],
)
def test_other_work_ends_the_comparison(monkeypatch, tmp_path, changes, message):
    sides = (Side("one"), Side("other"))
    monkeypatch.setattr(
        placement, "train", lambda run, *a, **k: metrics(1.0, **(changes if "other" in run.name else {}))
    )
    with pytest.raises(SystemExit, match="^other did not do the work of one: .*" + message):
        placement.measure(sides, [], argparse.Namespace(rounds=1, runtime="ray"), tmp_path)


def test_sides_take_turns_with_their_own_threads(monkeypatch, tmp_path):
    log = []

    def train(run, changes, *, threads, launcher):
        log.append((run.name, threads, changes))
        return metrics(1.0)

    monkeypatch.setattr(placement, "train", train)
    sides = (Side("one"), Side("a, b", threads=2, changes=("k=v",)))
    found = placement.measure(sides, ["c=d"], argparse.Namespace(rounds=2, runtime="ray"), tmp_path)
    assert {name: len(runs) for name, runs in found.items()} == {"one": 2, "a, b": 2}
    assert log == [
        ("0-one", 1, ["c=d"]),
        ("0-a-b", 2, ["c=d", "k=v"]),
        ("1-a-b", 2, ["c=d", "k=v"]),
        ("1-one", 1, ["c=d"]),
    ]


def test_ratios_are_the_baseline_s_median_over_the_side_s():
    report = Report("t")
    found = {"one": [metrics(2.0), metrics(2.0)], "two": [metrics(0.5), metrics(0.5)]}
    fill(report, "micro_batches", found, placement.MICRO_BATCH_PHASES)
    faster = report.results["micro_batches"]["times_faster"]["two"]
    assert faster == {"step": 4.0, "update_actor": 4.0, "update_critic": 4.0}
    assert report.results["micro_batches"]["seconds"]["one"]["step"]["values"] == [2.0] * 4
    header, rows = report.tables[0]
    assert header == ["micro-batches", "step", "update_actor", "update_critic"]
    assert rows[1] == ["two", "0.500 s ±0% 4.00x", "0.125 s ±0% 4.00x", "0.125 s ±0% 4.00x"]


def test_device_groups_can_save_the_shorter_update():
    assert "1.33x faster" in placement._allowed([metrics(2.0)])


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--steps", "2"], ["--runtime", "mpi"]])
def test_arguments_that_measure_nothing(argv, capsys):
    with pytest.raises(SystemExit):
        placement._parse(argv)
    assert "error" in capsys.readouterr().err
