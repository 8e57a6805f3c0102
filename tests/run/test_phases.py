"""Keys that change during a run."""

from types import SimpleNamespace

import pytest

from verl.config import load_config
from verl.errors import ConfigError, ModelError
from verl.programs.ppo_roles import ppo_roles
from verl.roles.api import Roles
from verl.roles.rollout import RolloutWorker
from verl.run.schedule import Phases, by_role, scheduler_of
from verl.trainer import DynamicConfigScheduler

pytestmark = pytest.mark.seed("C6")

ACTOR = "actor_rollout_ref.actor.fsdp_config"
SEED_PHASES = [
    {"from_step": 101, "changes": {"batch_group_size": 4}},
    {"from_step": 1, "changes": {"batch_group_size": 1}},
    {"from_step": 5001, "changes": {"enable_chunked_attention": False}},
]


def test_a_value_holds_until_another_phase_changes_it():
    scheduler = DynamicConfigScheduler(SEED_PHASES)
    assert scheduler.values(1) == scheduler.values(100) == {"batch_group_size": 1}
    assert scheduler.values(101) == {"batch_group_size": 4}
    assert scheduler.values(9000) == {"batch_group_size": 4, "enable_chunked_attention": False}
    scheduler.set(batch_group_size=2)
    assert scheduler.values(9000)["batch_group_size"] == 2


def test_keys_belong_to_a_role():
    values = {"batch_group_size": 2, "fsdp_config.chunk_size": 7, "critic.fsdp.batch_group_size": 3}
    config = load_config(["actor_rollout_ref.model.path=x", "algorithm.adv_estimator=gae"], check=False).config
    changes = by_role(values, ppo_roles(config).models)
    assert changes == {"actor": {"batch_group_size": 2, "chunk_size": 7}, "critic": {"batch_group_size": 3}}


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ([{"from_step": 0, "changes": {}}], "from_step=0 must be"),
        ([{"step": 3, "changes": {}}], r"dynamic_config\[0\] must be"),
        ([{"from_step": 1, "changes": {"batch_grop_size": 2}}], "did you mean 'batch_group_size'"),
        ([{"from_step": 1, "changes": {"actor.optim.lr": 2}}], "'lr' is no key that can change"),
        ([{"from_step": 1, "changes": {"layer_per_group": 2}}], "fixed when the model is sharded"),
        ([{"from_step": 1, "changes": {"batch_group_size": 0}}], "at least 1"),
        ([{"from_step": 1, "changes": {"enable_chunked_attention": 1}}], "True or False"),
    ],
)
def test_what_cannot_be_is_said(phases, words):
    with pytest.raises(ConfigError, match=words):
        DynamicConfigScheduler(phases)


class Worker:
    def __init__(self):
        self.calls = []

    def reconfigure(self, changes):
        self.calls.append(changes)


@pytest.fixture
def hybrid(tiny_overrides):
    """A config of an actor that divides its work in three dimensions."""
    return load_config([*tiny_overrides, f"{ACTOR}.use_3d_hybrid=True", f"{ACTOR}.batch_group_size=3"]).config


def phases_of(scheduler, config):
    """The phases, and the actor that follows them."""
    specs = ppo_roles(config).models
    roles = Roles({spec.name: Worker() for spec in specs}, specs=specs)
    return Phases(scheduler, roles, broadcast=lambda value: value), roles.models["actor"]


def test_only_changes_reach_the_engines(hybrid):
    phases, actor = phases_of(DynamicConfigScheduler(SEED_PHASES), hybrid)
    for step in (99, 100, 101, 102, 5001):
        phases.start_step(step)
    assert actor.calls == [{"batch_group_size": 1}, {"batch_group_size": 4}, {"enable_chunked_attention": False}]
    assert phases.metrics() == {
        "training/dynamic_config/actor/batch_group_size": 4.0,
        "training/dynamic_config/actor/enable_chunked_attention": 0.0,
    }
    phases.scheduler.set({"critic.fsdp.batch_group_size": 2})
    with pytest.raises(ConfigError, match="critic.fsdp.batch_group_size is no key of this run"):
        phases.start_step(5002)


