"""Override lists for vision-language models (vision_lists.py): each trains two steps on a tiny model of its family, or gets its
sentence."""

import json

import pytest

from tests.compat.recipes import dynamic_sampling
from tests.compat.vision_lists import FINE_TUNING, GEO3K, QUICK, RUNS
from tests.json_lines import write_lines
from tests.letters_task import REWARD, merge, overrides
from tests.run.conftest import Run, train_run
from tests.run.test_vision import dots
from tests.slow import slow
from verl.config import PPO, SFT, load_config
from verl.errors import ModelError


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Folder with train.jsonl and val.jsonl of rows like geometry3k's, sft.jsonl and reward.py."""
    folder = tmp_path_factory.mktemp("geometry")
    question = [{"role": "user", "content": "<image>How many?"}]
    rows = [
        {"data_source": "dots", "prompt": question, "images": [dots(i % 4)], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": str(i % 4)}, "extra_info": {"split": "train", "index": i}}
        for i in range(8)
    ]  # fmt: skip
    sft = [
        {"messages": [*question, {"role": "assistant", "content": f"{i % 4}"}], "images": [dots(i % 4)]}
        for i in range(8)
    ]
    for name, written in (("train", rows), ("val", rows[:2]), ("sft", sft)):
        write_lines(folder / f"{name}.jsonl", written)
    (folder / "reward.py").write_text(REWARD)
    (folder / "tools.yaml").write_text(
        "tools:\n- {class_name: verl.tools.geo3k_tool.Geo3kTool, config: {type: native}}\n"
    )
    return folder


def settings_of(model, task, text, out=""):
    places = {"model": model, "tools": f"{task}/tools.yaml", "out": out}
    return merge(overrides(model, task, "data.max_prompt_length=300"), text.format(**places).split())


@pytest.mark.parametrize("name", [slow(name, when=name not in QUICK) for name in RUNS])
def test_a_list_trains_two_steps(name, folder_of, task, tmp_path):
    family, text = RUNS[name]
    run = train_run(tmp_path / "run", settings_of(folder_of(family), task, text, tmp_path))
    assert [row["step"] for row in run.training_rows() if row["actor/grad_norm"] > 0] == [1, 2]


def test_the_lists_pass_the_checks(folder_of, task):
    model = folder_of("qwen2_vl")
    for _, text in RUNS.values():
        load_config(settings_of(model, task, text), schema=PPO)
    for _, text in FINE_TUNING.values():
        loaded = load_config([f"model.path={model}", *text.format(task=task).split()], schema=SFT)
        assert loaded.config.data.image_key == "images"


@pytest.mark.parametrize("name", [slow(name) for name in FINE_TUNING])
def test_a_list_of_fine_tuning_trains_two_steps(name, folder_of, task, tmp_path):
    family, text = FINE_TUNING[name]
    settings = [f"model.path={folder_of(family)}", *text.format(task=task).split()]
    run = train_run(tmp_path / "run", settings, program="sft")
    assert [row["step"] for row in run.training_rows() if row["train/grad_norm"] > 0] == [1, 2]


@pytest.mark.slow
def test_the_fit_of_a_recipe_trains_on_images(folder_of, task, tmp_path):
    text = f"{GEO3K} algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_reward"
    settings = settings_of(folder_of("qwen2_5_vl"), task, text)
    ours = train_run(tmp_path / "ours", settings)
    dynamic_sampling.main([*settings, f"trainer.default_local_dir={tmp_path}/theirs"])
    assert all("media" in batch.non_tensor_batch for _, batch in dynamic_sampling.Runner.trainers[-1].trained)
    for our_row, row in zip(ours.training_rows(), Run(tmp_path / "theirs").training_rows(), strict=True):
        assert row["actor/grad_norm"] == pytest.approx(our_row["actor/grad_norm"], rel=1e-4)


def test_a_family_of_other_code_gets_its_sentence(folder_of, task, tmp_path):
    """MiniCPM-o has its code in its folder, and no module of transformers."""
    folder = tmp_path / "minicpm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "minicpmo", "architectures": ["MiniCPMO"]}))
    with pytest.raises(ModelError):
        train_run(tmp_path / "run", settings_of(folder, task, GEO3K))
