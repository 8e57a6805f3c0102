"""A resumed run compares the content of everything that it reads with what its checkpoint was trained on."""

import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import letters_task
from verl.cli.main import main
from verl.config import PPO, PREFERENCE, RM, SFT, load_config
from verl.errors import CheckpointError, ConfigError
from verl.manifest import find_damage
from verl.models import content
from verl.models.content import digest_of_files, digest_of_weights
from verl.models.tiny import make_tiny_model
from verl.programs.api import PROGRAMS
from verl.registry import reference_to
from verl.run.host import train
from verl.run.inputs import inputs_of
from verl.run.state import START_FILE, digest_of_start, is_same_start

SHORT = ("trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=-1")
PROGRAMS_OF = {schema.name: schema for schema in (PPO, PREFERENCE, SFT, RM)}


# -- changes ------------------------------------------------------------------------------------------------------------


def lines_of(file):
    return file.read_text().splitlines(keepends=True)


def shuffle_rows(inputs):
    rows = lines_of(inputs / "train.jsonl")
    (inputs / "train.jsonl").write_text("".join(rows[1:] + rows[:1]))


def shorten_rows(inputs):
    (inputs / "train.jsonl").write_text("".join(lines_of(inputs / "train.jsonl")[:-4]))


def swap_completions(inputs):
    text = (inputs / "train.jsonl").read_text()
    (inputs / "train.jsonl").write_text(
        text.replace('"chosen"', '"x"').replace('"rejected"', '"chosen"').replace('"x"', '"rejected"')
    )


def edit_validation(inputs):
    (inputs / "val.jsonl").write_text((inputs / "val.jsonl").read_text().replace("val", "VAL"))


def scale_weights(inputs):
    file = inputs / "model" / "model.safetensors"
    save_file({name: tensor * 1.05 for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def swap_token_ids(inputs):
    file = inputs / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tokenizer))


def edit_template(inputs):
    file = inputs / "model" / "tokenizer_config.json"
    if (inputs / "model" / "chat_template.jinja").is_file():
        file = inputs / "model" / "chat_template.jinja"
        file.write_text(file.read_text() + "{# #}")
        return
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "chat_template": settings["chat_template"] + "{# #}"}))


def edit_config(inputs, key="rope_theta", value=20_000.0):
    file = inputs / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


def edit_generation_config(inputs):
    (inputs / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))


def edit_reward(inputs):
    (inputs / "reward.py").write_text((inputs / "reward.py").read_text().replace("1.0 /", "2.0 /"))


def change_nothing(inputs):
    pass


# -- runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def preference_rows():
    pairs = [{"prompt": f"p{i}", "chosen": "ab" * (i % 3 + 1), "rejected": "x" * (i % 2 + 1)} for i in range(8)]
    return "".join(json.dumps(row) + "\n" for row in pairs)


