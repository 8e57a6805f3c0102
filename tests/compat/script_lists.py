"""Override lists as launch scripts of public releases write them, by kind of script. Paths, counts, devices, loggers and the
rollout engine are changed, nothing else. {model}, {rm}, {tools}, {turns}, {rows}, {parts}, {asks}, {kk}, {countdown}: files
of the tests. {out}: the run folder."""

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, MEGATRON = "actor_rollout_ref.model", f"{ACTOR}.megatron"
LAYERS, OPTIMIZER = f"+{MEGATRON}.override_transformer_config", f"+{ACTOR}.optim.override_optimizer_config"
FALLBACK = "trainer.engine_fallback=fsdp"
CORRECTION = "algorithm.rollout_correction"
TEACHER = "distillation.teacher_models.teacher_model"
OVERLONG = "+reward_model.reward_kwargs.overlong_buffer_cfg"


def under(section: str, keys: str) -> str:
    """The overrides `keys` of a section."""
    return " ".join(f"{section}.{key}" for key in keys.split())


KL = f"{under(ACTOR, 'use_kl_loss=True kl_loss_coef=0.001 kl_loss_type=low_var_kl entropy_coeff=0')} trainer.critic_warmup=0"
FSDP = (
    f"{under(MODEL, 'use_remove_padding=True enable_gradient_checkpointing=True')} {REF}.fsdp_config.param_offload=True "
    f"{under(f'{ACTOR}.fsdp_config', 'param_offload=False optimizer_offload=False')} data.filter_overlong_prompts=True"
)
MICRO = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=2 "
    f"{REF}.log_prob_micro_batch_size_per_gpu=2"
)
DYNAMIC = (
    f"{under(ACTOR, 'use_dynamic_bsz=True ppo_max_token_len_per_gpu=2048')} trainer.balance_batch=True "
    f"{under(ROLLOUT, 'log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=2048')} "
    f"{under(REF, 'log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=2048')}"
)
SERVED = under(
    ROLLOUT,
    "gpu_memory_utilization=0.6 tensor_model_parallel_size=1 enable_chunked_prefill=True free_cache_engine=True "
    "enforce_eager=False max_num_batched_tokens=2048 max_num_seqs=64 mode=async",
)
GRPO = f"algorithm.use_kl_in_reward=False {KL} {FSDP} {MICRO} {SERVED}"
DAPO = (
    f"{under('algorithm', 'use_kl_in_reward=False kl_ctrl.kl_coef=0.0')} {DYNAMIC} data.prompt_key=prompt data.truncation=left "
    f"{under(ACTOR, 'use_kl_loss=False kl_loss_coef=0.0 clip_ratio_low=0.2 clip_ratio_high=0.28 clip_ratio_c=10.0')} "
    f"{under(ACTOR, 'loss_agg_mode=token-mean grad_clip=1.0 optim.lr_warmup_steps=10 optim.weight_decay=0.1')} "
    f"reward_model.reward_manager=dapo {under(OVERLONG, 'enable=True len=2 penalty_factor=1.0 log=False')} "
    f"+reward_model.reward_kwargs.max_resp_len=4 {under(ROLLOUT, 'temperature=1.0 top_p=1.0 top_k=-1')} "
    f"{under(f'{ROLLOUT}.val_kwargs', 'temperature=1.0 top_p=0.7 top_k=-1 do_sample=True n=1')} trainer.resume_mode=auto"
)
FORK = (
    f"{under(ROLLOUT, 'tensor_model_parallel_size=1 gpu_memory_utilization=0.6')} trainer.default_hdfs_dir=null "
    "trainer.save_freq=10 custom_reward_function.path=null"
)
_SIZES = "tensor_model_parallel_size=1 pipeline_model_parallel_size=1 expert_model_parallel_size=1 param_offload=True"
ON_MEGATRON = (
    f"model_engine=megatron {under(MEGATRON, _SIZES)} {under(f'{REF}.megatron', _SIZES)} "
    f"{under(MEGATRON, 'optimizer_offload=True grad_offload=True use_mbridge=True vanilla_mbridge=False')}"
)
EXPERTS = (
    f"{under(LAYERS, 'recompute_method=uniform recompute_granularity=full recompute_num_layers=1 moe_router_dtype=fp32')} "
    f"{under(LAYERS, 'moe_enable_deepep=True moe_token_dispatcher_type=flex apply_rope_fusion=True moe_permute_fusion=True')} "
    f"{under(LAYERS, 'gradient_accumulation_fusion=True moe_aux_loss_coeff=0.001 account_for_loss_in_pipeline_split=True')} "
    f"{under(OPTIMIZER, 'optimizer_offload_fraction=1 overlap_cpu_optimizer_d2h_h2d=True optimizer_cpu_offload=True')} "
    f"{OPTIMIZER}.use_precision_aware_optimizer=True"
)
CRITIC = (
    f"algorithm.adv_estimator=gae {FSDP} critic.optim.lr=1e-5 "
    f"{under('critic.model', 'path={model} use_remove_padding=True enable_gradient_checkpointing=True')}"
)
RM = "reward_model.model.path={rm} custom_reward_function.path=null"
REWARD_MODEL = f"{CRITIC} {MICRO} critic.ppo_micro_batch_size_per_gpu=2 reward_model.enable=True {RM}"
LORA = under(MODEL, "lora_rank=4 lora_alpha=8 target_modules=all-linear")
DISTILLATION = (
    f"{FSDP} {DYNAMIC} distillation.enabled=True {TEACHER}.model_path={{model}} "
    f"{under(f'{TEACHER}.inference', 'name=vllm tensor_model_parallel_size=1 gpu_memory_utilization=0.3 max_model_len=512')} "
    "distillation.distillation_loss.use_task_rewards=False distillation.n_gpus_per_node=1 distillation.nnodes=1"
)
LONG = "data.max_prompt_length=1400 data.train_files={turns}"
TURNS = f"{under(ROLLOUT, 'multi_turn.enable=True multi_turn.max_assistant_turns=2')} {ROLLOUT}.agent.num_workers=1"
TOOLS = f"{TURNS} {under(f'{ROLLOUT}.multi_turn', 'tool_config_path={tools} format=hermes')} {LONG}"
ASYNC = f"{KL} {DYNAMIC} {ROLLOUT}.calculate_log_probs=True trainer.v1.trainer_mode"

