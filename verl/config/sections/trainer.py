"""`trainer`: length of the run, logging, saving, devices and guards; `ray_kwargs`; `global_profiler` and `profiler`."""

from dataclasses import dataclass
from typing import Any

from verl.config.keys import Family, Section, ours, section, used
from verl.families import SINKS

ACTIONS = ("warn", "skip", "rollback", "stop")  # the later, the stronger
_LIMIT = "bound; null: not looked at"
_ACTION = (
    "skip: the batch or optimizer step is not applied; rollback: back to the newest checkpoint, then on with the next "
    "prompts; stop"
)


@dataclass(frozen=True)
class NonfiniteGuardConfig(Section):
    action: str = used("skip", _ACTION, choices=ACTIONS[1:])


@dataclass(frozen=True)
class GuardConfig(Section):
    limit: float | None = ours(None, _LIMIT, gt=0)  # if its section is not read
    action: str = ours("warn", f"warn; {_ACTION}", when="has_limit", choices=ACTIONS)


@dataclass(frozen=True)
class StepGuardsConfig(Section):
    """Guards of any program that trains."""

    nonfinite: NonfiniteGuardConfig = section(
        NonfiniteGuardConfig, "NaN or infinity in rewards, log-probs, values, advantages, loss or gradient"
    )
    grad_norm: GuardConfig = section(GuardConfig, "largest gradient norm of an optimizer step, before clipping")
    max_skips_in_row: int = used(5, "steps in a row in which something may be skipped; one more stops the run", ge=0)
    max_rollbacks: int = used(3, "times that a process may go back to a checkpoint; one more stops the run", ge=0)


@dataclass(frozen=True)
class GuardsConfig(StepGuardsConfig):
    """Guards of reinforcement learning."""

    policy_kl: GuardConfig = section(GuardConfig, "largest KL(old policy || policy) of a mini-batch, nats per token")
    reference_kl: GuardConfig = section(
        GuardConfig, "largest KL(policy || reference policy), nats per token", when="reference"
    )
    ratio: GuardConfig = section(GuardConfig, "largest probability ratio to the old policy of a token, or its inverse")
    entropy: GuardConfig = section(GuardConfig, "lowest mean entropy of the policy, nats per token")
    sampler_kl: GuardConfig = section(
        GuardConfig,
        "largest KL(sampler || policy), nats per token; with fewer bits in rollout 0.1 and stop, unless samples are made ahead",
    )
    mismatch: GuardConfig = section(
        GuardConfig, "largest difference between the trainer's and the sampler's probability of a sampled token"
    )


@dataclass(frozen=True)
class GlobalProfilerConfig(Section):
    steps: list[int] | None = used(None, "steps of which the ranks of a role with profiler.enable=True write a trace")
    profile_continuous_steps: bool = used(False, "one trace for neighbouring steps")
    tool: str | None = used(None, "torch_memory: also snapshots of GPU memory, step_N_rank_R_memory.pickle")
    save_path: str = used("outputs/profile", "folder of the traces step_N_rank_R.json, which Perfetto opens", path=True)


@dataclass(frozen=True)
class ProfilerConfig(Section):
    enable: bool = used(False, "trace the ranks of this role in global_profiler.steps")
    all_ranks: bool = used(False, "all ranks of the role write a trace, in place of `ranks`")
    ranks: list[int] = used([], "ranks of the role that write a trace; []: the first one")


@dataclass(frozen=True)
class ColocateAsyncConfig(Section):
    num_warmup_batches: int = used(1, "batches made ahead: the value of actor_rollout_ref.rollout.prefetch_num")


@dataclass(frozen=True)
class SeparateAsyncConfig(Section):
    num_warmup_batches: int = used(1, "batches made ahead: the value of actor_rollout_ref.rollout.prefetch_num")
    parameter_sync_step: int = used(
        1,
        "steps between two transfers of weights to a rollout on separate devices; samples are up to so many versions older",
        ge=1,
    )


@dataclass(frozen=True)
class SamplerConfig(Section):
    max_off_policy_threshold: int = used(
        8,
        "oldest sample that trains, in weight versions; the prompts of an older one are sampled again",
        when="prefetches",
    )


@dataclass(frozen=True)
class TrainerV1Config(Section):
    trainer_mode: str = used(
        "sync",
        "sync, or samples made ahead: colocate_async, separate_async (rollout.nnodes or trainer.placement say where)",
        choices=("sync", "colocate_async", "separate_async"),
    )
    colocate_async: ColocateAsyncConfig = section(
        ColocateAsyncConfig, "settings of colocate_async", when="trainer.v1.trainer_mode=colocate_async"
    )
    separate_async: SeparateAsyncConfig = section(
        SeparateAsyncConfig, "settings of separate_async", when="trainer.v1.trainer_mode=separate_async"
    )
    sampler: SamplerConfig = section(SamplerConfig, "which samples train")


