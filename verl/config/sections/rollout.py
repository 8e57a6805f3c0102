"""`actor_rollout_ref.rollout`: generation of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.keys import ALWAYS, OURS, Family, Section, ours, section, used
from verl.config.sections.multi_turn import MultiTurnConfig
from verl.families import AGENT_LOOPS, DEFAULT_ROLLOUT, ROLLOUT_ENGINES

_SAMPLED = "existing releases sample whatever do_sample says"
AGENTS = "runs_agents"


@dataclass(frozen=True)
class ValKwargsConfig(Section):
    """Sampling at validation."""

    n: int = used(1, "samples per validation prompt", ge=1)
    do_sample: bool = used(False, "sample instead of decoding greedily; on by itself if a temperature above 0 is set")
    temperature: float = used(0.0, "sampling temperature", when="val_samples", neutral=(0.0,), ge=0)
    top_p: float = used(1.0, "smallest set of tokens with this probability", when="val_samples", gt=0, le=1)
    top_k: int = used(-1, "only the k likeliest tokens; -1: all", when="val_samples", neutral=(0,), ge=1, also=(-1,))
    min_p: float = ours(
        0.0, "only tokens with at least this share of the likeliest one's probability", when="val_samples", ge=0, lt=1
    )
    also_greedy: bool = ours(
        False, "also decode once greedily at each validation (metrics under val-core/.../greedy)", when="val_samples"
    )
    max_new_tokens: int | None = used(None, "longest response; null: rollout.response_length", ge=1)


@dataclass(frozen=True)
class AgentConfig(Section):
    default_agent_loop: str = used(
        "single_turn_agent",
        "agent loop of rows that name none; unless set, tool_agent with multi_turn.enable",
        when=ALWAYS,
        family=Family("agent loop", AGENT_LOOPS, plugins=True, declared_in="agent_loop_config_path"),
    )
    agent_loop_config_path: str | None = used(None, "YAML file that declares agent loops", path=True, when=ALWAYS)
    environment: str | None = used(
        None,
        "environment class of environment_agent, as path/to/file.py:Class, or a dict of classes there, of which the column "
        "`environment` of a row chooses one; or verifiers:NAME, an environment of that package, or openenv:URL, a server",
        path=True,
        when=ALWAYS,
    )
    turn_discount: float = used(
        1.0, "weight of a turn's reward relative to the turn before it, in environments", ge=0, le=1
    )
    turn_rewards: bool = used(
        False,
        "reward each turn at its end: of environments, tools and interactions. False: the rewards of an environment count at "
        "the end of the episode, rewards of tools and interactions only reach the reward function",
    )
    mask_unfinished_episodes: bool = used(
        False, "train no token of an episode that a limit has cut: of the response, or of turns"
    )
    branches: str = used(
        "longest",
        "which conversations of an episode train: longest, the one with the most sampled tokens, or all, each as a row with "
        "the advantage of its episode",
        choices=("longest", "all"),
    )
    runner: str | None = used(
        None,
        "agent that talks to the run's endpoint, as path/to/file.py:function, or a command that begins with `command:`",
        path=True,
        when=ALWAYS,
    )
    runner_network: bool = used(
        False,
        "whether a command of `runner` may use the network; else it reaches only the run's endpoint, in the sandbox of reward "
        "functions",
    )
    gateway_host: str = used("127.0.0.1", "address of the endpoint for agents")
    gateway_port: int = used(
        0,
        "port of that endpoint on the first rank, the next one on the second, ...; 0: a free one",
        ge=0,
        le=65535,
    )
    max_episodes: int | None = used(
        None, "episodes of one rank in progress at once; null: four times max_num_seqs", ge=1
    )
    episode_timeout_s: float = used(
        1800.0, "seconds that one episode may take; a longer one fails and does not train", gt=0
    )
    num_retries: int = used(
        0,
        "times that a failed episode is made again, with the same tokens up to where its agent acts otherwise; not after its "
        "time limit, nor after a call of a tool whose result is not recorded",
        ge=0,
    )
    kv_cache_mb: int | None = used(
        2048,
        "MiB for keys and values of episodes that wait for a tool; beyond it the longest idle are computed again. null: any",
        sizing=True,
        ge=0,
    )


@dataclass(frozen=True)
class CheckpointEngineConfig(Section):
    backend: str = used(
        "naive",
        "delta: only values that have changed since the last update travel to other hosts, and one copy of the weights stays "
        "in the memory of each host. The placement chooses the way of weights in any case, so other values change nothing",
        when="takes_buckets",
        sizing=True,
    )
    update_weights_bucket_megabytes: int = used(
        2048, "most weights sent at a time (vLLM, SGLang)", when="takes_buckets", sizing=True, ge=1
    )


@dataclass(frozen=True)
class EngineKwargsConfig(Section):
    vllm: dict[str, Any] = used(
        {},
        "further arguments of vllm.LLM, which go before those made of other keys",
        when="actor_rollout_ref.rollout.name=vllm",
        sizing=True,
    )
    sglang: dict[str, Any] = used(
        {},
        "further arguments of sglang.launch_server, which go before those made of other keys",
        when="own_server",
        sizing=True,
    )


@dataclass(frozen=True)
class ServiceConfig(Section):
    """A service that generates: it is started apart, with the model of the run, or by the run (SGLang)."""

    url: str | None = used(
        None, "address of the service; null: http://127.0.0.1:8000, but with name=sglang a server that the run starts"
    )
    api: str = used(
        "openai",
        "what it understands: openai (/v1/completions with token ids; takes no weights), vllm (vLLM's server with verl's"
        " sampler and weight receiver), sglang; the last is implied by name=sglang",
        choices=("openai", "vllm", "sglang"),
    )
    served_model_name: str | None = used(None, "name under which it serves the model; null: its only one")
    token_env: str = used("VERL_ROLLOUT_TOKEN", "environment variable with its bearer token; needed on another node")
    timeout_s: float = used(600.0, "longest wait for one sample or one update, complete", gt=0)
    num_retries: int = used(3, "repetitions of a request that was not answered", ge=0)
    weights_dir: str | None = used(
        None,
        "folder that this run writes new weights to and the service reads them from, if it can neither read them in memory of "
        "this host nor fetch them; null: with a server that the run starts, /dev/shm if it has space for the weights twice, "
        "else the folder of temporary files",
        path=True,
    )


@dataclass(frozen=True)
class PrometheusConfig(Section):
    enable: bool = used(
        False,
        "serve metrics for Prometheus at /metrics of the run's page, which is then started (trainer.page)",
        when=ALWAYS,
    )
    port: int = used(9090, "port of Prometheus on this machine, which is asked to read `file`", ge=0, le=65535)
    file: str = used(
        "/tmp/ray/session_latest/metrics/prometheus/prometheus.yml",
        "settings file for Prometheus that is written then: it names the page and holds its token",
        path=True,
    )
    served_model_name: str | None = used(None, "label model_name of the metrics")


@dataclass(frozen=True)
class KVCacheConfig(Section):
    enable_paged_attention: bool | None = used(
        None,
        "keys and values in pages that come and go with their tokens (native engine; vLLM always pages). null: on a GPU whose "
        "flash attention reads pages",
    )
    block_size: int = used(
        16, "tokens of a block, the unit of allocation; 256 on a GPU", when="pages", choices=(16, 32, 64, 128, 256)
    )
    max_tokens: int | None = used(
        None,
        "most tokens in all blocks; samples beyond wait, and the last to start goes back to the queue when others need its "
        "blocks, without a change of any sample. null: as many as max_num_seqs samples need",
        when="pages",
        ge=16,
    )


@dataclass(frozen=True)
class SpeculativeConfig(Section):
    """Drafts of tokens that one step verifies together."""

    methods: list[str] = used(
        [],
        "where drafts come from: ngram, the sample itself with its prompt; history, earlier responses to the prompt; model, a "
        "draft model; mtp, the policy's head for further tokens. []: no drafts. The native engine's drafts change no sample",
        choices=("ngram", "history", "model", "mtp"),
        sizing=True,
    )
    model_path: str | None = used(
        None,
        "folder or hub name of the draft model, which has the policy's tokenizer",
        when="drafts_by_model",
        sizing=True,
        path=True,
    )
    num_speculative_tokens: int = used(
        7, "most drafts of a sample in a step; the native engine tries what saves time", when="has_drafts", ge=1, le=63
    )
    history_mb: int = used(64, "most MiB of earlier responses (history)", when="drafts_by_history", sizing=True, ge=1)


@dataclass(frozen=True)
class RolloutConfig(Section):
    name: str = used(DEFAULT_ROLLOUT, "rollout engine", family=Family("rollout engine", ROLLOUT_ENGINES, plugins=True))
    n: int = used(1, "samples per prompt; above 1 for estimators that compare a group", ge=1, le=1_000_000)
    temperature: float = used(
        1.0, "sampling temperature; log-probabilities are taken at it", when="samples", strict=_SAMPLED, neutral=(0.0,), ge=0
    )  # fmt: skip
    top_p: float = used(1.0, "smallest set of tokens of this probability", when="samples", strict=_SAMPLED, gt=0, le=1)
    top_k: int = used(
        -1, "only the k likeliest tokens; -1: all", when="samples", strict=_SAMPLED, neutral=(0,), ge=1, also=(-1,)
    )
    min_p: float = ours(
        0.0, "only tokens with at least this share of the likeliest one's probability", when="samples", ge=0, lt=1
    )
    do_sample: bool = used(True, "sample instead of decoding greedily")
    seed: int = used(42, "seed of sampling; a sample depends only on (seed, step, prompt, sample number)")
    stop: list[str] = used([], "strings that end a response")
    stop_token_ids: list[int] = used([], "token ids that end a response, in addition to the model's")
    ignore_eos: bool = used(False, "continue after an end-of-sequence token")
    prompt_length: int = used(512, "longest prompt in tokens")
    response_length: int = used(512, "longest response in tokens", ge=1)
    max_model_len: int | None = used(None, "longest prompt plus response; null: what the model can hold")
    max_num_seqs: int = used(256, "samples in generation at once (slots of the native engine)", sizing=True, ge=1)
    max_num_batched_tokens: int = used(
        8192, "prompt tokens computed at once (prefill of the native engine)", sizing=True, ge=1
    )
    kv_cache_config: KVCacheConfig = section(KVCacheConfig, "paged KV cache", when="pages_by_key", sizing=True)
    free_cache_engine: bool = used(
        True, "free the KV cache while training; the native engine's stays on a GPU with room for both", sizing=True
    )
    prepack_weights: bool = used(
        True,
        "on a CPU, generate with a copy of the weights in the order that its kernels read, which is faster; freed with the KV "
        "cache",
        sizing=True,
    )
    reuse_activations_gb: float = used(
        2.0,
        "most GB of activations that the sampler keeps on a CPU, at most a quarter of free memory; where both have equal bits, "
        "in bfloat16, the first update reads them in place of its forward; 0: none",
        sizing=True,
        ge=0,
    )
    batch_invariant: str = used(
        "auto",
        "whether a sample keeps its bits whichever others are generated with it, and however many at once. auto: where the "
        "compiled kernels compute the model, else a notice; require: refused at start where they do not; off: without a "
        "statement",
        choices=("auto", "require", "off"),
    )
    speculative: SpeculativeConfig = section(SpeculativeConfig, "drafts of tokens that one step verifies", strict=OURS)
    drift_check: str = used(
        "sampled",
        "check that generation has not changed the training weights: a few numbers of some tensors (other ones each "
        "time), a checksum of all, or not at all",
        choices=("sampled", "full", "off"),
        sizing=True,
    )
    keep_weights_copy: bool = used(
        False, "keep a copy of the training weights while generating, to go back to if they have changed", sizing=True
    )
    calculate_log_probs: bool = used(True, "keep the sampled log-probabilities, so that they need not be recomputed")
    log_prob_micro_batch_size: int | None = used(None, "older form of log_prob_micro_batch_size_per_gpu", sizing=True)
    log_prob_micro_batch_size_per_gpu: int | None = used(
        None,
        "samples per forward pass of old log-probabilities; null: cut by token count",
        when="log_prob_fixed_bsz",
        sizing=True,
        ge=1,
    )
    log_prob_use_dynamic_bsz: bool = used(False, "cut by token count even if the former is set", sizing=True)
    log_prob_max_token_len_per_gpu: int = used(
        16384, "tokens per forward pass when cut by token count", sizing=True, ge=1
    )
    prefetch_num: int = used(
        0,
        "batches of samples made ahead of training; above 0 the asynchronous program runs, and a sample is at most so many "
        "weight versions old when it trains",
    )
    partial_rollout: bool = ours(
        False,
        "make each response in prefetch_num + 1 parts, one a step, the first one short: long ones continue under newer weights",
        when="prefetches",
    )
    keep_partial_kv_cache: bool = ours(
        False,
        "the native engine keeps keys and values of unfinished responses while weights change; the next part sees keys of "
        "older weights and computes only new tokens. A checkpoint drops them",
        when=".partial_rollout=True",
    )
    in_flight_updates: bool = ours(
        False,
        "a generation of the native engine lasts until the next batch is complete and a slot lacks a sample; running samples "
        "then take new weights between two decode steps",
        when="prefetches",
    )
    in_flight_keys: str = ours(
        "kept",
        "keys and values of samples that run while weights change: kept as older weights computed them, or computed again. A "
        "checkpoint drops them",
        choices=("kept", "computed_again"),
        when=".in_flight_updates=True",
    )
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig, "sampling at validation")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "several turns with tools", when="runs_agents")
    agent: AgentConfig = section(AgentConfig, "agent loops", when="runs_agents", strict=OURS)
    mode: str = used(
        "async",
        "where vLLM runs: in separate processes (async), or in the training processes (sync), as far as all of them generate "
        "and are as many as its workers",
        when="joins_ranks",
        choices=("sync", "async"),
        sizing=True,
    )
    max_engine_restarts: int = used(
        2,
        "restarts of a lost vLLM process between two weight syncs, after which it continues; one copy of the weights stays in "
        "the memory of each host for that. 0: the run stops",
        when="restarts",
        sizing=True,
        ge=0,
    )
    service: ServiceConfig = section(
        ServiceConfig, "a service that generates (name=http or sglang)", when="asks_service", strict=OURS
    )
    adapters_by_name: bool = ours(
        False,
        "updates of LoRA training send SGLang only the adapters, as files under a name; else they are merged into the weights, "
        "which all travel",
        when="takes_adapters",
    )
    nnodes: int = used(0, "nodes only for rollout; 0: it shares the training devices", ge=0, le=10_000)
    n_gpus_per_node: int = used(1, "devices of such a node", sizing=True, ge=0, le=1024)
    tensor_model_parallel_size: int = used(
        1,
        "devices of one rollout replica; there are as many replicas as the devices make",
        when="spans_devices",
        sizing=True,
    )
    data_parallel_size: int = used(
        1,
        "the number of replicas must be a multiple of this; each is a separate engine",
        when="spans_devices",
        sizing=True,
    )
    expert_parallel_size: int = used(
        1,
        "devices of a replica that share its experts: tensor_model_parallel_size, or 1 (the native engine always divides them)",
        when="spans_devices",
        sizing=True,
    )
    pipeline_model_parallel_size: int = used(
        1, "stages of layers in a replica; there is no engine with more than one", when="spans_devices", sizing=True
    )
    gpu_memory_utilization: float = used(
        0.5,
        "share of a GPU's memory for vLLM or SGLang",
        when="starts_process",
        sizing=True,
    )
    enforce_eager: bool = used(False, "no CUDA graphs in decoding", sizing=True)
    enable_chunked_prefill: bool = used(
        True, "long prompts in chunks (vLLM; the native engine always bounds them)", when="prefills_by_key", sizing=True
    )
    enable_prefix_caching: bool = used(
        True, "compute equal prompts once (vLLM; the native engine always does)", when="prefills_by_key", sizing=True
    )
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig, "further settings by engine")
    prometheus: PrometheusConfig = section(
        PrometheusConfig, "metrics for Prometheus", when="actor_rollout_ref.rollout.prometheus.enable"
    )
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig, "how weights reach the engine")
    enable_rollout_routing_replay: bool = used(
        False, "record the experts that rollout chooses, for actor.router_replay.mode=R3"
    )
    quantization: str | None = used(
        None, "numbers of the sampler's layers (docs/low-precision.md)", choices=(None, "int8", "fp8")
    )
    kv_cache_dtype: str = used("auto", "numbers of the KV cache; auto: of the model", choices=("auto", "int8", "fp8"))
