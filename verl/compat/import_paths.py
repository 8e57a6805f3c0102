"""Import paths and commands of other verl releases, and the modules here that serve them.

A module of this table has no file: verl/compat/finder.py makes it on import. A name is resolved on first use.
"""

_WORKER_GROUPS = "verl.compat.ray_worker_group"
_REGISTER = "Dispatch Execute register register_dispatch_mode update_dispatch_mode"
_ROLES = "Role WorkerType need_critic need_reference_policy need_reward_model"
_DATASETS = "create_rl_dataset create_rl_sampler"
_PROFILER = {
    "verl.compat.devices": "DistProfiler DistProfilerExtension GPUMemoryLogger ProfilerConfig log_gpu_memory_usage",
    "verl.compat.tracking": "marked_timer simple_timer",
}
_WORKERS = {
    "verl.compat.task_runner": "ActorRolloutRefWorker AsyncActorRolloutRefWorker CriticWorker RewardModelWorker"
}
_SHARDING = "verl.compat.sharding_manager"
_BOXED = "last_boxed_only_string remove_boxed"
_MATH_SCORER = {"verl.rewards.scorers.math_answers": f"compute_score=score_boxed is_equiv=math_equal {_BOXED}"}

_AGENT_LOOPS = {
    "verl.agents.loops": "AgentLoopBase AgentLoopMetrics AgentLoopOutput AsyncLLMServerManager DictConfigWrap "
    "SingleTurnAgentLoop register=register_agent_loop",
    "verl.agents.tool_agent": "ToolAgentLoop",
    "verl.compat.agents": "AgentLoopManager AgentLoopWorker AgentLoopWorkerBase=AgentLoopWorker "
    "_agent_loop_registry=agent_loop_registry get_trajectory_info",
}

