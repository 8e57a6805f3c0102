"""The Python API: a run of any program from Python objects, in one call or step by step.

    run = verl.train(model="Qwen/Qwen3-0.6B", data=rows, reward=score, algorithm="grpo")
    run = verl.sft(model="Qwen/Qwen3-0.6B", data="conversations.parquet", trainer={"total_epochs": 2})

    with verl.Trainer(model, rows, reward) as trainer:
        while (metrics := trainer.step()) is not None:
            print(metrics["critic/score/mean"])

Further arguments are keys of docs/config.md, nested or dotted: `trainer={"save_freq": 10}`, or for sections that an argument
is named like `config={"data": {"train_batch_size": 64}, "reward.num_workers": 2}`. A value may be a function or a class if the
key takes "path/to/file.py:name".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from verl.config import SCHEMAS, LoadedConfig, PPOConfig, load_config
from verl.config.active_keys import runs_agents
from verl.config.command_defaults import Face
from verl.config.presets import PRESETS, preset_name
from verl.data.files import is_data_file
from verl.data.messages import unfilled
from verl.data.python_rows import Data, Row, Rows, checked_row, listed_rows, prompt_row, row_as_json
from verl.data.tables import NAMES_OF_ROWS
from verl.distributions import is_installed, load_part
from verl.errors import ConfigError, DataError, InterruptedRun
from verl.foreign_text import quoted
from verl.parallel.torch_settings import run_settings
from verl.registry import is_in_process, reference_to, with_references
from verl.rewards.functions import FUNCTION_LIST, RewardFunction, require_columns, require_distinct, reward_parameters
from verl.run.host import SteppedRun
from verl.tracking.files import write_atomically
from verl.tracking.run_folder import unwritable
from verl.tracking.trained import TrainedRun
from verl.user_objects import short_traceback

if TYPE_CHECKING:
    from verl.page.notebook import Run

Model: TypeAlias = "str | os.PathLike[str] | Run"
Reward = Callable[..., Any] | str | os.PathLike[str] | Sequence[Callable[..., Any]]
Metrics = dict[str, float]
Callback = Callable[["Trainer", Metrics], Any]

_PROGRAMS = {"sft": "sft", "preference": "preference", "reward_model": "rm"}
_FILE_KEYS = (("data", "data.train_files"), ("eval_data", "data.val_files"))
_FOLDER = "trainer.default_local_dir"
_NAME = re.compile(r"[^\s?!]*|.*\.\w+")  # of a file or a data set


class Trainer(SteppedRun):
    """A run that is taken step by step. Use it as a context manager, or call `close` at the end.

    model: Hugging Face folder or name, or a `verl.Run`: its newest model
    data: rows, a `datasets.Dataset`, or paths of data files (docs/python.md)
    reward: a function (TRL's form or verl's, docs/rewards.md), several, or the path of a file with `compute_score`; without one
      the built-in scorer of each row's `data_source`
    algorithm: a preset or an advantage estimator of docs/algorithms.md (default: "grpo"), a function of its form, or a program:
      "sft", "preference", "reward_model"
    loss: of "preference" (docs/preferences.md)
    eval_data: rows for validation, in the forms of `data`
    output_dir: the run folder; the same call resumes there after an interruption; without one a new folder below `runs/`
    callbacks: called with (trainer, metrics) after each step
    config, keys: keys of docs/config.md, nested or dotted; `config` may be a list of "key=value" texts. An argument that is not
      given leaves its key to them

    Raises ConfigError and DataError before training.
    """

    defaults: Face = "command"
    label = ""  # of a new run folder; "": the algorithm
    splits: ClassVar[Mapping[str, str]] = {"train": "train data", "val": "eval_data"}  # in messages

    @short_traceback
    def __init__(
        self,
        model: Model,
        data: Data,
        reward: Reward | None = None,
        *,
        algorithm: str | Callable[..., object] | None = None,
        loss: str | None = None,
        eval_data: Data | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        config: Mapping[str, object] | Sequence[str] | None = None,
        **keys: object,
    ):
        _refuse_import_by_worker()
        model = getattr(model, "model_path", model)
        if isinstance(model, str | os.PathLike) and any(Path(model).expanduser().glob("global_step_*")):
            model = TrainedRun(Path(model)).model_path
        if isinstance(reward, Iterator):  # it can be read once only
            reward = list(reward)
        self.callbacks = [callbacks] if callable(callbacks) else list(callbacks)
        name = algorithm if isinstance(algorithm, str | None) else reference_to(algorithm)
        name = name and (preset_name(name) or name)
        self.program_name = _PROGRAMS.get(str(name), "ppo")
        rows, functions = listed_rows("train", data), _functions(reward)
        eval_rows = None if eval_data is None else rows if eval_data is data else listed_rows("val", eval_data)
        arguments = self._arguments(model, reward, name, loss)
        arguments |= {} if output_dir is None else {"output_dir": {_FOLDER: os.fspath(output_dir)}}
        mapping = config if isinstance(config, Mapping) else {}
        texts = [config] if isinstance(config, str) else [] if config is None or config is mapping else list(config)
        trees = [with_references(tree) for tree in (mapping, keys)]
        is_rl = self.program_name == "ppo"
        preset = PRESETS.get(str(name), PRESETS["grpo"]).settings if is_rl else {}
        fallbacks: dict[str, object] = {"data.val_files": [], **preset}

        def load(files: Sequence[object], check: bool = True) -> LoadedConfig[Any]:
            named = {n: {key: file} for (n, key), file in zip(_FILE_KEYS, files, strict=True) if file is not None}
            calls: dict[str, Any] = {"values": trees, "arguments": arguments | named, "fallbacks": fallbacks}
            return load_config(texts, schema=SCHEMAS[self.program_name], check=check, defaults=self.defaults, **calls)

        first = load([r if isinstance(r, str | None) else "rows" for r in (rows, eval_rows)], check=False)
        self.is_new_folder = _FOLDER not in first.settings
        if self.is_new_folder:
            label = "evaluate" if first.config.trainer.val_only else self.label
            label = label or (name or first.config.algorithm.adv_estimator).rpartition(":")[2]
            fallbacks[_FOLDER] = f"runs/{label}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        folder = Path(str(fallbacks.get(_FOLDER, first.config.trainer.default_local_dir)))
        self.folder = folder.expanduser().absolute()
        media = (first.config.data.image_key, first.config.data.video_key)
        self._names = (first.config.data.prompt_key, first.config.data.reward_fn_key) if is_rl else ("", "")
        files = [None if r is None else self._files(s, r, media) for s, r in (("train", rows), ("val", eval_rows))]
        super().__init__(load(files), self.program_name)
        root = self.loaded.config  # agents and classes of rows add columns
        if isinstance(root, PPOConfig) and not (runs_agents(root) or root.data.custom_cls.path):
            _require_columns(functions, rows, media)
        self._stop = False

    def _arguments(
        self, model: Model, reward: Reward | None, algorithm: str | None, loss: str | None
    ) -> dict[str, dict[str, object]]:
        """The keys that arguments of the call stand for, by argument."""
        is_rl = self.program_name == "ppo"
        if reward is not None and not is_rl:
            raise ConfigError(f"algorithm={algorithm!r} trains on rows and reads no reward; leave `reward` out.")
        if not isinstance(model, str | os.PathLike):
            hint = "Give the name or the folder of a model; `save_pretrained` of the model and of its tokenizer write a folder."
            raise ConfigError(f"model is a {type(model).__name__}. {hint}")
        preset = PRESETS.get(str(algorithm))
        estimator: dict[str, object] = {"algorithm.adv_estimator": preset.estimator if preset else algorithm}
        return {
            "model": {"actor_rollout_ref.model.path" if is_rl else "model.path": os.fspath(model)},
            "algorithm": estimator if is_rl and algorithm is not None else {},
            **({} if loss is None else {"loss": {"preference.loss": loss}}),
            **({} if reward is None else {"reward": _reward_keys(reward)}),
        }

    def _files(self, split: str, data: Rows, media: Sequence[str]) -> object:
        """Paths of data files. Rows are written to `inputs/` of the run folder, to a file named by their content: what another
        run in the folder reads stays as it is."""
        if isinstance(data, str):
            return data
        if data and all(isinstance(row, str | os.PathLike) for row in data):
            if text := next((row for row in data if isinstance(row, str) and not _NAME.fullmatch(row)), None):
                raise DataError(
                    f"The {self.splits[split]} have the text {quoted(text, 40)}, which names no file. Give a row for each "
                    f'prompt: {{"prompt": {quoted(text, 40)}}}.'
                )
            return [os.fspath(row) for row in data]
        if not data:
            raise DataError(f"The {self.splits[split]} have no rows.")
        rows: list[Row]
        if self.program_name == "ppo":
            prompts = [prompt_row(row, number, media, self._names) for number, row in enumerate(data)]
            columns = dict.fromkeys(name for row in prompts for name in row["extra_info"])  # None if a row has none
            rows = [{**row, "extra_info": columns | row["extra_info"]} for row in prompts]
        else:
            rows = [checked_row(unfilled(row), number) for number, row in enumerate(data)]
        text = "".join(row_as_json(row, number) + "\n" for number, row in enumerate(rows))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = self.folder / "inputs" / f"{split}_{digest}.jsonl"
        NAMES_OF_ROWS[str(file)] = f"Row {{}} of the {self.splits[split]}".format
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        return str(file)

    @short_traceback
    def step(self) -> Metrics | None:
        """Take the next step, with validation and checkpoints when due, and call the callbacks; returns its metrics, or
        None after the last step and after `stop`. Raises InterruptedRun after saving on Ctrl-C and SIGTERM."""
        try:
            metrics = None if self._stop else super().step()
        except InterruptedRun as error:
            resume = f"Call it again with output_dir={str(self.folder)!r} to resume."
            raise InterruptedRun(str(error).replace(error.hint, resume)) from None
        if metrics is not None:
            for callback in self.callbacks:
                callback(self, metrics)
        return metrics

    def train(self) -> None:
        """Take all steps that are left."""
        while self.step() is not None:
            pass

    def stop(self) -> None:
        """End after the step under way, for callbacks: `step` then returns None. Save first what must be kept."""
        self._stop = True

    @short_traceback
    @run_settings()
    def evaluate(self) -> Metrics:
        """Metrics of the current weights on `eval_data`. Raises ConfigError without it."""
        loop, _ = self._started()
        if not loop.data.has_validation:
            raise ConfigError("Trainer.evaluate needs eval_data.")
        return dict(loop.validate())

    @short_traceback
    @run_settings()
    def save(self) -> Path:
        """Write a checkpoint of the last step, unless it has one; returns its folder. `<role>/huggingface` in it opens with
        `from_pretrained`."""
        loop, _ = self._started()
        if loop.state.step == 0:
            raise ConfigError("Nothing has been trained yet. Call step() before save().")
        loop.save()
        loop.store.finish()
        return self.folder / f"global_step_{loop.state.step}"

    @property
    @short_traceback
    def global_step(self) -> int:
        """Number of the last step taken; after a resume the step of the checkpoint."""
        return int(self._started()[0].state.step)

    @property
    @short_traceback
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model."""
        return self._started()[0].data.tokenizer

    @property
    def run(self) -> Run:
        """The run folder for reading: metrics and samples as data frames, with verl-page."""
        run = load_part("verl.page.notebook").Run if is_installed("verl-page") else TrainedRun
        return cast("Run", run(self.folder))


