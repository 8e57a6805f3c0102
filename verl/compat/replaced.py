"""Modules and names of other releases that have no counterpart: the sentence with what replaces each."""

from verl.errors import VerlError

_ENGINES = (
    "Engines compute here: a worker of FSDP or Megatron, its checkpoint manager or a patch of its model has no part of a run "
    "to replace. The classes of verl.workers.engine_workers stand for the roles. Name a loss by register_policy_loss, a model "
    "by model.external_lib, or write an engine: CONTRIBUTING.md."
)
_SAMPLERS = (
    "The rollout worker of each rank has the engine that samples. Agents of your own reach it by rollout.agent.runner or a "
    "loop of AgentLoopBase (docs/agents.md), and rollout.name chooses the engine (docs/engines.md)."
)
_TRAINERS = (
    "Samples ahead of training, filters of groups and devices of their own are keys: rollout.prefetch_num, "
    "algorithm.filter_groups, rollout.nnodes (docs/async.md). A subclass of RayPPOTrainer with its own fit runs."
)
_TOKENS = (
    "The chat template of the model decides how messages follow sampled tokens, for every family: verl.agents.continuity. "
    "A loop of AgentLoopBase calls self.apply_chat_template(messages, remove_system_prompt=True)."
)
_SERVED = (
    "A model that judges is served by reward.reward_model.rollout.name=http, and a function of yours scores by "
    "reward.custom_reward_function.path (docs/rewards.md)."
)
_PROGRAMS = "Programs of a model run on this machine, with limits: verl.rewards.programs (docs/rewards.md)."

# module, or module:name, and everything below it -> the sentence
SENTENCES = {
    **dict.fromkeys(
        """verl.models.llama verl.models.mcore verl.models.transformers verl.single_controller.base.megatron
        verl.single_controller.ray.megatron verl.third_party verl.trainer.distillation verl.trainer.fsdp_sft_trainer:
        verl.utils.checkpoint.fsdp_checkpoint_manager verl.utils.checkpoint.megatron_checkpoint_manager verl.utils.fsdp_utils:
        verl.utils.megatron verl.utils.megatron_utils verl.utils.memory_buffer verl.utils.rendezvous verl.utils.veomni
        verl.workers.actor verl.workers.critic verl.workers.engine verl.workers.engine_workers:
        verl.workers.engine_workers_tinker
        verl.workers.fsdp_workers: verl.workers.megatron_workers: verl.workers.sharding_manager verl.workers.utils.losses:
        """.split(),
        _ENGINES,
    ),
    **dict.fromkeys(
        "verl.checkpoint_engine: verl.utils.sglang verl.utils.vllm verl.utils.vllm_utils verl.workers.rollout".split(),
        _SAMPLERS,
    ),
    **dict.fromkeys(
        """verl.experimental.fully_async_policy verl.experimental.separation verl.experimental.transfer_queue
        verl.trainer.ppo.v1 verl.utils.transferqueue_utils:""".split(),
        _TRAINERS,
    ),
    "verl.utils.tokenizer.continuous_token": _TOKENS,
    "verl.utils.tokenizer.continuous_token_wiring": _TOKENS,
    "verl.experimental.reward_loop": _SERVED,
    "verl.utils.reward_score.prime_code": _PROGRAMS,
    "verl.utils.reward_score.sandbox_fusion": _PROGRAMS,
}


class ReplacedModuleError(VerlError, ModuleNotFoundError):
    """A module of another release that has no counterpart here."""

    def __init__(self, module: str, sentence: str):
        super().__init__(f"There is no {module} here. {sentence}")
        self.name = module


class ReplacedNameError(VerlError, ImportError):
    """A name of another release that has no counterpart here; no AttributeError, since an import statement hides its text."""


def sentence_of(name: str) -> str | None:
    """The sentence for a module, or for `module:name`; None if there is nothing to say."""
    parts = name.replace(":", ".").split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 1, -1)]
    return next((SENTENCES[p] for prefix in prefixes for p in (prefix, f"{prefix}:") if p in SENTENCES), None)
