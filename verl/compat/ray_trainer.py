"""`RayPPOTrainer`: the class of the existing trainer that recipes subclass.

Without a `fit` of its own, a subclass trains as `verl train` does. A subclass with its own `fit` decides the order of the
phases, and calls the roles of a run through the methods here (verl/compat/own_fit.py).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sized
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from verl.compat.batches import compute_rollout_correction_and_add_to_batch, log_seqlen_unbalance
from verl.compat.devices import DistProfiler, ProfilerConfig
from verl.compat.llm_server import Addressed, CheckpointEngineManager, LLMServerManager, Sampler
from verl.compat.metrics import FlopsCounter
from verl.compat.own_fit import FitRun, HeldOutBatches, PromptBatches
from verl.compat.own_rows import Row, ScriptRows, batches_of
from verl.compat.run_workers import RoleCalls
from verl.compat.task_runner import INSTEAD, WORKERS, Pools, refuse_overrides, undecorated
from verl.config.active_keys import uses_critic, uses_reference
from verl.data.order import prompts_per_generation
from verl.data_proto.proto import DataProto
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.models.load import load_model_config

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from verl.compat.endpoint import PolicyEndpoint

log = logging.getLogger(__name__)
_PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")
_REWARD_COLUMNS = ("data_source", "reward_model", "extra_info", "uid")


class RayPPOTrainer:
    """`fit()` trains by the config, on the runtime that it names. Raises ConfigError for worker classes, rewards or samplers of
    the script: they would not be used; and for overridden methods that no `fit` of the script calls.

    config: the tree that was given, completed by the defaults. global_steps: the step in progress, counted by a `fit`.
    """

    async_rollout_mode = ref_in_actor = False  # either choice of a fit leads to the same calls
    hybrid_engine = True

    def __init__(
        self,
        config: object,
        tokenizer: Tokenizer | None = None,
        role_worker_mapping: dict[object, Any] | None = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        processor: object = None,
        reward_fn: object = None,
        val_reward_fn: Any = None,
        train_dataset: object = None,
        val_dataset: Any = None,
        collate_fn: object = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        **other: Any,
    ):
        from verl.compat.sections import completed, loaded_config

        if type(self).fit is RayPPOTrainer.fit:
            hooks = [name for name in vars(RayPPOTrainer) if callable(vars(RayPPOTrainer)[name]) and name[:2] != "__"]
            refuse_overrides(self, RayPPOTrainer, tuple(hooks))
        if other:
            raise ConfigError(f"RayPPOTrainer has no argument {next(iter(other))!r} here. {INSTEAD}")
        self._loaded = loaded_config(config, type(self), chooses=type(self).fit is not RayPPOTrainer.fit)
        self.config = completed(self._loaded.config, config)
        self.tokenizer, self.processor = tokenizer, processor
        if train_dataset is None:  # a project may have set its rows before
            train_dataset, val_dataset = (vars(self).get(name) for name in ("train_dataset", "val_dataset"))
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.role_worker_mapping, self.ray_worker_group_cls = role_worker_mapping or {}, ray_worker_group_cls
        self.device_name = device_name or self._loaded.config.trainer.device
        self.resource_pool_manager = resource_pool_manager or Pools(self._loaded.config.trainer)
        self.use_critic = uses_critic(self._loaded.config)
        self.use_reference_policy = uses_reference(self._loaded.config)
        self.use_rm = bool(self._loaded.config.reward.reward_model.enable)
        self.global_steps, self.is_fitting = 0, False
        self._opened: FitRun | None = None
        self._endpoint: PolicyEndpoint | None = None
        self._own_rows = self._rows_of_script(train_dataset, val_dataset, collate_fn, train_sampler)
        self._batches: PromptBatches | None = None
        self._profiler: DistProfiler | None = None
        if self._own_rows is None:
            self._refuse_own_parts((reward_fn, val_reward_fn), train_sampler)
            self._refuse_own_rows(train_dataset, val_dataset)
        else:
            self._refuse_own_parts((), None)
            create = getattr(type(self), "_create_dataloader", None)
            if create is not None:
                takes_rows = len(inspect.signature(create).parameters) > 1
                create(self, *((train_dataset, val_dataset, collate_fn, train_sampler) if takes_rows else ()))

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if "fit" in vars(cls):
            cls.fit = _closing(vars(cls)["fit"])  # type: ignore[method-assign]

    def init_workers(self) -> None:
        """Start the processes of a run for a `fit` of the script; else `fit` starts and ends them."""
        if type(self).fit is not RayPPOTrainer.fit:
            self._open()

    def _open(self) -> None:
        _ = self._run

    def fit(self) -> None:
        """Train. Raises the errors of `verl train`; call it again to resume an interrupted run."""
        from verl.run.host import train

        if self._opened is not None:
            raise ConfigError(
                "RayPPOTrainer.fit trains in a run of its own, and one is open. Call it in no fit of your own."
            )
        train(self._loaded)

    @contextmanager
    def _fitting(self) -> Any:
        self.is_fitting = True
        try:
            with self._run.within():
                yield
        finally:
            if self._endpoint is not None:
                self._endpoint.close()
            self.is_fitting, self._opened, self._batches, self._endpoint = False, None, None, None

    @property
    def _run(self) -> FitRun:
        if self._opened is None:
            self._opened = FitRun(self._own_rows.counted(self._loaded) if self._own_rows else self._loaded)
        return self._opened

    def __setattr__(self, name: str, value: object) -> None:
        """A loader, or a number of steps, of the script's own goes before the run's."""
        if isinstance(getattr(RayPPOTrainer, name, None), property):
            vars(self).setdefault("_values", {})[name] = value
        else:
            super().__setattr__(name, value)

    # -- what a fit reads -------------------------------------------------------------------------------------------------

    @property
    def train_dataloader(self) -> PromptBatches | DataLoader[Row]:
        """See PromptBatches; a resumed run begins behind the prompts that have trained. Of a script's rows, a torch loader."""
        if "train_dataloader" in (values := vars(self).get("_values", {})):
            return cast("DataLoader[Row]", values["train_dataloader"])
        if self._own_rows is not None:
            rows = self._own_rows
            return batches_of(rows, rows.train, prompts_per_generation(self._loaded.config), sampled=True)
        if self._batches is None:
            self._batches = self._run.prompts()
        return self._batches

    @property
    def total_training_steps(self) -> int:
        """The run's, or the script's number if it has set one."""
        return int(vars(self).get("_values", {}).get("total_training_steps") or self._run.loop.data.num_steps)

    @property
    def kl_ctrl_in_reward(self) -> Any:
        """The controller of algorithm.kl_ctrl; checkpoints have its state."""
        return self._run.program.kl_controller

    kl_ctrl = kl_ctrl_in_reward

    @property
    def val_dataloader(self) -> HeldOutBatches | DataLoader[Row]:
        """Batches of held-out rows, of the script's own or of the run. Raises ConfigError without them."""
        if "val_dataloader" in (values := vars(self).get("_values", {})):
            return cast("DataLoader[Row]", values["val_dataloader"])
        rows = self._own_rows
        if rows is None and (loader := self._run.program.data.validation) is not None:
            return HeldOutBatches(self._run, loader)
        if rows is None or rows.val is None:
            raise ConfigError("There are no held-out rows: set data.val_files.")
        size = self._loaded.config.data.val_batch_size or len(cast("Sized", rows.val))
        return batches_of(rows, rows.val, size, sampled=False)

    @property
    def async_rollout_manager(self) -> SimpleNamespace:
        """`generate_sequences(batch)`: see FitRun.generate. `server_addresses`: see PolicyEndpoint, which starts with them."""
        manager = self.llm_server_manager
        return Addressed(
            manager.get_addresses, generate_sequences=self._generate, rollout_replicas=manager.get_replicas()
        )

    @property
    def llm_server_manager(self) -> LLMServerManager:
        return LLMServerManager(self._sampler)

    @property
    def _sampler(self) -> Sampler:
        calls = (
            lambda: self._run.sync(),
            lambda: self._run.end_generation(),
            lambda stop: self._run.sample_until(stop),
        )
        return Sampler(self._served, *calls)

    def _served(self) -> PolicyEndpoint:
        if self._endpoint is None:
            from verl.compat.endpoint import PolicyEndpoint

            self._endpoint = PolicyEndpoint(self._run, lambda: self.global_steps)
        return self._endpoint

    @property
    def checkpoint_manager(self) -> CheckpointEngineManager:
        """`update_weights(step)` gives the trained weights to the rollout engine, `sleep_replicas()` frees its cache."""
        return CheckpointEngineManager(trainer=self.actor_rollout_wg)

    @property
    def actor_rollout_wg(self) -> RoleCalls:
        """The worker group of earlier releases, by the methods of this class; also for one that a script has built."""
        return RoleCalls(
            init_model=self._open,
            sampler=self._sampler,
            world_size=self.resource_pool_manager.get_n_gpus(),
            generate_sequences=self._generate,
            compute_log_prob=lambda batch: self._compute_old_log_prob(batch)[0],
            compute_ref_log_prob=self._compute_ref_log_prob,
            update_actor=self._update_actor,
            save_checkpoint=lambda *_, **__: RayPPOTrainer._save_checkpoint(self),  # of all roles, where the run saves
        )

    ref_policy_wg = actor_rollout_wg

    @property
    def critic_wg(self) -> RoleCalls:
        return RoleCalls(
            init_model=self._open,
            compute_values=self._compute_values,
            update_critic=self._update_critic,
            save_checkpoint=lambda *_, **__: None,
        )

    @property
    def rm_wg(self) -> SimpleNamespace:
        return SimpleNamespace(compute_rm_score=self._compute_reward_colocate)

    # -- what a fit calls -------------------------------------------------------------------------------------------------

    def _load_checkpoint(self) -> int:
        """The step of the checkpoint that the run has resumed from, 0 without one; also in `global_steps`."""
        self.global_steps = self._run.step
        return self.global_steps

    def _save_checkpoint(self) -> None:
        """A checkpoint of `global_steps`, in the layout of `verl train`."""
        self._run.save(self.global_steps)

    def _validate(self, merged: bool = False) -> dict[str, float]:
        """Metrics of the held-out prompts under the trained weights; {} for rows of the script."""
        if self._own_rows is not None:
            log.warning(
                "_validate of RayPPOTrainer measures no rows of a script: override it, or set trainer.test_freq=-1."
            )
        return self._run.validate()

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """The batch for generation. `batch` keeps its other tensors, and the columns that rewards read."""
        names = [name for name in batch.non_tensor_batch if name not in _REWARD_COLUMNS]
        tokens = [name for name in _PROMPT_COLUMNS if name in batch.batch.keys()]
        popped = batch.pop(batch_keys=tokens, non_tensor_batch_keys=names).non_tensor_batch
        return DataProto.from_dict(dict(batch.batch.items()), {**popped, **batch.non_tensor_batch})

    def _generate(self, batch: DataProto) -> DataProto:
        return self._run.generate(batch, self.global_steps)

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        """(old_log_probs and entropys, utilization of the devices, 0 for devices of unknown peak)."""
        outputs = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return self._run.forward("actor", batch, outputs, "old_log_prob"), self._utilization(batch)

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        return self._run.forward("reference", batch, {"log_probs": "ref_log_prob"}, "ref")

    def _compute_values(self, batch: DataProto) -> DataProto:
        return self._run.forward("critic", batch, {"values": "values"}, "values")

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        """rm_scores; generation has computed them already."""
        return self._run.rewards(batch)

    def compute_rollout_importance_weights_and_add_to_batch(self, batch: DataProto) -> tuple[DataProto, object]:
        """See compute_rollout_correction_and_add_to_batch; (batch, {}) without a correction."""
        section = self._loaded.config.algorithm.rollout_correction
        if not (section.rollout_is or section.rollout_rs) or "rollout_log_probs" not in batch.batch.keys():
            return batch, {}
        return compute_rollout_correction_and_add_to_batch(batch, section)

    def _update_actor(self, batch: DataProto) -> DataProto:
        """All optimizer steps of the actor; meta_info["metrics"]. The step then counts as taken."""
        return DataProto(meta_info={"metrics": self._run.update("actor", batch, self.global_steps)})

    def _update_critic(self, batch: DataProto) -> DataProto:
        """All optimizer steps of the critic; meta_info["metrics"]."""
        return DataProto(meta_info={"metrics": self._run.update("critic", batch, self.global_steps)})

    def _balance_batch(
        self, batch: DataProto, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **_: Any
    ) -> None:
        """Metrics of the tokens of each device's rows. The rows keep their order: calls divide them by their cost."""
        lengths, count = batch.batch["attention_mask"].sum(-1).tolist(), self.resource_pool_manager.get_n_gpus()
        partitions = [list(range(rank, len(lengths), count)) for rank in range(count)]
        metrics.update(log_seqlen_unbalance(lengths, partitions, logging_prefix))

    def _log_rollout_data(self, batch: DataProto, *_: object, **__: object) -> None:
        """The samples with all columns so far, to the run folder and trainer.rollout_data_dir."""
        self._run.write_rows(batch, self.global_steps)

    def _start_profiling(self, do_profile: bool) -> None:
        """Start a trace of this process, to profile/ of the run folder."""
        if do_profile and self._profiler is None:
            folder = str(Path(self._run.loop.folder.root) / "profile")
            self._profiler = DistProfiler(0, ProfilerConfig(enable=True, all_ranks=True, save_path=folder))
            self._profiler.start(role=f"step_{self.global_steps}")

    def _stop_profiling(self, do_profile: bool) -> None:
        if do_profile and self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _utilization(self, batch: DataProto) -> float:
        model = self._loaded.config.actor_rollout_ref.model
        counter = FlopsCounter(load_model_config(model.path, model.trust_remote_code, model.override_config))
        achieved, peak = counter.estimate_flops(batch.batch["attention_mask"].sum(-1).tolist(), self._run.forward_s)
        return achieved / 3 / (peak * self._run.loop.roles.num_devices)  # a forward is a third of the operations

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"RayPPOTrainer has no {name!r} here. {INSTEAD}")

    def _refuse_own_parts(self, rewards: tuple[object, ...], sampler: object) -> None:
        from torch.utils.data import RandomSampler, SequentialSampler

        from verl.compat.reward_managers import NaiveRewardManager

        classes = map(undecorated, self.role_worker_mapping.values())
        foreign = [cls for cls in classes if not getattr(cls, "__module__", "").startswith("verl.")]
        if foreign:
            raise ConfigError(f"The worker class {foreign[0].__name__} would not be used. {WORKERS}")
        for reward in rewards:
            if reward is not None and type(reward).__module__ != NaiveRewardManager.__module__:
                raise ConfigError(f"The reward_fn {reward!r} would not be called. {INSTEAD}")
        is_torchs = type(sampler).__module__.startswith("torchdata.")
        if sampler is not None and not is_torchs and not isinstance(sampler, (RandomSampler, SequentialSampler)):
            raise ConfigError(f"The sampler {type(sampler).__name__} would not be used. {INSTEAD}")

    def _rows_of_script(self, train: Any, val: Any, collate: Any, sampler: Any) -> ScriptRows | None:
        """Rows that a script holds in a dataset class of its own, for its own fit; None if the config names them."""
        from verl.data.dataset import dataset_class

        if type(self).fit is RayPPOTrainer.fit or type(train) is dataset_class(self._loaded.config.data):
            return None
        if train is None and not hasattr(type(self), "_create_dataloader"):  # whose agents make the rows
            return None
        return ScriptRows(train, val, collate, sampler)

    def _refuse_own_rows(self, *datasets: object) -> None:
        from verl.data.dataset import dataset_class

        expected_class = dataset_class(self._loaded.config.data)
        for dataset in datasets:
            if dataset is not None and type(dataset) is not expected_class:
                raise ConfigError(
                    f"The rows of {type(dataset).__name__} would not be used. Set data.custom_cls.path and .name to it."
                )


def _closing(fit: Callable[..., object]) -> Callable[..., Any]:
    """`fit` with its run open around it, once if subclasses call the fit of a base."""

    @functools.wraps(fit)
    def run(self: RayPPOTrainer, *arguments: Any, **keywords: Any) -> Any:
        with nullcontext() if self.is_fitting else self._fitting():
            return fit(self, *arguments, **keywords)

    return run
