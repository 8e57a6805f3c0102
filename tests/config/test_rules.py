"""Every rule between keys is broken by at least one row here."""

import ast
import inspect
import re
import sys
from dataclasses import fields

import pytest

from verl.config import PPO, load_config
from verl.config.checks import check_config
from verl.config.keys import Bounds
from verl.config.rules import ppo, ppo_parts, sections
from verl.config.schema import value_at

from .helpers import ACTOR, FIXTURES, GRPO, ROLLOUT, load, problems, refused

CORRECTION = "algorithm.rollout_correction"
REJECTION = ("algorithm.program=rejection_sampling", f"{ROLLOUT}.n=4")
# words of the table -> overrides
GROUPS = {
    "REJECTION": REJECTION,
    "ONLINE": ("algorithm.program=online_dpo", f"{ROLLOUT}.n=4"),
    "SEPARATE": ("trainer.v1.trainer_mode=separate_async",),
    "TAUGHT": ("distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=t"),
    "GRPO": GRPO,
}
# words of the table -> what they stand for in keys and values
PATHS = {
    "ACTOR": ACTOR,
    "ROLLOUT": ROLLOUT,
    "MODEL": "actor_rollout_ref.model",
    "REF": "actor_rollout_ref.ref",
    "CORRECTION": CORRECTION,
    "GUARDS": "trainer.guards",
    "LOSS": "distillation.distillation_loss",
    "TEACHERS": "distillation.teacher_models",
    "SYNC_STEP": "trainer.v1.separate_async.parameter_sync_step",
    "FIXTURES": str(FIXTURES),
}
# level, key of the problem, and overrides that cause it
BROKEN = """
error    ROLLOUT.enable_rollout_routing_replay  ACTOR.router_replay.mode=R2  ROLLOUT.enable_rollout_routing_replay=True
error    ACTOR.router_replay.mode  ACTOR.router_replay.mode=R2  CORRECTION.bypass_mode=True
error    ACTOR.router_replay.mode  ACTOR.router_replay.mode=R3  ROLLOUT.name=hf
error    ACTOR.router_replay.mode  ACTOR.router_replay.mode=R3  ROLLOUT.multi_turn.enable=True
error    ACTOR.router_replay.mode  ACTOR.router_replay.mode=R3  ROLLOUT.name=vllm  ROLLOUT.stop=[x]
notice   global_profiler.tool  global_profiler.tool=nsys
notice   ACTOR.megatron  model_engine=megatron  +ACTOR.megatron.override_transformer_config.num_layers=3
notice   ROLLOUT.checkpoint_engine.backend  ROLLOUT.name=vllm  ROLLOUT.checkpoint_engine.backend=nixl
error    algorithm.program  algorithm.program=rejection
error    rejection.keep  REJECTION  rejection.keep=5
warning  rejection.keep  REJECTION  rejection.keep=4
error    rejection.write  REJECTION  rejection.write=kept.parquet
error    ROLLOUT.prefetch_num  REJECTION  ROLLOUT.prefetch_num=1
notice   algorithm.adv_estimator  REJECTION  algorithm.adv_estimator=grpo
notice   ACTOR.use_kl_loss  REJECTION  ACTOR.use_kl_loss=True
error    distillation.enabled  TAUGHT  algorithm.program=rejection_sampling  ROLLOUT.n=4
error    TEACHERS.teacher_model.model_path  distillation.enabled=True
error    distillation.other_teachers  TAUGHT  TEACHERS.more.path=t
error    TEACHERS  TAUGHT  TEACHERS.more.model_path=t
error    TEACHERS  TAUGHT  distillation.on_policy_share=0  distillation.stored_outputs=True
error    distillation.stored_outputs  TAUGHT  distillation.stored_outputs=True
error    LOSS.loss_mode  TAUGHT  LOSS.loss_mode=k1
error    distillation.on_policy_share  TAUGHT  distillation.on_policy_share=0.5
error    ROLLOUT.n  algorithm.program=online_dpo  ROLLOUT.n=1
error    preference.loss  ONLINE  preference.loss=kto
error    preference.loss_weights  ONLINE  preference.loss_weights=[1.0,2.0]
error    ROLLOUT.prefetch_num  ONLINE  ROLLOUT.prefetch_num=1
error    online.sync_steps  ONLINE  online.sync_steps=1  MODEL.lora_rank=4
notice   algorithm.adv_estimator  ONLINE  algorithm.adv_estimator=grpo
error    algorithm.adv_estimator  algorithm.adv_estimator=grop
error    algorithm.adv_estimator  algorithm.adv_estimator=dpo
error    ACTOR.policy_loss.loss_mode  ACTOR.policy_loss.loss_mode=vanila
warning  ACTOR.policy_loss.loss_mode  ACTOR.policy_loss.loss_mode=gspo  ACTOR.loss_agg_mode=seq-mean-token-mean
warning  ACTOR.kl_loss_type  ACTOR.use_kl_loss=True  ACTOR.kl_loss_type=kl
error    ROLLOUT.name  ROLLOUT.name=natve
error    ACTOR.strategy  ACTOR.strategy=fsdp3
error    ACTOR.deepspeed.config  ACTOR.strategy=deepspeed  ACTOR.deepspeed.config=missing.json
error    ACTOR.deepspeed.config  ACTOR.strategy=deepspeed  ACTOR.deepspeed.offload_param=True
error    ACTOR.megatron  model_engine=megatron  ACTOR.megatron.use_megatron_fsdp=True
error    ROLLOUT.speculative.model_path  ROLLOUT.speculative.methods=[model]
error    ROLLOUT.dtype  ROLLOUT.dtype=float16
error    ACTOR.fsdp_config.model_dtype  ACTOR.fsdp_config.model_dtype=fp16
error    SYNC_STEP  SEPARATE  SYNC_STEP=2
error    SYNC_STEP  SEPARATE  SYNC_STEP=9  ROLLOUT.nnodes=1
warning  SYNC_STEP  SEPARATE  SYNC_STEP=2  ROLLOUT.nnodes=1  trainer.save_freq=3
error    trainer.logger  trainer.logger=[console,wandbb]
error    MODEL.override_config  MODEL.override_config.num_hidden_layers=1000000000
error    MODEL.override_config  MODEL.override_config.vocab_size=10000000000
error    ACTOR.checkpoint.save_contents  ACTOR.checkpoint.save_contents=[models]
error    ACTOR.checkpoint.load_contents  ACTOR.checkpoint.load_contents=[models]
error    critic.checkpoint.save_contents  critic.checkpoint.save_contents=[models]
error    critic.checkpoint.load_contents  critic.checkpoint.load_contents=[models]
error    reward.reward_manager.name  reward.reward_manager.name=naiv
error    reward.debug  reward.debug=True  trainer.n_gpus_per_node=2
error    ACTOR.ppo_micro_batch_size  ACTOR.ppo_micro_batch_size=4  ACTOR.ppo_micro_batch_size_per_gpu=4
error    critic.ppo_micro_batch_size  critic.ppo_micro_batch_size=4  critic.ppo_micro_batch_size_per_gpu=4
error    critic.forward_micro_batch_size  critic.forward_micro_batch_size=4  critic.forward_micro_batch_size_per_gpu=4
error    ROLLOUT.log_prob_micro_batch_size  ROLLOUT.log_prob_micro_batch_size=4  ROLLOUT.log_prob_micro_batch_size_per_gpu=4
error    REF.log_prob_micro_batch_size  REF.log_prob_micro_batch_size=4  REF.log_prob_micro_batch_size_per_gpu=4
error    ACTOR.ppo_mini_batch_size  data.train_batch_size=8  ACTOR.ppo_mini_batch_size=16
error    critic.ppo_mini_batch_size  data.train_batch_size=8  critic.ppo_mini_batch_size=16
warning  ACTOR.ppo_mini_batch_size  data.train_batch_size=10  ACTOR.ppo_mini_batch_size=4
error    data.gen_batch_size  algorithm.filter_groups.enable=True  data.gen_batch_size=4
error    ROLLOUT.max_model_len  ROLLOUT.max_model_len=1000
error    ROLLOUT.prompt_length  ROLLOUT.prompt_length=100
error    ROLLOUT.response_length  ROLLOUT.response_length=100  data.max_response_length=200
error    ROLLOUT.n  algorithm.adv_estimator=grpo_passk
warning  ROLLOUT.n  algorithm.adv_estimator=grpo
error    algorithm.gdpo_reward_keys  algorithm.adv_estimator=gdpo
error    algorithm.gdpo_reward_weights  algorithm.adv_estimator=gdpo  algorithm.gdpo_reward_keys=[a,b]
        algorithm.gdpo_reward_weights=[1]
error    algorithm.use_pf_ppo  GRPO  algorithm.use_pf_ppo=True
error    critic.enable  critic.enable=False
warning  critic.enable  GRPO  critic.enable=True
warning  algorithm.use_kl_in_reward  algorithm.use_kl_in_reward=True  ACTOR.use_kl_loss=True
warning  algorithm.filter_groups.enable  algorithm.filter_groups.enable=True
error    ACTOR.policy_loss.dro_beta  ACTOR.policy_loss.loss_mode=dro
error    ACTOR.policy_loss.loss_mode  ACTOR.policy_loss.loss_mode=bypass_mode
error    CORRECTION.rollout_rs_threshold  CORRECTION.rollout_rs=token_k4  CORRECTION.rollout_rs_threshold=2
error    CORRECTION.rollout_rs_threshold  CORRECTION.rollout_rs=token
error    CORRECTION.rollout_rs_threshold  CORRECTION.rollout_rs=token  CORRECTION.rollout_rs_threshold=nan
error    CORRECTION.rollout_rs_threshold  CORRECTION.rollout_rs=seq_max_k2  CORRECTION.rollout_rs_threshold=0.1_2
error    CORRECTION.rollout_rs_threshold  CORRECTION.rollout_rs=token_k1,token_k2  CORRECTION.rollout_rs_threshold=0.5_2
error    CORRECTION.rollout_rs_threshold_lower  CORRECTION.rollout_rs=token_k1  CORRECTION.rollout_rs_threshold=0.5_2
        CORRECTION.rollout_rs_threshold_lower=0.7
error    CORRECTION.rollout_rs_threshold_lower  CORRECTION.rollout_rs=token_k1,seq_sum_k1  CORRECTION.rollout_rs_threshold=2
        CORRECTION.rollout_rs_threshold_lower=0.7
error    CORRECTION.rollout_rs_threshold_lower  CORRECTION.rollout_token_veto_threshold=0.1
        CORRECTION.rollout_rs_threshold_lower=0.7
error    CORRECTION.rollout_rs_threshold  CORRECTION.rollout_rs=token_k1
error    CORRECTION.rollout_rs_threshold  CORRECTION.rollout_rs=token_k1,seq_max_k2,seq_sum_k3
        CORRECTION.rollout_rs_threshold='1,2'
error    CORRECTION.rollout_is_threshold  CORRECTION.rollout_is=token  CORRECTION.rollout_is_threshold=2_1
warning  CORRECTION.bypass_mode  CORRECTION.bypass_mode=True  ROLLOUT.prefetch_num=1
error    ROLLOUT.calculate_log_probs  CORRECTION.rollout_is=token  ROLLOUT.calculate_log_probs=False
error    ACTOR.optim.min_lr  ACTOR.optim.lr_scheduler_type=cosine  ACTOR.optim.min_lr=1e-3
warning  ACTOR.optim.lr  MODEL.lora_rank=8
warning  ACTOR.optim.lr  ACTOR.optim.lr=1e-12
warning  ACTOR.optim.lr_warmup_steps  ACTOR.optim.lr_warmup_steps=7  trainer.total_training_steps=6
error    ACTOR.optim.weight_decay  ACTOR.optim.weight_decay=1e6
warning  ACTOR.optim.weight_decay  ACTOR.optim.weight_decay=1e5
error    ACTOR.optim.override_optimizer_config  +ACTOR.optim.override_optimizer_config.eps=1e-5
error    ACTOR.optim.lr_scheduler_kwargs  ACTOR.optim.lr_scheduler_type=polynomial
        ACTOR.optim.lr_scheduler_kwargs={num_cycles:2}
error    ACTOR.optim.lr_scheduler_kwargs  ACTOR.optim.lr_scheduler_type=warmup_stable_decay
error    critic.optim.override_optimizer_config  +critic.optim.override_optimizer_config={eps:1e-5}
error    ROLLOUT.batch_invariant  ROLLOUT.batch_invariant=require  ROLLOUT.name=hf
error    ROLLOUT.val_kwargs.temperature  ROLLOUT.val_kwargs.do_sample=True
warning  ROLLOUT.val_kwargs.n  ROLLOUT.val_kwargs.n=8
error    ROLLOUT.do_sample  GRPO  ROLLOUT.do_sample=False
error    ROLLOUT.do_sample  GRPO  ROLLOUT.top_k=1
error    ROLLOUT.do_sample  GRPO  ROLLOUT.top_p=1e-9
error    ROLLOUT.do_sample  GRPO  ROLLOUT.temperature=1e-9
error    ROLLOUT.do_sample  GRPO  ROLLOUT.min_p=0.9999
warning  ROLLOUT.do_sample  GRPO  ROLLOUT.do_sample=False  ROLLOUT.multi_turn.enable=True
error    reward.reward_kwargs  +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
        +reward_model.reward_kwargs.overlong_buffer_cfg.len=9
error    reward.reward_kwargs  reward_model.reward_manager=dapo
        +reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:4096}  +reward_model.reward_kwargs.max_resp_len=1024
error    ROLLOUT.prefetch_num  ROLLOUT.prefetch_num=9
error    ROLLOUT.partial_rollout  ROLLOUT.prefetch_num=1  ROLLOUT.partial_rollout=True  ROLLOUT.stop=[END]
error    ROLLOUT.keep_partial_kv_cache  ROLLOUT.prefetch_num=1  ROLLOUT.partial_rollout=True
        ROLLOUT.keep_partial_kv_cache=True  ROLLOUT.name=hf
error    ROLLOUT.keep_partial_kv_cache  ROLLOUT.prefetch_num=1  ROLLOUT.partial_rollout=True
        ROLLOUT.keep_partial_kv_cache=True  ROLLOUT.enable_rollout_routing_replay=True
error    ROLLOUT.in_flight_updates  ROLLOUT.prefetch_num=1  ROLLOUT.in_flight_updates=True  ROLLOUT.name=vllm
error    ROLLOUT.in_flight_updates  ROLLOUT.prefetch_num=1  ROLLOUT.in_flight_updates=True  ROLLOUT.name=sglang
error    ROLLOUT.in_flight_updates  ROLLOUT.prefetch_num=1  ROLLOUT.in_flight_updates=True
        ROLLOUT.multi_turn.enable=True
error    ROLLOUT.in_flight_updates  ROLLOUT.prefetch_num=1  ROLLOUT.in_flight_updates=True  ROLLOUT.stop=[END]
error    ROLLOUT.in_flight_updates  ROLLOUT.prefetch_num=1  ROLLOUT.in_flight_updates=True  ROLLOUT.speculative.methods=[ngram]
error    ROLLOUT.in_flight_updates  ROLLOUT.prefetch_num=1  ROLLOUT.in_flight_updates=True
        ROLLOUT.partial_rollout=True
error    MODEL.quantization  MODEL.quantization=nf4
error    ROLLOUT.adapters_by_name  ROLLOUT.name=sglang  ROLLOUT.adapters_by_name=True
error    ROLLOUT.adapters_by_name  ROLLOUT.name=sglang  ROLLOUT.adapters_by_name=True  MODEL.lora_rank=4  MODEL.use_dora=True
error    ROLLOUT.speculative.methods  ROLLOUT.name=hf  ROLLOUT.speculative.methods=[ngram]
error    ROLLOUT.speculative.methods  ROLLOUT.speculative.methods=[ngram]  ROLLOUT.enable_rollout_routing_replay=True
error    ROLLOUT.speculative.methods  ROLLOUT.speculative.methods=[model,mtp]  ROLLOUT.speculative.model_path=draft
warning  ROLLOUT.speculative.methods  ROLLOUT.name=vllm  ROLLOUT.speculative.methods=[ngram]
error    MODEL.mtp.enable_train  trainer.n_gpus_per_node=2  MODEL.mtp.enable=True  MODEL.mtp.enable_train=True
error    MODEL.mtp.enable_rollout  ROLLOUT.name=vllm  MODEL.mtp.enable=True  MODEL.mtp.enable_rollout=True
        ROLLOUT.speculative.methods=[ngram]
error    MODEL.mtp.num_speculative_tokens  ROLLOUT.name=vllm  MODEL.mtp.enable=True  MODEL.mtp.enable_rollout=True
        MODEL.mtp.num_speculative_tokens=2  ROLLOUT.speculative.num_speculative_tokens=3
error    MODEL.lora_adapter_path  MODEL.lora_adapter_path=/nowhere
error    critic.model.lora_adapter_path  critic.model.lora_adapter_path=/nowhere
error    reward.reward_model.model_path  reward.reward_model.enable=True
error    reward.reward_model.rollout.name  reward.reward_model.enable=True  reward_model.model.path=rm
        reward_model.rollout.name=http
error    reward.reward_manager.module.path  reward.reward_manager.source=importlib
error    trainer.default_local_dir  trainer.default_local_dir=' '
error    trainer.default_local_dir  trainer.default_local_dir=FIXTURES/model
error    trainer.hub_model_id  trainer.push_to_hub=True  trainer.save_freq=1
error    trainer.save_freq  trainer.push_to_hub=True  trainer.hub_model_id=me/model
error    trainer.resume_from_path  trainer.resume_mode=resume_path
error    trainer.resume_from_path  trainer.resume_mode=resume_path  trainer.resume_from_path=/nowhere/global_step_3
error    GUARDS.nonfinite.action  GUARDS.nonfinite.action=rollback  trainer.save_freq=-1
error    GUARDS.grad_norm.action  GUARDS.grad_norm.action=rollback  GUARDS.grad_norm.limit=2  trainer.save_freq=-1
error    GUARDS.policy_kl.action  GUARDS.policy_kl.action=rollback  GUARDS.policy_kl.limit=2  trainer.save_freq=-1
error    GUARDS.reference_kl.action  GUARDS.reference_kl.action=rollback  GUARDS.reference_kl.limit=2  trainer.save_freq=-1
error    GUARDS.ratio.action  GUARDS.ratio.action=rollback  GUARDS.ratio.limit=2  trainer.save_freq=-1
error    GUARDS.entropy.action  GUARDS.entropy.action=rollback  GUARDS.entropy.limit=2  trainer.save_freq=-1
error    ROLLOUT.quantization  ROLLOUT.name=vllm  ROLLOUT.quantization=int8
error    ROLLOUT.quantization  ROLLOUT.name=hf  ROLLOUT.quantization=fp8
error    ROLLOUT.quantization  ROLLOUT.quantization=int8  ROLLOUT.prepack_weights=False
error    ROLLOUT.quantization  ROLLOUT.quantization=int8  ROLLOUT.tensor_model_parallel_size=2  trainer.n_gpus_per_node=2
error    ROLLOUT.kv_cache_dtype  ROLLOUT.name=sglang  ROLLOUT.service.url=http://host:1  ROLLOUT.kv_cache_dtype=fp8
error    ROLLOUT.kv_cache_dtype  ROLLOUT.kv_cache_dtype=fp8
error    ROLLOUT.kv_cache_dtype  ROLLOUT.name=vllm  ROLLOUT.kv_cache_dtype=int8
error    ROLLOUT.kv_cache_dtype  ROLLOUT.kv_cache_dtype=int8  ROLLOUT.prepack_weights=False
error    ROLLOUT.kv_cache_dtype  ROLLOUT.kv_cache_dtype=int8  ROLLOUT.quantization=fp8
error    ROLLOUT.kv_cache_dtype  ROLLOUT.kv_cache_dtype=int8  ROLLOUT.tensor_model_parallel_size=2  trainer.n_gpus_per_node=2
error    ACTOR.qat.mode  ACTOR.qat.enable=True
error    ACTOR.qat.mode  ACTOR.qat.enable=True  ROLLOUT.quantization=fp8
error    ACTOR.qat.mode  ACTOR.qat.enable=True  ACTOR.qat.mode=w4a16  ROLLOUT.quantization=int8
error    ACTOR.qat.ignore_patterns  ACTOR.qat.enable=True  ACTOR.qat.mode=w4a16  ACTOR.qat.ignore_patterns=['re:(']
error    ACTOR.qat.enable  ACTOR.qat.enable=True  ROLLOUT.quantization=int8  MODEL.lora_rank=8
error    ACTOR.qat.enable  ACTOR.qat.enable=True  ROLLOUT.quantization=int8  trainer.n_gpus_per_node=2
error    ACTOR.qat.enable  ACTOR.qat.enable=True  ROLLOUT.quantization=int8  ACTOR.strategy=megatron
error    GUARDS.sampler_kl.action  GUARDS.sampler_kl.action=rollback  GUARDS.sampler_kl.limit=2  trainer.save_freq=-1
error    GUARDS.mismatch.action  GUARDS.mismatch.action=rollback  GUARDS.mismatch.limit=2  trainer.save_freq=-1
error    GUARDS.nonfinite.action  GUARDS.nonfinite.action=rollback  trainer.save_freq=1  ROLLOUT.prefetch_num=1
error    GUARDS.ratio.limit  GUARDS.ratio.limit=0.5
"""


