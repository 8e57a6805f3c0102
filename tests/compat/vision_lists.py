"""Override lists of launch scripts for vision-language models. Paths, counts, devices and the rollout engine are changed,
nothing else. {model}, {tools}, {task}: files of the tests. {out}: the run folder."""

from tests.compat.script_lists import (
    ACTOR,
    DYNAMIC,
    EXPERTS,
    FALLBACK,
    FSDP,
    KL,
    LAYERS,
    MICRO,
    MODEL,
    OPTIMIZER,
    REF,
    ROLLOUT,
    TEACHER,
    under,
)  # fmt: skip

GEO3K = f"algorithm.use_kl_in_reward=False data.image_key=images data.truncation=error {KL} {FSDP}"
EAGER = f"{ROLLOUT}.enable_chunked_prefill=False {ROLLOUT}.enforce_eager=False {ROLLOUT}.free_cache_engine=True"
CACHES = (
    f"+{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
    f"+{ROLLOUT}.engine_kwargs.vllm.mm_processor_cache_gb=0",
)
MEGATRON = (
    f"{ACTOR}.megatron.param_offload=True {ACTOR}.megatron.optimizer_offload=True {ACTOR}.megatron.grad_offload=True "
    "actor_rollout_ref.ref.megatron.param_offload=True"
)
DISTILLATION = (
    f"algorithm.adv_estimator=grpo data.image_key=images {DYNAMIC} distillation.enabled=True {TEACHER}.model_path={{model}} "
    "distillation.distillation_loss.use_task_rewards=False"
)

# of Qwen3.5
_CHUNKS = "use_torch_compile=False entropy_from_logits_with_chunking=True"
_SHARDED = (
    f"algorithm.use_kl_in_reward=False data.image_key=images data.shuffle=False data.truncation=error {KL} "
    f"data.filter_overlong_prompts=True {MICRO} {under(ACTOR, f'{_CHUNKS} strategy=fsdp2 use_dynamic_bsz=False')} "
    f"{under(f'{ACTOR}.fsdp_config', 'reshard_after_forward=True entropy_checkpointing=True offload_policy=True')} "
    f"{under(f'{ACTOR}.fsdp_config', 'param_offload=True optimizer_offload=True ulysses_sequence_parallel_size=1')} "
    f"{under(REF, f'{_CHUNKS} strategy=fsdp2')} {under(MODEL, 'use_remove_padding=True enable_gradient_checkpointing=True')} "
    f"{under(f'{REF}.fsdp_config', 'reshard_after_forward=True offload_policy=True param_offload=True')} "
    f"{under(ROLLOUT, 'ignore_eos=False enable_chunked_prefill=True max_num_batched_tokens=8192 free_cache_engine=True')} "
    f"{under(ROLLOUT, 'enforce_eager=False enable_prefix_caching=False')} "
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=6144 "
    "trainer.balance_batch=False trainer.resume_from_path=checkpoints/"
)
_TURBO = (
    f"{_SHARDED} {ACTOR}.strategy=fsdp_turbo {REF}.strategy=fsdp_turbo {FALLBACK} {ACTOR}.optim.optimizer=AdamW "
    f"{ACTOR}.fsdp_config.turbo_config.distributed.fully_shard_parallel_size=1 "
    f"+{ACTOR}.fsdp_config.turbo_config.memory.recompute=True"
)
_PADDED = f"{MODEL}.use_remove_padding=False data.image_patch_size=16 data.filter_overlong_prompts_workers=8"
_VEOMNI = (
    f"model_engine=veomni {FALLBACK} {MICRO} {MODEL}.use_remove_padding=True data.filter_overlong_prompts_workers=2 "
    f"{under(ACTOR, 'clip_ratio_low=3e-4 clip_ratio_high=4e-4 clip_ratio_c=10.0 policy_loss.loss_mode=gspo')} "
    f"{under(f'{ACTOR}.veomni', 'param_offload=True optimizer_offload=True enable_full_shard=True')} "
    f"{under(f'{ACTOR}.veomni', 'expert_parallel_size=1 attn_implementation=flash_attention_2')} data.return_raw_chat=True "
    f"{under(f'{ROLLOUT}.val_kwargs', 'top_p=0.7 temperature=1.0 n=1')} trainer.log_val_generations=100"
)
_MEGATRON = (
    f"model_engine=megatron {KL} {MICRO} {MODEL}.use_remove_padding=False {MODEL}.trust_remote_code=True "
    f"{under(f'{ACTOR}.megatron', 'use_mbridge=True vanilla_mbridge=True use_remove_padding=False dtype=bfloat16')} "
    f"{ACTOR}.checkpoint.save_contents=['model','extra','optimizer'] {under(ACTOR, 'use_dynamic_bsz=False')} "
    f"{under(LAYERS, 'recompute_granularity=full recompute_method=uniform recompute_num_layers=1 apply_rope_fusion=False')} "
    f"{LAYERS}.moe_router_load_balancing_type=none {OPTIMIZER}.optimizer_cpu_offload=True "
    f"{ROLLOUT}.dtype=bfloat16 {ROLLOUT}.calculate_log_probs=True"
)

