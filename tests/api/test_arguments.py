"""Arguments of Python calls against the keys that they stand for."""

import inspect
import os
from functools import partial

import pytest

import verl
import verl.api
import verl.session
from tests.api.functions import length, starts
from verl.errors import ConfigError

ROWS = [{"prompt": "a", "answer": "b", "chosen": "b", "rejected": "c", "completion": "b"}]
PATH, KEY_OF_REWARD = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
# argument with a default -> (its key, another value of the key, a value of the argument)
KEYS = {
    "reward": (PATH, __file__, starts),
    "algorithm": ("algorithm.adv_estimator", "rloo", "grpo"),
    "loss": ("preference.loss", "ipo", "hinge"),
    "eval_data": ("data.val_files", __file__, ROWS),
    "output_dir": ("trainer.default_local_dir", "elsewhere", "here"),
}
WITHOUT_KEY = {"callbacks": "an object of the script", "config": "the keys themselves"}
# entry -> its arguments that stand for keys; of a Trainer if the signature has **arguments
ENTRIES = {
    "Trainer": {*KEYS} - {"loss"},
    "train": {*KEYS} - {"loss"},
    "sft": {"eval_data", "output_dir"},
    **dict.fromkeys(("preference", "dpo"), {"loss", "eval_data", "output_dir"}),
    **dict.fromkeys(("kto", "orpo", "simpo", "cpo"), {"eval_data", "output_dir"}),  # their loss is their name
    "reward_model": {"eval_data", "output_dir"},
    "evaluate": {"reward", "algorithm", "output_dir"},
    "generate": {"reward", "algorithm", "output_dir"},
}


class Loaded(Exception):
    """Ends a call once its config exists."""


@pytest.fixture
def values(monkeypatch, tmp_path):
    """Function: entry, arguments -> the values of all keys."""
    monkeypatch.chdir(tmp_path)

    class Stops(verl.api.Trainer):
        def __init__(self, *args, **arguments):
            super().__init__(*args, **arguments)
            raise Loaded(self.loaded.schema.flatten(self.loaded.config))

    monkeypatch.setattr(verl.api, "Trainer", Stops)
    monkeypatch.setattr(verl.api, "_Sampler", Stops)

    def call(entry, **arguments):
        function = Stops if entry == "Trainer" else getattr(verl, entry)
        with pytest.raises(Loaded) as loaded:
            function("model", ROWS, **arguments)
        return loaded.value.args[0]

    return call


def with_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is not p.empty}


def test_every_argument_with_a_default_is_in_a_table():
    functions = {name: getattr(verl, name) for name in verl._API}
    assert {*functions} == {*ENTRIES}
    for name, function in functions.items():
        assert with_defaults(function) <= {*KEYS, *WITHOUT_KEY}, name


@pytest.mark.parametrize("form", ["dotted", "nested", "text"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_argument_that_is_not_given_gives_way_to_its_key(values, entry, form):
    for argument in ENTRIES[entry]:
        key, other, _ = KEYS[argument]
        section, name = key.split(".", 1)
        config = {"dotted": {key: other}, "nested": {section: {name: other}}, "text": [f"{key}={other}"]}[form]
        reward = {} if argument == "reward" or entry in ("sft", "reward_model") else {"reward": length}
        if ENTRIES[entry] & {"loss"} or entry in ("kto", "orpo", "simpo", "cpo"):
            reward = {}
        expected = os.path.abspath(other) if argument == "output_dir" else other
        assert values(entry, config=config, **reward)[key] == expected, argument


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_argument_and_another_value_of_its_key_are_refused_by_both_names(values, entry):
    for argument in ENTRIES[entry]:
        key, other, value = KEYS[argument]
        for config in ({key: other}, [f"{key}={other}"]):
            with pytest.raises(ConfigError, match=rf"{key}=.* and the argument {argument} of the call"):
                values(entry, config=config, **{argument: value})


def test_equal_values_of_an_argument_and_its_key_are_one(values):
    loaded = values(
        "train", reward=length, algorithm="rloo", config={"algorithm.adv_estimator": "rloo"}, output_dir="a"
    )
    assert (loaded["algorithm.adv_estimator"], loaded["trainer.default_local_dir"]) == ("rloo", os.path.abspath("a"))
    assert values("kto", config={"preference.loss": "kto"})["preference.loss"] == "kto"


def test_the_loss_of_a_name_and_another_loss_are_refused(values):
    for entry in ("kto", "orpo", "simpo", "cpo"):
        with pytest.raises(ConfigError, match=r"preference.loss='ipo' .* the argument loss of the call"):
            values(entry, config={"preference.loss": "ipo"})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (verl.orpo, "data"),
        (verl.sft, "model"),
        (partial(verl.train, "m"), "data"),
        (partial(verl.evaluate, "m"), "data"),
    ],
)
def test_a_section_with_the_name_of_an_argument_belongs_to_config(call, name):
    with pytest.raises(ConfigError, match=rf"config=\{{'{name}'"):
        call("m", [], **{name: {"train_batch_size": 2}})


def test_samples_are_scored_by_the_function_of_a_key(values):
    assert values("generate")[PATH] is None
    loaded = values("generate", config={PATH: __file__})
    assert (loaded[KEY_OF_REWARD], loaded["reward.custom_reward_function.reward_kwargs"]) == ("compute_score", {})


def test_arguments_of_a_session(monkeypatch):
    def stop(config):
        raise Loaded(config.path)

    monkeypatch.setattr(verl.session, "load_tokenizer", stop)
    with pytest.raises(Loaded, match="model"):
        verl.Session("model", config={"actor_rollout_ref.model.path": "model"})
    with pytest.raises(ConfigError, match=r"model\.path='other' \(Python\) and the argument model of the call"):
        verl.Session("model", config={"actor_rollout_ref.model.path": "other"})
    assert with_defaults(verl.Session) == {"config"}
    assert inspect.signature(verl.Session.sample).parameters["n"].default is None  # rollout.n, see test_session.py


def test_presets_are_named_as_papers_write_them(tiny_llama, tmp_path):
    for name in ("DAPO", "dapo"):
        trainer = verl.Trainer(tiny_llama, ROWS, length, algorithm=name, output_dir=tmp_path / name)
        assert trainer.loaded.config.algorithm.filter_groups.enable


def test_an_output_folder_that_cannot_be_written_is_named(tiny_llama, tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "file", "Not a directory"), (tmp_path / ("n" * 300), "File name too long")):
        with pytest.raises(
            ConfigError, match=rf"run folder .* cannot be written \({reason}\)\. Set trainer\.default_local_dir"
        ):
            verl.Trainer(tiny_llama, ROWS, length, output_dir=folder)
