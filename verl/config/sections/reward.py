"""`reward`: how a response becomes a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import DISTRIBUTED, GPU_ENGINES, OURS, Section, inert, section, used


@dataclass(frozen=True)
class CustomRewardFunctionConfig(Section):
    path: str | None = used(None, "file, or pkg://module, of a reward function that replaces the built-in scorers")
    name: str = used("compute_score", "name of that function", when="has_path")
    reward_kwargs: dict[str, Any] = used({}, "further arguments of that function", when="has_path")


@dataclass(frozen=True)
class RewardManagerModuleConfig(Section):
    path: str | None = used(None, "file or module of the class", when="imported_manager")
    name: str = inert("custom_reward_manager", "name that the module is imported under", "modules keep their own name")


@dataclass(frozen=True)
class RewardManagerConfig(Section):
    source: str = used(
        "register", "built-in (register) or from a module (importlib)", choices=("register", "importlib")
    )
    name: str = used("naive", "name of the manager")
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig, "where a class of one's own is")


@dataclass(frozen=True)
class EngineSizesConfig(Section):
    """An engine that serves a teacher: only known names, nothing reads them yet."""

    name: str | None = used(None, "engine")
    dtype: str = used("bfloat16", "dtype")
    gpu_memory_utilization: float = used(0.5, "share of device memory")
    enforce_eager: bool = used(True, "no CUDA graphs")
    cudagraph_capture_sizes: list[int] | None = used(None, "batch sizes of CUDA graphs")
    free_cache_engine: bool = used(True, "free the KV cache between uses")
    data_parallel_size: int = used(1, "copies")
    expert_parallel_size: int = used(1, "devices that share the experts")
    tensor_model_parallel_size: int = used(2, "devices that share one layer")
    pipeline_model_parallel_size: int = used(1, "stages of layers")
    max_num_batched_tokens: int = used(8192, "tokens computed at once")
    max_model_len: int | None = used(None, "longest sequence")
    max_num_seqs: int = used(1024, "sequences at once")
    load_format: str = used("auto", "how weights are loaded")
    layered_summon: bool = used(False, "send weights layer by layer")
    scheduling_policy: str = used("fcfs", "order of requests")
    full_determinism: bool = used(False, "deterministic")
    seed: int = used(42, "seed")
    multi_stage_wake_up: bool = used(False, "wake weights before the cache")
    engine_kwargs: dict[str, Any] = used({}, "further settings by engine")
    limit_images: int | None = used(None, "most images of a prompt")
    enable_chunked_prefill: bool = used(True, "long prompts in pieces")
    enable_prefix_caching: bool = used(True, "reuse computed prompts")
    disable_log_stats: bool = used(True, "no statistics")
    skip_tokenizer_init: bool = used(False, "tokens in and out")
    ignore_eos: bool = used(False, "go on after an end-of-sequence token")
    temperature: float = used(1.0, "sampling temperature")
    top_k: int = used(-1, "only the k likeliest tokens")
    top_p: float = used(1.0, "smallest set of tokens with this probability")
    do_sample: bool = used(True, "sample instead of decoding greedily")
    n: int = used(1, "samples")
    prompt_length: int = used(2048, "longest prompt")
    response_length: int = used(2048, "longest response")
    quantization: str | None = used(None, "quantised weights")
    quantization_config_file: str | None = used(None, "settings of that")
    mtp: dict[str, Any] | None = used(None, "multi-token prediction")
    disaggregation: dict[str, Any] = used({}, "prefill and decode on different devices")


_GREEDY = "a judge replies greedily, once"
_ONE_COPY = "every process that scores holds the whole reward model"


@dataclass(frozen=True)
class JudgeServiceConfig(Section):
    """A chat service that judges (/v1/chat/completions); it is started apart, or somebody else's."""

    url: str = used("http://127.0.0.1:8000", "address of the service")
    served_model_name: str | None = used(
        None, "name under which it serves the judge; null: its only one, or model_path"
    )
    token_env: str = used(
        "VERL_REWARD_MODEL_TOKEN", "environment variable with its bearer token; needed on another machine"
    )
    timeout_s: float = used(600.0, "longest wait for one reply")
    num_retries: int = used(3, "repetitions of a request that was not answered")


