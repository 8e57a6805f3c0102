"""Actor, rollout and reference policy of one process behind one object, for scripts with custom training loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl.config import load_config
from verl.data.prompts import PromptEncoder
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError, DataError
from verl.families import DEFAULT_ROLLOUT, engine_facts, engines_with
from verl.parallel.device import resolve_device
from verl.programs.ppo_roles import ppo_roles
from verl.programs.specs import placement_of
from verl.roles.api import RoleSpec
from verl.roles.rollout import sampling_params
from verl.roles.updates import Updates
from verl.runtime.rank import RankContext
from verl.runtime.rank_workers import RankWorkers

_PROCESSES = engines_with("starts_process")
Prompts = DataProto | str | Sequence[str] | Sequence[Sequence[int]]


class ActorRolloutRefWorker:
    """A policy that generates with the engine `rollout_backend` (native, hf, vllm, ...), trains, and is compared with a
    reference policy (its initial weights).

        with ActorRolloutRefWorker(model_path, tensor_parallel_size=2, max_batch_size=32, rollout_backend="vllm") as worker:
            batch = worker.generate_sequences(["2+2=", "3+3="], n=4)

    `tensor_parallel_size` is the number of devices that share the engine's copy of the model, `max_batch_size` the number of
    samples in generation at once. `overrides` are config overrides, as of `verl train`. Raises the errors of loading a config
    and a model, MissingExtraError without the engine, and ConfigError for several devices that this one process cannot use.
    """

    def __init__(
        self,
        model_path: str,
        tensor_parallel_size: int = 1,
        max_batch_size: int = 256,
        rollout_backend: str = DEFAULT_ROLLOUT,
        overrides: Sequence[str] = (),
    ):
        rollout = "actor_rollout_ref.rollout"
        settings = [
            f"actor_rollout_ref.model.path={model_path}",
            f"{rollout}.name={rollout_backend}",
            f"{rollout}.tensor_model_parallel_size={tensor_parallel_size}",
            f"{rollout}.max_num_seqs={max_batch_size}",
            "actor_rollout_ref.actor.use_kl_loss=True",  # for the reference policy
            *overrides,
        ]
        self.config = load_config(settings, check=False).config
        everything = placement_of(self.config)
        if everything.num_devices > 1 or (tensor_parallel_size > 1 and engine_facts(rollout_backend).is_in_run):
            choice = f"tensor_parallel_size={tensor_parallel_size} with {rollout_backend}"
            fix = f"Leave that out, take rollout_backend={_PROCESSES[0]!r} for an engine over several devices"
            if everything.num_devices > 1:
                choice = f"a placement on {everything.num_devices} devices (set_device_map, trainer.*)"
                fix = "Take the placement back by set_device_map(None)"
            raise ConfigError(
                f"ActorRolloutRefWorker is one process, whose roles share one device, and was given {choice}. {fix}, or train "
                "with verl train, which places roles."
            )
        # scores are the script's business
        specs = replace(ppo_roles(self.config), reward=None)
        if type(self)._build_model_optimizer is not ActorRolloutRefWorker._build_model_optimizer:
            built = [replace(s, build=partial(self._build, s)) if s.head == "lm" else s for s in specs.models]
            specs = replace(specs, models=tuple(built))
        placement = replace(everything, devices={**everything.devices, "reward": ()})
        device = resolve_device(self.config.trainer.device)
        num_steps = self.config.trainer.total_training_steps or 0
        workers = RankWorkers(RankContext(specs, placement, 0, device, num_steps, []), None)
        assert workers.rollout is not None
        assert workers.weights is not None
        self.actor, self.reference = workers.models["actor"], workers.models["reference"]
        self.rollout, self.weights = workers.rollout, workers.weights
        self.tokenizer = self.rollout.tokenizer
        self._encoder = PromptEncoder(self.tokenizer, self.config.data)
        self._num_prompts = 0
        self._version = -1
        try:
            self.update_weights()
        except BaseException:
            self.close()
            raise

    def _build_model_optimizer(
        self,
        model_path: str,
        fsdp_config: object,
        optim_config: object,
        override_model_config: Mapping[str, object],
        role: str = "actor",
    ) -> object:
        """The model of `role` (actor or ref). A subclass returns its own model here, in place of the folder's: a Hugging Face
        causal language model, or a PreTrainedModel with a forward from token ids to logits. Its dropout is turned off, and its
        optimizer is made as for any model."""
        raise NotImplementedError

    def _build(self, spec: RoleSpec) -> object:
        role = "actor" if spec.trains else "ref"
        override = dict(spec.model.override_config)
        return self._build_model_optimizer(spec.model.path, spec.engine, spec.optim, override, role=role)

    def generate_sequences(self, prompts: Prompts, *, n: int | None = None, step: int = 0) -> DataProto:
        """`n` samples (default: rollout.n) of each prompt, adjacent, as prompts, responses [batch, response], masks and
        rollout_log_probs. Prompts are texts (put through the chat template), token ids, or a DataProto with the columns
        ordinal and prompt_token_ids; `step` is a part of the seed. Raises DataError when there are none."""
        params = sampling_params(self.config.actor_rollout_ref.rollout)
        params = params if n is None else replace(params, n=n)
        listed = [prompts] if isinstance(prompts, str) else prompts
        batch = listed if isinstance(listed, DataProto) else self._batch(listed)
        samples = self.rollout.generate(batch, step=step, params=params)
        self.rollout.end_generation()
        return batch.repeat(params.n, interleave=True).union(samples)

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys [batch, response] of generated rows, under the current weights."""
        return self.actor.forward(batch, {"log_probs": "old_log_probs", "entropy": "entropys"})

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob [batch, response], under the weights of the model's files."""
        return self.reference.forward(batch, {"log_probs": "ref_log_prob"})

    def update_actor(self, batch: DataProto, step: int = 0) -> Updates:
        """Train on rows with advantages and the columns that the configured loss reads; generation follows. Raises DataError
        if one is missing."""
        made_by = {"advantages": "Put [batch, response] advantages into it"}
        if self.config.actor_rollout_ref.actor.use_kl_loss:
            made_by["ref_log_prob"] = "Call compute_ref_log_prob first, and union its result with the batch"
        if len(self.actor.schedule.rows(batch, step)) > 1:  # the first optimizer step moves the policy
            made_by["old_log_probs"] = "Call compute_log_prob first, and union its result with the batch"
        for column, fix in made_by.items():
            if column not in batch.batch.keys():
                raise DataError(f"update_actor reads the column {column}, which the batch does not have. {fix}.")
        updates = self.actor.update(batch, step)
        self.update_weights()
        return updates

    def update_weights(self) -> None:
        """Bring the actor's weights to the rollout engine, under the next version."""
        self._version += 1
        self.weights.sync(self._version)

    def close(self) -> None:
        """End the engine's processes, if it has any."""
        self.rollout.close()

    def __enter__(self) -> ActorRolloutRefWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _batch(self, prompts: Iterable[Any]) -> DataProto:
        prompts = list(prompts)
        if not prompts:
            raise DataError("There are no prompts; give at least one text or list of token ids.")
        ids = [self._encoder.encode(p, f"prompt {i}") if isinstance(p, str) else list(p) for i, p in enumerate(prompts)]
        first, self._num_prompts = self._num_prompts, self._num_prompts + len(ids)
        ordinals = torch.arange(first, self._num_prompts)
        return DataProto.from_dict({"ordinal": ordinals}, {"prompt_token_ids": object_array(ids)})
