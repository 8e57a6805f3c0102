"""The tree knows every key of an existing release, and its documentation matches its declarations."""

import inspect
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from verl import families
from verl.config import PPO, SFT, ActorConfig, PPOConfig, RolloutConfig, load_config, schema_of
from verl.registry import load_module

from .helpers import fixture_lines, load

LISTED = [line.partition("=")[::2] for line in fixture_lines("keys.txt")]
NOT_YET = {"trainer.n_gpus_per_node"}  # their default is 8 devices
DIFFERENT = {
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.actor.use_fused_kernels",
    "actor_rollout_ref.model.use_fused_kernels",
    "critic.model.use_fused_kernels",
    "actor_rollout_ref.ref.fsdp_config.dtype",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "critic.fsdp.dtype",
    "critic.model.path",
    "trainer.device",
    "trainer.logger",
    "trainer.n_gpus_per_node",
    "trainer.v1.separate_async.parameter_sync_step",
}


def test_the_fixture_is_whole():
    assert len(LISTED) == 645


def test_every_known_key_has_its_place():
    assert [key for key, _ in LISTED if PPO.locate(PPO.resolve(key)[0]) is None] == []


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key, _ in LISTED}))
def test_every_known_key_is_accepted_at_its_default(section):
    for key, default in LISTED:
        if key.startswith(section + ".") and default not in ("FOLLOWS", "REQUIRED") and key not in NOT_YET:
            load(f"{key}={default}")


def test_defaults_are_theirs_but_for_the_listed_ones():
    ours = load().config
    theirs = load(*(f"{k}={v}" for k, v in LISTED if v not in ("FOLLOWS", "REQUIRED") and k not in NOT_YET)).config

    def different(one, other, path=""):
        for name in one:
            a, b = one[name], other[name]
            if isinstance(a, dict) and path + name not in PPO.leaves:
                yield from different(a, b, path + name + ".")
            elif a != b:
                yield path + name

    assert set(different(asdict(ours), asdict(theirs))) <= DIFFERENT


def test_sections_read_like_mappings():
    actor = ActorConfig(clip_ratio=0.1)
    assert actor["clip_ratio"] == actor.get("clip_ratio") == actor.clip_ratio == 0.1
    assert actor.get("no_such_key", 7) == 7
    assert "clip_ratio" in actor
    assert "no_such_key" not in actor
    assert dict(actor.items())["ppo_epochs"] == 1
    with pytest.raises(KeyError):
        actor["no_such_key"]


def test_sections_are_frozen_and_independent():
    with pytest.raises(AttributeError):
        RolloutConfig().n = 3  # type: ignore[misc]
    assert RolloutConfig().stop is not RolloutConfig().stop


BOTH = pytest.mark.parametrize("schema", [PPO, SFT], ids=lambda schema: schema.name)


@BOTH
def test_every_declaration_is_complete(schema):
    for path, leaf in schema.leaves.items():
        assert leaf.key.meaning, path
        for name, place in leaf.conditions:
            key = name.partition("=")[0]
            key = f"{place}{key}" if key.startswith(".") else key
            assert name in schema.conditions or key in schema.leaves, (path, name)
            assert schema.condition(name).because
    used = {condition for leaf in schema.leaves.values() for condition, _ in leaf.conditions}
    facts = {field.name for field in fields(families.EngineFacts)}  # conditions of whichever keys name them
    assert used >= set(schema.conditions) - facts
    assert all(schema.sections.values())


@BOTH
def test_tables_name_existing_keys(schema):
    for key, source in schema.follows:
        assert key in schema.leaves, key
        assert source in schema.leaves, source
    for row in schema.compat.aliases:
        new = row.new.rstrip(".")
        assert new in {*schema.leaves, *schema.sections} or schema.locate(new) is not None, row
        assert row.old not in schema.leaves, row
        assert schema.leaves.keys() >= row.implies.keys(), row
    for missing in schema.compat.unavailable:
        assert schema.locate(missing.path) is not None, missing.path
    for choices in schema.group_choices.values():
        assert all(schema.leaves.keys() >= values.keys() for values in choices.values())


@BOTH
def test_a_followed_key_stands_above_its_followers(schema):
    earlier = set()
    for key, source in schema.follows:
        assert source not in {k for k, _ in schema.follows} - earlier, (
            f"{key} follows {source}, which is filled in later"
        )
        earlier.add(key)


@BOTH
def test_a_config_is_built_from_its_values(schema):
    config = load_config(schema=schema).config
    assert schema_of(config) is schema
    assert schema.build(schema.flatten(config)) == config


def test_docs_are_current():
    docs = Path(__file__).parents[2] / "docs"
    generator = load_module(str(docs / "make_config.py"))
    texts = generator.pages()
    texts |= {name: updated((docs / name).read_text(encoding="utf-8")) for name, updated in generator.TABLES.items()}
    for name, text in texts.items():
        assert (docs / name).read_text(encoding="utf-8") == text, f"{name}: run: python docs/make_config.py"
    assert {f"config/{path.name}" for path in (docs / "config").iterdir()} <= texts.keys()


@pytest.mark.parametrize("family", [families.ADVANTAGES, families.POLICY_LOSSES, families.PREFERENCE_LOSSES])
def test_a_row_reads_the_arguments_of_its_function(family):
    for name, reads in family.reads.items():
        arguments = set(inspect.signature(family.get(name)).parameters)
        assert arguments - family.shared == reads, name


def test_a_function_of_the_user_may_read_any_key():
    assert families.POLICY_LOSSES.may_read("mine.py:loss", "tau_pos")
    assert not families.POLICY_LOSSES.may_read("gspo", "tau_pos")


def test_root_is_the_defaults():
    loaded = load_config()
    assert loaded.notices == []
    assert isinstance(loaded.config, PPOConfig)
    assert set(loaded.origins) == set(PPO.leaves)
