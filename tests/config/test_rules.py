"""Every rule between keys is broken by at least one row here."""

import ast
import inspect
import sys

import pytest

from verl.config import PPO, load_config
from verl.config.checks import check_config
from verl.config.keys import Bounds
from verl.config.rules import distillation, ppo, routing, sections

from .helpers import ACTOR, FIXTURES, GRPO, ROLLOUT, load, problems, refused

MODEL = "actor_rollout_ref.model"
DRAW = f"{ROLLOUT}.val_kwargs"
CORRECTION = "algorithm.rollout_correction"
MICRO = "micro_batch_size"
GUARDS = "trainer.guards"
LIMITED = ("grad_norm", "policy_kl", "reference_kl", "ratio", "entropy", "mismatch")

REJECTION = ("algorithm.program=rejection_sampling", f"{ROLLOUT}.n=4")
ONLINE = ("algorithm.program=online_dpo", f"{ROLLOUT}.n=4")

SEPARATE, SYNC_STEP = ("trainer.v1.trainer_mode=separate_async",), "trainer.v1.separate_async.parameter_sync_step"

DISTILLATION = "distillation"
LOSS, TEACHERS = f"{DISTILLATION}.distillation_loss", f"{DISTILLATION}.teacher_models"
TAUGHT = [f"{DISTILLATION}.enabled=True", f"{TEACHERS}.teacher_model.model_path=t"]

REPLAY, R3 = f"{ACTOR}.router_replay.mode", f"{ACTOR}.router_replay.mode=R3"

