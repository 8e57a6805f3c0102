"""The workers of one process: models, reward processes and rollout engine of the roles that are placed on its device."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from verl.config import FSDPConfig, ModelConfig, RewardConfig, RolloutConfig, full_key
from verl.data.conversations.turn_ends import TurnEnds
from verl.data_proto.tokenizer import Tokenizer
from verl.distributions import load_part
from verl.engines.api import ENGINES as TRAIN_ENGINES
from verl.engines.api import TrainEngine
from verl.engines.groups import ProcessGroups
from verl.errors import ConfigError
from verl.families import engine_facts
from verl.models.heads import SequenceScoreModel
from verl.models.hf_module import HFModule
from verl.models.load import load_tokenizer
from verl.models.tokenizer import check_vocabulary, eos_token_ids
from verl.parallel.mesh import Mesh
from verl.rewards.managers import build_reward_manager
from verl.rewards.managers.build import asks_service, serves_judge
from verl.rewards.scorers.route import find_scorer
from verl.roles.api import RoleSpec
from verl.roles.judges import EngineJudge, build_judge
from verl.roles.model import ModelRole
from verl.roles.reward import RewardWorker, Server, called_manager
from verl.roles.reward_model import build_reward_model
from verl.roles.rollout import RolloutWorker, sampling_params
from verl.roles.updates import Utilization
from verl.rollout.api import ENGINES as ROLLOUT_ENGINES
from verl.rollout.api import RolloutEngine
from verl.rollout.requests import vocab_size
from verl.rollout.rollout_model import copy_group
from verl.rollout.weight_version import PassiveRollout
from verl.runtime.rank import RankContext
from verl.runtime.weight_sync import ENGINE_TRANSFER, RankWeightSync, load_replica, skeleton
from verl.specs import RewardSpec
from verl.tracking.files import file_system_of

log = logging.getLogger(__name__)

_FSDP = ("fsdp", "fsdp2")  # strategies of several devices that map weights to a file, and freeze vision towers


def set_determinism(deterministic: bool) -> None:
    """Deterministic kernels for this process, if they were requested."""
    if deterministic:
        # read when CUDA's matrix library starts: without it, its products may take their sums in any order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        # a debugging aid that comes with it and writes every new tensor twice
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build_models(context: RankContext) -> dict[str, ModelRole]:
    """The model roles of this rank, by name. All ranks call it: they make the process groups of every role together."""
    models: dict[str, ModelRole] = {}
    for spec in context.specs.models:
        if not context.holds(spec.name):
            mesh = context.mesh(spec.name)
            if mesh is not None and spec.shares is None and spec.settings is None:
                join_groups(context, mesh, spec.engine)
            continue
        engine = models[spec.shares].engine if spec.shares is not None else _engine(context, spec)
        if spec.router_replay != "disabled":
            engine.routing.follow(engine.module)
        writes = context.rank == context.ranks(spec.name)[0]
        hf_files = partial(_hf_files, engine.module, spec.model)
        followed = models[spec.follows].engine if spec.follows is not None else None
        mesh = context.mesh(spec.name)
        num_devices = 1 if mesh is None else mesh.size // mesh.dp_size
        models[spec.name] = ModelRole(
            spec, engine, hf_files,
            writes=writes,
            number=context.ranks(spec.name).index(context.rank),
            total_steps=context.total_steps,
            followed=followed,
            utilization=Utilization.of(engine.module, context.device, num_devices) if spec.trains else None,
        )  # fmt: skip
    return models


def join_groups(context: RankContext, mesh: Mesh, engine: FSDPConfig) -> None:
    """Take part in making the process groups of a role without this rank; all processes of a run make them together."""
    ProcessGroups(mesh, context.device.type, engine.expert_parallel_size, context.specs.run.collective_timeout_s)


def _engine(context: RankContext, spec: RoleSpec) -> TrainEngine:
    """The local engine if one device holds the model, else the engine of the spec's strategy."""
    mesh = context.mesh(spec.name)
    settings: dict[str, object] = {
        "model": spec.model,
        "engine": spec.engine,
        "optim": spec.optim if spec.trains else None,
        "head": spec.head,
        "device": context.device,
        "total_steps": context.total_steps,
    }
    fsdp_options = {"memory_map": spec.memory_map, "freezes_vision_tower": spec.freezes_vision_tower}
    if mesh is None:
        engine = TRAIN_ENGINES.get("local")(**settings, **fsdp_options, build=spec.build, rounds=spec.rounds)
    else:
        if spec.strategy in _FSDP:
            settings |= fsdp_options
        elif any(fsdp_options.values()):
            key = "ref.memory_map" if spec.memory_map else "actor.freeze_vision_tower"
            raise ConfigError(
                f"{full_key(key)}=True works with strategy=fsdp2 on several devices, and the {spec.name} on {mesh.size} "
                f"has {spec.strategy}. Set {full_key(key.partition('.')[0])}.strategy=fsdp2, or the key to False."
            )
        if spec.settings is not None:
            settings["section"] = spec.settings
        engine = TRAIN_ENGINES.get(spec.strategy)(
            mesh=mesh, timeout_s=context.specs.run.collective_timeout_s, **settings
        )
    if spec.memory_map:
        folder = context.specs.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        engine.map_weights(folder, file_system_of(folder))
    train_engine: TrainEngine = engine
    return train_engine