@dataclass(frozen=True)
class PageConfig(Section):
    enable: bool | str = used(
        "auto",
        "show the run in a browser, from a separate process (see docs/page.md); auto: if the extra `page` is installed and "
        "the run was started from the command line",
        choices=("auto", True, False),
    )
    host: str = used(
        "127.0.0.1", "address at which the page listens; another than loopback lets others in who have its link"
    )
    port: int = used(0, "port of the page; 0: any that is free", ge=0, le=65535)


AFTER_EACH_EPOCH = "after_each_epoch"


def steps_between(freq: int | str) -> int:
    """A value of save_freq or test_freq in steps; 0 for a word."""
    return freq if isinstance(freq, int) else 0


@dataclass(frozen=True)
class TrainerConfig(Section):
    """Keys that the host reads for every program."""

    project_name: str = used("verl_examples", "project, for trackers and the run folder")
    experiment_name: str = used("gsm8k", "name of the run, for trackers and the run folder")
    total_epochs: int = used(30, "passes over the training rows", when="ends_by_epochs", ge=1)
    total_training_steps: int | None = used(None, "stop after this many steps; null: total_epochs decides", ge=1)
    logger: list[str] = used(
        ["console", "file"],
        "where metrics go: a list of console, file, tensorboard, wandb, mlflow, swanlab, trackio (docs/trackers.md)",
        family=Family("tracker", SINKS),
    )
    default_local_dir: str = used("checkpoints/verl_examples/gsm8k", "the run folder", path=True)
    log_dir: str | None = used(
        None,
        "further folder for a log file of each rank (--log-dir); the run folder's are in logs/",
        sizing=True,
        path=True,
    )
    save_freq: int | str = used(
        -1,
        "steps between checkpoints, and one at the end, or after_each_epoch; -1: only when the run is interrupted",
        words=(AFTER_EACH_EPOCH,),
    )
    test_freq: int | str = used(
        -1,
        "steps between validations, and one at the end, or after_each_epoch; -1: none while training",
        words=(AFTER_EACH_EPOCH,),
    )
    val_before_train: bool = used(True, "validate before the first step")
    val_only: bool = used(False, "validate the checkpoint of resume_mode, or without one the model, and stop")
    resume_mode: str = used(
        "auto", "continue the newest checkpoint, never, or a given one", choices=("auto", "disable", "resume_path")
    )
    resume_from_path: str | None = used(
        None, "folder global_step_N to continue", when="trainer.resume_mode=resume_path", path=True
    )
    resume_changed_inputs: str = used(
        "refuse",
        "refuse, or warn: whether a run resumes with another content of training files, tokenizer, or weights that it reads "
        "and does not train (docs/resume.md)",
        choices=("refuse", "warn"),
    )
    device: str = used("auto", "device of the run", choices=("auto", "cpu", "cuda"))
    engine_fallback: str | None = used(
        None,
        "fsdp: where a training engine is not available or not installed, use FSDP2 with its tensor, sequence and expert "
        "parallel sizes; stages of a pipeline become data-parallel shards. Where the kind of device is not available, use auto",
        choices=(None, "fsdp"),
    )
    deterministic: bool = used(
        True,
        "the same run gives the same bits, on the same kind of node with as many threads: sums in a fixed order only. It "
        "was seen to cost nothing on a CPU; False is worth a try where operations without such an order are a large part of a "
        "step, as scatters on a GPU can be",
    )
    strict_config: bool = used(False, "make errors of the notices about keys that have no effect")
    push_to_hub: bool = used(
        False, "upload the trained model to the Hugging Face Hub at the end, in bfloat16 and with a model card"
    )
    hub_model_id: str | None = used(None, "repository for push_to_hub, owner/name", when="trainer.push_to_hub")
    hub_private_repo: bool = used(True, "create that repository as a private one", when="trainer.push_to_hub")
    min_free_disk_gb: float = used(1.0, "stop before the disk has less than this left", ge=0)
    nnodes: int = used(1, "nodes of the run", ge=1, le=10_000)
    n_gpus_per_node: int = used(1, "devices per node; on CPUs, processes per node", ge=0, le=1024)
    placement: dict[str, Any] = used(
        {}, "role -> list of devices, for actor, rollout, reference, critic, reward; others are where their actor is"
    )
    max_restarts: int = used(
        3,
        "times in a row, without a new checkpoint in between, that a run which crashed is started again; 0: never",
        ge=0,
    )
    restart_backoff_s: float = used(5.0, "wait before the first of these restarts; it doubles with each", ge=0)
    hang_timeout_s: float = used(
        7200.0,
        "longest that one phase of a step (generation, an update, a checkpoint) may take; then the run's stacks are written "
        "down and it is started again; 0: no limit",
        ge=0,
    )
    stop_timeout_s: float = used(
        1800.0,
        "longest from a Ctrl-C or SIGTERM to the end of the run, which ends its phase and saves; then it ends without saving. "
        "Choose less than a scheduler leaves before its SIGKILL; 0: no limit",
        ge=0,
    )
    call_timeout_s: float = used(
        3600.0, "longest that one call on a worker may take in a run over several processes", sizing=True
    )
    nccl_timeout: int = used(600, "deadline of collectives in seconds", sizing=True, ge=1)
    ray_wait_register_center_timeout: int = used(
        300, "seconds that the processes of a run may take to find each other", sizing=True, ge=1
    )
    guards: StepGuardsConfig = section(StepGuardsConfig, "action on NaN, infinity and values beyond a limit")
    page: PageConfig = section(PageConfig, "the live page of the run")
    log_val_generations: int = used(0, "validation samples shown to the trackers", ge=0)
    rollout_data_dir: str | None = used(None, "folder for a JSONL of training samples per step", path=True)
    validation_data_dir: str | None = used(None, "folder for a JSONL of validation samples per step", path=True)
    dynamic_config: list[dict[str, Any]] = used(
        [],
        "phases of training, each {from_step: N, changes: {key: value}}: keys of fsdp_config.use_3d_hybrid that get other "
        "values from that step on",
    )
    dynamic_config_scheduler: str | None = used(
        None, "the same as the user's object, path/to/file.py:name, with values(step) -> {key: value}", path=True
    )
    checkpoint_callback_class: str | None = used(None, "class whose on_save is called after a save")
    default_hdfs_dir: str | None = used(None, "HDFS folder for checkpoints", path=True)

    @property
    def num_checkpoints_kept(self) -> int:
        """Number of the newest checkpoints that stay; 0: all of them."""
        raise NotImplementedError