BROKEN = [
    (
        "error",
        f"{ROLLOUT}.enable_rollout_routing_replay",
        [f"{REPLAY}=R2", f"{ROLLOUT}.enable_rollout_routing_replay=True"],
    ),
    ("error", REPLAY, [R3, f"{ACTOR}.strategy=megatron"]),
    ("error", REPLAY, [f"{REPLAY}=R2", f"{CORRECTION}.bypass_mode=True"]),
    ("error", REPLAY, [R3, f"{ROLLOUT}.name=hf"]),
    ("error", REPLAY, [R3, f"{ROLLOUT}.multi_turn.enable=True"]),
    ("error", REPLAY, [R3, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.stop=[x]"]),
    (
        "notice",
        f"{ACTOR}.megatron",
        ["model_engine=megatron", f"+{ACTOR}.megatron.override_transformer_config.num_layers=3"],
    ),
    ("error", "algorithm.program", ["algorithm.program=rejection"]),
    ("error", "rejection.keep", [*REJECTION, "rejection.keep=5"]),
    ("warning", "rejection.keep", [*REJECTION, "rejection.keep=4"]),
    ("error", "rejection.write", [*REJECTION, "rejection.write=kept.parquet"]),
    ("error", f"{ROLLOUT}.prefetch_num", [*REJECTION, f"{ROLLOUT}.prefetch_num=1"]),
    ("notice", "algorithm.adv_estimator", [*REJECTION, "algorithm.adv_estimator=grpo"]),
    ("notice", f"{ACTOR}.use_kl_loss", [*REJECTION, f"{ACTOR}.use_kl_loss=True"]),
    ("error", f"{DISTILLATION}.enabled", [*TAUGHT, *REJECTION]),
    ("error", f"{TEACHERS}.teacher_model.model_path", [f"{DISTILLATION}.enabled=True"]),
    ("error", f"{DISTILLATION}.other_teachers", [*TAUGHT, f"{TEACHERS}.more.path=t"]),
    ("error", TEACHERS, [*TAUGHT, f"{TEACHERS}.more.model_path=t"]),
    ("error", TEACHERS, [*TAUGHT, f"{DISTILLATION}.on_policy_share=0", f"{DISTILLATION}.stored_outputs=True"]),
    ("error", f"{DISTILLATION}.stored_outputs", [*TAUGHT, f"{DISTILLATION}.stored_outputs=True"]),
    ("error", f"{LOSS}.loss_mode", [*TAUGHT, f"{LOSS}.loss_mode=k1"]),
    ("error", f"{DISTILLATION}.on_policy_share", [*TAUGHT, f"{DISTILLATION}.on_policy_share=0.5"]),
    ("error", f"{ROLLOUT}.n", [*ONLINE[:1], f"{ROLLOUT}.n=1"]),
    ("error", "preference.loss", [*ONLINE, "preference.loss=kto"]),
    ("error", "preference.loss_weights", [*ONLINE, "preference.loss_weights=[1.0,2.0]"]),
    ("error", f"{ROLLOUT}.prefetch_num", [*ONLINE, f"{ROLLOUT}.prefetch_num=1"]),
    ("error", "online.sync_steps", [*ONLINE, "online.sync_steps=1", "actor_rollout_ref.model.lora_rank=4"]),
    ("notice", "algorithm.adv_estimator", [*ONLINE, "algorithm.adv_estimator=grpo"]),
    ("error", "algorithm.adv_estimator", ["algorithm.adv_estimator=grop"]),
    ("error", "algorithm.adv_estimator", ["algorithm.adv_estimator=dpo"]),
    ("error", f"{ACTOR}.policy_loss.loss_mode", [f"{ACTOR}.policy_loss.loss_mode=vanila"]),
    ("error", f"{ROLLOUT}.name", [f"{ROLLOUT}.name=natve"]),
    ("error", f"{ACTOR}.strategy", [f"{ACTOR}.strategy=fsdp3"]),
    ("error", f"{ACTOR}.deepspeed.config", [f"{ACTOR}.strategy=deepspeed", f"{ACTOR}.deepspeed.config=missing.json"]),
    ("error", f"{ACTOR}.deepspeed.config", [f"{ACTOR}.strategy=deepspeed", f"{ACTOR}.deepspeed.offload_param=True"]),
    ("error", f"{ACTOR}.megatron", ["model_engine=megatron", f"{ACTOR}.megatron.use_megatron_fsdp=True"]),
    ("error", f"{ROLLOUT}.dtype", [f"{ROLLOUT}.dtype=float16"]),
    ("error", f"{ACTOR}.fsdp_config.model_dtype", [f"{ACTOR}.fsdp_config.model_dtype=fp16"]),
    ("error", SYNC_STEP, [*SEPARATE, f"{SYNC_STEP}=2"]),
    ("error", SYNC_STEP, [*SEPARATE, f"{SYNC_STEP}=9", f"{ROLLOUT}.nnodes=1"]),
    ("warning", SYNC_STEP, [*SEPARATE, f"{SYNC_STEP}=2", f"{ROLLOUT}.nnodes=1", "trainer.save_freq=3"]),
    ("error", "trainer.logger", ["trainer.logger=[console,wandbb]"]),
    ("error", f"{MODEL}.override_config", [f"{MODEL}.override_config.num_hidden_layers=1000000000"]),
    ("error", f"{MODEL}.override_config", [f"{MODEL}.override_config.vocab_size=10000000000"]),
    ("error", f"{ACTOR}.checkpoint.save_contents", [f"{ACTOR}.checkpoint.save_contents=[models]"]),
    ("error", f"{ACTOR}.checkpoint.load_contents", [f"{ACTOR}.checkpoint.load_contents=[models]"]),
    ("error", "critic.checkpoint.save_contents", ["critic.checkpoint.save_contents=[models]"]),
    ("error", "critic.checkpoint.load_contents", ["critic.checkpoint.load_contents=[models]"]),
    ("error", "reward.reward_manager.name", ["reward.reward_manager.name=naiv"]),
    ("error", "reward.debug", ["reward.debug=True", "trainer.n_gpus_per_node=2"]),
    ("error", f"{ACTOR}.ppo_{MICRO}", [f"{ACTOR}.ppo_{MICRO}=4", f"{ACTOR}.ppo_{MICRO}_per_gpu=4"]),
    ("error", f"critic.ppo_{MICRO}", [f"critic.ppo_{MICRO}=4", f"critic.ppo_{MICRO}_per_gpu=4"]),
    ("error", f"critic.forward_{MICRO}", [f"critic.forward_{MICRO}=4", f"critic.forward_{MICRO}_per_gpu=4"]),
    (
        "error",
        f"{ROLLOUT}.log_prob_{MICRO}",
        [f"{ROLLOUT}.log_prob_{MICRO}=4", f"{ROLLOUT}.log_prob_{MICRO}_per_gpu=4"],
    ),
    (
        "error",
        f"actor_rollout_ref.ref.log_prob_{MICRO}",
        [f"actor_rollout_ref.ref.log_prob_{MICRO}=4", f"actor_rollout_ref.ref.log_prob_{MICRO}_per_gpu=4"],
    ),
    ("error", f"{ACTOR}.ppo_mini_batch_size", ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=16"]),
    ("error", "critic.ppo_mini_batch_size", ["data.train_batch_size=8", "critic.ppo_mini_batch_size=16"]),
    ("warning", f"{ACTOR}.ppo_mini_batch_size", ["data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=4"]),
    ("error", "data.gen_batch_size", ["algorithm.filter_groups.enable=True", "data.gen_batch_size=4"]),
    ("error", f"{ROLLOUT}.max_model_len", [f"{ROLLOUT}.max_model_len=1000"]),
    ("error", f"{ROLLOUT}.prompt_length", [f"{ROLLOUT}.prompt_length=100"]),
    ("error", f"{ROLLOUT}.response_length", [f"{ROLLOUT}.response_length=100", "data.max_response_length=200"]),
    ("error", f"{ROLLOUT}.n", ["algorithm.adv_estimator=grpo_passk"]),
    ("warning", f"{ROLLOUT}.n", ["algorithm.adv_estimator=grpo"]),
    ("error", "algorithm.gdpo_reward_keys", ["algorithm.adv_estimator=gdpo"]),
    (
        "error",
        "algorithm.gdpo_reward_weights",
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"],
    ),
    ("error", "algorithm.use_pf_ppo", [*GRPO, "algorithm.use_pf_ppo=True"]),
    ("error", "critic.enable", ["critic.enable=False"]),
    ("warning", "critic.enable", [*GRPO, "critic.enable=True"]),
    ("warning", "algorithm.use_kl_in_reward", ["algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True"]),
    ("warning", "algorithm.filter_groups.enable", ["algorithm.filter_groups.enable=True"]),
    ("error", f"{ACTOR}.policy_loss.dro_beta", [f"{ACTOR}.policy_loss.loss_mode=dro"]),
    ("error", f"{ACTOR}.policy_loss.loss_mode", [f"{ACTOR}.policy_loss.loss_mode=bypass_mode"]),
    (
        "error",
        f"{CORRECTION}.rollout_rs",
        [f"{CORRECTION}.rollout_rs=token_k4", f"{CORRECTION}.rollout_rs_threshold=2"],
    ),
    ("error", f"{CORRECTION}.rollout_rs_threshold", [f"{CORRECTION}.rollout_rs=token_k1"]),
    (
        "error",
        f"{CORRECTION}.rollout_rs_threshold",
        [f"{CORRECTION}.rollout_rs=token_k1,seq_max_k2,seq_sum_k3", f"{CORRECTION}.rollout_rs_threshold='1,2'"],
    ),
    (
        "error",
        f"{CORRECTION}.rollout_is_threshold",
        [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=2_1"],
    ),
    (
        "error",
        f"{ROLLOUT}.calculate_log_probs",
        [f"{CORRECTION}.rollout_is=token", f"{ROLLOUT}.calculate_log_probs=False"],
    ),
    ("error", f"{ACTOR}.optim.override_optimizer_config", [f"+{ACTOR}.optim.override_optimizer_config.eps=1e-5"]),
    (
        "error",
        f"{ACTOR}.optim.lr_scheduler_kwargs",
        [f"{ACTOR}.optim.lr_scheduler_type=polynomial", f"{ACTOR}.optim.lr_scheduler_kwargs={{num_cycles:2}}"],
    ),
    ("error", f"{ACTOR}.optim.lr_scheduler_kwargs", [f"{ACTOR}.optim.lr_scheduler_type=warmup_stable_decay"]),
    ("error", "critic.optim.override_optimizer_config", ["+critic.optim.override_optimizer_config={eps:1e-5}"]),
    (
        "error",
        "actor_rollout_ref.rollout.batch_invariant",
        ["actor_rollout_ref.rollout.batch_invariant=require", "actor_rollout_ref.rollout.name=hf"],
    ),
    ("error", f"{DRAW}.temperature", [f"{DRAW}.do_sample=True"]),
    ("warning", f"{DRAW}.n", [f"{DRAW}.n=8"]),
    ("error", f"{ROLLOUT}.do_sample", [*GRPO, f"{ROLLOUT}.do_sample=False"]),
    ("error", f"{ROLLOUT}.do_sample", [*GRPO, f"{ROLLOUT}.top_k=1"]),
    ("warning", f"{ROLLOUT}.do_sample", [*GRPO, f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.multi_turn.enable=True"]),
    (
        "error",
        "reward.reward_kwargs",
        [
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=9",
        ],
    ),
    (
        "error",
        "reward.reward_kwargs",
        [
            "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:4096}",
            "+reward_model.reward_kwargs.max_resp_len=1024",
        ],
    ),
    ("error", f"{ROLLOUT}.prefetch_num", [f"{ROLLOUT}.prefetch_num=9"]),
    (
        "error",
        f"{ROLLOUT}.partial_rollout",
        [f"{ROLLOUT}.prefetch_num=1", f"{ROLLOUT}.partial_rollout=True", f"{ROLLOUT}.stop=[END]"],
    ),
    *(
        ("error", f"{model}.lora_adapter_path", [f"{model}.lora_adapter_path=/nowhere"])
        for model in ("actor_rollout_ref.model", "critic.model")
    ),
    ("error", "reward.reward_model.model_path", ["reward.reward_model.enable=True"]),
    (
        "error",
        "reward.reward_model.rollout.name",
        ["reward.reward_model.enable=True", "reward_model.model.path=rm", "reward_model.rollout.name=http"],
    ),
    ("error", "reward.reward_manager.module.path", ["reward.reward_manager.source=importlib"]),
    ("error", "trainer.default_local_dir", ["trainer.default_local_dir=' '"]),
    ("error", "trainer.default_local_dir", [f"trainer.default_local_dir={FIXTURES / 'model'}"]),
    ("error", "trainer.hub_model_id", ["trainer.push_to_hub=True", "trainer.save_freq=1"]),
    ("error", "trainer.save_freq", ["trainer.push_to_hub=True", "trainer.hub_model_id=me/model"]),
    ("error", "trainer.resume_from_path", ["trainer.resume_mode=resume_path"]),
    (
        "error",
        "trainer.resume_from_path",
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere/global_step_3"],
    ),
    *(
        ("error", f"{GUARDS}.{name}.action", [f"{GUARDS}.{name}.action=rollback", *limit, "trainer.save_freq=-1"])
        for name, limit in (("nonfinite", []), *((name, [f"{GUARDS}.{name}.limit=2"]) for name in LIMITED))
    ),
    (
        "error",
        f"{GUARDS}.nonfinite.action",
        [f"{GUARDS}.nonfinite.action=rollback", "trainer.save_freq=1", f"{ROLLOUT}.prefetch_num=1"],
    ),
    ("error", f"{GUARDS}.ratio.limit", [f"{GUARDS}.ratio.limit=0.5"]),
]


def test_names_of_rejection_sampling_stand_for_keys():
    explicit = load(*REJECTION[:1], "rejection.n=8", "rejection.rounds=3", "rejection.epochs=2").config
    numbers = (
        explicit.actor_rollout_ref.rollout.n,
        explicit.trainer.total_training_steps,
        explicit.actor_rollout_ref.actor.ppo_epochs,
    )
    assert numbers == (8, 3, 2)


def test_each_row_breaks_its_rule_and_every_rule_has_a_row():
    """Each `yield` of a problem in the rules is reached by a row above."""
    modules = {module.__file__: module for module in (distillation, ppo, routing, sections)}
    problems = {
        (file, node.lineno)
        for file, module in modules.items()
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Yield)
    }
    reached = set()

    def follow(frame, event, argument):
        if frame.f_code.co_filename not in modules:
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return follow

    before = sys.gettrace()
    for level, key, overrides in BROKEN:
        loaded = load_config(overrides, check=False)
        sys.settrace(follow)
        try:
            reported = [(problem.level, problem.key) for problem in check_config(loaded)]
        finally:
            sys.settrace(before)
        assert (level, key) in reported, overrides
    assert len(problems) > 30
    assert not problems - reached


@pytest.mark.parametrize("key", [path for path, leaf in PPO.leaves.items() if leaf.key.bounds])
def test_values_out_of_range_are_refused(key):
    lowest = PPO.leaves[key].key.bounds.ge or 0
    bad = "[-1,0.5]" if "list" in str(PPO.leaves[key].annotation) else str(min(-5, 10 * lowest))
    loaded = load_config([f"{key}={bad}"], check=False)
    sentences = [p.sentence for p in check_config(loaded) if p.key == key and "must be" in p.sentence]
    assert len(sentences) == 1
    assert key in sentences[0]


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "words"),
    [
        (Bounds(ge=1), (1, 2), (0, -1), "at least 1"),
        (Bounds(gt=0), (0.1,), (0, -1), "above 0"),
        (Bounds(gt=0, le=1), (0.1, 1), (0, 1.1), "above 0 and at most 1"),
        (Bounds(ge=0, lt=1), (0, 0.9), (1, -0.1), "at least 0 and below 1"),
        (Bounds(ge=0, le=1), (0, 1), (1.1, -0.1), "between 0 and 1"),
        (Bounds(ge=1, also=(-1,)), (-1, 1), (0, -2), "-1 or at least 1"),
        (Bounds(ge=0, lt=1, length=2), ([0, 0.5],), ([0], [0, 1]), "a list of 2 numbers, each at least 0 and below 1"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bounds(bounds, inside, outside, words):
    assert all(map(bounds.hold, (*inside, None)))
    assert not any(map(bounds.hold, outside))
    assert bounds.words() == words


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=0.5_2.0"),
        (f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2'", f"{CORRECTION}.rollout_rs_threshold='0.5_2,3'"),
        (f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=0.999_1.001"),
        (f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=token"),
        (
            "algorithm.adv_estimator=gdpo",
            f"{ROLLOUT}.n=4",
            "algorithm.gdpo_reward_keys=[a,b]",
            "algorithm.gdpo_reward_weights=[1,2]",
        ),
        (f"{ACTOR}.policy_loss.loss_mode=my_loss", "actor_rollout_ref.model.external_lib=my_package.losses"),
        (f"{ACTOR}.policy_loss.loss_mode=losses.py:mine",),
        (
            "reward.reward_manager.source=importlib",
            "reward.reward_manager.module.path=m.py",
            "reward.reward_manager.name=Mine",
        ),
        ("data.train_batch_size=8",),
        (f"{ROLLOUT}.top_k=50", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.min_p=0.05"),
    ],
    ids=lambda v: v[-1],
)
def test_good_combinations_are_accepted(overrides):
    assert not any("must" in notice for notice in load(*overrides).notices)


def test_a_small_batch_is_one_mini_batch():
    loaded = load("data.train_batch_size=8")
    assert loaded.config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert loaded.config.critic.ppo_mini_batch_size == 8
    assert loaded.origins[f"{ACTOR}.ppo_mini_batch_size"] == "follows data.train_batch_size"


def test_resume_path_is_accepted_where_it_exists(tmp_path):
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    load("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")


def test_optimal_token_baseline_turns_on_what_it_needs():
    config = load("algorithm.adv_estimator=optimal_token_baseline", f"{ROLLOUT}.n=4").config
    assert config.actor_rollout_ref.actor.calculate_sum_pi_squared is True


def test_warnings_do_not_stop_a_run():
    assert any("gives only one" in notice for notice in load("algorithm.adv_estimator=grpo").notices)


def test_errors_come_first():
    levels = [level for level, _ in problems("algorithm.adv_estimator=grpo", "data.use_shm=True", f"{ROLLOUT}.top_p=2")]
    assert levels == ["error", "warning", "notice"]


def test_errors_are_sentences_with_braces_kept():
    assert "{x}" in refused("trainer.logger=['{x}']")