@dataclass(frozen=True)
class RewardModelRolloutConfig(Section):
    """How the reward model is run. A classifier reads dtype and max_num_batched_tokens alone."""

    name: str | None = used(
        None,
        "what a judge runs on: native (also null), vllm (in a process of its own), or a chat service at service.url (http, "
        "sglang). A classifier needs none",
        when="judge",
        choices=(None, "native", "vllm", "http", "sglang"),
    )
    service: JudgeServiceConfig = section(
        JudgeServiceConfig, "a service that judges (name=http or sglang)", when="judge_service"
    )

    dtype: str = used("bfloat16", "number format that it computes in")
    max_num_batched_tokens: int = used(8192, "tokens computed at once")
    max_num_seqs: int = used(1024, "replies in generation at once")
    max_model_len: int | None = used(None, "longest prompt and reply of a judge; null: what the model can hold")
    response_length: int = used(2048, "longest reply of a judge in tokens")
    free_cache_engine: bool = used(True, "free the judge's KV cache between uses")
    gpu_memory_utilization: float = used(0.5, "share of a GPU's memory for a judge on vLLM", when="judge_vllm")
    enforce_eager: bool = used(True, "no CUDA graphs", when="judge_vllm")
    cudagraph_capture_sizes: list[int] | None = inert(None, "batch sizes of CUDA graphs", GPU_ENGINES)
    data_parallel_size: int = inert(1, "copies", _ONE_COPY)
    expert_parallel_size: int = inert(1, "devices that share the experts", _ONE_COPY)
    tensor_model_parallel_size: int = inert(2, "devices that share one layer", _ONE_COPY)
    pipeline_model_parallel_size: int = inert(1, "stages of layers", _ONE_COPY)
    load_format: str = inert("auto", "how weights are loaded", "they are read from safetensors files")
    layered_summon: bool = inert(False, "send weights layer by layer", _ONE_COPY)
    scheduling_policy: str = inert("fcfs", "order of requests", "replies do not depend on the order")
    full_determinism: bool = inert(False, "deterministic", "scores and replies always are")
    seed: int = inert(42, "seed", _GREEDY)
    multi_stage_wake_up: bool = inert(False, "wake weights before the cache", _ONE_COPY)
    engine_kwargs: dict[str, Any] = used(
        {},
        "further settings by engine; under `vllm` arguments of vllm.LLM, which go before all others",
        when="judge_vllm",
    )
    limit_images: int | None = inert(None, "most images of a prompt", "reward models read text")
    enable_chunked_prefill: bool = inert(True, "long prompts in pieces", "max_num_batched_tokens always bounds them")
    enable_prefix_caching: bool = inert(True, "reuse computed prompts", "what sequences share is computed once")
    disable_log_stats: bool = inert(True, "no statistics", GPU_ENGINES)
    skip_tokenizer_init: bool = inert(False, "tokens in and out", GPU_ENGINES)
    ignore_eos: bool = inert(False, "go on after an end-of-sequence token", _GREEDY)
    temperature: float = inert(1.0, "sampling temperature", _GREEDY)
    top_k: int = inert(-1, "only the k likeliest tokens", _GREEDY)
    top_p: float = inert(1.0, "smallest set of tokens with this probability", _GREEDY)
    do_sample: bool = inert(True, "sample instead of decoding greedily", _GREEDY)
    n: int = inert(1, "samples", _GREEDY)
    prompt_length: int = inert(2048, "longest prompt", "the reward model's own limit, or max_model_len, counts")
    quantization: str | None = inert(None, "quantised weights", "the reward model's own number format counts")
    quantization_config_file: str | None = inert(None, "settings of that", "see quantization")
    mtp: dict[str, Any] | None = inert(None, "multi-token prediction", GPU_ENGINES)
    disaggregation: dict[str, Any] = inert({}, "prefill and decode on different devices", GPU_ENGINES)


@dataclass(frozen=True)
class RewardModelConfig(Section):
    enable: bool = used(False, "score with a reward model")
    enable_resource_pool: bool = inert(False, "give it devices of its own", DISTRIBUTED)
    n_gpus_per_node: int = inert(8, "devices per node of that pool", DISTRIBUTED)
    nnodes: int = inert(0, "nodes of that pool", DISTRIBUTED)
    model_path: str | None = used(
        None,
        "folder or hub name: a sequence classification model with one label, or a judge; not needed for a judge at a service",
        when="reward_model",
    )
    judge_template: str | None = used(
        None,
        "makes it a judge: the question put to a causal language model about each sample, as text or file, with the "
        "places {prompt}, {response} and {ground_truth}. Its reply goes to the reward function as reward_model_reply; "
        "without one the last number of the reply is the score",
        when="reward_model",
        strict=OURS,
    )
    reward_batch_size: int | None = used(
        None, "samples that it is given at a time; null: all that are there", when="reward_model", sizing=True, ge=1
    )
    external_lib: str | None = used(None, "Python module that is imported first", when="reward_model")
    trust_remote_code: bool = used(False, "run Python code that comes with the model", when="reward_model", sizing=True)
    strategy: str = inert("fsdp", "training engine of a reward model", "a reward model is not trained in a run")
    rollout: RewardModelRolloutConfig = section(
        RewardModelRolloutConfig, "how it is run", when="reward_model", sizing=True
    )


@dataclass(frozen=True)
class SandboxFusionConfig(Section):
    url: str | None = used(None, "code sandbox service")
    max_concurrent: int = used(64, "requests at once", when="sandbox", sizing=True)
    memory_limit_mb: int = used(1024, "memory of one program", when="sandbox", sizing=True)


@dataclass(frozen=True)
class RewardConfig(Section):
    num_workers: int = used(8, "processes that score", ge=1)
    timeout_s: float = used(30.0, "seconds after which a scorer is ended and its sample gets default_score", gt=0)
    memory_mb: int = used(4096, "MiB that a scoring process may allocate; more ends it", gt=0)
    cpu_s: float | None = used(
        None, "processor seconds of one call, all its threads and processes together; null: twice timeout_s", gt=0
    )
    max_file_mb: int = used(1024, "largest file that a scorer may write, in MiB", gt=0)
    max_open_files: int = used(1024, "files that each process of a scorer may have open", ge=32)
    max_processes: int = used(64, "processes that a scorer may have started at once", ge=0)
    network: bool = used(False, "whether scorers may reach the network, and see keys and passwords in the environment")
    process_per_sample: bool = used(
        False,
        "score each sample in a process forked for it, so that nothing which a scorer keeps in memory lasts or reaches "
        "another sample",
    )
    default_score: float = used(0.0, "score of a sample whose scorer hung, crashed or gave no number")
    reward_kwargs: dict[str, Any] = used({}, "arguments of the reward manager (overlong_buffer_cfg, max_resp_len, ...)")
    custom_reward_function: CustomRewardFunctionConfig = section(
        CustomRewardFunctionConfig, "reward function of one's own"
    )
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "what turns scores into rewards")
    reward_model: RewardModelConfig = section(RewardModelConfig, "reward model")
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig, "sandbox for code")
    launch_reward_fn_async: bool = inert(False, "score while training goes on", "samples are scored as they end")
    use_reward_loop: bool = inert(
        True, "score in processes of their own", "samples are always scored in such processes"
    )