class _Sampler(Trainer):
    """A run that samples and trains nothing: one response to a prompt."""

    defaults = "release"
    label = "generate"
    splits: ClassVar[Mapping[str, str]] = dict.fromkeys(("train", "val"), "prompts")


@short_traceback
def train(model: Model, data: Data, reward: Reward | None = None, **arguments: Any) -> Run:
    """Train to the last step and save; returns the run. Its `model_path` is the trained model:

        verl.train("Qwen/Qwen3-0.6B", rows, reward, algorithm="grpo", actor_rollout_ref={"rollout": {"n": 8}})

    Arguments as of `Trainer`.
    """
    with Trainer(model, data, reward, **arguments) as trainer:
        trainer.train()
        trainer.save()
        return trainer.run


@short_traceback
def sft(model: Model, data: Data, **arguments: Any) -> Run:
    """Fine-tune on rows of docs/sft.md: messages, prompt and completion, or text. Further arguments as of `Trainer`."""
    return train(model, data, algorithm="sft", **arguments)


@short_traceback
def preference(model: Model, data: Data, *, loss: str | None = None, **arguments: Any) -> Run:
    """Train on rows of docs/preferences.md with one of its losses; default: the key preference.loss (DPO). Further
    arguments as of `Trainer`."""
    return train(model, data, algorithm="preference", loss=loss, **arguments)