def test_what_is_not_said_any_more_is_as_configured(hybrid):
    """By a scheduler that speaks of one step only, and after a step back to before a phase."""
    once = SimpleNamespace(values=lambda step: {"batch_group_size": 8} if step == 2 else {})
    phases, actor = phases_of(once, hybrid)
    for step in (1, 2, 3, 4):
        phases.start_step(step)
    assert actor.calls == [{"batch_group_size": 8}, {"batch_group_size": 3}]
    phases, actor = phases_of(DynamicConfigScheduler([{"from_step": 4, "changes": {"chunk_size": 9}}]), hybrid)
    for step in (4, 3, 4):
        phases.start_step(step)
    default = ppo_roles(hybrid).models[0].engine.chunk_size
    assert actor.calls == [{"chunk_size": 9}, {"chunk_size": default}, {"chunk_size": 9}]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("critic.fsdp.chunk_size", "no key of this run"),
        ("actor_rollout_ref.ref.fsdp_config.chunk_size", "with LoRA is the actor without adapters"),
        ("chunk_size", "began with .*use_3d_hybrid=True"),
    ],
)
def test_a_phase_to_come_is_refused_at_the_start(tiny_overrides, key, words):
    late = DynamicConfigScheduler([{"from_step": 5001, "changes": {key: 4}}])
    lora = ("actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.actor.use_kl_loss=True")
    with pytest.raises(ConfigError, match=words):
        phases_of(late, load_config([*tiny_overrides, *lora]).config)


def test_an_object_of_the_users(tmp_path, tiny_overrides):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.trainer import DynamicConfigScheduler\n"
        "mine = DynamicConfigScheduler([{'from_step': 2, 'changes': {'chunk_size': 9}}])\n"
        "other = 3\n"
    )
    config = load_config([*tiny_overrides, f"trainer.dynamic_config_scheduler={file}:mine"]).config
    assert scheduler_of(config).values(2) == {"chunk_size": 9}
    config = load_config([*tiny_overrides, f"trainer.dynamic_config_scheduler={file}:other"]).config
    with pytest.raises(ConfigError, match=r"method values\(step\)"):
        scheduler_of(config)


def test_chunks_change_during_a_run_and_the_losses_do_not(tiny_run):
    chunked = [f"{ACTOR}.use_3d_hybrid=True", f"{ACTOR}.enable_chunked_attention=True", f"{ACTOR}.chunk_size=16"]
    phases = "trainer.dynamic_config=[{from_step:2,changes:{enable_chunked_attention:False}}]"
    plain = tiny_run(folder="plain").training_rows()
    ours = tiny_run(*chunked, phases, folder="chunked").training_rows()
    for row, expected in zip(ours, plain, strict=True):
        assert row["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-6, abs=1e-6)
        assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    name = "training/dynamic_config/actor/enable_chunked_attention"
    assert [row.get(name) for row in ours] == [None, 0.0]


def test_a_change_without_the_switch_is_refused(tiny_run):
    with pytest.raises(ConfigError, match="use_3d_hybrid=True"):
        tiny_run("trainer.dynamic_config=[{from_step:1,changes:{chunk_size:4}}]")


def test_stale_samples_stop_the_run(tiny_run, around):
    """An engine that continues under its old version: nothing trains on its samples."""

    def forgets(set_weights, worker, version, weights=None):
        set_weights(worker, min(version, 0), weights)

    around(RolloutWorker, "set_weights", forgets)
    with pytest.raises(ModelError, match="made by weights of version 0, but only version 1 may train"):
        tiny_run()


def test_sampler_and_trainer_are_compared_in_every_step(tiny_run):
    """Whether old log-probs fall out of the update, are the sampler's, or are computed."""
    sources = {
        "update": (),
        "rollout": ("actor_rollout_ref.actor.ppo_mini_batch_size=2",),
        "recompute": ("algorithm.rollout_correction.rollout_is=token",),
    }
    for name, changes in sources.items():
        for row in tiny_run(*changes, folder=name).training_rows():
            assert row["training/rollout_probs_diff_valid"] == 1, name
            assert 0 < row["training/rollout_probs_diff_mean"] <= row["training/rollout_probs_diff_max"] < 1e-4, name
            assert row["training/rollout_probs_diff_std"] < 1e-4, name
