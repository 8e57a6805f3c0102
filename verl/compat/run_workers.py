"""Worker groups of a script that builds them itself, from the classes that stand for roles: one run behind all of them.

    worker = RayClassWithInitArgs(ActorRolloutRefWorker, config=config.actor_rollout_ref, role="actor_rollout")
    group = RayWorkerGroup(pool, create_colocated_worker_cls({"actor_rollout": worker}))  # RunWorkers
    actor = group.spawn({"actor_rollout"})["actor_rollout"]
    actor.init_model()                                                                    # opens the run
    LLMServerManager.create(config, actor)                                                # its sampler

Rows come as a DataProto, or as a TensorDict without padding (verl/compat/nested.py); results have the same form.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from tensordict import TensorDict

from verl.compat import tensordicts
from verl.compat.llm_server import Sampler
from verl.compat.models import compute_position_id_with_mask
from verl.compat.own_rows import of_steps
from verl.compat.sections import loaded_config
from verl.compat.task_runner import WORKERS, ActorRolloutRefWorker
from verl.data_proto.proto import DataProto
from verl.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.compat.endpoint import PolicyEndpoint
    from verl.compat.own_fit import FitRun
    from verl.config import ActorConfig

log = logging.getLogger(__name__)

Rows: TypeAlias = DataProto | TensorDict
_PADDED = ("prompts", "responses", "attention_mask")


def stand_for_roles(classes: Iterable[type]) -> bool:
    """Whether a group of these classes is a run. Raises ConfigError for a subclass of a script: it would not be used."""
    roles = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, ActorRolloutRefWorker)]
    foreign = [cls.__name__ for cls in roles if cls.__module__.partition(".")[0] != "verl"]
    if foreign:
        raise ConfigError(f"The worker class {foreign[0]} would not be used. {WORKERS}")
    return bool(roles)


class RunWorkers:
    """A worker group for each role of a run, under the names of existing releases. `section` is the node of an OmegaConf tree
    that a worker is made with; the run takes the tree around it, with the keys that `reads` names. One pass over the steps of
    trainer.total_training_steps, on rows that the script has. Raises ConfigError for a section without its tree."""

    def __init__(self, section: DictConfig | None, reads: set[str]):
        root = section._get_root() if hasattr(section, "_get_root") else None  # type: ignore[union-attr]
        tree = cast("DictConfig", root)
        if tree is None or "actor_rollout_ref" not in tree:
            raise ConfigError(
                "The workers of a script share the run of its config. Give RayClassWithInitArgs config.actor_rollout_ref of "
                "the OmegaConf tree itself, not a copy of that section."
            )
        self._tree, self._reads = tree, reads
        self._opened: FitRun | None = None
        self._endpoint: PolicyEndpoint | None = None
        self._loss: Callable[..., object] | None = None
        self._step = 0
        self._dispatch_info: dict[str, list[int]] = {}
        self.world_size = int(tree.trainer.nnodes * tree.trainer.n_gpus_per_node)
        self.sampler = Sampler(
            self._served, self._sync, lambda: self._run.end_generation(), lambda stop: self._run.sample_until(stop)
        )

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RunWorkers]:
        return dict.fromkeys(prefix_set, self)

    def init_model(self) -> None:
        """Load the models; the run is open from here on, until the process ends."""
        _ = self._run

    reset = init_model

    @property
    def _run(self) -> FitRun:
        if self._opened is None:
            from verl.compat.own_fit import FitRun

            loaded, optim = loaded_config(self._tree, reads=self._reads), self._tree.actor_rollout_ref.actor.optim
            steps = loaded.config.trainer.total_training_steps or optim.get("total_training_steps")
            self._opened = FitRun(of_steps(loaded, steps))
            self._step = self._opened.step + 1
            atexit.register(self.close)
        return self._opened

    def close(self) -> None:
        """End the run, and write its summary."""
        opened, self._opened = self._opened, None
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if opened is not None:
            with opened.within():
                pass

    def _served(self) -> PolicyEndpoint:
        if self._endpoint is None:
            from verl.compat.endpoint import PolicyEndpoint

            self._endpoint = PolicyEndpoint(self._run, lambda: self._step)
        return self._endpoint

    def _sync(self) -> None:
        """The sampler gets the trained weights: the next step begins."""
        self._run.sync()
        self._step = self._run.step + 1

    def _query_dispatch_info(self, mesh_name: str) -> list[int]:
        return list(range(self.world_size))

    def start_profile(self, *_: object, **__: object) -> None:
        """Each step reports where its time went."""

    stop_profile = start_profile

    def set_loss_fn(self, loss_fn: Callable[..., object]) -> None:
        """`loss_fn(model_output=, data=, dp_group=)` chooses a registered loss by calling `ppo_loss`. Raises ConfigError for a
        loss that computes by itself."""
        self._loss = loss_fn
        self._loss_mode(TensorDict({}, batch_size=[]))

    def _loss_mode(self, data: TensorDict) -> str | None:
        if self._loss is None:
            return None
        try:
            chosen = self._loss(_CHOICE, data, None)
        except (AttributeError, TypeError) as error:
            raise ConfigError(f"set_loss_fn got a loss that computes by itself ({error}). {_REGISTERED}") from error
        if not isinstance(chosen, Choice):
            raise ConfigError(f"set_loss_fn got a loss that does not call ppo_loss. {_REGISTERED}")
        return chosen.loss_mode

    def generate_sequences(self, rows: DataProto) -> DataProto:
        """Samples of rows of tokens, see verl.compat.own_rows."""
        return self._run.generate(rows, self._step)

    def compute_log_prob(self, rows: Rows) -> Rows:
        """old_log_probs and entropys [batch, response], or jagged log_probs and entropy. With `no_lora_adapter` of the
        reference."""
        if isinstance(rows, TensorDict) and tensordicts.get(rows, "no_lora_adapter"):
            return self.compute_ref_log_prob(rows)
        outputs = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return self._forward("actor", rows, outputs, "old_log_prob")

    def compute_ref_log_prob(self, rows: Rows) -> Rows:
        return self._forward("reference", rows, {"log_probs": "ref_log_prob"}, "ref")

    def compute_values(self, rows: DataProto) -> Rows:
        return self._forward("critic", rows, {"values": "values"}, "values")

    def _forward(self, role: str, rows: Rows, outputs: dict[str, str], span: str) -> Rows:
        padded = _padded(rows)
        values = self._run.forward(role, padded, outputs, span)
        if isinstance(rows, DataProto):
            return values
        mask = padded.batch["attention_mask"].bool()
        return tensordicts.get_tensordict(
            {output: _at_all_tokens(values.batch[column], mask) for output, column in outputs.items()}
        )

    def update_actor(self, rows: Rows) -> Rows:
        """All optimizer steps on the rows; `metrics`. Of a TensorDict, `mini_batch_size` rows each and `epochs` passes."""
        return self._update("actor", rows)

    def update_critic(self, rows: Rows) -> Rows:
        return self._update("critic", rows)

    def _update(self, role: str, rows: Rows) -> Rows:
        padded = _padded(rows)
        if isinstance(rows, DataProto):
            return DataProto(meta_info={"metrics": self._run.update(role, padded, self._step)})
        mode = self._loss_mode(rows) if role == "actor" else None
        configured = self._run.config.actor_rollout_ref.actor.policy_loss.loss_mode
        if mode not in (None, configured):
            raise ConfigError(
                f"The rows ask for the loss {mode}, and the run trains by {configured}: set it for all roles."
            )
        size, passes = (tensordicts.get(rows, name) for name in ("mini_batch_size", "epochs"))
        divisor, trained = tensordicts.get(rows, "global_batch_size"), int(padded.batch["response_mask"].any(-1).sum())
        if divisor and size and divisor * len(padded) != trained * size:
            log.warning(
                "The script divides losses by %s of its samples; here they are means over the %s rows that train.",
                divisor,
                trained,
            )
        schedule = {name: value for name, value in (("size", size), ("epochs", passes)) if value}
        metrics = self._run.update(role, padded, self._step, **schedule)
        return tensordicts.get_tensordict({}, {"metrics": metrics})

    def save_checkpoint(self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, **_: object) -> None:
        """A checkpoint of the run, below trainer.default_local_dir; its folder global_step_N is the script's too."""
        self._run.save(global_step or self._run.step)
        self._run.loop.store.finish()

    def load_checkpoint(self, local_path: str | None, *_: object, **__: object) -> None:
        """The run has resumed when it opened. Raises ConfigError if that was from another step."""
        name = f"global_step_{self._run.step}"
        if local_path and name not in Path(local_path).parts:
            raise ConfigError(
                f"The run has resumed from {name}, and the script asks for {local_path}. Set trainer.resume_mode and "
                "trainer.resume_from_path for both."
            )


