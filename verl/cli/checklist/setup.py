"""Checks of the config, devices, engines, algorithm, trackers and run folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

from verl.cli.checklist import Subject
from verl.cli.report import Line, fail, info, passed, skip, warn
from verl.errors import MissingExtraError, VerlError
from verl.families import engine_facts


def check_config_problems(subject: Subject) -> Iterator[Line]:
    """Contradictions, unavailable features, and keys without effect."""
    from verl.config.checks import check_config

    problems = check_config(subject.loaded)
    num_keys = len(subject.loaded.settings)
    if not any(p.level == "error" for p in problems):
        yield passed(f"{num_keys} key{'' if num_keys == 1 else 's'} given, all known and read")
    for problem in problems:
        level = "fail" if problem.level == "error" else "warn" if problem.level == "warning" else "info"
        yield Line(level, problem.sentence)  # type: ignore[arg-type]
    for notice in subject.loaded.notices:
        yield info(notice)


def check_layout(subject: Subject) -> Iterator[Line]:
    """Devices of each role, and of each rollout replica; the devices need not be on this machine."""
    from verl.programs.ppo_roles import ppo_roles
    from verl.runtime.rank import check_meshes, check_packages

    specs = ppo_roles(subject.config)
    placement = specs.place(None)
    devices, nodes, where = placement.num_devices, placement.num_nodes, placement.describe(specs.names)
    try:
        check_packages(specs, placement)
    except MissingExtraError as error:
        yield fail(str(error)) if devices == 1 else warn(f"{error}; needed where the ranks start")
    plan = check_meshes(specs, placement)
    yield passed(f"{devices} device{'s' if devices > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}: {where}")
    if plan is None:
        return
    if specs.main is not None:
        without_gpus = subject.config.trainer.device == "cpu"
        yield passed(f"sharding: {specs.main.describe_sharding(devices, without_gpus=without_gpus)}")
        if specs.main.settings is not None:  # an engine with layers of its own
            strategy, model = f"strategy={specs.main.strategy}", specs.main.model
            if model.recompute == "selective":
                yield info(f"enable_gradient_checkpointing=selective recomputes whole layers with {strategy}")
            if model.enable_activation_offload:
                yield info(f"enable_activation_offload moves nothing with {strategy}")
    yield passed(plan.describe())
    if plan.sizes.tensor > 1 and engine_facts(plan.engine).is_in_run and subject.config.trainer.device != "cpu":
        yield info(
            "on GPUs a divided model decodes without CUDA graphs and fused layers: set rollout.tensor_model_parallel_size=1 if "
            "a GPU holds all weights, else another rollout.name"
        )


def check_engines(subject: Subject) -> Iterator[Line]:
    """Device and dtype; the files of the rollout engine, estimator and loss can be imported; phases are valid."""
    from verl.algorithms.advantages import ADVANTAGES
    from verl.algorithms.policy_losses import POLICY_LOSSES
    from verl.algorithms.user_functions import require_loss_arguments
    from verl.rollout.api import ENGINES
    from verl.run.schedule import scheduler_of

    config = subject.config
    group = config.actor_rollout_ref
    yield from check_device(subject)
    ENGINES.get(group.rollout.name)
    ADVANTAGES.get(config.algorithm.adv_estimator)
    loss_mode = group.actor.policy_loss.loss_mode
    require_loss_arguments(loss_mode, POLICY_LOSSES.get(loss_mode))
    scheduler_of(config)
    yield passed(f"rollout {group.rollout.name}, advantages {config.algorithm.adv_estimator}, loss {loss_mode}")


def check_code(subject: Subject) -> Iterator[Line]:
    """The program, stages, the sampler, agent loops, users, environments and the runner load and take the calls of the run."""
    from verl.config.active_keys import runner_of, runs_agents
    from verl.data.order import sampler_class
    from verl.distributions import load_part
    from verl.programs.api import PROGRAMS
    from verl.programs.specs import agent_spec
    from verl.programs.stages import Stages

    config = subject.config
    sampler, rollout = config.data.sampler, config.actor_rollout_ref.rollout
    agent, loop = rollout.agent, "actor_rollout_ref.rollout.agent.default_agent_loop"
    loaders: list[Callable[[], object]] = [
        lambda: PROGRAMS.get(subject.loaded.schema.name).select(config),
        lambda: Stages(config.algorithm.stages or []),
    ]
    if sampler.class_path:
        loaders.append(lambda: sampler_class(sampler.class_path, sampler.class_name))
    if runs_agents(config):
        agents = load_part("verl.agents.agents")
        loaders += [
            lambda: agents.loop_named(agents.load_loops(agent.agent_loop_config_path), agent.default_agent_loop, loop),
            lambda: agents.load_interactions(rollout.multi_turn.interaction_config_path),
            lambda: agents.players_of_games(agent_spec(config), agents.load_environments(agent.environment)),
            lambda: agents.load_runner(runner_of(agent)),
        ]
    for load in loaders:
        try:
            load()
        except VerlError as error:
            yield fail(str(error))


def check_device(subject: Subject) -> Iterator[Line]:
    """Device and dtype of training, and settings that fit the links between several GPUs."""
    from verl.cli.machine.host import advice, links
    from verl.config.active_keys import runs_on_several_devices
    from verl.parallel.device import compute_dtype, has_only_float16, native_bf16, resolve_device, visible_devices

    config = subject.config
    if (device := subject.device) is None:
        yield skip(f"trainer.device={config.trainer.device} is checked where the run starts")
        device = resolve_device("cpu")
    if runs_on_several_devices(config) and device.type == "cuda":
        yield from advice(links())
    if runs_on_several_devices(config) and not visible_devices():
        yield info(
            "this machine has no GPU: if the run starts here, its devices are processes that share the processor"
        )
    dtype = compute_dtype(subject.engine.dtype, device)
    yield passed(f"computes on {device} in {str(dtype).removeprefix('torch.')}")
    key = "actor.fsdp_config.dtype" if subject.loaded.schema.name == "ppo" else "engine.dtype"
    if str(dtype) == "torch.float32" and has_only_float16(device):
        yield warn(f"{device} has tensor cores for float16 and not for float32 or bfloat16: {key}=float16 uses them")
    if str(dtype) == "torch.bfloat16" and not native_bf16(device):
        yield warn(f"{device} has no fast bfloat16 arithmetic: leave {key}=auto for float32")


def check_trackers(subject: Subject) -> Iterator[Line]:
    """Every tracker of trainer.logger can be created."""
    from verl.tracking.sinks.api import RunInfo, make_sink

    trainer = subject.config.trainer
    run = RunInfo(_run_folder(subject), trainer.project_name, trainer.experiment_name)
    for name in trainer.logger:
        try:
            make_sink(name, run)
        except VerlError as error:
            yield fail(str(error))
        else:
            yield passed(name)


def check_run_folder(subject: Subject) -> Iterator[Line]:
    """The run folder, and other folders that the config names, can be written; its checkpoints, if any."""
    from verl.checkpoint.filesystem import examine_folder
    from verl.checkpoint.retention import candidates
    from verl.manifest import find_damage

    trainer, folder = subject.config.trainer, _run_folder(subject)
    subject.loaded.require_outputs()
    file_system = examine_folder(folder)
    for refusal in file_system.refusals:
        yield fail(f"{folder} ({file_system.kind or 'unknown file system'}) cannot hold checkpoints: {refusal}")
    for notice in file_system.notices:
        yield warn(f"{folder}: {notice}")
    steps = candidates(folder)
    if trainer.resume_mode == "resume_path":
        damage = find_damage(Path(trainer.resume_from_path or "").expanduser())
        fault = f", which is damaged: {damage}. Set another one" if damage else ""
        yield Line("fail" if damage else "pass", f"{folder}; resumes from {trainer.resume_from_path}{fault}")
        if not damage:
            yield from _changed_inputs(subject, Path(trainer.resume_from_path or "").expanduser())
    elif steps and trainer.resume_mode == "auto":
        yield from _resumption(subject, folder, steps)
    elif steps:
        yield warn(f"{folder} has checkpoints, and trainer.resume_mode=disable starts a new run beside them")
    else:
        yield passed(f"{folder}; a new run")


def _resumption(subject: Subject, folder: Path, steps: list[int]) -> Iterator[Line]:
    """The newest intact checkpoint of `steps`, after a line for each damaged newer one."""
    from verl.manifest import find_damage

    for step in steps:
        damage = find_damage(folder / f"global_step_{step}")
        if damage is None:
            yield passed(f"{folder}; resumes from step {step}")
            yield from _changed_inputs(subject, folder / f"global_step_{step}")
            return
        yield warn(f"global_step_{step} is damaged and not used: {damage}")
    yield fail(f"no checkpoint in {folder} is complete; set trainer.resume_mode=disable to start a new run")


def _changed_inputs(subject: Subject, checkpoint: Path) -> Iterator[Line]:
    """A line for files that have changed since `checkpoint` was saved. Raises CheckpointError as the run does."""
    from verl.programs.api import PROGRAMS
    from verl.run.inputs import inputs_of
    from verl.run.state import RunState, resumable_state

    schema, config = subject.loaded.schema, subject.config
    program = PROGRAMS.get(schema.name).select(config)
    state = RunState(command=schema.command, inputs=inputs_of(subject.loaded, program))
    _, changed = resumable_state(checkpoint, state, program.state_schema, program.roles(config).models, config.trainer)
    if changed:
        yield warn(changed)


def _run_folder(subject: Subject) -> Path:
    return Path(subject.config.trainer.default_local_dir).expanduser()