def _hf_files(module: HFModule, model: ModelConfig, folder: Path) -> None:
    """Write the config, generation config, tokenizer and image processor, for `from_pretrained` with the weights."""
    config, tokenizer = module.config, load_tokenizer(replace(model, text_tokens=[]))
    if isinstance(module, SequenceScoreModel):  # transformers reads its score before the last padding tokens
        config, padding = copy.deepcopy(config), TurnEnds(tokenizer).padding
        config.get_text_config().pad_token_id = padding
        tokenizer.pad_token = None if padding is None else tokenizer.convert_ids_to_tokens(padding)
    config.save_pretrained(folder)
    generation_config = getattr(module, "generation_config", None)
    if generation_config is not None:
        generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if tokenizer.processor is not None:
        tokenizer.processor.save_pretrained(folder)


def build_reward(context: RankContext, spec: RewardSpec) -> RewardWorker:
    """Reward processes, and the reward model, if any."""
    run, scoring = context.specs.run, _scoring_ranks(context)
    tokenizer = load_tokenizer(spec.model)
    share = spec.section.num_workers // len(scoring) if context.rank in scoring else 0
    section, server = _with_judge(spec.section, context) if context.rank in scoring else (spec.section, None)
    manager = called_manager(section, tokenizer) or build_reward_manager(
        replace(section, num_workers=max(1, share)),
        max_response_length=spec.max_response_length,
        log_dir=run.folder / "logs" / f"reward_rank_{context.rank}",
        parts=spec.parts,
    )
    sources = context.data_sources
    if spec.only_built_in:  # its rows need no scorer, but other agents of the run may
        sources = [source for source in sources if find_scorer(source) is not None]
    manager.start(sources)
    try:
        model = None
        if spec.section.reward_model.enable and not asks_service(spec.section):
            model = build_reward_model(
                spec.section.reward_model,
                tokenizer,
                context.device,
                start_timeout_s=run.start_timeout_s,
                call_timeout_s=run.collective_timeout_s,
            )
        return RewardWorker(
            manager, model, tokenizer, section.default_score, spec.needs_answer, spec.turn_rewards, server
        )
    except BaseException:
        manager.close()
        if server is not None:
            server.close()
        raise


def _with_judge(section: RewardConfig, context: RankContext) -> tuple[RewardConfig, Server | None]:
    """The section of a reward function that asks the reward model of this run, with its address, and the server; the section as
    it is for any other."""
    if not serves_judge(section):
        return section, None
    run, model = context.specs.run, section.reward_model
    if engine_facts(model.rollout.name).asks_service:
        log.warning(
            "reward.reward_model.rollout.name=%s has no service.url: native runs the judge.", model.rollout.name
        )
        model = replace(model, rollout=replace(model.rollout, name=None))
    times = {"start_timeout_s": run.start_timeout_s, "call_timeout_s": run.collective_timeout_s}
    judge = build_judge(model, context.device, **times)
    assert isinstance(judge, EngineJudge)
    server: Server = load_part("verl.roles.judge_server").JudgeServer(judge)
    log.info("The judge %s answers at %s; scoring processes reach the network.", model.model_path, server.address)
    service = replace(model.rollout.service, url=f"http://{server.address}")
    served = replace(model, rollout=replace(model.rollout, service=service))
    return replace(section, reward_model=served, network=True), server