class RoleCalls(SimpleNamespace):
    """The methods of a role under the names of a worker group, as a trainer class has it."""


class Choice(SimpleNamespace):
    """The loss that a function of a script chooses, by its registered name."""

    loss_mode: str


_CHOICE = Choice(loss_mode="")
_REGISTERED = "Register the loss by register_policy_loss, and name it in actor.policy_loss.loss_mode."


def ppo_loss(config: ActorConfig | DictConfig, model_output: object, data: object, dp_group: object = None) -> Choice:
    """The loss that `config` (of an actor) names. Raises ConfigError for model outputs: losses compute in the run."""
    if model_output is not _CHOICE:
        raise ConfigError(f"ppo_loss chooses a loss of a run and takes no model outputs here. {_REGISTERED}")
    loss = config.policy_loss
    return Choice(loss_mode=loss["loss_mode"] if isinstance(loss, Mapping) else loss.loss_mode)


def _padded(rows: Rows) -> DataProto:
    """Rows with their padding. Raises ConfigError for columns that are missing, and for images."""
    if isinstance(rows, DataProto):
        return rows
    data = DataProto.from_tensordict(rows)
    columns = dict(data.batch.items())
    missing = [name for name in _PADDED if name not in columns or columns[name].is_nested]
    if missing:
        raise ConfigError(f"The rows have no padded column {missing[0]}: give {', '.join(_PADDED)} [batch, width].")
    if any(map(bool, data.non_tensor_batch.get("multi_modal_inputs", ()))):
        raise ConfigError(
            "Rows of a script's own workers have no images here: train them by a RayPPOTrainer of the run."
        )
    columns = {name: column for name, column in columns.items() if not column.is_nested}
    columns["input_ids"] = torch.cat([columns["prompts"], columns["responses"]], dim=1)
    columns["position_ids"] = compute_position_id_with_mask(columns["attention_mask"])
    columns.setdefault("response_mask", columns["attention_mask"][:, -columns["responses"].shape[1] :])
    return DataProto.from_dict(columns)


def _at_all_tokens(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values of response tokens [batch, response] as a jagged tensor of all tokens under `mask`; see verl/compat/nested.py."""
    width, jagged = values.shape[1], []
    for row, tokens in zip(values, mask, strict=True):
        count, length = int(tokens[-width:].sum()), int(tokens.sum())
        outputs = row.new_zeros(length)
        outputs[length - count - 1 : length - 1] = row[:count]
        jagged.append(outputs)
    return tensordicts.nested_tensor_from_tensor_list(jagged)
