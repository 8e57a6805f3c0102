"""Vision towers in plans: their sizes, and what images add to the memory and the time of a step."""

import json

import pytest
import torch

from tests.vision_families import CONFIGS, random_images, random_model
from verl.cli.main import main
from verl.data_proto.extras import BatchExtras
from verl.data_proto.media import Media
from verl.engines.api import MicroBatching
from verl.engines.micro_batches import image_costs, plan_micro_batches
from verl.models.packing import unpadded_rows
from verl.models.shapes import ModelShape, known_shape
from verl.models.vision import freeze_towers

PLAN = ("actor_rollout_ref.model.path=Qwen2.5-VL-7B", "data.max_prompt_length=2048", "plan.workload.prompt_mean=1100")


def test_a_published_tower_has_its_size():
    """Qwen2.5-VL-7B has 8.29 billion parameters, 0.68 of them in its tower (arXiv:2502.13923, table 1)."""
    shape = known_shape("Qwen/Qwen2.5-VL-7B-Instruct")
    assert shape.tower.num_parameters / 1e9 == pytest.approx(0.68, abs=0.01)
    assert shape.num_parameters / 1e9 == pytest.approx(8.29, abs=0.01)


@pytest.mark.parametrize("family", CONFIGS)
def test_micro_batches_count_the_tower(family):
    model = random_model(family)
    media = Media("a", random_images(family)[0])
    cost = image_costs(model)(media)
    assert cost > 0
    assert ModelShape.from_config(model.config).tower.patches == (1 if family.startswith("llava") else 4)
    ids = torch.arange(1, 9).repeat(4, 1)
    columns = {"prompts": ids, "prompt_mask": ids > 0, "responses": ids, "response_mask": ids > 0}
    rows = unpadded_rows(columns, extras=BatchExtras([media, media, None, None]), cost_of=image_costs(model))
    one = 8 + cost + 7 + 7
    assert plan_micro_batches(rows, MicroBatching(max_tokens=one), True) == [[0, 1], [2, 3]]
    freeze_towers(model)
    assert image_costs(model) is None


def test_images_take_time_of_a_plan_that_says_the_tower(capsys):
    def planned(*settings):
        assert main(["plan", *PLAN, *settings]) == 0
        return capsys.readouterr().out

    best = [json.loads(planned("--json", f"plan.workload.image_tokens={n}"))["best"] for n in (1, 1000)]
    assert best[0]["step_s"] < best[1]["step_s"]
    printed = planned("plan.workload.image_tokens=1000")
    assert "vision tower: 675 million parameters, 4 patches a token; 1,000 of 1,100 tokens of a prompt" in printed
    assert "vision tower " in printed.split("phase")[1]
    assert "no images, set plan.workload.image_tokens" in planned()