# module -> {module here: its names, as "name" or "name=name_here"}
IMPORT_PATHS: dict[str, dict[str, str]] = {
    "verl.base_config": {"verl.compat.sections": "BaseConfig"},
    "verl.checkpoint_engine": {"verl.compat.llm_server": "CheckpointEngineManager"},
    "verl.experimental.agent_loop": _AGENT_LOOPS,
    "verl.experimental.agent_loop.agent_loop": _AGENT_LOOPS,
    "verl.experimental.agent_loop.single_turn_agent_loop": {"verl.agents.loops": "SingleTurnAgentLoop"},
    "verl.experimental.agent_loop.tool_agent_loop": {"verl.agents.tool_agent": "AgentData AgentState ToolAgentLoop"},
    "verl.experimental.agent_loop.tool_parser": {
        "verl.agents.parsers": "Gemma4ToolParser=GemmaToolParser GptOssToolParser HermesToolParser "
        "KimiToolParser ToolParser",
        "verl.compat.agents": "Qwen3XMLToolParser",
        "verl.tools.schemas": "FunctionCall",
    },
    "verl.experimental.agent_loop.utils": {
        "verl.compat.agents": "add_generation_prompt_for_gpt_oss format_gpt_oss_tool_response_manually resolve_config_path"
    },
    "verl.experimental.dataset.sampler": {"verl.compat.samplers": "AbstractCurriculumSampler AbstractSampler"},
    "verl.experimental.reward_loop": {"verl.compat.sections": "migrate_legacy_reward_impl"},
    "verl.interactions": {"verl.agents.interactions": "BaseInteraction"},
    "verl.interactions.base": {"verl.agents.interactions": "BaseInteraction"},
    "verl.interactions.gsm8k_interaction": {"verl.compat.gsm8k": "Gsm8kInteraction"},
    "verl.interactions.utils.interaction_registry": {
        "verl.agents.interactions": "initialize_interactions_from_config=load_interactions",
        "verl.compat.python": "get_interaction_class=load_class_from_fqn",
    },
    "verl.model_merger": {"verl.compat.commands": "main=model_merger"},
    "verl.single_controller.base": {
        "verl.compat.dispatch": _REGISTER,
        "verl.compat.user_worker": "Worker",
        "verl.runtime.worker_group": "WorkerGroup",
    },
    "verl.single_controller.base.worker": {"verl.compat.user_worker": "Worker"},
    "verl.single_controller.base.worker_group": {"verl.runtime.worker_group": "WorkerGroup"},
    "verl.single_controller.base.decorator": {
        "verl.compat.dispatch": f"DISPATCH_MODE_FN_REGISTRY {_REGISTER} make_nd_compute_dataproto_dispatch_fn"
    },
    "verl.single_controller.ray": {
        _WORKER_GROUPS: "RayClassWithInitArgs RayResourcePool RayWorkerGroup ResourcePool ResourcePoolManager "
        "create_colocated_worker_cls"
    },
    "verl.single_controller.ray.base": {
        _WORKER_GROUPS: "RayClassWithInitArgs RayResourcePool RayWorkerGroup create_colocated_worker_cls"
    },
    "verl.tools.geo3k_tool": {"verl.compat.gsm8k": "Geo3kTool"},
    "verl.tools.gsm8k_tool": {"verl.compat.gsm8k": "Gsm8kTool"},
    "verl.tools.sandbox_fusion_tools": {"verl.compat.agents": "SandboxFusionTool"},
    "verl.tools.search_tool": {"verl.compat.search": "SearchTool"},
    "verl.tools.utils.tool_registry": {
        "verl.compat.python": "get_tool_class=load_class_from_fqn",
        "verl.tools.tool_registry": "initialize_tools_from_config load_all_tools",
    },
    "verl.trainer": {
        "verl.runner.runner": "RLRunner",
        "verl.compat.trainer": "PPOTrainer RLTrainer",
        "verl.run.schedule": "DynamicConfigScheduler",
    },
    "verl.trainer.rl_trainer": {"verl.compat.trainer": "RLTrainer"},
    "verl.trainer.constants_ppo": {"verl.compat.task_runner": "NVTX_INJECTION_ENV get_ppo_ray_runtime_env"},
    "verl.trainer.main_ppo_v0": {
        "verl.compat.datasets": _DATASETS,
        "verl.compat.task_runner": "BaseTaskRunner TaskRunner run_ppo",
    },
    "verl.trainer.logger": {"verl.compat.tracking": "RLLogger"},
    "verl.trainer.ppo.core_algos": {
        "verl.algorithms.advantages": "register_adv_est",
        "verl.algorithms.kl": "AdaptiveKLController FixedKLController kl_penalty kl_penalty_forward=kl_penalty",
        "verl.algorithms.losses": "compute_entropy_loss",
        "verl.algorithms.policy_losses": "register_policy_loss",
        "verl.algorithms.user_functions": "agg_loss",
        "verl.compat.core_algos": "ADV_ESTIMATOR_REGISTRY AdvantageEstimator POLICY_LOSS_REGISTRY compute_gae_advantage_return "
        "compute_gdpo_outcome_advantage compute_gpg_outcome_advantage compute_grpo_outcome_advantage "
        "compute_grpo_passk_outcome_advantage compute_grpo_vectorized_outcome_advantage "
        "compute_multi_turn_optimal_token_baseline_advantage compute_opo_outcome_advantage "
        "compute_optimal_token_baseline_advantage compute_policy_loss_bypass_mode compute_policy_loss_cispo "
        "compute_policy_loss_clip_cov compute_policy_loss_dppo_kl compute_policy_loss_dppo_tv compute_policy_loss_dro "
        "compute_policy_loss_geo_mean compute_policy_loss_gpg compute_policy_loss_gspo compute_policy_loss_kl_cov "
        "compute_policy_loss_sapo compute_policy_loss_vanilla compute_reinforce_plus_plus_baseline_outcome_advantage "
        "compute_reinforce_plus_plus_outcome_advantage compute_remax_outcome_advantage compute_rloo_outcome_advantage "
        "compute_rloo_vectorized_outcome_advantage compute_value_loss get_adv_estimator_fn get_kl_controller "
        "defaultdict get_policy_loss_fn np torch verl_F",
    },
    "verl.trainer.ppo.metric_utils": {
        "verl.compat.metrics": "_compute_response_info=compute_response_info bootstrap_metric calc_maj_val "
        "compute_data_metrics compute_throughout_metrics compute_timing_metrics process_validation_metrics reduce_metrics"
    },
    "verl.trainer.ppo.ray_trainer": {
        "verl.compat.ray_trainer": "RayPPOTrainer",
        "verl.compat.task_runner": _ROLES,
        "verl.compat.batches": "apply_kl_penalty compute_advantage compute_response_mask",
        "verl.algorithms.user_functions": "agg_loss",
        "verl.compat.core_algos": "AdvantageEstimator",
        _WORKER_GROUPS: "ResourcePoolManager create_colocated_worker_cls",
        "verl.compat.metrics": "compute_data_metrics compute_spec_decode_metrics compute_throughout_metrics "
        "compute_timing_metrics process_validation_metrics reduce_metrics",
        "verl.compat.tracking": "_timer=simple_timer marked_timer",
    },
    "verl.trainer.ppo.reward": {
        "verl.compat.reward_managers": "compute_reward compute_reward_async extract_reward get_custom_reward_fn "
        "load_reward_manager"
    },
    "verl.trainer.ppo.rollout_corr_helper": {
        "verl.compat.batches": "apply_bypass_mode apply_rollout_correction compute_offpolicy_metrics "
        "compute_rollout_correction_and_add_to_batch compute_rollout_correction_and_rejection_mask"
    },
    "verl.trainer.ppo.v1.replay_buffer": {"verl.compat.v1": "DAPO_FILTERED_REWARD_COUNTS_KEY"},
    "verl.trainer.ppo.v1.utils": {
        "verl.compat.v1": "MetricsAggregator compute_advantage compute_advantage_for_multi_trajectories"
    },
    "verl.trainer.ppo.utils": {"verl.compat.datasets": _DATASETS, "verl.compat.task_runner": _ROLES},
    "verl.utils": {
        "verl.compat.measure": "benchmark_nccl benchmark_throughput",
        "verl.compat.models": "check_model_consistency hf_processor hf_tokenizer",
        "verl.compat.tensors": "as_torch_index group_mean_std",
        "verl.parallel.placement": "set_device_map",
    },
    "verl.utils.rollout_skip": {"verl.compat.agents": "RolloutSkip"},
    "verl.utils.groupwise": {"verl.compat.tensors": "as_torch_index group_mean_std"},
    "verl.utils.attention_utils": {
        "verl.compat.tensors": "index_first_axis pad_input unpad_input",
        "functorch.einops.rearrange": "rearrange",
    },
    "verl.utils.checkpoint.checkpoint_manager": {
        "verl.compat.files": "find_latest_ckpt_path get_checkpoint_tracker_filename should_save_ckpt_esi",
        "verl.compat.checkpoint_manager": "BaseCheckpointManager",
    },
    "verl.utils.config": {"verl.compat.sections": "omega_conf_to_dataclass validate_config"},
    "verl.utils.dataset": {"verl.data.dataset": "RLHFDataset collate_fn"},
    "verl.utils.dataset.rl_dataset": {"verl.data.dataset": "RLHFDataset collate_fn"},
    "verl.utils.debug": _PROFILER,
    "verl.utils.debug.metrics": {"verl.compat.metrics": "calculate_debug_metrics"},
    "verl.utils.device": {
        "verl.compat.devices": "auto_set_device get_device_id get_device_name get_nccl_backend get_torch_device "
        "get_visible_devices_keyword is_cuda_available is_npu_available set_expandable_segments"
    },
    "verl.utils.flops_counter": {"verl.compat.metrics": "FlopsCounter get_device_flops"},
    "verl.utils.fs": {
        "verl.compat.files": "_is_non_local=is_non_local copy_local_path_from_hdfs copy_to_local is_non_local local_mkdir_safe"
    },
    "verl.utils.hdfs_io": {"verl.compat.files": "copy exists makedirs"},
    "verl.utils.import_utils": {
        "verl.compat.python": "deprecated import_external_libs  is_nvtx_available "
        " is_trl_available  load_class_from_fqn load_extern_object load_extern_type"
    },
    "verl.utils.memory_utils": {"verl.compat.devices": "aggressive_empty_cache"},
    "verl.utils.metric.utils": {"verl.compat.metrics": "AggregationType Metric=MetricValues reduce_metrics"},
    "verl.utils.metric": {"verl.compat.metrics": "AggregationType Metric=MetricValues reduce_metrics"},
    "verl.utils.logger": {"verl.compat.tracking": "LocalLogger=local_logger"},
    "verl.utils.model": {
        "verl.compat.models": "compute_position_id_with_mask convert_weight_keys extract_multi_modal_inputs "
        "get_generation_config get_model_size print_model_size update_model_config"
    },
    "verl.utils.net_utils": {"verl.compat.python": "get_free_port is_valid_ipv6_address"},
    "verl.utils.profiler": _PROFILER,
    "verl.utils.profiler.performance": _PROFILER,
    "verl.utils.py_functional": {
        "verl.compat.python": "append_to_dict convert_to_regular_types temp_env_var union_two_dict"
    },
    "verl.utils.ray_utils": {"verl.compat.python": "auto_await get_event_loop parallel_put"},
    "verl.utils.reward_score": {
        "verl.rewards.scorers.route": "_default_compute_score=default_compute_score default_compute_score"
    },
    "verl.utils.reward_score.geo3k": {"verl.rewards.scorers.math_answers": "compute_score=score_boxed"},
    "verl.utils.reward_score.gsm8k": {"verl.rewards.scorers.gsm8k": "compute_score extract_solution"},
    "verl.utils.reward_score.math": _MATH_SCORER,
    "verl.utils.reward_score.math_dapo": {
        "verl.rewards.scorers.math_answers": f"compute_score=score_answer_line {_BOXED} normalize_final_answer"
    },
    "verl.utils.reward_score.math_reward": _MATH_SCORER,
    "verl.utils.reward_score.openr1mm": {"verl.rewards.scorers.math_answers": "compute_score=score_tagged"},
    "verl.utils.reward_score.search_r1_like_qa_em": {"verl.rewards.scorers.exact_match": "compute_score"},
    "verl.utils.reward_score.rlla": {"verl.compat.tool_calls": "compute_score"},
    "verl.utils.reward_score.tinyllava_video_r1": {"verl.rewards.scorers.math_answers": "compute_score=score_tagged"},
    "verl.utils.rollout_trace": {"verl.compat.tracking": "RolloutTraceConfig rollout_trace_attr rollout_trace_op"},
    "verl.utils.seqlen_balancing": {
        "verl.compat.batches": "calculate_workload get_group_balanced_partitions get_reverse_idx "
        "get_seqlen_balanced_partitions log_seqlen_unbalance "
        "prepare_dynamic_batch rearrange_micro_batches restore_dynamic_batch"
    },
    "verl.utils.tensordict_utils": {
        "verl.compat.tensordicts": "assert_tensordict_eq assign_non_tensor assign_non_tensor_data assign_non_tensor_stack "
        "chunk_tensordict concat_nested_tensors concat_tensordict contiguous get get_keys get_non_tensor_data get_tensordict "
        "index_select_tensor_dict make_iterator nested_tensor_from_tensor_list pad_to_divisor pop pop_keys union_tensor_dict "
        "unpad unwrap_non_tensor_data"
    },
    "verl.utils.tokenizer": {"verl.compat.models": "hf_processor hf_tokenizer normalize_token_ids"},
    "verl.utils.torch_dtypes": {"verl.compat.tensors": "PrecisionType"},
    "verl.utils.torch_functional": {
        "verl.compat.tensors": "clip_by_value get_constant_schedule_with_warmup get_cosine_schedule_with_warmup "
        "get_response_mask logprobs_from_logits masked_mean masked_sum masked_var masked_whiten "
        "pad_sequence_to_length tokenize_and_postprocess_data",
        "verl.algorithms.losses": "entropy_from_logits",
        "verl.algorithms.kl": "AdaptiveKLController FixedKLController",
    },
    "verl.utils.tracking": {"verl.compat.tracking": "Tracking ValidationGenerationsLogger"},
    "verl.utils.transferqueue_utils": {"verl.compat.agents": "tqbridge"},
    "verl.utils.ulysses": {
        "verl.compat.sequence_parallel": "gather_outputs_and_unpad get_ulysses_sequence_parallel_group "
        "get_ulysses_sequence_parallel_rank get_ulysses_sequence_parallel_world_size "
        "set_ulysses_sequence_parallel_group slice_input_tensor ulysses_pad ulysses_pad_and_slice_inputs"
    },
    "verl.utils.fsdp_utils": {
        "verl.compat.models": "get_init_weight_context_manager init_context",
        "torch.distributed.fsdp": "CPUOffloadPolicy MixedPrecisionPolicy",
    },
    "verl.worker": {
        "verl.compat.hybrid_worker": "ActorRolloutRefWorker",
        "verl.roles.rollout": "RolloutWorker",
        "verl.roles.model": "UpdateWorker=ModelRole",
        "verl.compat.models": "init_context",
    },
    "verl.workers.engine_workers": {
        "verl.compat.task_runner": "ActorRolloutRefWorker CriticWorker TrainingWorker=CriticWorker"
    },
    "verl.workers.fsdp_workers": _WORKERS,
    "verl.workers.megatron_workers": _WORKERS,
    "verl.workers.roles": {"verl.compat.task_runner": "CriticWorker RewardModelWorker"},
    "verl.workers.config": {
        "verl.compat.sections": "HFModelConfig",
        "verl.config": "ActorConfig CriticConfig FSDPActorConfig=ActorConfig FSDPCriticConfig=CriticConfig "
        "FSDPEngineConfig=FSDPConfig FSDPOptimizerConfig=OptimConfig OptimizerConfig=OptimConfig PolicyLossConfig "
        "RolloutConfig",
    },
    "verl.workers.config.actor": {"verl.config": "ActorConfig FSDPActorConfig=ActorConfig PolicyLossConfig"},
    "verl.workers.config.critic": {"verl.config": "CriticConfig FSDPCriticConfig=CriticConfig"},
    "verl.workers.config.engine": {"verl.config": "FSDPEngineConfig=FSDPConfig"},
    "verl.workers.config.model": {"verl.compat.sections": "HFModelConfig"},
    "verl.workers.config.optimizer": {"verl.config": "FSDPOptimizerConfig=OptimConfig OptimizerConfig=OptimConfig"},
    "verl.workers.config.rollout": {"verl.config": "RolloutConfig"},
    "verl.workers.rollout.async_server": {"verl.compat.agents": "AsyncLLMServerManager"},
    "verl.workers.rollout.llm_server": {"verl.compat.llm_server": "LLMServerClient LLMServerManager"},
    "verl.workers.rollout.replica": {"verl.agents.loops": "TokenOutput"},
    "verl.workers.sharding_manager": {_SHARDING: "FSDPVLLMShardingManager MegatronVLLMShardingManager"},
    "verl.workers.sharding_manager.fsdp_vllm": {_SHARDING: "FSDPVLLMShardingManager"},
    "verl.workers.sharding_manager.megatron_vllm": {_SHARDING: "MegatronVLLMShardingManager"},
    "verl.workers.utils.losses": {"verl.compat.run_workers": "ppo_loss"},
    "verl.workers.utils.padding": {
        "verl.compat.nested": "build_attention_mask_from_nested embeds_padding_2_no_padding left_right_2_no_padding "
        "no_padding_2_padding response_from_nested response_to_nested"
    },
    "verl.workers.reward_manager": {
        "verl.compat.reward_managers": "AbstractRewardManager BatchRewardManager DAPORewardManager NaiveRewardManager "
        "PrimeRewardManager REWARD_MANAGER_REGISTRY get_reward_manager_cls register"
    },
    "verl.workers.reward_manager.abstract": {"verl.compat.reward_managers": "AbstractRewardManager RawRewardFn"},
    "verl.workers.reward_manager.batch": {"verl.compat.reward_managers": "BatchRewardManager"},
    "verl.workers.reward_manager.dapo": {"verl.compat.reward_managers": "DAPORewardManager"},
    "verl.workers.reward_manager.prime": {"verl.compat.reward_managers": "PrimeRewardManager"},
    "verl.workers.reward_manager.naive": {"verl.compat.reward_managers": "NaiveRewardManager"},
    "verl.workers.reward_manager.registry": {
        "verl.compat.reward_managers": "REWARD_MANAGER_REGISTRY get_reward_manager_cls register"
    },
}

