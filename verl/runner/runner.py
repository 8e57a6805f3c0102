"""`RLRunner`: the training loop of a transformers or TRL script.

    - trainer = Trainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    + trainer = RLRunner(model=model, args=args, train_dataset=rows, processing_class=tokenizer)

The script's model, rows and arguments become a run of `verl sft`, `verl dpo` or `verl train` in this process; its model has
the trained weights afterwards.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config import PPO, PREFERENCE, RM, SFT, LoadedConfig, load_config
from verl.config.active_keys import uses_reference_policy
from verl.config.values import absolute_path, parse_value, written
from verl.data.conversations.tokenized import tokenized
from verl.data_proto.token_ids import num_embeddings
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError
from verl.models.load import load_tokenizer
from verl.run.host import evaluate, train
from verl.runner.arguments import COMPARING, GIVEN_ROWS, PREFERENCES, Arguments, algorithm_of, refuse_arguments
from verl.runner.models import (
    drops_inputs,
    init_arguments,
    is_peft,
    load_script_model,
    push_model,
    saved,
    set_special_tokens,
    special_tokens,
    take_weights,
    with_adapters,
    write_merged,
    write_script_model,
)
from verl.runner.packing import Packing
from verl.runner.programs import Processes, Script, refuse_other_checkpoints, resume_keys, reward_list
from verl.runner.rows import ScriptRows, padded_ids, rows_of_script
from verl.user_objects import short_traceback

_KINDS = {"sft": "RunnerSFT", "reward": "RunnerRewardModel", **dict.fromkeys(PREFERENCES, "RunnerPreference")}
_KINDS |= dict.fromkeys(("grpo", "ppo", "rloo", "gkd"), "RunnerPPO")
_PROGRAMS = {name: f"verl.runner.programs:{kind}" for name, kind in _KINDS.items()}
_SCHEMAS: dict[str, Any] = {"sft": SFT, "reward": RM, **dict.fromkeys(PREFERENCES, PREFERENCE)}


class RLRunner:
    """Runner with the arguments of transformers.Trainer and of TRL's trainers, and:

    `teacher_model`: a module or path, for the arguments of TRL's GKDConfig (rows of `messages`).
    `reward_funcs`: functions `f(prompts, completions, **columns)` -> list of numbers (TRL), verl's compute_score, or the path
    of a sequence classification model. `algorithm`: sft, dpo, kto, reward, grpo, rloo or ppo (default: by the class of a TRL
    config; else grpo with `reward_funcs`, dpo if rows have chosen and rejected, else sft). `ref_model`: another reference for
    dpo and kto than the model at the start. `model` may be a PeftModel with one LoRA adapter: only the adapter trains;
    `peft_config` makes a plain module a PeftModel.
    `config`: keys of docs/config.md as `key=value` texts or a mapping, without contradiction to the fields set in `args`.

    Rows for sft have input_ids (and labels), or the columns of docs/sft.md; `data_collator` is applied to each row by
    itself. Rows for dpo have the columns of docs/preferences.md; rows of other algorithms have `prompt`, a text or messages.
    `args` may be a TrainingArguments or a config of TRL; a field that is set and has no meaning here is refused. Raises
    ConfigError and DataError before anything is trained.
    """

    @short_traceback
    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        processing_class: Tokenizer | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        reward_funcs: Any = None,
        ref_model: Any = None,
        teacher_model: Any = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        algorithm: str | None = None,
        formatting_func: Callable[..., str] | None = None,
        config: Mapping[str, Any] | Sequence[str] | None = None,
        **unread: object,
    ):
        from transformers import TrainingArguments

        refuse_arguments(args, data_collator, unread)
        self.overrides = _overrides(config)
        folder = _values(self.overrides).get("trainer.default_local_dir", "tmp_trainer")
        self.args: Any = TrainingArguments(output_dir=folder) if args is None else args
        self.train_dataset = rows_of_script("train_dataset", train_dataset, self.args, formatting_func)
        self.eval_dataset = rows_of_script("eval_dataset", eval_dataset, self.args, formatting_func)
        self._algorithm_is_given = algorithm is not None
        rows = self.train_dataset or self.eval_dataset or []
        self.algorithm = algorithm or algorithm_of(self.args, rows, has_rewards=reward_funcs is not None)
        self.teacher_model = teacher_model or getattr(self.args, "teacher_model_name_or_path", None)
        self._refuse(optimizers, compute_metrics, data_collator, ref_model)
        self.ref_model, self.compute_metrics = ref_model, compute_metrics
        self.folder = Path(str(self.args.output_dir)).absolute()
        self.inputs = self.folder / "inputs" / os.environ.get("RANK", "0")  # each rank of torchrun has its own
        is_path = isinstance(model, str | os.PathLike)
        self._path = absolute_path(str(model if is_path else model.config._name_or_path), os.path.isdir)
        self._module: Any = None if is_path else self._adapted(model, peft_config)
        self._start: Path | None = None  # the model from before dpo
        given_tokenizer = processing_class if processing_class is not None else tokenizer
        self.processing_class = load_tokenizer(self._path) if given_tokenizer is None else given_tokenizer
        self._init_arguments = init_arguments(self.args, is_path, quantization_config)
        tokens = special_tokens(self.args)
        if is_path and (given_tokenizer is not None or self._init_arguments or peft_config is not None or tokens):
            self._module = self._adapted(self.model, peft_config)  # model and tokenizer are written into one folder
        set_special_tokens(self.processing_class, self._module, tokens)
        self.accelerator, self.hub_model_id = Processes(), getattr(self.args, "hub_model_id", None)
        self.rewards = reward_list(reward_funcs)
        if self.algorithm not in (*GIVEN_ROWS, "gkd") and not self.rewards:
            raise ConfigError(f"algorithm={self.algorithm!r} needs reward_funcs.")
        self._mapped = self._arguments()
        self._rows = ScriptRows(
            self.args, self.algorithm, self._mapped, data_collator, self.inputs, self.processing_class
        )
        self.script = self._script(callbacks or ())

    def _refuse(self, optimizers: tuple[Any, Any], compute_metrics: Any, data_collator: Any, ref_model: Any) -> None:
        """Raise ConfigError for an argument that would be left out."""
        if self.algorithm not in _PROGRAMS:
            raise ConfigError(f"RLRunner has no algorithm {self.algorithm!r}; there are {', '.join(_PROGRAMS)}.")
        if any(part is not None for part in optimizers):
            raise ConfigError("RLRunner makes an optimizer: leave `optimizers` out, and set args.optim or config.")
        packs = any(getattr(self.args, name, False) for name in ("packing", "eval_packing"))
        if (self.algorithm in COMPARING or packs) and (compute_metrics or data_collator):
            name = "compute_metrics" if compute_metrics else "data_collator"
            what = "packing=True" if packs else f"algorithm={self.algorithm!r}"
            raise ConfigError(f"RLRunner has no {name} for {what}: it tokenizes the rows, and keeps no logits.")
        if self.algorithm not in PREFERENCES and ref_model is not None:
            raise ConfigError(f"RLRunner reads ref_model only for dpo and kto; this is {self.algorithm!r}.")
        if (self.algorithm == "gkd") != (self.teacher_model is not None):
            raise ConfigError("RLRunner takes teacher_model with the arguments of a GKDConfig, and needs both.")
        if self.algorithm == "gkd" and self.eval_dataset:
            raise ConfigError("RLRunner does not evaluate distillation: leave eval_dataset out.")

    @property
    def model(self) -> Any:
        """The module; if `model` is a path, loaded on first use."""
        if self._module is None:
            is_reward_model = self.algorithm == "reward"
            self._module = load_script_model(self._path, self._init_arguments, is_reward_model=is_reward_model)
        return self._module

    @property
    def state(self) -> Any:
        """transformers' TrainerState: global_step, epoch, log_history."""
        return self.script.state

    @short_traceback
    def train(self, resume_from_checkpoint: str | bool | None = None) -> Any:
        """Train to the end; returns transformers' TrainOutput. True resumes the newest checkpoint of output_dir, a path that
        one. Raises the errors of `verl train`; nothing trains when a row, an argument or a key is bad, or if output_dir has
        checkpoints of another trainer."""
        from transformers.trainer_utils import TrainOutput

        if self._mapped is None:
            raise ConfigError("RLRunner.train needs train_dataset.")
        refuse_other_checkpoints(self.folder)
        script = self.script
        script.losses.clear()
        loaded = self._load(resume_keys(resume_from_checkpoint))
        self._keep_start()
        with script.running():
            script.call("on_train_begin")
            train(loaded, program=_PROGRAMS[self.algorithm])
        self._take_weights()
        script.call("on_train_end")
        return TrainOutput(self.state.global_step, loss := float(np.mean(script.losses or [0.0])), {"train_loss": loss})

    @short_traceback
    def evaluate(self, eval_dataset: Iterable[Mapping[str, object]] | None = None) -> dict[str, float]:
        """Metrics of the current weights on `eval_dataset` (default: the runner's dataset): eval_loss, more of the program, and
        the values of compute_metrics. The reference of dpo is ref_model, or the model at the start of training; raises
        ConfigError if the reference has moved (sync_ref_model)."""
        rows = self.eval_dataset if eval_dataset is None else list(eval_dataset)
        if not rows:
            raise ConfigError("RLRunner.evaluate needs eval_dataset.")
        rows = rows if eval_dataset is None else self._packing.blocks(rows, "eval_") or []
        before, self.eval_dataset = self.eval_dataset, rows
        try:
            loaded = self._load({"trainer.val_only": True})
            if self._start is not None and self.ref_model is None and uses_reference_policy(loaded.config):
                if loaded.config.ref.sync_steps:
                    raise ConfigError(
                        "sync_ref_model has moved the reference; set eval_strategy to evaluate in training."
                    )
                loaded = self._load({"trainer.val_only": True, "ref.model_path": self._start})
            with self.script.running():
                evaluate(loaded, program=_PROGRAMS[self.algorithm])
        finally:
            self.eval_dataset = before
        metrics = {n: v for n, v in self.state.log_history[-1].items() if n.startswith("eval_")}
        if self.compute_metrics is None:
            return metrics
        computed: dict[str, float] = self.predict(rows).metrics
        self.script.log(computed)
        return metrics | computed

    @torch.no_grad()
    def predict(self, test_dataset: Iterable[Mapping[str, object]]) -> Any:
        """transformers' PredictionOutput: logits [rows, tokens, vocabulary] and labels [rows, tokens], padded with -100.
        Raises ConfigError for pairs and labelled completions."""
        from transformers.trainer_utils import EvalPrediction, PredictionOutput

        if self.algorithm in COMPARING:
            raise ConfigError(
                f"RLRunner.predict has no meaning for algorithm={self.algorithm!r}; evaluate() has its metrics."
            )

        size = num_embeddings(self.processing_class)
        rows = [
            tokenized(self._rows.tokens(row, place), f"row {place}", size) for place, row in enumerate(test_dataset)
        ]
        ids, masks = (
            padded_ids([np.asarray(getattr(row, name)) for row in rows]) for name in ("input_ids", "loss_mask")
        )
        exists = padded_ids([np.ones(len(row.input_ids)) for row in rows])
        module = self.model.eval()
        logits = torch.cat(
            [
                module(input_ids=part, attention_mask=mask).logits.float().cpu()
                for part, mask in zip(ids.to(module.device).split(8), exists.to(module.device).split(8), strict=True)
            ]
        )
        logits[exists == 0] = -100
        labels = torch.where(masks == 1, ids, -100).numpy()
        metrics = (
            self.compute_metrics(EvalPrediction(logits.numpy(), labels)) if self.compute_metrics is not None else {}
        )
        return PredictionOutput(
            logits.numpy(), labels, {f"eval_{k.removeprefix('eval_')}": v for k, v in metrics.items()}
        )

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the model and the tokenizer, for from_pretrained; with args.push_to_hub also upload them."""
        self.model.save_pretrained(output_dir or self.folder)
        self.processing_class.save_pretrained(output_dir or self.folder)
        if self.args.push_to_hub:
            self.push_to_hub("Model save")

    def push_to_hub(self, commit_message: str = "End of training", **card_fields: object) -> None:
        """Upload the model and the tokenizer to the repository of args.hub_model_id, without a card."""
        if self.accelerator.is_main_process:
            self.hub_model_id = push_model(
                self.model, self.processing_class, self.args, commit_message
            ).repo_url.repo_id

    def end(self) -> None:
        """Nothing is left to end: train() closes its trackers and processes."""

    # -- from the script to a run ------------------------------------------------------------------------------------------

    def _adapted(self, model: Any, peft_config: object) -> Any:
        return with_adapters(model, peft_config, drops=self.algorithm in GIVEN_ROWS or not drops_inputs(self.args))

    def _arguments(self) -> Arguments | None:
        self._packing = Packing(self.args, self.algorithm, self._path, self.processing_class, _values(self.overrides))
        self.train_dataset = self._packing.blocks(self.train_dataset)
        self.eval_dataset = self._packing.blocks(self.eval_dataset, "eval_")
        if self.train_dataset is None:
            return None
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        return Arguments(self.args, self.algorithm, num_ranks, len(self.train_dataset), _values(self.overrides))

    def _script(self, callbacks: Sequence[object]) -> Script:
        from transformers import TrainerControl, TrainerState
        from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

        mapped, args = self._mapped, self.args
        max_steps = mapped.max_steps if mapped else 0
        state = TrainerState(max_steps=max_steps, num_train_epochs=mapped.num_epochs if mapped else 0)
        state.compute_steps(args, max_steps)
        state.is_world_process_zero = state.is_local_process_zero = os.environ.get("RANK", "0") == "0"
        events = CallbackHandler([DefaultFlowCallback, *callbacks], self._module, self.processing_class, None, None)
        functions = [fn for fn in self.rewards if callable(fn)]
        weights = list(getattr(args, "reward_weights", None) or [1.0] * len(functions))
        if len(weights) != len(functions):
            raise ConfigError(f"reward_weights has {len(weights)} weights for {len(functions)} reward functions.")
        steps = mapped.steps_per_epoch if mapped else 1
        script = Script(args, state, TrainerControl(), events, steps, functions, weights)
        script.call("on_init_end")
        return script

    def _load(self, more: Mapping[str, object]) -> LoadedConfig[Any]:
        """The config of a run on the files that it writes."""
        self.inputs.mkdir(parents=True, exist_ok=True)
        has_rows = self.algorithm in GIVEN_ROWS
        keys: dict[str, object] = {
            **self._write_model("model" if has_rows else "actor_rollout_ref.model"),
            **more,
            "trainer.resume_changed_inputs": "warn",  # the file of rows depends on the number of epochs, and Trainer resumes
        }
        for split, part in (("train", self.train_dataset), ("val", self.eval_dataset)):
            keys[f"data.{split}_files"] = "[]" if not part else self._rows.write(split, part, _values(self.overrides))
        more_keys: dict[str, Callable[[], dict[str, Any]]] = {
            "sft": partial(self._rows.loss_on, self.train_dataset or self.eval_dataset or []),
            "reward": dict,
            "gkd": self._teacher,
            **dict.fromkeys(PREFERENCES, self._reference),
        }
        keys |= more_keys.get(self.algorithm, self._reward_keys)()
        if self._module is not None and self._module.dtype == torch.float32 and not self.args.bf16:
            keys["engine.dtype" if has_rows else "actor_rollout_ref.actor.fsdp_config.dtype"] = "float32"
        paths = [key for key, value in keys.items() if key.endswith(("path", "_files")) and value != "[]"]
        keys |= {key: written(str(keys[key]), is_path=True) for key in paths}
        base = [*(self._mapped.overrides() if self._mapped else []), *(f"{key}={value}" for key, value in keys.items())]
        return load_config(self._joined(base), schema=_SCHEMAS.get(self.algorithm, PPO))

    def _joined(self, mapped: Sequence[str]) -> list[str]:
        """The overrides of args and of config. Raises ConfigError for a key with two values, one of them of a field that was
        set."""
        values, configured = _values(mapped), _values(self.overrides)
        for key in [k for k, v in configured.items() if parse_value(values.get(k, v), k) != parse_value(v, k)]:
            is_set = key == "algorithm.adv_estimator" and self._algorithm_is_given
            if is_set or self._mapped is None or not self._mapped.gives_way(key, values[key]):
                raise ConfigError(
                    f"config gives {key}={configured[key]}, and args or the data sets give {values[key]}. Change one of them."
                )
        return [*(f"{key}={value}" for key, value in values.items() if key not in configured), *self.overrides]

    def _write_model(self, section: str) -> dict[str, Any]:
        if self._module is None:
            return {f"{section}.path": self._path}
        folder = self.inputs / ("model" if self._start is None else "trained")
        self.processing_class.save_pretrained(folder)
        return {
            f"{section}.{name}": path
            for name, path in write_script_model(self._module, folder, drops=drops_inputs(self.args)).items()
        }

    def _teacher(self) -> dict[str, Any]:
        """The keys of teacher_model, a module or a path."""
        path = saved(self.teacher_model, self.inputs / "teacher", self.processing_class)
        is_half = self.args.bf16 or "bfloat16" in str(getattr(self.teacher_model, "dtype", ""))
        keys = {"model_path": path, "inference.dtype": "bfloat16" if is_half else "float32"}
        return {f"distillation.teacher_models.teacher_model.{key}": value for key, value in keys.items()}

    def _reference(self) -> dict[str, Any]:
        """The key of ref_model, a module or a path."""
        return {} if self.ref_model is None else {"ref.model_path": saved(self.ref_model, self.inputs / "reference")}

    def _keep_start(self) -> None:
        """Keep the weights from before training: evaluate() compares with them."""
        if self.algorithm not in PREFERENCES or self._start is not None:
            return
        if is_peft(self._module):
            self._start = write_merged(self._module, self.inputs / "start")
        else:
            self._start = Path(self._path) if self._module is None else self.inputs / "model"

    def _reward_keys(self) -> dict[str, Any]:
        models = [str(reward) for reward in self.rewards if not callable(reward)]
        if models:
            if len(self.rewards) > 1:
                raise ConfigError("reward_funcs has a model among other rewards; give functions, or one model.")
            return {"reward.reward_model.enable": True, "reward.reward_model.model_path": models[0]}
        return {
            "reward.reward_manager.source": "importlib",
            "reward.reward_manager.name": "ScriptRewards",
            "reward.reward_manager.module.path": "verl.runner.programs",
        }

    def _take_weights(self) -> None:
        """Put the trained weights into the script's module; a path's module is loaded from them."""
        role = "model" if self.algorithm in GIVEN_ROWS else "actor"
        folder = self.folder / f"global_step_{self.state.global_step}" / role
        if self._module is None:
            self._path = str(folder / "huggingface")
        else:
            take_weights(self._module, folder)


def _values(overrides: Sequence[str]) -> dict[str, str]:
    """Key -> text of its value."""
    return {key: value for key, _, value in (text.lstrip("+").partition("=") for text in overrides)}


def _overrides(config: Mapping[str, Any] | Sequence[str] | None) -> list[str]:
    return [f"{k}={_text(v)}" for k, v in config.items()] if isinstance(config, Mapping) else list(config or [])


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, list | dict) else str(value)
