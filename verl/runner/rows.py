"""Rows of a script as files of a run."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.data.python_rows import Row, checked_row, prompt_row, row_as_json
from verl.data.tables import NAMES_OF_ROWS
from verl.errors import ConfigError, DataError
from verl.runner.arguments import GIVEN_ROWS, Arguments

_TOKENIZED = ("input_ids", "labels", "loss_mask", "completion_mask")
_COLUMNS = ("input_ids", "attention_mask", "labels", "seq_lengths")


@dataclass
class ScriptRows:
    """Writes the rows of `algorithm` to `folder`. `collator` is applied to each row of the format `tokenized`; `mapped` has the
    batches of training."""

    args: Any
    algorithm: str
    mapped: Arguments | None
    collator: Callable[[list[Any]], Mapping[str, Any]] | None
    folder: Path
    tokenizer: Any = None

    def loss_on(self, rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """TRL's defaults for a config of TRL: all tokens of messages train, and of a prompt with completion the latter."""
        flags = ("assistant_only_loss", "completion_only_loss")
        assistant, completion = (getattr(self.args, name, None) for name in flags)
        if rows and "messages" in rows[0] and assistant is not None:
            return {"data.loss_on": "assistant" if assistant else "all"}
        return {"data.loss_on": "all"} if completion is False else {}

    def write(self, split: str, rows: Sequence[Mapping[str, object]], overrides: Mapping[str, str]) -> str:
        file = self.folder / f"{split}.jsonl"
        keys = {"data.prompt_key": "prompt", "data.reward_fn_key": "data_source", **overrides}
        names = keys["data.prompt_key"], keys["data.reward_fn_key"]
        is_given = self.algorithm in (*GIVEN_ROWS, "gkd")
        convert: Callable[[Row, int], Row] = checked_row if is_given else partial(prompt_row, names=names)
        convert = self.distilled if self.algorithm == "gkd" else convert
        is_tokenized = self.algorithm == "sft" and any(name in rows[0] for name in _TOKENIZED)
        convert = self.tokens if is_tokenized else convert
        order = self._order(len(rows)) if is_given and split == "train" else range(len(rows))
        NAMES_OF_ROWS[str(file)] = lambda row: f"Row {order[row]} of the {split} data"
        with file.open("w", encoding="utf-8") as out:
            out.writelines(row_as_json(convert(rows[place], place), place) + "\n" for place in order)
        return str(file)

    def _order(self, num_rows: int) -> Sequence[int]:
        """Rows of all epochs as transformers' Trainer takes them; each leaves out its incomplete last batch."""
        if self.mapped is None:
            return []
        args, mapped = self.args, self.mapped
        seed = args.seed if args.data_seed is None else args.data_seed
        if getattr(args, "train_sampling_strategy", "random") != "random":
            return list(range(mapped.steps_per_epoch * mapped.batch_size)) * mapped.num_epochs
        return trainer_order(num_rows, mapped.num_epochs, mapped.batch_size, seed)

    def distilled(self, row: Row, place: int) -> Row:
        """A row of messages as prompt and response, whose tokens are the chat template's, as TRL's collator takes them. Raises
        DataError for a row without them, and for a response of more than max_new_tokens."""
        messages, render = row.get("messages"), getattr(self.tokenizer, "apply_chat_template", None)
        if not isinstance(messages, list) or len(messages) < 2 or render is None:
            raise DataError(f"Row {place} of the data has no `messages`, a prompt and the turn that answers it.")
        prompt = render(messages[:-1], add_generation_prompt=True, tokenize=False)
        text = render(messages, tokenize=False).removeprefix(prompt)
        response = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(response) > self.args.max_new_tokens:
            raise DataError(
                f"The response of row {place} has {len(response)} tokens. Set max_new_tokens={len(response)} at least."
            )
        source = {"data_source": "data", "reward_model": {"style": "model"}, "extra_info": {"index": place}}
        return {"prompt": messages[:-1], "response": list(response), **source}

    def tokens(self, row: Mapping[str, Any], place: int) -> dict[str, Any]:
        """A row of the format `tokenized`, through the data collator."""
        if self.collator is not None:
            row = {name: value[0] for name, value in self.collator([dict(row)]).items() if len(value)}
        ids = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
        if "labels" not in ids:
            ids["loss_mask"] = ids.get("completion_mask") or ids.get("loss_mask") or [1] * len(ids["input_ids"])
        return {name: ids[name] for name in (*_COLUMNS, "loss_mask") if name in ids}


def rows_of_script(name: str, dataset: Any, args: Any, formatting_func: Callable[..., str] | None) -> list[Row] | None:
    """The rows of a data set; texts, with a `formatting_func`. Of training data without a length, the rows that max_steps
    takes. Raises ConfigError for several data sets."""
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise ConfigError(f"{name} has several data sets: {names}. Give one of them.")
    if name == "train_dataset" and not hasattr(dataset, "__len__") and args.max_steps > 0:
        args.train_sampling_strategy = "sequential"  # a stream is not shuffled
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        dataset = itertools.islice(dataset, args.max_steps * batch * int(os.environ.get("WORLD_SIZE", "1")))
    return [row if formatting_func is None else {"text": formatting_func(row)} for row in dataset]


def trainer_order(num_rows: int, num_epochs: int, batch_size: int, seed: int) -> list[int]:
    """Rows of all epochs in the order of accelerate's SeedableRandomSampler, without the incomplete last batch of each."""
    order: list[int] = []
    for epoch in range(num_epochs):
        generator = torch.Generator().manual_seed(seed + epoch)
        order += torch.randperm(num_rows, generator=generator)[: num_rows - num_rows % batch_size].tolist()
    return order


def padded_ids(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """int64 [rows, longest], zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row.astype(np.int64)) for row in rows], batch_first=True)
