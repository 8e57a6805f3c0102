"""Command-line overrides: the frequent ones, the syntax, and the refused ones."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl.config.loaded import scalar
from verl.config.values import parse_override
from verl.errors import ConfigError

from .helpers import ACTOR, GRPO, ROLLOUT, fixture_lines, load, refused

FREQUENT = [(*line.split("\t"), "")[:3] for line in fixture_lines("overrides.tsv")]


@pytest.mark.parametrize("status", ["accepted", "later", "other trainer"])
def test_frequent_overrides(status):
    rows = [row for row in FREQUENT if row[1] == status]
    assert rows
    for override, _, context in rows:
        if status == "accepted":
            load(*context.split(), override)
        elif status == "later":
            refused(
                *context.split(), override, match="not available in this version|reward_model.enable|lora_rank|enable="
            )
        else:
            refused(override, match="There is no key")


def test_frequent_overrides_together_are_a_run():
    """The most frequent keys at a frequent value, with engine name and counts changed: a typical GRPO script."""
    counts = {"trainer.n_gpus_per_node": "1", "trainer.nnodes": "1"}
    chosen: dict[str, str] = {}
    for override, status, _ in FREQUENT:
        key, _, value = override.partition("=")
        if status != "other trainer" and len(chosen) < 90:
            chosen.setdefault(key, value)
    chosen.update({**counts, f"{ROLLOUT}.name": "native", "model_engine": "dp"})
    chosen.update({"algorithm.adv_estimator": "grpo", f"{ACTOR}.policy_loss.loss_mode": "vanilla"})
    chosen.pop("critic.model.path")
    loaded = load(*(f"{k}={v}" for k, v in chosen.items()))
    assert loaded.config.actor_rollout_ref.rollout.n == 5
    assert loaded.config.trainer.logger == ["console", "wandb"]
    assert any("data.return_raw_chat" in n for n in loaded.notices)


SYNTAX = [
    ("a.b=1", 1),
    ("a.b=-1", -1),
    ("a.b=1e-6", 1e-6),
    ("a.b=.5", 0.5),
    ("a.b=0.5_2", "0.5_2"),
    ("a.b=1_2", "1_2"),
    ("a.b=True", True),
    ("a.b=false", False),
    ("a.b=null", None),
    ("a.b=", ""),
    ("a.b=word", "word"),
    ("a.b='1'", "1"),
    ('a.b="a b"', "a b"),
    (r"a.b='it\'s'", "it's"),
    ("a.b=x=y", "x=y"),
    ("a.b=$HOME/data", "$HOME/data"),
    ("a.b=~/data", "~/data"),
    ("a.b=['console','wandb']", ["console", "wandb"]),
    ('a.b=["console","wandb"]', ["console", "wandb"]),
    ("a.b=[console, wandb]", ["console", "wandb"]),
    ("a.b=[0.9,0.95]", [0.9, 0.95]),
    ("a.b=[]", []),
    ("a.b=[[1,2],['a,b']]", [[1, 2], ["a,b"]]),
    ("a.b={}", {}),
    ("a.b={x:1,y:[a,b],'z z':null}", {"x": 1, "y": ["a", "b"], "z z": None}),
    ("a.b={url:'http://x:1'}", {"url": "http://x:1"}),
    ("a.b=http://x:1/y", "http://x:1/y"),
    ("+a.b=1", 1),
    ("++a.b=1", 1),
    ("a.b=${oc.env:HOME}", "${oc.env:HOME}"),
    ("a.b=inf", float("inf")),
]


@pytest.mark.parametrize(("argument", "value"), SYNTAX)
def test_syntax(argument, value):
    override = parse_override(argument)
    assert override.key == "a.b"
    assert override.value == value
    assert type(override.value) is type(value)


@pytest.mark.parametrize(
    "argument", ["a.b", "=1", "--config-name=x", "a.b=[1,2", "a.b=[1,'2]", "a.b={x}", "a.b=[1]]", "a b", "a.b=[(1]"]
)
def test_bad_syntax_is_a_sentence(argument):
    with pytest.raises(ConfigError, match=r"key=value|no value|bracket|quotation|name:value"):
        parse_override(argument)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc .:,", max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_written_values_read_back(value):
    """Values of config.yaml can be pasted into an override."""
    text = scalar(value)
    assume("\\u" not in text)
    assume("\\" not in text.replace('\\"', "").replace("\\\\", ""))  # JSON's other escapes are YAML's, not the shell's
    assert parse_override(f"a.b={text}").value == value


def test_marks_and_deletion():
    loaded = load(
        *GRPO, "+trainer.total_epochs=2", "++trainer.save_freq=5", "trainer.test_freq=7", "~trainer.test_freq"
    )
    trainer = loaded.config.trainer
    assert (trainer.total_epochs, trainer.save_freq, trainer.test_freq) == (2, 5, -1)
    assert loaded.origins["trainer.test_freq"] == "default"
    assert any("~trainer.test_freq" in notice for notice in loaded.notices)
    refused("+trainer.no_such_key=1", match="no key")
    refused("~trainer.no_such_key", match="no key")


def test_hydra_keys_are_a_notice():
    assert any("hydra.run.dir" in notice for notice in load("hydra.run.dir=/x").notices)
    refused("rollout@actor_rollout_ref.rollout=other", match="config group; the groups here are: actor, ref, critic")
    refused("actor@actor_rollout_ref.actor=mlite_actor", match=r"training engine is not available.*strategy=mlite")
    refused("actor@actor_rollout_ref.actor=some_actor", match="no such option; there are dp_actor")
    group = load(*GRPO, "actor@actor_rollout_ref.actor=dp_actor", "ref@actor_rollout_ref.ref=megatron_ref").config
    assert group.actor_rollout_ref.ref.strategy == "megatron"


def test_text_keys_keep_what_was_written():
    trainer = load("trainer.experiment_name=007", "trainer.project_name=1e3").config.trainer
    assert (trainer.experiment_name, trainer.project_name) == ("007", "1e3")
    assert load("trainer.experiment_name='null'").config.trainer.experiment_name == "null"


def test_one_value_is_a_list_of_one_where_a_list_is_meant():
    assert load("trainer.logger=console").config.trainer.logger == ["console"]
    assert load("data.train_files=a.parquet").config.data.train_files == "a.parquet"
    assert load("data.train_files=[a.parquet,b.parquet]").config.data.train_files == ["a.parquet", "b.parquet"]


def test_numbers_fit_their_type():
    config = load(
        f"{ACTOR}.entropy_coeff=0",
        "trainer.total_epochs=1e1",
        "data.train_batch_size=1_024",
        f"{ACTOR}.optim.lr='1e-5'",
    ).config
    assert config.actor_rollout_ref.actor.entropy_coeff == 0.0
    assert isinstance(config.actor_rollout_ref.actor.entropy_coeff, float)
    assert config.trainer.total_epochs == 10
    assert isinstance(config.trainer.total_epochs, int)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.total_epochs=ten", "a whole number"),
        ("trainer.total_epochs=1.5", "a whole number"),
        ("trainer.total_epochs=inf", "a whole number"),
        ("trainer.total_epochs=null", "a whole number"),
        ("trainer.total_epochs=[1]", "a whole number"),
        (f"{ACTOR}.optim.lr=fast", "a number"),
        (f"{ACTOR}.use_kl_loss=1", "True or False"),
        ("trainer.logger={a:1}", "a list of text"),
        ("data.apply_chat_template_kwargs=3", "a mapping"),
        (f"{ACTOR}.optim.betas=[a,b]", "a list of a number"),
        (f"{ACTOR}.optim.betas='[a,b]'", "a list of a number"),
    ],
)
def test_wrong_types_are_refused(override, words):
    message = refused(override)
    assert words in message
    assert override.partition("=")[0] in message
    assert "command line" in message


def test_choices_are_refused_with_the_nearest():
    assert "did you mean 'token-mean'" in refused(f"{ACTOR}.loss_agg_mode=token_mean")
    assert "left" in refused("data.truncation=middel")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor_rollout_ref.actor.kl_los_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.train_batch_size", "data.train_batch_size"),
        ("optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("algorithm.temperature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.ref.kl_coef", "algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_unknown_keys_name_the_nearest(key, meant):
    assert repr(meant) in refused(f"{key}=1", match="There is no key")


def test_an_absurd_key_is_refused_without_a_guess():
    assert "docs/config.md" in refused("zzzzqqqq=1")


def test_a_section_is_no_key():
    assert "is a section" in refused("actor_rollout_ref.actor=3")
    assert "There is no key" in refused("trainer.total_epochs.foo=3")


@pytest.mark.parametrize(
    "text", ["{% for m in messages %}{{ m['content'] }}{% endfor %}", "{{ bos_token }}", "{# a #}x"]
)
def test_a_chat_template_is_a_text_and_no_mapping(text):
    key = "actor_rollout_ref.model.custom_chat_template"
    assert parse_override(f"{key}={text}").value == text
