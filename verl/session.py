"""A policy, its rollout engine and its optimizer for training loops that users write themselves.

    with verl.Session("Qwen/Qwen3-0.6B") as session:
        for step in range(20):
            samples = session.sample(prompts, n=4)
            rows = [{**sample, "advantage": advantage} for sample, advantage in zip(samples, advantages(samples))]
            session.forward_backward(rows, loss)
            session.optim_step()
            session.sync_weights()

The same code runs in one process, under torchrun (every rank runs the script) and on Ray, on any training and rollout engine.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from verl.checkpoint.files import remove_tree, write_json
from verl.config import PPOConfig, load_config
from verl.data.messages import messages_in, without_marks
from verl.data.prompts import PromptEncoder
from verl.data_proto.merge import object_array
from verl.data_proto.proto import DataProto
from verl.data_proto.token_ids import are_whole, num_embeddings, token_ids, token_mask
from verl.data_proto.trajectory import padded, response_lengths, token_columns
from verl.errors import SYSTEM_ERRORS, CheckpointError, ConfigError, DataError
from verl.foreign_text import clean, quoted
from verl.manifest import MANIFEST, FileRecord, find_damage, is_there, put_in_place, seal
from verl.models.load import load_tokenizer
from verl.parallel.torch_settings import run_settings
from verl.programs.api import ProgramSpecs
from verl.programs.ppo_roles import ppo_roles
from verl.registry import reference_to, with_references
from verl.regular_files import make_folder
from verl.roles.api import Objective, RoleSpecs
from verl.roles.objectives.function import LossFunction
from verl.roles.rollout import greedy, sampling_params
from verl.roles.updates import MiniBatchSchedule
from verl.runtime.api import open_runtime
from verl.tracking.files import has, is_count, read_json
from verl.user_objects import short_traceback

Row = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

_STATE, _FORMAT = "session.json", 2  # the first format had no manifest
_TOKENS = ("prompt_ids", "response_ids", "response_mask")


def _call(method: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """A method of an open session, under the settings of a run."""

    @short_traceback
    @functools.wraps(method)
    def call(self: Session, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._is_closed:
            raise ConfigError("The Session is closed. Make another one, and load what the closed one has saved.")
        with run_settings():
            return method(self, *args, **kwargs)

    return call


class SessionRoles:
    """The roles of a session: the policy without a loss, a reference policy if `actor.use_kl_loss` asks for one, and the
    rollout engine. Rewards are the script's."""

    @classmethod
    def roles(cls, config: PPOConfig, *, train: bool = True) -> RoleSpecs:
        """See DeclaresRoles."""
        specs = ppo_roles(config, train=train)
        models = tuple(
            replace(spec, objective=lambda guard: Objective(), schedule=MiniBatchSchedule(), guards=None)
            if spec.name == "actor"
            else spec
            for spec in specs.models
        )
        return replace(specs, models=models, reward=None)