@pytest.fixture(scope="module")
def copy_inputs(tiny_llama, tiny_task, preference_rows):
    """`copy_inputs(program, folder)` copies all that a run of it reads to the new `folder`."""

    def copy(program, folder):
        shutil.copytree(tiny_task, folder)
        shutil.copytree(tiny_llama, folder / "model")
        for split in ("train", "val") if program in ("preference", "rm") else ():
            (folder / f"{split}.jsonl").write_text(preference_rows)
        if program == "sft":
            rows = [json.dumps({"prompt": f"p{i}", "completion": f"c{i}"}) for i in range(8)]
            for split in ("train", "val"):
                (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
        return folder

    return copy


@pytest.fixture
def make_inputs(copy_inputs, tmp_path):
    return lambda program="ppo", name="inputs": copy_inputs(program, tmp_path / name)


@pytest.fixture(scope="module")
def overrides_of(tiny_llama, tiny_task):
    def of(program, inputs, *changes):
        files = (f"data.train_files={inputs}/train.jsonl", f"data.val_files={inputs}/val.jsonl")
        if program == "ppo":
            model = f"actor_rollout_ref.model.path={inputs}/model"
            reward = f"reward.custom_reward_function.path={inputs}/reward.py"
            return letters_task.overrides(tiny_llama, tiny_task, *files, model, reward, *changes)
        base = ["data.train_batch_size=4", "engine.dtype=float32", "trainer.logger=[file]", *files]
        return letters_task.merge([*base, f"model.path={inputs}/model"], changes)

    return of


@pytest.fixture(scope="module")
def start_run(copy_inputs, overrides_of, tmp_path_factory):
    """`start_run(folder, program, *settings)` makes the folder of a run of one step; equal runs are trained once."""

    @functools.cache
    def trained(program, *settings):
        root = tmp_path_factory.mktemp("started")
        folder = f"trainer.default_local_dir={root / 'run'}"
        changes = overrides_of(program, copy_inputs(program, root / "inputs"), *settings, *SHORT, folder)
        assert train(load_config(changes, schema=PROGRAMS_OF[program]), program) == 0
        return root / "run"

    return lambda folder, program, *settings: shutil.copytree(trained(program, *settings), folder)


REFUSED, LISTED = "refused", "listed"
LORA = ("actor_rollout_ref.model.lora_rank=4",)
KL = ("actor_rollout_ref.actor.use_kl_loss=True",)
CHANGES = {
    "rows shuffled": ("ppo", (), shuffle_rows, REFUSED, "data.train_files"),
    "rows left out": ("ppo", (), shorten_rows, REFUSED, "data.train_files"),
    "rows of SFT shuffled": ("sft", (), shuffle_rows, REFUSED, "data.train_files"),
    "rows of a reward model shuffled": ("rm", (), shuffle_rows, REFUSED, "data.train_files"),
    "chosen and rejected swapped": ("preference", (), swap_completions, REFUSED, "data.train_files"),
    "weights under LoRA": ("ppo", LORA, scale_weights, REFUSED, "weights of the actor"),
    "weights of the KL reference": ("ppo", KL, scale_weights, REFUSED, "weights of the actor, weights of the reference"),
    "weights of DPO's reference": (
        "preference", ("ref.precompute=False",), scale_weights, REFUSED, "weights of the model, weights of the reference",
    ),
    "token ids swapped": ("ppo", (), swap_token_ids, REFUSED, "tokenizer of the actor"),
    "chat template": ("ppo", (), edit_template, LISTED, "chat template of the actor"),
    "rope_theta": ("ppo", (), edit_config, LISTED, "config of the actor"),
    "generation config": ("ppo", (), edit_generation_config, LISTED, "generation config of the actor"),
    "reward function": ("ppo", (), edit_reward, LISTED, "reward.custom_reward_function.path"),
    "validation rows": ("ppo", (), edit_validation, LISTED, "data.val_files"),
    "first weights of a policy that trains whole": ("ppo", (), scale_weights, REFUSED, "weights of the actor"),
    "nothing, in another folder": ("ppo", (*KL, *LORA), change_nothing, None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_input_is_refused_or_listed(name, make_inputs, start_run, overrides_of, tmp_path, caplog):
    program, settings, change, effect, words = CHANGES[name]
    schema = PROGRAMS_OF[program]

    def run(inputs, *more):
        folder = f"trainer.default_local_dir={tmp_path / 'run'}"
        train(load_config(overrides_of(program, inputs, *settings, *SHORT, folder, *more), schema=schema), program)

    start_run(tmp_path / "run", program, *settings)
    moved = make_inputs(program, "moved")
    change(moved)
    if effect == REFUSED:
        with pytest.raises(CheckpointError, match=f"trained with another content of: .*{words}.*=warn"):
            run(moved)
        run(moved, "trainer.resume_changed_inputs=warn")
    else:
        run(moved)
    said = [record.getMessage() for record in caplog.records if "another content" in record.getMessage()]
    assert said == ([] if effect is None else [f"The run resumes with another content of: {words}."])


def test_check_says_what_the_run_would_say(make_inputs, overrides_of, tmp_path, capsys):
    def run(inputs, verb):
        return main([verb, *overrides_of("ppo", inputs, *SHORT, f"trainer.default_local_dir={tmp_path / 'run'}")])

    inputs = make_inputs()
    assert run(inputs, "train") == 0
    for change, code, words in (
        (change_nothing, 0, "resumes from step 1"),
        (edit_reward, 0, "resumes with another content of: reward.custom_reward_function.path."),
        (shuffle_rows, 1, "trained with another content of: data.train_files."),
    ):
        change(inputs)
        capsys.readouterr()
        assert run(inputs, "check") == code
        assert words in " ".join(capsys.readouterr().out.split())
        assert run(inputs, "train") == (6 if code else 0)
    assert run(inputs, "train") == 6


@pytest.mark.parametrize(
    ("first", "second"), [("ppo", "sft"), ("sft", "preference"), ("preference", "rm"), ("rm", "ppo")]
)
def test_the_folder_of_another_program_names_both(first, second, make_inputs, start_run, overrides_of, tmp_path):
    start_run(tmp_path / "run", first)
    changes = overrides_of(second, make_inputs(second), *SHORT, f"trainer.default_local_dir={tmp_path / 'run'}")
    words = f"belongs to a run of {PROGRAMS_OF[first].command}, and this is a run of {PROGRAMS_OF[second].command}"
    with pytest.raises(CheckpointError, match=words):
        train(load_config(changes, schema=PROGRAMS_OF[second]), second)


def test_changed_keys_are_compared_with_the_run_that_saved(tiny_run, caplog):
    first = tiny_run(*SHORT, "actor_rollout_ref.actor.optim.lr=0.001", folder="first")
    tiny_run(
        *SHORT, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={first.folder}/global_step_1",
        "data.seed=7", folder="second",
    )  # fmt: skip
    assert "changed settings: data.seed: 42 -> 7; actor_rollout_ref.actor.optim.lr: 0.001 -> 0.002." in caplog.text


def test_a_start_is_compared_where_the_saved_config_has_a_masked_secret(tmp_path):
    def digest(*overrides):
        kwargs = ["+reward.reward_kwargs.api_key=secret-of-the-judge", *overrides]
        return digest_of_start(load_config(kwargs, check=False), {})

    (tmp_path / START_FILE).write_text(json.dumps({"digest": digest("trainer.logger=[file]")}))
    assert is_same_start(tmp_path, digest())
    assert not is_same_start(tmp_path, digest("data.seed=7"))
    assert not is_same_start(tmp_path / "elsewhere", digest())


@pytest.mark.parametrize(
    ("place", "words"),
    [("inputs/model", "is the folder of a model"), ("run/global_step_1", "is in the checkpoint"),
     ("run/global_step_1/inner/run", "is in the checkpoint"), ("link/run", "is in the checkpoint")],
)  # fmt: skip
def test_a_folder_that_is_something_else_is_refused_before_anything_is_written(
    place, words, make_inputs, start_run, overrides_of, tmp_path
):
    inputs, run = make_inputs(), start_run(tmp_path / "run", "ppo")
    (tmp_path / "link").symlink_to(run / "global_step_1")
    with pytest.raises(ConfigError, match=rf"trainer\.default_local_dir={tmp_path}/{place} {words}"):
        load_config(overrides_of("ppo", inputs, f"trainer.default_local_dir={tmp_path / place}"))
    assert find_damage(run / "global_step_1") is None


# -- every input --------------------------------------------------------------------------------------------------------


def digests(program, overrides):
    loaded = load_config(overrides, schema=PROGRAMS_OF[program], check=False)
    return inputs_of(loaded, PROGRAMS.get(program))


ROLLOUT = "actor_rollout_ref.rollout"
SOURCE = "x = 1\n\n\nclass C:\n    pass\n"
ESTIMATOR = "def f(token_level_rewards, response_mask):\n    return token_level_rewards, response_mask\n"
LOSS = "def f(old_log_prob, log_prob, advantages, response_mask, *, agg):\n    return agg(log_prob)\n"
# key -> its value for the file; content of the file is SOURCE unless the row has it
NAMED = {
    "reward.custom_reward_function.path": ("{file}.py", SOURCE),
    "data.custom_cls.path": ("{file}.py", SOURCE),
    "data.sampler.class_path": ("{file}.py", SOURCE),
    "reward.reward_manager.module.path": ("{file}.py", SOURCE),
    "reward.reward_model.judge_template": ("{file}.txt", "{prompt} {response}"),
    "reward.reward_model.rubric": ("{file}.yaml", "- {name: a, question: b, weight: 1}"),
    "reward.custom_reward_function.reward_kwargs": ("{{answers: '{file}.json'}}", "[1]"),
    "data.tool_config_path": ("{file}.yaml", "tools: []"),
    "data.function_tool_path": ("{file}.py", SOURCE),
    f"{ROLLOUT}.multi_turn.tool_config_path": ("{file}.yaml", "tools: []"),
    f"{ROLLOUT}.multi_turn.function_tool_path": ("{file}.py", SOURCE),
    f"{ROLLOUT}.multi_turn.interaction_config_path": ("{file}.yaml", "interaction: []"),
    f"{ROLLOUT}.agent.agent_loop_config_path": ("{file}.yaml", "[]"),
    f"{ROLLOUT}.agent.environment": ("{file}.py:C", SOURCE),
    f"{ROLLOUT}.agent.runner": ("{file}.py:C", SOURCE),
    "actor_rollout_ref.model.custom_chat_template": ("{file}.jinja", "{{ messages }}"),
    "actor_rollout_ref.model.external_lib": ("{module}", SOURCE),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("{file}.py:f", LOSS),
    "algorithm.adv_estimator": ("{file}.py:f", ESTIMATOR),
    "algorithm.stages": ("[{{path: '{file}.py:C', share: 1}}]", SOURCE),
    "trainer.dynamic_config_scheduler": ("{file}.py:C", SOURCE),
}


def changed(overrides, edit):
    """Names of the digests of a PPO run that `edit()` changes."""
    before = digests("ppo", overrides)
    edit()
    after = digests("ppo", overrides)
    return {name for name in before if after[name] != before[name]}


@pytest.mark.parametrize("key", NAMED)
def test_a_byte_of_every_file_that_a_key_names_counts(key, make_inputs, overrides_of, tmp_path, monkeypatch):
    value, text = NAMED[key]
    monkeypatch.syspath_prepend(tmp_path)
    named, inputs = tmp_path / "named", make_inputs()
    file = Path(value.format(file=named, module="named.py").strip("[{}]").split("'")[-2 if "'" in value else 0])
    file = file.with_name(re.sub(r":\w$", "", file.name))
    if not file.is_absolute():
        file = tmp_path / file
    file.write_text(text)
    overrides = overrides_of("ppo", inputs, f"{key}={value.format(file=named, module='named')}")
    assert digests("ppo", overrides) == digests("ppo", overrides)
    assert changed(overrides, lambda: file.write_text(text + "\n")) == {key}


# keys of files without a row in NAMED, by the reason
SOURCES = {
    "rows, see test_inputs_of_rows.py": ("data.train_files", "data.val_files"),
    "models and tokenizers, see MODELS": (
        "model.path", "model.tokenizer_path", "model.model_path", "teacher_model.model_path", "ref.model_path",
        "model.lora_adapter_path",
    ),
    "the same key of another section": ("critic.model.custom_chat_template", "model.external_lib"),
    "written by the run": (
        "prometheus.file", "reply_cache", "default_local_dir", "rollout_data_dir", "validation_data_dir", "save_path",
        "default_hdfs_dir", "weights_dir",
    ),
    "checkpoints": ("resume_from_path", "save_contents", "load_contents"),
    "a name of a family, or a file as that of adv_estimator": (
        "strategy", "rollout.name", "multi_turn.format", "algorithm.program", "policy_loss_mode", "preference.loss",
        "trainer.logger", "agent.default_agent_loop",
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS_OF)
def test_every_key_that_names_files_is_in_the_list(program):
    """A new key gets a row in NAMED, or its reason in SOURCES."""
    reasons = tuple(ending for endings in SOURCES.values() for ending in endings)
    leaves = PROGRAMS_OF[program].leaves.items()
    named = {path for path, leaf in leaves if leaf.names_files and not leaf.inert and not leaf.sizing}
    unlisted = {path for path in named if path not in NAMED and f"actor_rollout_ref.{path}" not in NAMED}
    assert sorted(path for path in unlisted if not path.endswith(reasons)) == []


def test_files_that_named_files_name_count(make_inputs, overrides_of, tmp_path, monkeypatch):
    """The class of a tool, a module that a reward function imports, and a module in a package."""
    inputs = make_inputs()
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "own_tools"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "search.py").write_text(SOURCE)
    (inputs / "tools.yaml").write_text("tools: [{class_name: own_tools.search.C, config: {type: native}}]")
    (inputs / "parts.py").write_text("y = 1\n")
    (inputs / "reward.py").write_text("import json\nfrom parts import y\n" + (inputs / "reward.py").read_text())
    overrides = overrides_of("ppo", inputs, f"{ROLLOUT}.multi_turn.tool_config_path={inputs}/tools.yaml")
    tool, part = f"{ROLLOUT}.multi_turn.tool_config_path", "reward.custom_reward_function.path"
    assert changed(overrides, lambda: (package / "search.py").write_text(SOURCE + "y = 2\n")) == {tool}
    assert changed(overrides, lambda: (inputs / "parts.py").write_text("y = 2\n")) == {part}
    assert "own_tools" not in sys.modules


@pytest.mark.parametrize("line", ["import lib.parts", "from lib.parts import y", "from lib import parts"])
def test_every_way_to_import_a_module_of_a_package_in_the_folder_counts(line, make_inputs, overrides_of):
    inputs = make_inputs()
    (inputs / "lib").mkdir()
    (inputs / "lib" / "parts.py").write_text("y = 1\n")
    (inputs / "reward.py").write_text(f"{line}\n" + (inputs / "reward.py").read_text())
    edited = changed(overrides_of("ppo", inputs), lambda: (inputs / "lib" / "parts.py").write_text("y = 2\n"))
    assert edited == {"reward.custom_reward_function.path"}


def test_the_closure_of_a_function_given_as_an_object_counts(make_inputs, overrides_of):
    inputs = make_inputs()

    def of(value):
        reference = reference_to(lambda completions: [value] * len(completions))
        return digests("ppo", overrides_of("ppo", inputs, f"+reward.reward_kwargs={{functions: ['{reference}']}}"))

    before, after = of(1.0), of(2.0)
    assert of(1.0) == before
    assert {name for name in before if after[name] != before[name]} == {"reward.reward_kwargs"}


MODELS = {
    "teacher": ("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path={model}"),
    "critic": ("algorithm.adv_estimator=gae", "critic.model.path={model}", "critic.model.lora_rank=4"),
    "reward model": ("reward.reward_model.enable=True", "reward.reward_model.model_path={model}"),
}


@pytest.mark.parametrize("role", MODELS)
def test_the_models_of_all_roles_count(role, make_inputs, overrides_of, tmp_path):
    inputs, other = make_inputs(), tmp_path / "other"
    shutil.copytree(inputs / "model", other / "model")
    overrides = overrides_of("ppo", inputs, *(setting.format(model=other / "model") for setting in MODELS[role]))
    before = digests("ppo", overrides)
    assert {f"{part} of the actor" for part in ("tokenizer", "chat template", "generation config", "config")} <= set(
        before
    )
    scale_weights(other)
    after = digests("ppo", overrides)
    assert {name.partition(" of ")[0] for name in before if after[name] != before[name]} == {"weights"}
    edit_config(other, "rms_norm_eps", 1e-3)
    last = digests("ppo", overrides)
    assert {name.partition(" of ")[0] for name in before if last[name] != after[name]} == {"config"}


def test_adapters_that_are_merged_into_a_frozen_model_count(make_inputs, overrides_of, tmp_path):
    inputs, adapter = make_inputs(), tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a": torch.ones(4)}, adapter / "adapter_model.safetensors")
    model = (f"actor_rollout_ref.model.lora_adapter_path={adapter}", "actor_rollout_ref.model.lora_rank=4")
    overrides = overrides_of("ppo", inputs, *KL, *model)
    edited = changed(overrides, lambda: save_file({"a": torch.zeros(4)}, adapter / "adapter_model.safetensors"))
    frozen = {spec.name for spec in roles_of(overrides) if not spec.changes and spec.model.lora_adapter_path}
    assert edited == {f"weights of the {name}" for name in frozen}


def roles_of(overrides):
    return PROGRAMS.get("ppo").roles(load_config(overrides, check=False).config).models


def test_the_settings_of_an_image_processor_count(make_inputs, overrides_of):
    inputs = make_inputs()
    file = inputs / "model" / "preprocessor_config.json"
    file.write_text("{}")
    edited = changed(overrides_of("ppo", inputs), lambda: file.write_text('{"do_resize": false}'))
    assert edited == {"image processor of the actor"}


def test_a_list_of_data_files_counts_in_order(make_inputs, overrides_of):
    inputs = make_inputs()

    def of(files):
        return digests("ppo", overrides_of("ppo", inputs, f"data.train_files={files}"))["data.train_files"]

    shutil.copyfile(inputs / "train.jsonl", inputs / "copy.jsonl")
    train_file, copy, val = inputs / "train.jsonl", inputs / "copy.jsonl", inputs / "val.jsonl"
    assert of(f"[{train_file},{val}]") == of(f"[{copy},{val}]")
    assert of(f"[{train_file},{val}]") != of(f"[{val},{train_file}]")
    assert of(f"[{train_file},{val}]") != of(f"[{train_file}]")


# -- digests ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    """Sampling as of tensors and files that are thousands of times as large."""
    for name, value in {"_WHOLE_BYTES": 4096, "_END_BYTES": 256, "_NUM_BLOCKS": 16, "_BLOCK": 16}.items():
        monkeypatch.setattr(content, name, value)
    monkeypatch.setattr(content, "_WHOLE_TENSOR_BYTES", 64)
    monkeypatch.setattr(content, "_TENSOR_STRIDE", 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_counts(dtype, small_blocks, tmp_path):
    """Scaled by 1.05, or exchanged with another one of its shape."""
    folder = make_tiny_model(tmp_path / "model")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}

    def digest(changed):
        save_file(changed, tmp_path / "changed.safetensors")
        return digest_of_weights([tmp_path / "changed.safetensors"])

    before, shapes = digest(tensors), {}
    for name, tensor in tensors.items():
        assert digest({**tensors, name: tensor * 1.05}) != before, name
        if (other := shapes.setdefault(tensor.shape, name)) != name and not tensor.equal(tensors[other]):
            assert digest({**tensors, name: tensors[other], other: tensor}) != before, (name, other)


def test_the_division_into_weight_files_does_not_count(tmp_path):
    tensors = load_file(make_tiny_model(tmp_path / "model") / "model.safetensors")
    halves = [dict(list(tensors.items())[part::2]) for part in range(2)]
    for part, half in enumerate(halves):
        save_file(half, tmp_path / f"{part}.safetensors", {"format": "pt"})
    parts = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    assert digest_of_weights(parts) == digest_of_weights([tmp_path / "model" / "model.safetensors"])


def test_a_large_file_counts_by_size_end_and_blocks(small_blocks, tmp_path):
    """A byte between two blocks is not seen, as docs/resume.md says."""
    text, file = bytes(range(256)) * 64, tmp_path / "rows.jsonl"

    def digest(content):
        file.write_bytes(content)
        return digest_of_files([file])

    before = digest(text)
    assert digest(text + b"x") != before
    assert digest(text[:-200] + b"x" + text[-199:]) != before
    assert digest(text[1:] + text[:1]) != before
    assert digest(text[:100] + b"x" + text[101:]) == before
