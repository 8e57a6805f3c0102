"""Override lists in the style of real launch scripts load, and say of every key without effect why it has none."""

import shlex

import pytest

from verl.programs.specs import placement_of

from .helpers import ACTOR, GRPO, ROLLOUT, fixture_lines, load, refused


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
    assert all(notice.startswith("No effect: ") for notice in loaded.notices), loaded.notices
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


# (overrides as scripts have them, the override that has no effect)
ROWS = [
    *(
        ([f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.clip_ratio_c=10.0"], "clip_ratio_c")
        for loss in ("gspo", "clip_cov", "kl_cov", "cispo")
    ),
    (["data.train_batch_size=512", "data.gen_batch_size=1536"], "gen_batch_size"),
    (["trainer.resume_from_path=ckpts/global_step_100", "trainer.resume_mode=auto"], "resume_from_path"),
    ([f"{ROLLOUT}.val_kwargs.top_p=0.7"], "top_p"),
    ([f"{ROLLOUT}.val_kwargs.do_sample=False", f"{ROLLOUT}.val_kwargs.temperature=1.0"], "temperature"),
    (["algorithm.lam=0.95"], "lam"),
    (["algorithm.filter_groups.enable=False", "algorithm.filter_groups.metric=acc"], "metric"),
    (["algorithm.filter_groups.enable=False", "algorithm.filter_groups.metric=null"], "metric"),
    (["algorithm.filter_groups.enable=False", "algorithm.filter_groups.max_num_gen_batches=10"], "max_num_gen_batches"),
    ([f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.kl_loss_coef=0.01"], "kl_loss_coef"),
    (
        ["algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=sequence"],
        "rollout_is",
    ),
    (["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=32"], "lora_alpha"),
    (["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.exclude_modules=.*visual.*"], "exclude_modules"),
    (["reward.custom_reward_function.name=null"], "name"),
    ([f"+{ACTOR}.optim.min_lr=1e-7"], "min_lr"),
    ([f"+{ACTOR}.optim.lr_decay_steps=1000"], "lr_decay_steps"),
    ([f"+{ACTOR}.optim.lr_warmup_init=1e-8"], "lr_warmup_init"),
]


@pytest.mark.parametrize(("overrides", "key"), ROWS, ids=lambda v: v[-1] if isinstance(v, list) else "")
def test_a_row_that_was_refused_is_a_notice(overrides, key):
    (notice,) = [n for n in load(*GRPO, *overrides).notices if f"{key}" in n]
    assert notice.startswith("No effect: ")


def test_sapo_reads_its_temperatures_under_both_names():
    actor = load(*GRPO, f"{ACTOR}.policy_loss.loss_mode=sapo", f"+{ACTOR}.policy_loss.tau_pos=1.5").config
    assert actor.actor_rollout_ref.actor.tau_pos == 1.5
    refused(f"+{ACTOR}.policy_loss.tau_pos=1.5", f"{ACTOR}.tau_pos=1.6", match="two spellings")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.device=npu"], "This kind of device is not available"),
        (["model_engine=veomni", f"{ACTOR}.veomni.param_offload=True"], "This training engine is not available"),
    ],
)
def test_the_feature_is_named_and_nothing_else(overrides, sentence):
    message = refused(*overrides)
    assert message.startswith(sentence)
    assert "\n" not in message