def broken_rules():
    """(level, key, overrides) of each row."""
    for row in re.sub(r"\n +", "  ", BROKEN).strip().splitlines():
        text = re.sub(r"\b[A-Z_]+\b", lambda word: PATHS.get(word[0], word[0]), row)
        level, key, *overrides = re.split(r" {2,}", text)
        yield level, key, [part for word in overrides for part in GROUPS.get(word, [word])]


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
    modules = {module.__file__: module for module in (ppo, ppo_parts, sections)}
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
    for level, key, overrides in broken_rules():
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
        (f"{ROLLOUT}.n=4", f"{ROLLOUT}.top_p=0.01", f"{ROLLOUT}.temperature=0.01"),
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


SET = "rollout_is=null rollout_is_threshold=3 rollout_rs_threshold=0.5_2 rollout_rs=null"
SET_ALONE = [
    *(f"{CORRECTION}.{key}" for key in SET.split()),
    *(f"trainer.guards.sampler_kl.{k}" for k in ("action=warn", "limit=2")),
]


@pytest.mark.parametrize("override", SET_ALONE)
def test_a_key_that_is_set_keeps_the_other_defaults_of_a_sampler_in_few_bits(override):
    loaded, defaults = load(f"{ROLLOUT}.quantization=int8", override), load(f"{ROLLOUT}.quantization=int8")
    key = override.partition("=")[0]
    changed = {path for section in (CORRECTION, "trainer.guards.sampler_kl")
               for field in fields(value_at(loaded.config, section)) if (path := f"{section}.{field.name}")
               if value_at(loaded.config, path) != value_at(defaults.config, path)}  # fmt: skip
    assert changed == ({key, f"{key}_threshold"} if key.endswith("_rs") else {key})
    assert not any(key in notice for notice in loaded.notices)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("method", ["rollout_is=token", "rollout_is=sequence", "rollout_rs=seq_mean_k1"])
