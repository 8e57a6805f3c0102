"""Files behind the names of data sets, and pictures that rows name, are known by their content."""

import json

import pytest
from PIL import Image

from tests.json_lines import write_lines
from verl.config import PPO, PREFERENCE, RM, SFT, load_config
from verl.errors import CheckpointError
from verl.models.tiny import make_tiny_model
from verl.programs.api import PROGRAMS
from verl.run.host import train
from verl.run.inputs import changed_inputs, inputs_of

ROWS = [
    {"prompt": f"What is {n} + 1?", "data_source": "sums", "reward_model": {"ground_truth": "5"}} for n in range(12)
]
SCHEMAS = {schema.name: schema for schema in (PPO, PREFERENCE, SFT, RM)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


# -- data sets ----------------------------------------------------------------------------------------------------------


def write_rows(folder, rows):
    """The rows in every form that a name can have."""
    import datasets
    import pyarrow.csv
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    write_lines(folder / "rows.jsonl", rows)
    (folder / "rows.txt").write_text("".join(row["prompt"] + "\n" for row in rows))
    for part in (0, 1):
        pyarrow.parquet.write_table(table.slice(6 * part, 6), folder / f"part-{part}.parquet")
    with pyarrow.ipc.new_stream(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    pyarrow.csv.write_csv(table.select(["prompt"]), folder / "rows.csv")
    datasets.disable_progress_bars()
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(folder / "saved")


NAMES = [
    "{0}/rows.jsonl", "json:{0}/rows.jsonl", "json:{0}/rows.jsonl@train", "json:{0}/rows.jsonl:train[:20]",
    "parquet:{0}/part-*.parquet", "parquet:{0}/part-*.parquet:train", "arrow:{0}/rows.arrow", "csv:{0}/rows.csv",
    "text:{0}/rows.txt@train", "stream:json:{0}/rows.jsonl:train[:5]", "{0}/saved", "{0}/saved:train", "{0}/saved@train",
    "[json:{0}/rows.jsonl,{0}/part-0.parquet]", "[{0}/part-0.parquet,json:{0}/rows.jsonl]", "[org/absent:train,{0}/rows.jsonl]",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_files_behind_every_name_of_rows_count(name, tiny, tmp_path):
    pytest.importorskip("datasets")

    def digests():
        files = [f"{key}={name.format(tmp_path)}" for key in ("data.train_files", "data.val_files")]
        return inputs_of(load_config([f"model.path={tiny}", *files], schema=SFT, check=False), PROGRAMS.get("sft"))

    write_rows(tmp_path, ROWS)
    before = digests()
    assert digests() == before
    write_rows(tmp_path, ROWS[::-1])
    after = digests()
    assert {key for key in before if before[key] != after[key]} == {"data.train_files", "data.val_files"}
    with pytest.raises(CheckpointError, match=r"another content of: data\.train_files\. Bring it back"):
        changed_inputs(tmp_path, before, after, "refuse")


def test_a_data_set_of_the_hub_has_no_digest(tiny):
    loaded = load_config([f"model.path={tiny}", "data.train_files=org/absent:train"], schema=SFT, check=False)
    assert "data.train_files" not in inputs_of(loaded, PROGRAMS.get("sft"))


# -- pictures -----------------------------------------------------------------------------------------------------------


def ppo_row(place, content="<image>Which colour?"):
    reward = {"style": "rule", "ground_truth": "red"}
    return {"data_source": "colours", "prompt": [{"role": "user", "content": content}], "reward_model": reward, **place}


def asked(place):
    return {"prompt": [{"role": "user", "content": "<image>Which colour?"}], **place}


def answer(text):
    return [{"role": "assistant", "content": text}]


FORMS = {
    "path": lambda file: {"images": [str(file)]},
    "file URL": lambda file: {"images": [file.as_uri()]},
    "object": lambda file: {"images": [{"path": str(file)}]},
    "frames of a video": lambda file: {"videos": [{"video": [str(file), str(file)], "fps": 1}]},
}
PROGRAM_ROWS = {
    "ppo": ppo_row,
    "sft": lambda place: asked(place) | {"completion": answer("red")},
    "preference": lambda place: asked(place) | {"chosen": answer("red"), "rejected": answer("blue")},
    "rm": lambda place: asked(place) | {"chosen": answer("red"), "rejected": answer("blue")},
}
CASES = [(program, "path", ()) for program in PROGRAM_ROWS] + [
    *(("ppo", form, ()) for form in FORMS if form != "path"),
    ("ppo", "path", ("data.filter_overlong_prompts=True",)),
    ("sft", "frames of a video", ()),
]


def paint(folder, *colours):
    for number, colour in enumerate(colours):
        Image.new("RGB", (56, 56), colour).save(folder / f"{number}.bmp")  # of one size, whatever it shows


@pytest.mark.parametrize(("program", "form", "settings"), CASES)
def test_pictures_that_rows_name_count(program, form, settings, folder_of, tmp_path):
    def load(*more):
        model = "actor_rollout_ref.model.path" if program == "ppo" else "model.path"
        files = [f"data.{split}_files={tmp_path}/rows.jsonl" for split in ("train", "val")]
        changes = [f"{model}={folder_of('qwen2_vl')}", *files, "data.train_batch_size=2", *settings, *more]
        config = load_config(changes, schema=SCHEMAS[program], check=False).config
        return PROGRAMS.get(program).select(config).load_data(config).inputs

    paint(tmp_path, "red", "blue")
    rows = [PROGRAM_ROWS[program](FORMS[form](tmp_path / f"{number}.bmp")) for number in (0, 1)]
    if "videos" in rows[0]:
        rows = [json.loads(json.dumps(row).replace("<image>", "<video>")) for row in rows]
    write_lines(tmp_path / "rows.jsonl", rows)
    names = {f"2 pictures of data.{split}_files" for split in ("train", "val")}
    before = load()
    assert set(before) == names
    assert load() == before
    paint(tmp_path, "red", "green")
    after = load()
    assert all(after[name] != before[name] for name in names)
    with pytest.raises(CheckpointError, match="another content of: .*2 pictures of data.train_files"):
        changed_inputs(tmp_path, before, after, "refuse")
    if program == "ppo" and not settings:
        assert load("data.max_prompt_length=400", "data.filter_overlong_prompts=True") == after


def test_a_resume_with_other_pictures_is_refused(folder_of, tmp_path):
    def run(*more):
        changes = [
            f"model.path={folder_of('qwen2_vl')}", f"data.train_files={tmp_path}/rows.jsonl", "data.val_files=[]",
            "data.train_batch_size=2", "data.max_length=200", "engine.dtype=float32", "trainer.logger=[file]",
            "trainer.total_training_steps=1", "trainer.save_freq=1", f"trainer.default_local_dir={tmp_path}/run", *more,
        ]  # fmt: skip
        return train(load_config(changes, schema=SFT), "sft")

    paint(tmp_path, "red", "blue")
    rows = [PROGRAM_ROWS["sft"](FORMS["path"](tmp_path / f"{number}.bmp")) for number in (0, 1)]
    write_lines(tmp_path / "rows.jsonl", rows)
    assert run() == 0
    paint(tmp_path, "red", "green")
    with pytest.raises(CheckpointError, match="trained with another content of: 2 pictures of data.train_files. Bring"):
        run()
    assert run("trainer.resume_changed_inputs=warn") == 0


def test_rows_of_text_have_no_pictures(folder_of, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ppo_row({}, "Which colour?")) + "\n")
    files = [f"data.train_files={tmp_path}/rows.jsonl", "data.val_files=[]", "data.train_batch_size=1"]
    config = load_config([f"actor_rollout_ref.model.path={folder_of('qwen2_vl')}", *files], check=False).config
    assert PROGRAMS.get("ppo").load_data(config).inputs == {}
