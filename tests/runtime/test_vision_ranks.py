"""Rows with images on two ranks: tokens, losses and weights equal a single process's, under torchrun and on Ray."""

import pytest
import torch

from tests.json_lines import write_lines
from tests.run.test_vision import FAMILY, dots, is_of_tower
from tests.runtime.conftest import assert_same, assert_same_weights, train_here
from tests.runtime.ranks import run
from tests.vision_families import vision_folder
from verl.data_proto.media import Media
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.parallel.serialize import from_bytes, to_bytes

ACTOR = "actor_rollout_ref.actor"
# an image is in every third row, so that a rank often has none
NUM_ROWS, EVERY = 12, 3
PIXEL_BYTES = 4 * 4 * 2 * 3 * 14 * 14 * 4  # of the patches of an image: two frames of three colours in float32
ON_TWO = {
    "fsdp2": [],
    "replicas": [f"{ACTOR}.fsdp_config.fsdp_size=1"],
    "named_layers": [
        f"{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[Qwen2VLDecoderLayer,Qwen2VLVisionBlock]"
    ],
}
FROZEN = [f"{ACTOR}.freeze_vision_tower=True"]


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    folder = vision_folder(tmp_path_factory.mktemp("vision"), FAMILY)
    for name, count in (("train", NUM_ROWS), ("val", 3)):
        rows = [
            {
                "data_source": "dots",
                "prompt": [{"role": "user", "content": f"{'<image>' if i % EVERY == 0 else ''}{name} {i}?"}],
                "images": [dots(i % 5)] if i % EVERY == 0 else [],
                "reward_model": {"style": "rule", "ground_truth": str(i)},
            }
            for i in range(count)
        ]
        write_lines(folder / f"{name}.jsonl", rows)
    files = [f"data.{name}_files={folder}/{name}.jsonl" for name in ("train", "val")]
    return [f"actor_rollout_ref.model.path={folder}", "data.max_prompt_length=300", *files]


@pytest.fixture(scope="module")
def two_ranks(jobs, vision):
    for name, changes in ON_TWO.items():
        jobs.add(name, *vision, *changes)
    jobs.add("frozen", *vision, *FROZEN)
    jobs.add("resumed", *vision, "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=-1")
    jobs.add("resumed", *vision)
    jobs.add("refused", *vision, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", may_fail=True)
    return jobs, run(2, "tests.runtime.several_runs", jobs.file(), timeout_s=300)


@pytest.fixture(scope="module")
def alone(jobs, vision):
    return train_here(jobs, "alone", *vision)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_equal_one_process(two_ranks, alone, name):
    jobs, _ = two_ranks
    assert_same(jobs.run(name), alone, rel=1e-10)
    assert_same_weights(jobs.run(name), alone, 3, rel=1e-10)


@pytest.mark.slow
def test_a_frozen_tower_keeps_its_weights_on_two_ranks(two_ranks, jobs, vision):
    here, divided = train_here(jobs, "frozen_alone", *vision, *FROZEN), two_ranks[0].run("frozen")
    assert_same(divided, here, rel=1e-10)
    ours, theirs = divided.weights(3), here.weights(3)
    assert all(ours[name].equal(tensor) for name, tensor in theirs.items() if is_of_tower(name))


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_on_two_ranks(two_ranks):
    jobs, _ = two_ranks
    ours, theirs = jobs.run("resumed").weights(3), jobs.run("fsdp2").weights(3)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_divided_sequence_refuses_images(two_ranks):
    assert "without tensor and sequence parallelism" in "".join(two_ranks[1] or ())


@pytest.mark.slow
def test_two_ray_workers_equal_one_process(jobs, vision, alone, monkeypatch, around):
    """And the process of the run gives the pixels of an image to Ray once, for all the calls that read it."""
    ray = pytest.importorskip("ray")
    sizes = []
    around(ray, "put", lambda put, v: sizes.append(sum(getattr(b, "nbytes", 0) for b in v[1:])) or put(v))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("VERL_TEST_WIDE_NORMS", "1")
    on_ray = train_here(jobs, "ray", *vision, "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=4")
    assert_same(on_ray, alone, rel=1e-10)
    assert_same_weights(on_ray, alone, 3, rel=1e-10)
    pictured = [
        {row["prompt"] for row in rows if "<|image_pad|>" in row["prompt"]} for rows in on_ray.samples().values()
    ]
    assert sum(size // PIXEL_BYTES for size in sizes) == sum(map(len, pictured)) > 2


def test_the_rows_of_a_prompt_send_its_images_once():
    media = [Media(str(i), {"pixel_values": torch.randn(64, 100)}) for i in range(2)]
    batch = DataProto.from_dict(
        {"ordinal": torch.arange(8)}, {"media": object_array([media[i // 4] if i != 7 else None for i in range(8)])}
    )
    sent = to_bytes(batch)
    assert len(sent) < 2 * 64 * 100 * 4 + 4000
    column = from_bytes(sent).non_tensor_batch["media"]
    assert [None if item is None else item.digest for item in column] == [*"0000111", None]
    assert all(column[i] is column[i // 4 * 4] for i in range(7))
    assert column[4].tensors["pixel_values"].equal(media[1].tensors["pixel_values"])