class Session:
    """A model that samples and trains under your own loop. Use it as a context manager, or call `close` at the end.

    model: Hugging Face folder or name
    config, keys: keys of docs/config.md, nested or dotted, such as `config={"actor_rollout_ref.actor.optim.lr": 1e-5}`

    Prompts and responses are at most data.max_prompt_length and data.max_response_length tokens. `tokenizer` is the Hugging
    Face tokenizer. Raises ConfigError, and ModelError for a model that cannot be loaded.
    """

    @short_traceback
    @run_settings()
    def __init__(self, model: str | os.PathLike[str], *, config: Mapping[str, Any] | Sequence[str] = (), **keys: Any):
        mapping, texts = (config, ()) if isinstance(config, Mapping) else ({}, config)
        trees = [with_references(tree) for tree in (mapping, keys)]
        arguments = {"model": {"actor_rollout_ref.model.path": os.fspath(model)}}
        self.config = load_config(list(texts), values=trees, arguments=arguments, check=False).absolute().config
        self.tokenizer = load_tokenizer(self.config.actor_rollout_ref.model)
        self._encoder = PromptEncoder(self.tokenizer, self.config.data)
        self._num_prompts, self._version, self._has_gradients = 0, -1, False
        self._is_closed = False
        with ExitStack() as stack:
            self._runtime = stack.enter_context(open_runtime(ProgramSpecs(SessionRoles, self.config)))
            self._roles = self._runtime.build_roles(
                total_steps=self.config.trainer.total_training_steps or 0, data_sources=[]
            )
            stack.callback(self._roles.close)
            self._policy = self._roles.models["actor"]
            self.sync_weights()
            self._stack = stack.pop_all()
        weakref.finalize(self, self._stack.close)

    @_call
    def sample(
        self,
        prompts: Iterable[Prompt],
        *,
        n: int | None = None,
        max_tokens: int | None = None,
        greedy_decoding: bool = False,
    ) -> list[dict[str, Any]]:
        """`n` samples (default: rollout.n) of each prompt under the weights of the last `sync_weights`, samples of a prompt
        adjacent.

        A prompt is a text (put through the chat template, if there is one), a list of messages, or token ids. A sample has
        prompt (its index), prompt_ids, response_ids, log_probs (of the sampled tokens, at rollout.temperature), response (text)
        and finish_reason ("stop" or "length"). Random numbers differ in each call; a loaded session continues with the numbers
        of the saved one. Raises DataError.
        """
        listed = [] if isinstance(prompts, str) else list(prompts)
        if not listed:
            raise DataError("Session.sample takes a list of prompts with at least one entry.")
        rollout = self.config.actor_rollout_ref.rollout
        limit = rollout.response_length
        n = rollout.n if n is None else n
        if not are_whole([n]) or n < 1:
            raise DataError(f"n={n!r} of Session.sample must be a whole number, 1 or larger.")
        if max_tokens is not None and not (are_whole([max_tokens]) and 0 < max_tokens <= limit):
            raise DataError(
                f"max_tokens={max_tokens} is no whole number between 1 and data.max_response_length={limit}."
            )
        params = replace(sampling_params(rollout), n=n, max_new_tokens=max_tokens or limit)
        params = greedy(params, n) if greedy_decoding else params
        ids = [self._prompt_ids(prompt, f"prompt {number}") for number, prompt in enumerate(listed)]
        first, self._num_prompts = self._num_prompts, self._num_prompts + len(ids)
        batch = DataProto.from_dict(
            {"ordinal": torch.arange(first, self._num_prompts)}, {"prompt_token_ids": object_array(ids)}
        )
        assert self._roles.rollout is not None
        generated = self._roles.rollout.generate(batch, step=0, params=params).get()
        self._roles.rollout.end_generation().get()
        return [self._sample(generated, row, row // n, ids[row // n]) for row in range(len(generated))]

    @_call
    def forward_backward(
        self, rows: Iterable[Row], loss: LossFunction, *, outputs: Sequence[str] = ("log_probs",)
    ) -> dict[str, float]:
        """Add the gradient of `loss` on `rows` to the gradients since the last `optim_step`; returns its value as "loss", and
        its metrics.

        A row has prompt_ids and response_ids, optionally response_mask (which tokens train; default: all), and values that the
        loss reads: a number becomes a column [rows, 1], a list with an entry for each token of the response a column [rows,
        response]. Texts and other values stay behind. verl/roles/objectives/function.py has the form of `loss`; `outputs` are
        rows of verl.models.outputs.OUTPUTS, such as "entropy". On Ray the function is imported from its file. Raises DataError
        for such rows, ConfigError for the loss.
        """
        batch = self._batch(rows)
        self._has_gradients = False  # a call that fails drops them
        updates = self._policy.forward_backward(batch, 0, reference_to(loss), tuple(outputs)).get()
        self._has_gradients = True
        return {name: metric.value for name, metric in updates.steps[0].items()}

    @_call
    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Clip the gathered gradients, take one optimizer step and forget them; returns grad_norm and lr. A norm that is not
        finite skips the step. `learning_rate`: of this step, instead of the rate of optim.lr's schedule. Raises ConfigError
        without gradients."""
        if learning_rate is not None and not 0 <= learning_rate < math.inf:
            raise ConfigError(f"learning_rate={learning_rate} of optim_step must be a finite number, 0 or larger.")
        metrics = self._policy.optim_step(learning_rate)
        self._has_gradients = False
        return {name: metric.value for name, metric in metrics.items()}

    @_call
    def log_probs(self, rows: Iterable[Row], *, reference: bool = False) -> list[list[float]]:
        """Log-probabilities of the response tokens of `rows` under the current weights; `reference`: under the initial weights
        (with actor_rollout_ref.actor.use_kl_loss=True)."""
        model = self._roles.models.get("reference") if reference else self._policy
        if model is None:
            raise ConfigError("There is no reference policy. Set actor_rollout_ref.actor.use_kl_loss=True.")
        batch = self._batch(rows)
        values = model.forward(batch, {"log_probs": "values"}).get().batch["values"]
        return [values[row, :length].tolist() for row, length in enumerate(response_lengths(batch.batch).tolist())]

    @_call
    def sync_weights(self) -> None:
        """Let the rollout engine sample with the trained weights from now on."""
        self._version += 1
        assert self._roles.weights is not None
        self._roles.weights.sync(self._version)

    @_call
    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write weights, optimizer and position to the new folder: it appears complete and synced, or not at all; returns it.
        `actor/huggingface` in it opens with `from_pretrained`. Raises CheckpointError for a folder that exists, and if the disk
        fails."""
        if self._has_gradients:
            raise ConfigError("Gradients wait for optim_step, and a checkpoint has none. Call optim_step before save.")
        path = Path(folder).expanduser().absolute()
        if self._runtime.broadcast(path.exists()):
            raise CheckpointError(f"{path} exists already. Choose a new folder for each checkpoint.")
        temporary = Path(self._runtime.broadcast(str(path.with_name(f".{path.name}.tmp-{os.getpid()}"))))
        try:
            self._on_rank_zero(functools.partial(_make_empty, temporary))
            records = next(part for part in self._policy.save(str(temporary / "actor")) if part is not None)
            self._on_rank_zero(functools.partial(self._complete, temporary, path, records))
        except (OSError, CheckpointError) as error:
            with suppress(OSError):
                remove_tree(temporary)
            raise CheckpointError(_sentence(error)) from error
        return path

    def _complete(self, temporary: Path, path: Path, records: Mapping[str, FileRecord]) -> None:
        state = {"num_prompts": self._num_prompts, "version": self._version, "format": _FORMAT}
        listed = {f"actor/{name}": record for name, record in records.items()}
        seal(temporary, str(path), {**listed, _STATE: write_json(temporary / _STATE, state, "The position")})
        put_in_place(temporary, path)

    def _on_rank_zero(self, act: Callable[[], object]) -> None:
        """Let rank 0 act on files. Every rank raises CheckpointError if that fails."""
        failure = ""
        if self._runtime.is_rank_zero:
            try:
                act()
            except (OSError, CheckpointError) as error:
                failure = _sentence(error)
        if failure := self._runtime.broadcast(failure):
            raise CheckpointError(failure)

    @_call
    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take the state that `save` wrote, bit for bit, and sync the weights. Raises CheckpointError, and leaves the session
        as it is, for a folder with any damage. Releases without a manifest saved folders that load with a warning."""
        path = Path(folder).expanduser().absolute()
        try:
            state = read_json(path / _STATE, has(num_prompts=is_count, version=is_count))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is no checkpoint of a session{_other_content(path)}") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is no checkpoint of a session: {_STATE}: {error}.") from error
        self._on_rank_zero(functools.partial(_require_intact, path, state))
        self._policy.load(str(path))
        self._has_gradients = False
        self._num_prompts, self._version = state["num_prompts"], state["version"]
        self.sync_weights()

    def close(self) -> None:
        """End every process that the session has started."""
        self._is_closed = True
        self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prompt_ids(self, prompt: Prompt, place: str) -> list[int]:
        if isinstance(prompt, Mapping):
            raise DataError(f"{place} is a single message. Session.sample takes a list of conversations, [messages].")
        if not isinstance(prompt, str) and len(prompt) and not isinstance(prompt[0], Mapping):
            ids: list[int] = token_ids(prompt, place, num_embeddings(self.tokenizer)).tolist()
            return self._encoder.fitted(ids, place)
        messages = prompt if isinstance(prompt, str) else without_marks(messages_in(prompt, place))
        return self._encoder.encode(messages, place)

    def _sample(self, generated: DataProto, row: int, prompt: int, prompt_ids: list[int]) -> dict[str, object]:
        columns = generated.batch
        length = int(response_lengths(columns[row : row + 1])[0])
        ids = columns["responses"][row, :length].tolist()
        return {
            "prompt": prompt,
            "prompt_ids": prompt_ids,
            "response_ids": ids,
            "log_probs": columns["rollout_log_probs"][row, :length].tolist(),
            "response": self.tokenizer.decode(ids, skip_special_tokens=True),
            "finish_reason": generated.non_tensor_batch["finish_reason"][row],
        }

    def _batch(self, all_rows: Iterable[Row]) -> DataProto:
        """The columns of the rows, as wide as the longest prompt and the longest response."""
        rows = list(all_rows)
        if not rows:
            raise DataError("There are no rows. Give at least one with prompt_ids and response_ids.")
        limit, tokens = num_embeddings(self.tokenizer), []
        keys = {"prompt_ids": "max_prompt_length", "response_ids": "max_response_length"}
        for number, row in enumerate(rows):
            prompt, response = (token_ids(row.get(name), f"{name} of row {number}", limit) for name in keys)
            for (name, key), ids in zip(keys.items(), (prompt, response), strict=True):
                if len(ids) > (max_tokens := getattr(self.config.data, key)):
                    raise DataError(f"{name} of row {number} has {len(ids)} tokens, more than data.{key}={max_tokens}.")
            mask = row.get("response_mask")
            mask = [1] * len(response) if mask is None else mask
            tokens.append((prompt, response, token_mask(mask, f"response_mask of row {number}", len(response))))
        columns = token_columns(tokens, self.tokenizer.pad_token_id or 0)
        values = _value_columns(rows, response_lengths(columns).tolist(), columns["responses"].shape[1])
        if hidden := sorted(columns.keys() & values.keys()):
            raise DataError(f"{hidden[0]} is a column that the session makes itself. Give the value another name.")
        return DataProto.from_dict({**columns, **values})


def _sentence(error: OSError | CheckpointError) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    place = f" {clean(error.filename)}" if error.filename else ""
    advice = SYSTEM_ERRORS.get(error.errno or 0, "Check the disk")
    return f"Reading or writing{place} failed: {error.strerror or error}. {advice}, and call it again."


def _make_empty(folder: Path) -> None:
    remove_tree(folder)
    make_folder(folder)


def _other_content(path: Path) -> str:
    """The end of a sentence about a folder without a session's state."""
    if not path.exists():
        return ": the folder does not exist. Session.save writes one."
    models = [folder for folder in (path, *path.glob("*/huggingface")) if (folder / "config.json").is_file()]
    if models:
        return f" (it has no {_STATE}), but has a model. Begin from it with verl.Session({str(models[0])!r})."
    return f": it has no {_STATE}, which Session.save writes."


def _require_intact(path: Path, state: Mapping[str, object]) -> None:
    if "format" not in state and not is_there(path / MANIFEST):
        log.warning("%s was saved by an earlier release, without digests: damage of its files is not seen.", path)
    elif damage := find_damage(path):
        raise CheckpointError(f"The session in {path} is damaged: {damage}. Load another one.")


def _value_columns(rows: Sequence[Row], lengths: Sequence[int], width: int) -> dict[str, torch.Tensor]:
    """float32 columns of the numbers of `rows`: [rows, 1], or [rows, response] if a row has a number for each token."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row if name not in _TOKENS):
        if (numbers := next(filter(lambda n: n is not None, (_numbers(row.get(name)) for row in rows)), None)) is None:
            continue
        is_per_token, values = numbers.ndim > 0, []
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            numbers = _numbers(row.get(name))
            if numbers is None or numbers.shape != ((length,) if is_per_token else ()):
                expected = f"{length} numbers, one for each token of the response" if is_per_token else "a number"
                text = quoted(row.get(name), 80)
                raise DataError(f"{name} of row {number} is {text}; it must be {expected}.")
            values.append(numbers)
        columns[name] = (
            padded(values, 0.0, width, torch.float32)[0]
            if is_per_token
            else torch.tensor([[float(value)] for value in values], dtype=torch.float32)
        )
    return columns


def _numbers(value: object) -> np.ndarray | None:
    """A number, or a list or a tensor of numbers, as float64; None for other values."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu", torch.float64)
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        return None
    return array.astype(np.float64) if array.dtype.kind in "biuf" else None
