"""Override lists in the style of real launch scripts load, and say of every key without effect why it has none."""

import shlex

import pytest

from verl.programs.specs import placement_of

from .helpers import ACTOR, GRPO, fixture_lines, load, refused


def lists():
    arrays = {}
    for line in fixture_lines("scripts.txt"):
        if line.startswith("["):
            name = line.strip("[]")
            arrays[name] = []
        else:
            arrays[name] += shlex.split(line)  # as a shell takes the quotes off
    return arrays


LISTS = lists()


@pytest.mark.parametrize("name", LISTS)
def test_a_real_script_loads(name, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    loaded = load(*LISTS[name])
    assert len(loaded.settings) > 9
    notices = [notice for notice in loaded.notices if not notice.startswith("No effect: ")]
    assert len(notices) == (name == "separate_async"), notices  # its bypass_mode with samples ahead
    assert loaded.config.actor_rollout_ref.rollout.name == "native"


def test_what_is_set_acts():
    dapo = load(*LISTS["dapo_qwen2.5_32b"]).config
    assert (dapo.data.gen_batch_size, dapo.algorithm.filter_groups.metric) == (1536, "acc")
    assert dapo.reward.reward_kwargs["overlong_buffer_cfg"]["len"] == 4096
    assert (
        load(
            *LISTS["sapo_qwen3_8b"], "actor_rollout_ref.actor.policy_loss.tau_neg=1.2"
        ).config.actor_rollout_ref.actor.tau_neg
        == 1.2
    )
    placed = placement_of(load(*LISTS["separate_async"]).config)
    assert (placed.devices["actor"], placed.devices["rollout"], placed.num_nodes) == ((0, 1, 2, 3), (4, 5, 6, 7), 1)


def test_sapo_reads_its_temperatures_under_both_names():
    actor = load(*GRPO, f"{ACTOR}.policy_loss.loss_mode=sapo", f"+{ACTOR}.policy_loss.tau_pos=1.5").config
    assert actor.actor_rollout_ref.actor.tau_pos == 1.5
    refused(f"+{ACTOR}.policy_loss.tau_pos=1.5", f"{ACTOR}.tau_pos=1.6", match="two spellings")
