"""The policy for keys (verl/config/checks.py): notices, refusals, and what comes first."""

import re

import pytest

from verl.config import SCHEMAS

from .helpers import ACTOR, GRPO, ROLLOUT, load, problems, refused

REF = "actor_rollout_ref.ref"

# Keys that the existing verl does not read either with these settings: they change nothing, here and there.
UNREAD_THERE_TOO = [
    (f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.kl_loss_coef=0.05"),
    (f"{ACTOR}.kl_loss_type=mse",),
    (*GRPO, "critic.optim.lr=3e-5"),
    (*GRPO, "critic.model.path=/models/x"),
    (*GRPO, "critic.cliprange_value=0.2"),
    (*GRPO, "algorithm.lam=0.95"),
    (*GRPO, "algorithm.gamma=0.99"),
    ("algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=4", "algorithm.norm_adv_by_std_in_grpo=False"),
    ("algorithm.kl_ctrl.kl_coef=0.02",),
    ("algorithm.kl_penalty=k3",),
    ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.target_kl=0.5"),
    ("algorithm.filter_groups.metric=acc",),
    ("algorithm.filter_groups.enable=False", "algorithm.filter_groups.metric=null"),
    ("algorithm.filter_groups.max_num_gen_batches=10",),
    ("data.gen_batch_size=2048",),
    ("algorithm.pf_ppo.weight_pow=3",),
    ("algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=max_min", "algorithm.pf_ppo.weight_pow=3"),
    ("algorithm.rollout_correction.rollout_is_threshold=3.0",),
    ("algorithm.rollout_correction.rollout_rs_threshold=3.0",),
    ("algorithm.rollout_correction.loss_type=reinforce",),
    ("algorithm.rollout_correction.bypass_mode=True", "algorithm.rollout_correction.rollout_is=token"),
    ("algorithm.gdpo_reward_keys=[a,b]",),
    (f"{ACTOR}.policy_loss.clip_cov_ratio=0.1",),
    (f"{ACTOR}.policy_loss.ppo_kl_coef=0.5",),
    (f"{ACTOR}.policy_loss.dro_beta=0.5",),
    (f"{ACTOR}.tau_neg=1.2",),
    (f"{ROLLOUT}.speculative.methods=[ngram]", f"{ROLLOUT}.speculative.history_mb=4"),
    (f"+{ACTOR}.policy_loss.tau_neg=1.2",),
    (f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.clip_ratio_high=0.28"),
    (f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio=0.1"),
    *(
        (f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.clip_ratio_c=10.0")
        for loss in ("gspo", "clip_cov", "kl_cov", "cispo", "geo_mean")
    ),
    (f"{ACTOR}.loss_scale_factor=100",),
    (f"{ACTOR}.optim.num_cycles=1.5",),
    (f"{ACTOR}.optim.min_lr_ratio=0.1",),
    (f"{ACTOR}.optim.lr_warmup_steps=10", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"),
    (f"+{ACTOR}.optim.lr_decay_steps=100",),
    (f"+{ACTOR}.optim.lr_warmup_init=1e-8",),
    (f"+{ACTOR}.optim.min_lr=1e-7",),
    (f"{ROLLOUT}.val_kwargs.do_sample=False", f"{ROLLOUT}.val_kwargs.temperature=0.7"),
    (f"{ROLLOUT}.val_kwargs.top_p=0.7",),
    (f"{ROLLOUT}.multi_turn.format=glm",),
    ("reward.custom_reward_function.name=score",),
    ("reward.custom_reward_function.name=null",),
    ("custom_reward_function.name=null",),
    ("+custom_reward_function.reward_kwargs.x=1",),
    ("data.custom_cls.name=Mine",),
    ("reward.reward_manager.module.path=mine.py",),
    ("reward_model.model.path=/models/rm",),
    ("distillation.distillation_loss.topk=8",),
    ("+distillation.teacher_models.math.model_path=/models/t",),
    (f"+{ACTOR}.veomni.param_offload=True",),
    ("trainer.resume_mode=auto", "trainer.resume_from_path=/x/global_step_5"),
    ("actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.lora_alpha=32"),
    ("actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.exclude_modules='.*visual.*'"),
    (f"{REF}.fsdp_config.dtype=float32",),
    ("skip.rollout.action=reuse",),
    ("trainer.total_training_steps=100", "trainer.total_epochs=1"),
]  # fmt: skip

# Keys that ask for something that would not happen.
REFUSED = [
    ((*GRPO, "trainer.critic_warmup=5"), "train nothing at all in these steps"),
    (("algorithm.rollout_correction.bypass_mode=True", f"{ACTOR}.policy_loss.loss_mode=gspo"), "loss_type"),
    ((f"{ROLLOUT}.val_kwargs.also_greedy=True",), "do_sample=True"),
    ((f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.top_p=0.9"), "existing releases sample whatever do_sample says"),
    ((f"{ACTOR}.fsdp_config.chunk_size=1024",), "use_3d_hybrid"),
    ((f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",), "existing releases put the tools into every prompt"),
    ((f"{ROLLOUT}.service.url=http://x",), "rollout.name=http"),
    ((f"{ROLLOUT}.speculative.num_speculative_tokens=4",), "methods is empty, so there are no drafts"),
    (("trainer.guards.ratio.action=stop",), "set trainer.guards.ratio.limit as well"),
    (("reward_model.judge_template=judge.txt",), "reward_model.enable=True"),
    (("trainer.v1.sampler.custom_sampler.path=mine.py",), "data.custom_cls.path"),
    ((f"{ROLLOUT}.agent.custom_async_server.path=mine.py",), "rollout.name=path/to/file.py:name"),
    (("actor_rollout_ref.model.hf_config_path=/x",), "override_config"),
]

NOTICES = [
    (*GRPO, "trainer.critic_warmup=0"),
    ("algorithm.kl_ctrl.kl_coef=0.001",),
    ("algorithm.kl_ctrl.kl_coef=0.0",),
    (f"{ACTOR}.kl_loss_coef=0.0",),
    (f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.name=native"),
    (f"{ROLLOUT}.tensor_model_parallel_size=2",),
    (f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.strategy=fsdp"),
    (f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",),
    (f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",),
    (f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",),
    (f"{REF}.fsdp_config.param_offload=True",),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=16",),
    (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"),
    (*GRPO, "critic.ppo_micro_batch_size_per_gpu=4"),
    (f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.policy_loss.loss_mode=gpg"),
    ("global_profiler.tool=nsys",),
    ("data.return_raw_chat=True",),
    ("critic.enable=False", *GRPO, "critic.optim.lr=1e-5"),
]


@pytest.mark.parametrize("overrides", UNREAD_THERE_TOO, ids=lambda v: v[-1])
def test_keys_that_change_nothing_there_either_are_notices(overrides):
    key, _, value = overrides[-1].lstrip("+").partition("=")
    loaded = load(*overrides)
    if key == "custom_reward_function.name":  # the older section is null in full by default
        assert loaded.notices == []
        return
    assert [notice for notice in loaded.notices if notice.startswith("No effect: ") and key in notice]
    assert "trainer.strict_config" in refused(*overrides, "trainer.strict_config=True", match=f"No effect: .*{key}")


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda v: v[-1] if isinstance(v, tuple) else None)
def test_keys_that_ask_for_what_would_not_happen_are_refused(overrides, words):
    message = refused(*overrides, match="is not read|has no effect")
    assert overrides[-1].partition("=")[0] in message
    assert words in message
    assert "Remove it" in message


@pytest.mark.parametrize("overrides", NOTICES, ids=lambda v: v[-1])
def test_keys_that_ask_for_nothing_are_notices(overrides):
    notices = load(*overrides).notices
    assert any("No effect" in notice for notice in notices), notices


@pytest.mark.parametrize("program", SCHEMAS)
def test_a_fix_names_keys_in_full(program):
    schema, named = SCHEMAS[program], set()
    for leaf in schema.leaves.values():
        for condition in leaf.conditions:
            fix = schema.condition(*condition).fix
            named.update(re.findall(r"\b(?:set|remove|set only) ([a-z]\w*_[\w.]*\w|[a-z]\w*\.[\w.]*\w)", fix))
    assert not named - schema.leaves.keys()


def test_one_notice_per_reason():
    notices = load(
        f"{ACTOR}.megatron.param_offload=True", f"{ACTOR}.megatron.sequence_parallel=False", "data.use_shm=True"
    ).notices
    assert len(notices) == 2
    assert "megatron.param_offload=True" in notices[0]
    assert "megatron.sequence_parallel=False" in notices[0]


def test_a_key_that_is_read_says_nothing():
    overrides = [
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.05",
        f"{REF}.log_prob_micro_batch_size_per_gpu=16",
    ]
    assert load(*overrides).notices == []


def test_a_users_own_estimator_may_read_anything():
    load(
        "algorithm.adv_estimator=mine.py:estimator", "critic.optim.lr=3e-5", "algorithm.lam=0.9", "algorithm.gamma=0.9"
    )


def test_validation_samples_where_a_temperature_is_set():
    loaded = load(f"{ROLLOUT}.val_kwargs.temperature=0.6", f"{ROLLOUT}.val_kwargs.top_p=0.95")
    assert loaded.config.actor_rollout_ref.rollout.val_kwargs.do_sample is True
    assert "temperature" in loaded.origins[f"{ROLLOUT}.val_kwargs.do_sample"]


def test_a_temperature_of_0_decodes_greedily():
    assert load(f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.n=1").config.actor_rollout_ref.rollout.temperature == 0


def test_missing_features_are_said_once():
    message = refused(f"{ROLLOUT}.name=trtllm", match="not available in this version")
    assert f"{ROLLOUT}.name=native" in message
    assert problems("trainer.n_gpus_per_node=8", "trainer.nnodes=2") == []


def test_a_notice_names_every_key_that_was_set():
    """Of a mapping too, each on its own: profilers are set by many keys."""
    overrides = [f"{ACTOR}.profiler.tool_config.{name}=1" for name in ("npu.level", "nsys.discrete")]
    overrides += ["global_profiler.global_tool_config.npu.level=1", f"{ACTOR}.profiler.tool=npu"]
    (notice,) = load(*overrides).notices
    assert all(override.partition("=")[0] in notice for override in overrides), notice
    assert "global_profiler.tool=npu" in load("global_profiler.tool=npu").notices[0]
    assert load("global_profiler.tool=torch_memory").notices == []


@pytest.mark.parametrize(
    ("overrides", "feature"),
    [
        (("trainer.device=npu",), "This kind of device"),
        (
            ("model_engine=veomni", f"{ACTOR}.veomni.param_offload=True", f"{REF}.veomni.fsdp_size=2"),
            "This training engine",
        ),
    ],
)
def test_a_feature_that_is_missing_is_named_and_the_keys_below_it_are_not(overrides, feature):
    message = refused(*overrides)
    assert message.startswith(feature)
    assert "not available in this version" in message
    assert "did you mean" not in message
    assert len(message.splitlines()) == 1


def test_all_problems_are_listed_at_once_the_missing_features_first():
    lines = refused(
        "trainer.total_epoch=1", "trainer.nnodes=x", "data.train_batch_size=-1", f"{ROLLOUT}.top_p=2",
        f"{ROLLOUT}.val_kwargs.also_greedy=True", "a b", f"{ROLLOUT}.name=trtllm", "trainer.strict_config=True",
        "data.use_shm=True", "trainer.experiment_name=${no.such}", "data.truncation=middel",
    ).splitlines()  # fmt: skip
    assert "not available" in lines[0]
    for words in ("'trainer.total_epochs'", "whole number", "at least 1", "at most 1", "also_greedy", "key=value",
                  "data.use_shm", "cannot be resolved", "did you mean 'middle'"):  # fmt: skip
        assert sum(words in line for line in lines) == 1, words
    assert len(lines) == 10