@dataclass(frozen=True)
class PPOTrainerConfig(TrainerConfig):
    critic_warmup: int = used(
        0,
        "steps in which only the critic trains",
        when="critic",
        strict="existing releases train nothing at all in these steps",
        ge=0,
    )
    max_actor_ckpt_to_keep: int | None = used(None, "newest checkpoints to keep; null: all", ge=1)
    max_critic_ckpt_to_keep: int | None = used(
        None, "the same for the critic; one folder holds both, the larger number counts", ge=1
    )
    v1: TrainerV1Config = section(TrainerV1Config, "how generation and training alternate")
    guards: GuardsConfig = section(GuardsConfig, "action on NaN, infinity and values beyond a limit")

    @property
    def num_checkpoints_kept(self) -> int:
        # checkpoints are kept whole: the role that wants more of them decides
        return max(self.max_actor_ckpt_to_keep or 0, self.max_critic_ckpt_to_keep or 0)


@dataclass(frozen=True)
class SFTTrainerConfig(TrainerConfig):
    project_name: str = used("gsm8k-sft", "project, for trackers and the run folder")
    experiment_name: str = used("test", "name of the run, for trackers and the run folder")
    total_epochs: int = used(4, "passes over the training rows", when="ends_by_epochs", ge=1)
    default_local_dir: str = used("checkpoints/gsm8k-sft/test", "the run folder", path=True)
    val_before_train: bool = used(False, "validate before the first step")
    max_ckpt_to_keep: int | None = used(None, "newest checkpoints to keep; null: all", ge=1)
    seed: int = used(1, "seed of the run: order of rows (unless data.seed is given), new adapters, noise")

    @property
    def num_checkpoints_kept(self) -> int:
        return self.max_ckpt_to_keep or 0


@dataclass(frozen=True)
class RayKwargsConfig(Section):
    ray_init: dict[str, Any] = used(
        {"num_cpus": None, "runtime_env": {"py_executable": None}},
        "arguments of ray.init",
        when="several_devices",
        sizing=True,
    )
    timeline_json_file: str | None = used(
        None, "file for Ray's timeline of the run", when="several_devices", sizing=True, path=True
    )