def test_a_method_of_correction_that_is_set_excludes_the_other(method, quantization):
    name, _, value = method.partition("=")
    loaded = load(
        f"{ROLLOUT}.quantization={quantization}", f"{CORRECTION}.{method}", f"{CORRECTION}.{name}_threshold=2.0"
    )
    section = loaded.config.algorithm.rollout_correction
    assert {"rollout_is": section.rollout_is, "rollout_rs": section.rollout_rs} == {
        "rollout_is": None, "rollout_rs": None, name: value
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "rules", "bounds"),
    [
        ("rollout_token_veto_threshold=1e-4", "seq_max_k1", "0.0001_inf"),
        ("rollout_rs=sequence rollout_rs_threshold=2.0", "seq_sum_k1", 2.0),
        ("rollout_rs=geometric rollout_rs_threshold=1.01 rollout_rs_threshold_lower=0.99", "seq_mean_k1", "0.99_1.01"),
        ("rollout_rs=token rollout_rs_threshold=2 rollout_token_veto_threshold=0.1", "token_k1,seq_max_k1", "2.0,0.1_inf"),
        ("rollout_rs='token_k1,token_k2' rollout_rs_threshold=2 rollout_token_veto_threshold=0.1",
         "token_k1,token_k2,seq_max_k1", "2.0,2.0,0.1_inf"),
        ("rollout_rs=seq_max_k1 rollout_rs_threshold=1e-3_inf rollout_token_veto_threshold=0.1",
         "seq_max_k1,seq_max_k1", "1e-3_inf,0.1_inf"),
    ],
)  # fmt: skip
def test_rejection_as_earlier_releases_write_it(keys, rules, bounds):
    section = load(*(f"{CORRECTION}.{key}" for key in keys.split())).config.algorithm.rollout_correction
    assert section.rollout_rs == rules
    assert str(section.rollout_rs_threshold) == str(bounds)


def test_the_loss_of_bypass_mode_has_no_weights_of_its_own():
    loaded = load(f"{ROLLOUT}.quantization=int8", f"{CORRECTION}.bypass_mode=True")
    assert loaded.config.algorithm.rollout_correction.rollout_is is None


def test_drafts_of_the_head_keep_the_number_that_is_set():
    head, number = f"{PATHS['MODEL']}.mtp", "num_speculative_tokens"
    keys = {f"{head}.{number}=3": 3, f"{ROLLOUT}.speculative.{number}=5": 5, f"{ROLLOUT}.speculative.methods=[mtp]": 1}
    for override, expected in keys.items():
        config = load(f"{ROLLOUT}.name=vllm", f"{head}.enable=True", f"{head}.enable_rollout=True", override).config
        assert vars(config.actor_rollout_ref.rollout.speculative) | {"methods": ["mtp"], number: expected} == vars(
            config.actor_rollout_ref.rollout.speculative
        )


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


def test_errors_are_sentences_that_keep_their_braces():
    assert "{x}" in refused("trainer.logger=['{x}']")