# family -> name -> overrides
RUNS_BY_FAMILY = {
    "qwen2_5_vl": {
        "qwen2.5-vl": f"{GEO3K} {MICRO} {EAGER} {CACHES[0]}",
        "qwen2.5-vl fsdp2":
        f"{GEO3K} {DYNAMIC} {ACTOR}.strategy=fsdp2 {MODEL}.use_fused_kernels=True {ROLLOUT}.multi_stage_wake_up=True",
        "qwen2.5-vl lora": f"{GEO3K} {MICRO} {EAGER} {MODEL}.lora_rank=4 {MODEL}.lora_alpha=8 "
        f"{MODEL}.target_modules=all-linear {MODEL}.exclude_modules=.*visual.*",
        "qwen2.5-vl frozen tower": f"{GEO3K} {MICRO} {ACTOR}.freeze_vision_tower=True",
        "qwen2.5-vl megatron": f"data.image_key=images {DYNAMIC} model_engine=megatron {MEGATRON} "
        f"{ACTOR}.megatron.use_mbridge=True {ACTOR}.use_kl_loss=True",
        "qwen2.5-vl served by sglang": f"{GEO3K} {MICRO} {EAGER} {under(ROLLOUT, 'multi_stage_wake_up=True mode=async')} "
        f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3",
        "qwen2.5-vl npu": f"{GEO3K} {MICRO} {EAGER} {CACHES[0]} trainer.device=npu {FALLBACK} "
        f"{ACTOR}.use_torch_compile=False +{ACTOR}.entropy_from_logits_with_chunking=True",
        "qwen2.5-vl fsdp_turbo": f"{GEO3K} {DYNAMIC} {ACTOR}.strategy=fsdp_turbo {REF}.strategy=fsdp_turbo {FALLBACK} "
        f"{ACTOR}.fsdp_config.turbo_config.enable=True",
        "qwen2.5-vl distillation of the top k": f"{DISTILLATION} distillation.distillation_loss.topk=8 "
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "qwen2.5-vl asynchronous": f"{GEO3K} {DYNAMIC} {ROLLOUT}.calculate_log_probs=True "
        "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=1",
        "qwen2.5-vl one step ahead": f"{GEO3K} {DYNAMIC} trainer.v1.trainer_mode=colocate_async",
        "qwen2.5-vl ppo": f"{GEO3K} {MICRO} algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.model.path={{model}} "
        "critic.ppo_micro_batch_size_per_gpu=2",
        "qwen2.5-vl rloo": f"{GEO3K} {MICRO} algorithm.adv_estimator=rloo",
        "qwen2.5-vl remax": f"{GEO3K} {MICRO} algorithm.adv_estimator=remax",
        "qwen2.5-vl dapo's filter": f"{GEO3K} {DYNAMIC} data.gen_batch_size=4 data.train_batch_size=2 "
        f"{under('algorithm.filter_groups', 'enable=True metric=seq_reward max_num_gen_batches=10')} "
        f"{ACTOR}.ppo_mini_batch_size=2",
        "qwen2.5-vl importance weights": f"{GEO3K} {DYNAMIC} {ROLLOUT}.calculate_log_probs=True "
        f"{under('algorithm.rollout_correction', 'rollout_is=token rollout_is_threshold=2.0')}",
        "qwen2.5-vl bypass": f"{GEO3K} {DYNAMIC} algorithm.rollout_correction.bypass_mode=True",
        "qwen2.5-vl fused kernels":
        f"{GEO3K} {DYNAMIC} {MODEL}.use_fused_kernels=True {MODEL}.fused_kernel_options.impl_backend=torch",
        "qwen2.5-vl turns with a tool":
        f"{GEO3K} {MICRO} {under(f'{ROLLOUT}.multi_turn', 'enable=True max_assistant_turns=2')} "
        f"{ROLLOUT}.multi_turn.tool_config_path={{tools}} data.max_prompt_length=1400",
        "qwen2.5-vl validation": f"{GEO3K} {MICRO} trainer.test_freq=1 trainer.log_val_generations=2 "
        f"{under(f'{ROLLOUT}.val_kwargs', 'temperature=1.0 n=2 do_sample=True')}",
        "qwen2.5-vl long prompts":
        f"{GEO3K} {MICRO} {under(ROLLOUT, 'enable_chunked_prefill=True max_model_len=512 limit_images=4')}",
        "qwen2.5-vl profiler": f"{GEO3K} {MICRO} {under(f'{ACTOR}.profiler', 'enable=True all_ranks=True')} "
        f"{under('global_profiler', 'tool=torch steps=[1] save_path={out}/traces')}",
        "qwen2.5-vl float16": f"{GEO3K} {DYNAMIC} {ACTOR}.fsdp_config.dtype=float16 {ROLLOUT}.dtype=float16",
    },
    "qwen2_vl": {
        "qwen2-vl dapo": f"data.image_key=images {ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 "
        f"{ACTOR}.loss_agg_mode=token-mean",
        "qwen2-vl smaller pictures": f"{GEO3K} {DYNAMIC} +data.mm_processor_kwargs.max_pixels=3136 data.image_patch_size=14 "
        "data.video_key=videos data.return_multi_modal_inputs=False",
    },
    "qwen3_vl": {
        "qwen3-vl": f"{GEO3K} {DYNAMIC} {EAGER} {CACHES[1]}",
        "qwen3-vl veomni": f"{GEO3K} {DYNAMIC} {CACHES[1]} model_engine=veomni {FALLBACK} "
        f"{under(f'{ACTOR}.veomni', 'param_offload=True attn_implementation=flash_attention_2')}",
        "qwen3-vl gspo": f"{GEO3K} {DYNAMIC} {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean "
        f"{ACTOR}.clip_ratio_low=3e-4 {ACTOR}.clip_ratio_high=4e-4",
        "qwen3-vl distillation": f"{DISTILLATION} distillation.distillation_loss.loss_mode=k1 "
        "distillation.distillation_loss.use_policy_gradient=True",
        "qwen3-vl lora, frozen tower": f"{GEO3K} {DYNAMIC} {ACTOR}.freeze_vision_tower=True "
        f"{under(MODEL, 'lora_rank=4 lora_alpha=8 target_modules=all-linear exclude_modules=.*visual.*')} "
        f"{under(ROLLOUT, 'load_format=safetensors layered_summon=True')}",
    },
    "qwen3_vl_moe": {
        "qwen3-vl moe": f"{GEO3K} {DYNAMIC}",
        "qwen3-vl moe megatron": f"{GEO3K} {DYNAMIC} {EAGER} model_engine=megatron {MEGATRON} {EXPERTS} "
        f"{LAYERS}.moe_z_loss_coeff=0.001 {ACTOR}.megatron.vanilla_mbridge=False",
        "qwen3-vl moe routing replay": f"{GEO3K} {DYNAMIC} model_engine=megatron {ACTOR}.megatron.router_replay.mode=R2",
    },
    "qwen3_5": {
        "qwen3.5": _SHARDED,
        "qwen3.5 openr1, videos": f"{_SHARDED} {_PADDED} {ROLLOUT}.layered_summon=True",
        "qwen3.5 fsdp_turbo": _TURBO,
        "qwen3.5 npu": f"{_SHARDED} trainer.device=npu {FALLBACK} {CACHES[1]}",
        "qwen3.5 distillation": f"{_SHARDED} {DISTILLATION} distillation.distillation_loss.loss_mode=k1 {ROLLOUT}.n=1 "
        f"{under('distillation.distillation_loss', 'use_policy_gradient=True loss_max_clamp=10.0 log_prob_min_clamp=-10.0')} "
        f"{TEACHER}.inference.max_model_len=512 {ROLLOUT}.max_model_len=512 {ROLLOUT}.calculate_log_probs=True",
    },
    "qwen3_5_moe": {
        "qwen3.5 moe": f"{_SHARDED} {CACHES[1]}",
        "qwen3.5 moe fsdp_turbo": _TURBO,
        "qwen3.5 moe veomni": _VEOMNI,
        "qwen3.5 moe veomni routing replay": f"{_VEOMNI} {ACTOR}.veomni.router_replay.mode=R3 "
        f"{under(f'{ACTOR}.veomni', 'moe_implementation=fused_triton cross_entropy_loss_implementation=liger_kernel')} "
        f"{under(ROLLOUT, 'calculate_log_probs=True enable_rollout_routing_replay=True mode=async')}",
        "qwen3.5 moe megatron": f"{_MEGATRON} {MEGATRON} {EXPERTS}",
        "qwen3.5 moe megatron npu": f"{_MEGATRON} {MEGATRON} {ACTOR}.megatron.vanilla_mbridge=False "
        f"{ACTOR}.checkpoint.strict=False {under(LAYERS, 'moe_aux_loss_coeff=0.01 moe_z_loss_coeff=0.001')} "
        f"{under(LAYERS, 'use_flash_attn=True moe_token_dispatcher_type=alltoall use_naive_l2norm=True')} "
        f"trainer.device=npu {FALLBACK}",
    },
    "glm4v": {
        "glm-4.1v": f"{GEO3K} {MICRO} {EAGER}",
        "glm-4.1v dr grpo":
        f"{GEO3K} {MICRO} algorithm.norm_adv_by_std_in_grpo=False {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    },
    "internvl": {
        "internvl": f"{GEO3K} {DYNAMIC} {ACTOR}.strategy=fsdp2 data.trust_remote_code=True "
        f"{MODEL}.trust_remote_code=True {MODEL}.use_fused_kernels=False",
        "internvl megatron": f"{GEO3K} {DYNAMIC} model_engine=megatron {MEGATRON}",
    },
    "llava": {"llava": f"{GEO3K} {MICRO}"},
}  # fmt: skip
RUNS = {name: (family, text) for family, lists in RUNS_BY_FAMILY.items() for name, text in lists.items()}
QUICK = ("qwen2.5-vl lora",)

_ROWS = (
    "data.train_files={task}/sft.jsonl data.train_batch_size=4 data.max_length=300 data.pad_mode=no_padding "
    "data.truncation=error data.use_dynamic_bsz=True data.max_token_len_per_gpu=1024 data.messages_key=messages "
    "model.use_remove_padding=True trainer.logger=[file] trainer.total_training_steps=2 optim.lr=2e-3"
)
# the same of fine-tuning
FINE_TUNING_BY_FAMILY = {
    "qwen3_vl": {
        "qwen3-vl": f"{_ROWS} data.ignore_input_ids_mismatch=True optim.lr_warmup_steps_ratio=0.01 optim.weight_decay=0.1 "
        "optim.betas=[0.9,0.95] optim.clip_grad=1.0 optim.lr_scheduler_type=cosine engine=fsdp engine.dtype=float32",
        "qwen3-vl megatron": f"{_ROWS} {under('optim', 'lr_warmup_init=0 lr_decay_style=cosine min_lr=1e-6')} "
        f"{under('engine', 'tensor_model_parallel_size=1 use_mbridge=True vanilla_mbridge=True')} engine=megatron",
        "qwen3-vl veomni": f"{_ROWS} engine=veomni engine.fsdp_size=-1 engine.attn_implementation=flash_attention_2 "
        f"optim.lr_min=1e-7 {FALLBACK}",
        "qwen3-vl automodel": f"{_ROWS} engine=automodel engine.distributed_strategy=fsdp2 engine.tp_size=1 {FALLBACK}",
        "qwen3-vl npu": f"{_ROWS} engine=fsdp trainer.device=npu {FALLBACK}",
    },
    "qwen2_5_vl": {
        "qwen2.5-vl lora": f"{_ROWS} engine=fsdp engine.strategy=fsdp2 engine.dtype=float32 "
        f"{under('model', 'lora_rank=4 lora_alpha=8 target_modules=all-linear')}",
    },
}  # fmt: skip
FINE_TUNING = {name: (family, text) for family, lists in FINE_TUNING_BY_FAMILY.items() for name, text in lists.items()}