dpo = partial(preference)
kto = partial(preference, loss="kto")
orpo = partial(preference, loss="orpo")
simpo = partial(preference, loss="simpo")
cpo = partial(preference, loss="cpo")


@short_traceback
def reward_model(model: Model, data: Data, **arguments: Any) -> Run:
    """Train a reward model on rows of docs/reward-models.md. Further arguments as of `Trainer`."""
    return train(model, data, algorithm="reward_model", **arguments)


@short_traceback
def evaluate(model: Model, data: Data, reward: Reward | None = None, **arguments: Any) -> Metrics:
    """Metrics of a model on `data`, such as "val/reward"; nothing is trained. Arguments as of `Trainer`."""
    from verl.run.host import evaluate as evaluate_run

    arguments["trainer.val_only"] = True
    trainer = Trainer(model, data, reward, eval_data=data, **arguments)
    evaluate_run(trainer.loaded, trainer.program_name)
    return dict(json.loads((trainer.folder / "eval" / "eval.json").read_text(encoding="utf-8")))


@short_traceback
def generate(model: Model, data: Data, reward: Reward | None = None, **arguments: Any) -> list[dict[str, Any]]:
    """Sample responses to the prompts of `data`: one dict per sample, with "response", "response_ids", "log_probs" and "score"
    (None if nothing scores). `data` may also be a list of prompts, each a text or messages. In a list of data files at least
    one exists. Sampling follows `actor_rollout_ref.rollout`. Other arguments as of `Trainer`."""
    from verl.programs.generate import generate as write_samples

    rows = listed_rows("prompt", data)  # `data` may be read once only
    if isinstance(rows, str) and re.search(r"\s", rows) and not os.path.lexists(os.path.expanduser(rows)):
        raise DataError(f"There is no data file {quoted(rows, 80)}. Give prompts as a list: [{quoted(rows, 40)}].")
    if isinstance(rows, list) and not any(isinstance(row, str | os.PathLike) and is_data_file(row) for row in rows):
        rows = [{"prompt": row} if isinstance(row, str | list) else row for row in rows]
    trainer = _Sampler(model, rows, reward, eval_data=rows, **arguments)
    output = trainer.folder / "samples.jsonl"
    write_samples(trainer.loaded, output)
    samples = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    if trainer.is_new_folder:
        shutil.rmtree(trainer.folder)
    return samples


