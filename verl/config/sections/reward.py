"""`reward`: scores of responses."""

from dataclasses import dataclass
from typing import Any

from verl.config.keys import ALWAYS, Family, Section, ours, section, used
from verl.families import ROLLOUT_ENGINES


@dataclass(frozen=True)
class CustomRewardFunctionConfig(Section):
    path: str | None = used(
        None, "file, or pkg://module, of a reward function that replaces the built-in scorers", path=True
    )
    name: str = used("compute_score", "name of that function", when="has_path")
    reward_kwargs: dict[str, Any] = used({}, "further arguments of that function", when="has_path")


@dataclass(frozen=True)
class RewardManagerModuleConfig(Section):
    path: str | None = used(
        None, "file or module of the class", when="reward.reward_manager.source=importlib", path=True
    )


@dataclass(frozen=True)
class RewardManagerConfig(Section):
    source: str = used(
        "register", "built-in (register) or from a module (importlib)", choices=("register", "importlib")
    )
    name: str = used("naive", "name of the manager")
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig, "place of the user's class")


@dataclass(frozen=True)
class JudgeServiceConfig(Section):
    """A chat service that judges (/v1/chat/completions); started separately, by the user or a provider."""

    url: str = used("http://127.0.0.1:8000", "address of the service")
    served_model_name: str | None = used(
        None, "name under which it serves the judge; null: its only one, or model_path"
    )
    token_env: str = used(
        "VERL_REWARD_MODEL_TOKEN", "environment variable with its bearer token; needed on another node"
    )
    timeout_s: float = used(600.0, "longest wait for one reply, complete", gt=0)
    num_retries: int = used(3, "repetitions of a request that was not answered", ge=0)


@dataclass(frozen=True)
class RewardModelRolloutConfig(Section):
    """Inference of the reward model. A classifier reads only dtype and max_num_batched_tokens."""

    name: str | None = used(
        None,
        "what a judge runs on, a rollout engine: native (also null), vllm in a separate process, a chat service at service.url "
        "(http, sglang). A classifier needs none",
        when="judge",
        family=Family("rollout engine", ROLLOUT_ENGINES, plugins=True),
    )
    service: JudgeServiceConfig = section(
        JudgeServiceConfig, "a service that judges (name=http or sglang)", when="judge_service"
    )

    dtype: str = used("bfloat16", "compute dtype")
    max_num_batched_tokens: int = used(8192, "tokens computed at once")
    max_num_seqs: int = used(1024, "replies in generation at once", ge=1)
    max_model_len: int | None = used(None, "longest prompt and reply of a judge; null: what the model can hold")
    response_length: int = used(2048, "longest reply of a judge in tokens", ge=1)
    free_cache_engine: bool = used(True, "free the judge's KV cache between uses")
    gpu_memory_utilization: float = used(0.5, "share of a GPU's memory for a judge on vLLM", when="judge_process")
    enforce_eager: bool = used(True, "no CUDA graphs", when="judge_process")
    engine_kwargs: dict[str, Any] = used(
        {},
        "further settings by engine; under `vllm` arguments of vllm.LLM, which go before all others",
        when="judge_process",
    )


@dataclass(frozen=True)
class RewardModelConfig(Section):
    enable: bool = used(False, "score with a reward model", when=ALWAYS)
    model_path: str | None = used(
        None,
        "folder or hub name: a sequence classification model with one label, or a judge; not needed for a judge at a service",
        path=True,
    )
    judge_template: str | None = ours(
        None,
        "makes it a judge: the question put to a causal language model about each sample, as text or file, with the "
        "places {prompt}, {response} and {ground_truth}. Its reply goes to the reward function as reward_model_reply; "
        "without one the last number of the reply is the score. With {first} and {second} in place of {response}, the "
        "response is compared with the ground truth in both orders: 1 where it is better, 0.5 for a tie",
        path=True,
    )
    rubric: str | None = ours(
        None,
        "YAML file of criteria, a list of {name, question, weight}: the judge grades each by itself, in the place {criterion} "
        "of judge_template, and the score is their mean by weight",
        when="judge",
        path=True,
    )
    reply_cache: str | None = used(
        None,
        "file that keeps the judge's replies by the digest of the question; an equal one is not asked again",
        when="judge",
        path=True,
    )
    reward_batch_size: int | None = used(
        None, "samples that it is given at a time; null: all that are there", sizing=True, ge=1
    )
    external_lib: str | None = used(None, "Python module that is imported first", path=True)
    trust_remote_code: bool = used(False, "run Python code that comes with the model", sizing=True)
    rollout: RewardModelRolloutConfig = section(RewardModelRolloutConfig, "how it is run", sizing=True)


@dataclass(frozen=True)
class SandboxFusionConfig(Section):
    url: str | None = used(None, "code sandbox service")


@dataclass(frozen=True)
class RewardConfig(Section):
    num_workers: int = used(8, "processes that score", ge=1, le=10_000)
    timeout_s: float = used(30.0, "seconds after which a scorer is ended and its sample has failed", gt=0)
    memory_mb: int = used(4096, "MiB that a scoring process may allocate; more ends it", gt=0)
    cpu_s: float | None = used(
        None, "processor seconds of one call, all its threads and processes together; null: twice timeout_s", gt=0
    )
    max_file_mb: int = used(1024, "largest file that a scorer may write, in MiB", gt=0)
    max_open_files: int = used(1024, "files that each process of a scorer may have open", ge=32)
    max_processes: int = used(64, "processes that a scorer may have started at once", ge=0)
    max_output_kb: int = used(64, "KiB of a sample's prints that are kept; the rest is dropped", ge=0)
    max_result_kb: int = used(
        256, "KiB that a scorer may return for one sample, as JSON; more is a failure", gt=0, le=65536
    )
    max_parts: int = used(
        256, "entries that a scorer may return for one sample with the score; more is a failure", ge=0
    )
    max_abs_score: float = used(
        1e12,
        "largest number that a scorer may return, as score or part; a larger one is a failure. Squares of 1e12 "
        "over a batch have a sum in float32",
        gt=0,
        le=1e18,
    )
    network: bool = used(False, "whether scorers may reach the network, and see keys and passwords in the environment")
    process_per_sample: bool = used(
        False,
        "score each sample in a process forked for it, so that nothing which a scorer keeps in memory lasts or reaches "
        "another sample",
    )
    debug: bool = used(
        False,
        "score in the process of the run, one sample after the other, without sandbox and limits, so that a breakpoint in a "
        "reward function works. For one process without Ray",
    )
    default_score: float | None = used(
        None,
        "score of a sample whose scorer hung, crashed or gave no number; null: it has no score, trains nothing and counts in "
        "no mean, and its group is compared without it",
        ge=-1e12,
        le=1e12,
    )
    reward_kwargs: dict[str, Any] = used({}, "arguments of the reward manager (overlong_buffer_cfg, max_resp_len, ...)")
    custom_reward_function: CustomRewardFunctionConfig = section(
        CustomRewardFunctionConfig, "the user's reward function"
    )
    reward_manager: RewardManagerConfig = section(RewardManagerConfig, "what turns scores into rewards")
    reward_model: RewardModelConfig = section(RewardModelConfig, "reward model", when="reward.reward_model.enable")
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig, "sandbox for code")