# kind -> name -> overrides, to GRPO with 2 prompts x 2 samples
KINDS: dict[str, dict[str, str]] = {
    "losses and clipping": {
        "grpo": f"{GRPO} {ACTOR}.optim.lr=1e-6 trainer.total_epochs=15 ray_kwargs.ray_init.runtime_env.py_executable=null",
        "grpo with KL in the rewards": f"{FSDP} {MICRO} algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl "
        f"{under('algorithm.kl_ctrl', 'type=adaptive horizon=10000 target_kl=0.1 kl_coef=0.001')}",
        "dapo": DAPO,
        "dapo with its filter": f"{DAPO} algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
        "algorithm.filter_groups.max_num_gen_batches=10 data.gen_batch_size=4",
        "dr grpo": f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=False",
        "gspo": f"{DAPO} {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.loss_agg_mode=seq-mean-token-mean",
        "cispo": f"{GRPO} {ACTOR}.policy_loss.loss_mode=cispo {ACTOR}.clip_ratio_low=10 {ACTOR}.clip_ratio_high=0.2",
        "gpg": f"algorithm.adv_estimator=gpg {FSDP} {MICRO} {ACTOR}.policy_loss.loss_mode=gpg {ACTOR}.use_kl_loss=False",
        "sapo": f"{DAPO} {under(f'+{ACTOR}.policy_loss', 'tau_pos=1.0 tau_neg=1.05')} {ACTOR}.policy_loss.loss_mode=sapo",
        "dppo": f"{DAPO} {ACTOR}.policy_loss.loss_mode=dppo_tv {ROLLOUT}.calculate_log_probs=True",
        "dppo by KL": f"{DAPO} {ACTOR}.policy_loss.loss_mode=dppo_kl",
        "gmpo": f"{DAPO} {ACTOR}.policy_loss.loss_mode=geo_mean",
        "clip_cov": f"{DAPO} {ACTOR}.policy_loss.loss_mode=clip_cov {ACTOR}.policy_loss.clip_cov_ratio=0.0002",
        "clip_cov, keys of earlier releases": f"{DAPO} "
        f"{under(ACTOR, 'loss_mode=clip_cov clip_cov_ratio=0.0002 clip_cov_lb=1.0 clip_cov_ub=5.0')}",
        "kl_cov": f"{DAPO} {under(f'{ACTOR}.policy_loss', 'loss_mode=kl_cov kl_cov_ratio=0.002 ppo_kl_coef=1')}",
        "importance weights and rejection": f"{DAPO} {ROLLOUT}.calculate_log_probs=True "
        f"{under(CORRECTION, 'rollout_is=token rollout_is_threshold=2.0 rollout_rs=token_k1 rollout_rs_threshold=0.6_1.6')}",
        "the sampler's log-probs as old ones": f"{DAPO} {ROLLOUT}.calculate_log_probs=True "
        f"{under(CORRECTION, 'bypass_mode=True loss_type=reinforce rollout_is=sequence rollout_is_batch_normalize=True')} "
        f"{under(CORRECTION, 'rollout_is_threshold=2.0 rollout_rs=seq_mean_k1 rollout_rs_threshold=0.999_1.001')}",
        "rejection and a veto of earlier releases": f"{DAPO} {ROLLOUT}.calculate_log_probs=True "
        f"{under(CORRECTION, 'rollout_is=sequence rollout_is_threshold=2.0 rollout_is_batch_normalize=true')} "
        f"{under(CORRECTION, 'rollout_rs=geometric rollout_rs_threshold=1.01 rollout_rs_threshold_lower=0.99')} "
        f"{CORRECTION}.rollout_token_veto_threshold=1e-4",
        "truncated weights of earlier releases": f"{DAPO} {ACTOR}.tis_imp_ratio_cap=2.0 {ROLLOUT}.calculate_log_probs=True",
    },
    "advantages": {
        "rloo": f"algorithm.adv_estimator=rloo {FSDP} {MICRO} algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl",
        "reinforce++": f"algorithm.adv_estimator=reinforce_plus_plus {FSDP} {MICRO} {ACTOR}.use_kl_loss=True "
        f"{ACTOR}.kl_loss_type=mse",
        "reinforce++ with a baseline": f"algorithm.adv_estimator=reinforce_plus_plus_baseline {FSDP} {MICRO}",
        "remax": f"algorithm.adv_estimator=remax {FSDP} {DYNAMIC} algorithm.use_kl_in_reward=True",
        "opo": "algorithm.adv_estimator=opo",
        "pass at k": f"algorithm.adv_estimator=grpo_passk {KL} {MICRO}",
        "gdpo": f"algorithm.adv_estimator=gdpo {GRPO} reward.reward_manager.name=gdpo +algorithm.gdpo_reward_keys=[a,b] "
        "+algorithm.gdpo_reward_weights=[1.0,1.0] custom_reward_function.path={parts}",
        "optimal token baseline": f"algorithm.adv_estimator=optimal_token_baseline {KL} {DYNAMIC} "
        f"{ACTOR}.calculate_sum_pi_squared=True {ROLLOUT}.calculate_log_probs=True",
        "ppo": f"{CRITIC} {MICRO} critic.ppo_micro_batch_size_per_gpu=2 "
        f"{under('critic.model.fsdp_config', 'param_offload=False optimizer_offload=False')}",
        "ppo, fused kernels": f"{CRITIC} {DYNAMIC} {MODEL}.use_fused_kernels=True critic.ppo_max_token_len_per_gpu=4096 "
        f"{MODEL}.fused_kernel_options.impl_backend=triton",
        "ppo, preferred samples": f"{CRITIC} {MICRO} algorithm.use_pf_ppo=True "
        f"{under('algorithm.pf_ppo', 'reweight_method=pow weight_pow=2.0')} critic.ppo_micro_batch_size_per_gpu=2",
        "ppo with a profiler": f"{CRITIC} {DYNAMIC} {under('global_profiler', 'tool=nsys steps=[1] save_path={out}')} "
        f"{under(f'{ACTOR}.profiler', 'enable=True ranks=[0] all_ranks=False')}",
        "ppo with a reward model": f"{REWARD_MODEL} reward_model.use_reward_loop=True reward_model.num_workers=1 "
        f"{under('reward_model.rollout', 'name=vllm tensor_model_parallel_size=1 prompt_length=512 response_length=16')}",
        "ppo with a reward model of earlier releases": f"{REWARD_MODEL} reward_model.micro_batch_size_per_gpu=32 "
        f"{under('reward_model', 'model.use_remove_padding=True param_offload=False megatron.tensor_model_parallel_size=1')}",
        "a judge that the reward function asks": f"{DAPO} {under('reward_model', 'enable=True enable_resource_pool=True')} "
        f"{under('reward_model', 'n_gpus_per_node=1 nnodes=1 model.path={model} rollout.name=sglang')} "
        f"{under('reward_model.rollout', 'gpu_memory_utilization=0.95 tensor_model_parallel_size=1 free_cache_engine=False')} "
        "custom_reward_function.path={asks} custom_reward_function.name=compute_score_fapo",
    },
    "models, optimizers and memory": {
        "lora": f"{GRPO} {LORA} {under(ROLLOUT, 'load_format=safetensors layered_summon=True')} {MODEL}.use_shm=True",
        "lora of some modules": f"{GRPO} {under(MODEL, 'lora_rank=4 lora_alpha=8 target_modules=[q_proj,v_proj]')}",
        "fsdp2": f"{KL} {DYNAMIC} {under(ACTOR, 'strategy=fsdp2 entropy_checkpointing=True')} {REF}.strategy=fsdp2 "
        f"{under(f'{ACTOR}.fsdp_config', 'offload_policy=True reshard_after_forward=True forward_prefetch=True')}",
        "prefix grouper": f"{GRPO} {ACTOR}.use_prefix_grouper=True trainer.balance_batch=False",
        "checkpoints": f"{GRPO} trainer.save_freq=1 trainer.max_actor_ckpt_to_keep=1 "
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model] trainer.rollout_data_dir={{out}}/samples",
        "weights in NVFP4": f"{DAPO} {under(f'{ACTOR}.fsdp_config.qat', 'enable=True mode=w4a16')} "
        f"{ACTOR}.fsdp_config.qat.ignore_patterns=['lm_head','embed_tokens','re:.*self_attn.*']",
        "float16": f"{DAPO} {under(ROLLOUT, 'dtype=float16')} {ACTOR}.fsdp_config.dtype=float16",
        "settings of rows, Ray and validation": f"{GRPO} ray_kwargs.ray_init.num_cpus=4 ray_kwargs.timeline_json_file=null "
        f"{under('data', 'return_raw_chat=True dataloader_num_workers=0 reward_fn_key=data_source val_batch_size=2')} "
        "+data.apply_chat_template_kwargs.enable_thinking=False trainer.test_freq=1 trainer.log_val_generations=1",
        "keys of trackers and of other engines": "trainer.tensorboard_dir=tb +trainer.rl_logging_board_dir=board "
        f"{ROLLOUT}.moe_tensor_parallel_size=1 {ACTOR}.model_engine=megatron skip.rollout_tq.enable=True "
        f"+{ROLLOUT}.engine_kwargs.dynamo.router_mode=kv +{ROLLOUT}.enable_sleep_mode=true "
        f"+{MODEL}.lora.fully_sharded_loras=True {ACTOR}.optim.lr_warmup_steps=null {ACTOR}.optim.betas='[0.9,0.95]' "
        f"{under(CORRECTION, 'rollout_rs_threshold_lower=null rollout_token_veto_threshold=null')}",
    },
    "Megatron": {
        "grpo": f"{KL} {MICRO} {ON_MEGATRON}",
        "ppo": f"algorithm.adv_estimator=gae {MICRO} {ON_MEGATRON} critic.model.path={{model}} "
        f"{under('critic.megatron', 'tensor_model_parallel_size=1 param_offload=True')}",
        "lora": f"{KL} {DYNAMIC} {ON_MEGATRON} {under(f'{MODEL}.lora', 'rank=4 alpha=8 type=lora merge=True')}",
        "experts": f"{KL} {DYNAMIC} {ON_MEGATRON} {EXPERTS}",
        "deepseek": f"{KL} {DYNAMIC} {ON_MEGATRON} {EXPERTS} "
        f"+{MODEL}.override_config.model_config.max_position_embeddings=512",
        "routing replay of the old pass": f"{DAPO} {ON_MEGATRON} {EXPERTS} {MEGATRON}.router_replay.mode=R2",
        "routing replay of rollout": f"{DAPO} {ON_MEGATRON} {MEGATRON}.router_replay.mode=R3 "
        f"{ROLLOUT}.enable_rollout_routing_replay=True",
        "FP8 training": f"{DAPO} {ON_MEGATRON} {under(LAYERS, 'fp8=hybrid fp8_recipe=blockwise')} "
        f"{OPTIMIZER}.fp8_recipe=blockwise {ROLLOUT}.quantization=fp8",
        "weights in NVFP4": f"{DAPO} {ON_MEGATRON} {under(f'{MEGATRON}.qat', 'enable=True mode=w4a16')} "
        f"{MEGATRON}.qat.quantization_config_path=nvfp4.json {MEGATRON}.qat.ignore_patterns=['lm_head','*mlp.gate']",
        "float16": f"{DAPO} {ON_MEGATRON} +{MEGATRON}.dtype=float16 {ROLLOUT}.dtype=float16",
    },
    "forks of 2025, with their own scorers": {
        "Logic-RL": f"{under(MODEL, 'use_remove_padding=True enable_gradient_checkpointing=True')} {FORK} "
        f"data.val_batch_size=32 {ACTOR}.ppo_micro_batch_size=16 "
        f"{under(ACTOR, 'use_kl_loss=True kl_loss_coef=0.001 kl_loss_type=low_var_kl')} "
        f"{under(f'{ACTOR}.fsdp_config', 'param_offload=True grad_offload=True optimizer_offload=True')} "
        f"{REF}.fsdp_config.param_offload=True {ROLLOUT}.log_prob_micro_batch_size=160 {REF}.log_prob_micro_batch_size=160 "
        "algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.total_epochs=5 "
        "data.train_files={kk} data.val_files={kk}",
        "TinyZero": f"algorithm.adv_estimator=gae critic.model.path={{model}} critic.optim.lr=1e-5 "
        f"critic.ppo_micro_batch_size=8 {FORK} data.val_batch_size=1312 "
        f"{ACTOR}.ppo_micro_batch_size=8 {ROLLOUT}.log_prob_micro_batch_size=8 "
        f"{REF}.log_prob_micro_batch_size=4 algorithm.kl_ctrl.kl_coef=0.001 +trainer.val_before_train=False "
        "trainer.total_epochs=15 data.train_files={countdown} "
        "data.val_files={countdown}",
    },
    "other engines and devices": {
        "veomni": f"{KL} {DYNAMIC} model_engine=veomni {FALLBACK} {ACTOR}.optim.lr_min=1e-7 "
        f"{under(f'{ACTOR}.veomni', 'param_offload=True attn_implementation=flash_attention_2 moe_implementation=fused')}",
        "torchtitan": f"model_engine=torchtitan {ACTOR}.torchtitan.data_parallel_shard_size=1 "
        f"{ACTOR}.optim.min_lr_factor=0.1 {FALLBACK}",
        "fsdp_turbo": f"{GRPO} {ACTOR}.strategy=fsdp_turbo {REF}.strategy=fsdp_turbo {FALLBACK}",
        "megatron-lite": f"actor@actor_rollout_ref.actor=mlite_actor ref@actor_rollout_ref.ref=mlite_ref {FALLBACK} "
        f"{OPTIMIZER}.offload_fraction=1.0",
        "Megatron-FSDP": f"{KL} {DYNAMIC} model_engine=megatron {MEGATRON}.use_megatron_fsdp=True {FALLBACK}",
        "npu": f"{GRPO} trainer.device=npu {FALLBACK} {ACTOR}.use_torch_compile=False "
        f"{under(f'+{ACTOR}', 'entropy_from_logits_with_chunking=True')}",
    },
    "distillation, agents and asynchronous runs": {
        "on-policy distillation": f"{DISTILLATION} distillation.distillation_loss.loss_mode=k1 "
        "distillation.distillation_loss.use_policy_gradient=True distillation.distillation_loss.loss_max_clamp=10.0",
        "on-policy distillation of the top k": f"{DISTILLATION} distillation.distillation_loss.loss_mode=forward_kl_topk "
        "distillation.distillation_loss.topk=8",
        "turns with a tool": f"{GRPO} {TOOLS} {ROLLOUT}.over_sample_rate=0.1",
        "turns, rows of a class": f"{DAPO} {TOOLS} data.custom_cls.path={{rows}} data.custom_cls.name=CustomRLHFDataset",
        "weights of their own for rollout": f"{ASYNC}=separate_async trainer.v1.separate_async.num_warmup_batches=1 "
        "trainer.v1.separate_async.parameter_sync_step=1",
        "one step ahead": f"{ASYNC}=colocate_async trainer.v1.colocate_async.num_warmup_batches=1",
    },
}  # fmt: skip
RUNS = {(kind, name): text for kind, lists in KINDS.items() for name, text in lists.items()}
QUICK = {  # names of one kind
    "dapo": "losses and clipping",
    "ppo": "advantages",
    "routing replay of the old pass": "Megatron",
    "npu": "other engines and devices",
    "veomni": "other engines and devices",
    "turns, rows of a class": "distillation, agents and asynchronous runs",
}
_MIXTURES = (
    "experts",
    "FP8 training",
    "weights in NVFP4",
    "routing replay of the old pass",
    "routing replay of rollout",
)
FAMILIES = {**dict.fromkeys(_MIXTURES, "qwen3_moe"), "deepseek": "deepseek_v3"}