def _reward_keys(reward: Reward) -> dict[str, object]:
    if isinstance(reward, str | os.PathLike):
        return {"reward.custom_reward_function.path": os.fspath(reward)}
    functions = _functions(reward)
    references = [reference_to(function) for function in functions]
    keys: dict[str, object] = {
        "reward.custom_reward_function.path": FUNCTION_LIST,
        "reward.custom_reward_function.name": "score_sample",
        "reward.custom_reward_function.reward_kwargs": {"functions": references},
    }
    if any("solution_str" not in reward_parameters(function) for function in functions):
        keys |= {"reward.custom_reward_function.name": "score_lists", "reward.reward_manager.name": "batch"}
    return keys | {"reward.debug": True} if any(map(is_in_process, references)) else keys


def _functions(reward: Reward | None) -> list[RewardFunction]:
    """The functions of `reward`; none for a path. Raises ConfigError for another value, RewardError for another form."""
    if reward is None or isinstance(reward, str | os.PathLike):
        return []
    items: list[object] = list(reward) if isinstance(reward, Sequence) else [reward]
    functions: list[RewardFunction] = [item for item in items if callable(item)]
    if len(functions) < len(items) or not items:
        bad = next((item for item in items if not callable(item)), reward)
        raise ConfigError(f"reward has {bad!r}, which is no function. Give a function, several, or the path of a file.")
    for function in functions:
        reward_parameters(function)
    require_distinct(functions)
    return functions


def _require_columns(functions: Sequence[RewardFunction], rows: Rows, media: Sequence[str]) -> None:
    """Raises RewardError for a parameter of a function over lists that is no column of `rows`, or holds `media`."""
    mappings = [row for row in rows if isinstance(row, Mapping)]
    columns = {name for row in mappings for name in (*row, *(row.get("extra_info") or ()))} - set(media)
    for function in functions:
        if mappings and "solution_str" not in reward_parameters(function):
            require_columns(function, columns | {"prompts", "completions", "index", "data_source"})


def _refuse_import_by_worker() -> None:
    """Raises ConfigError if a process of a run imports the script that started it, and would start another run."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith("verl.") and frame.f_back is not None:
        frame = frame.f_back
    if str(frame.f_globals.get("__name__")).startswith("verl_user_"):
        raise ConfigError(
            f"{frame.f_code.co_filename} starts a run while another process of the run imports it. Put the call below "
            'if __name__ == "__main__":'
        )