# the same for modules that have a file here: names that the file lacks
FURTHER_NAMES: dict[str, dict[str, str]] = {
    "verl.tools.function_tool": {
        "verl.compat.function_tools": "_LOADED_FUNCTION_TOOL_PATHS load_function_tools_from_path normalize_function_tool_return"
    }
}

# `python -m MODULE arguments` -> the function that runs it: fn(arguments) -> exit code
COMMANDS = {
    "verl.experimental.fully_async_policy.fully_async_main": "verl.compat.commands:main_fully_async",
    "verl.experimental.one_step_off_policy.main_ppo": "verl.compat.commands:main_one_step_off",
    "verl.model_merger": "verl.compat.commands:model_merger",
    "verl.trainer.fsdp_sft_trainer": "verl.compat.commands:fsdp_sft_trainer",
    "verl.trainer.main_eval": "verl.compat.generation:main_eval",
    "verl.trainer.main_generation": "verl.compat.generation:main_generation",
    "verl.trainer.main_generation_server": "verl.compat.generation:main_generation",
    "verl.trainer.main_ppo_v0": "verl.compat.commands:main_ppo",
    "verl.trainer.main_ppo_sync": "verl.compat.commands:main_ppo",
    "verl.trainer.preference_trainer": "verl.compat.commands:preference_trainer",
    "verl.trainer.rm_trainer": "verl.compat.commands:rm_trainer",
    "verl.trainer.sft_trainer": "verl.compat.commands:sft_trainer",
    "verl.trainer.sft_trainer_ray": "verl.compat.commands:sft_trainer",
}