def _scoring_ranks(context: RankContext) -> list[int]:
    """The ranks that get samples to score. On the rollout's devices, only the ranks that answer for a policy copy get them."""
    devices, mesh = context.placement.devices, context.rollout_mesh()
    if devices["reward"] == devices["rollout"]:
        return [mesh.ranks[index] for index in mesh.collectors()]
    return list(devices["reward"])


def rollout_group(context: RankContext) -> dist.ProcessGroup | None:
    """The process group of the ranks that share a copy of the policy; all ranks call it."""
    timeout_s = context.specs.run.collective_timeout_s
    return None if context.has_own_weights else copy_group(context.rollout_mesh(), timeout_s)


def _stop_ids(module: HFModule, tokenizer: Tokenizer, rollout: RolloutConfig) -> tuple[int, ...]:
    """The model's own token ids that end a response. Raises ConfigError for a rollout.stop_token_ids beyond its vocabulary."""
    ids = eos_token_ids(module, tokenizer)
    if warning := check_vocabulary(vocab_size(module), tokenizer, rollout.stop_token_ids):
        log.warning("%s", warning)
    if not (ids or rollout.stop_token_ids or rollout.stop):
        log.warning(
            "Neither the model nor its tokenizer has an end-of-sequence token, so that only the length ends a response."
        )
    return ids


def build_rollout(
    context: RankContext,
    group: dist.ProcessGroup | None,
    policy: ModelRole | None,
    reward: RewardWorker | None,
    weights: RankWeightSync,
) -> RolloutWorker:
    """The engine generates with the policy's module if all of it is in this process: then there is one copy of the weights."""
    spec, run, devices = context.rollout, context.specs.run, context.placement.devices
    rollout, tokenizer = spec.section, load_tokenizer(spec.model)
    if tokenizer.processor is not None:
        tokenizer.processor.keeps_files = engine_facts(rollout.name).holds_weights
    replica, settings = None, {}
    engine_class: type[RolloutEngine] = PassiveRollout
    if context.engine_plan.runs_engine(context.rank):
        engine_class = ROLLOUT_ENGINES.get(rollout.name)
    if context.has_own_weights:
        visible = _visible_devices(context)
        transfer = load_part(ENGINE_TRANSFER).weight_transfer(
            spec, run, context.device, context.engine_plan, visible, weights.delivery
        )
        module, settings = skeleton(spec.model, transfer.dtype), {"transfer": transfer}
    elif context.shares_weights and policy is not None:
        module = policy.engine.module
    else:
        replica = load_replica(spec, context.device, group)
        module = replica.module
    engine_class = engine_class.for_module(module)
    if rollout.in_flight_updates and not engine_class.facts.pauses:
        raise ConfigError(
            f"{full_key('rollout.in_flight_updates')}=True: {type(module).__name__} is generated by {engine_class.__name__}, "
            "which cannot pause. Set it to False, or use partial_rollout=True."
        )
    stop_ids = _stop_ids(module, tokenizer, rollout)
    engine = engine_class(module, tokenizer, rollout, eos_token_ids=stop_ids, **settings)
    agents = None
    if spec.agents is not None and engine_class is not PassiveRollout:
        stops = (*stop_ids, *rollout.stop_token_ids)
        agents = load_part("verl.agents.agents").Agents(
            spec.agents, tokenizer, engine, stop_token_ids=stops, folder=run.folder, rank=context.rank
        )
    streams = devices["reward"] == devices["rollout"] and context.rank in _scoring_ranks(context)
    return RolloutWorker(
        engine,
        tokenizer,
        sampling_params(rollout),
        max_prompt_length=rollout.prompt_length,
        free_cache=rollout.free_cache_engine,
        score_stream=reward.submit if streams and reward is not None else None,
        replica=replica,
        rank=devices["rollout"].index(context.rank),
        on_generation_end=weights.end_generation,
        agents=agents,
        records_experts=rollout.enable_rollout_routing_replay,
    )


def _visible_devices(context: RankContext) -> tuple[str, ...]:
    """Devices of this rank's engine process, in the order of its ranks; () to let the engine find its own."""
    replica = context.engine_plan.replica_of(context.rank)
    return tuple(context.device_names[rank] for rank in replica.ranks if context.device_names)