# name -> (overrides, the sentence)
REFUSED = {
    "veomni": ("model_engine=veomni", r"\(model_engine=veomni\). Use model_engine=dp.*engine_fallback=fsdp"),
    "torchtitan": (f"model_engine=torchtitan {ACTOR}.optim.min_lr_factor=0.1", r"\(model_engine=torchtitan\)"),
    "fsdp_turbo": (f"{ACTOR}.strategy=fsdp_turbo", r"strategy=fsdp_turbo\).*engine_fallback=fsdp"),
    "megatron-lite": ("actor@actor_rollout_ref.actor=mlite_actor", r"strategy=mlite\).*engine_fallback=fsdp"),
    "npu": ("trainer.device=npu", r"kind of device is not available.*trainer.device=auto.*engine_fallback=fsdp"),
    "qat of inputs": (
        f"{under(f'{ACTOR}.fsdp_config.qat', 'enable=True mode=w4a4')}",
        r"(?s)^(?!.*needs a sampler).*Rounding of inputs to four bits is not available.*w4a16",
    ),
    "a broken pattern of qat": (
        f"{under(f'{ACTOR}.fsdp_config.qat', 'enable=True mode=w4a16')} {ACTOR}.qat.ignore_patterns=['re:(']",
        "qat.enable=True has 're:\\(' in ignore_patterns, and what follows re: is no regular expression",
    ),
    "the loop of Search-R1": (
        "do_search=true retriever.url=http://x",
        "'do_search'.*with a search tool .Search-R1 has a loop",
    ),
    "qat of a critic": ("critic.megatron.qat.enable=True", "Quantisation-aware training of this role is not available"),
    "mtp": (
        f"{MODEL}.mtp.enable=True {MODEL}.mtp.enable_train=True trainer.n_gpus_per_node=8",
        "only a policy on one device does",
    ),
    "torchao rollout": (f"{ROLLOUT}.quantization=torchao", "weights quantised by torchao is not available"),
    "Megatron-FSDP": (
        f"model_engine=megatron {MEGATRON}.use_megatron_fsdp=True",
        "use_megatron_fsdp=True is not available",
    ),
    "trtllm": (f"{ROLLOUT}.name=trtllm", "rollout engine is not available"),
    "dynamo": (f"{ROLLOUT}.name=dynamo", "rollout engine is not available"),
    "a service of sandboxes": ("sandbox_fusion.url=https://x/run_code", "The code sandbox is not available"),
    "collabllm": (f"{ROLLOUT}.multi_turn.num_repeat_rollouts=3", "Repetition of one trajectory is not available"),
    "hdfs": ("trainer.default_hdfs_dir=hdfs://x", "Saving to HDFS is not available"),
    "a callback after a save": ("trainer.checkpoint_callback_class=a.B", "callback after a save is not available"),
    "a manager with its own service": ("reward.reward_manager.name=remote", "reward manager is not available"),
    "another group": ("rollout@actor_rollout_ref.rollout=mine", "the groups here are: actor, ref, critic"),
}
