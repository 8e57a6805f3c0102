"""Data sets of prompts: `RLHFDataset` of the built-in schema, or the user's class of `data.custom_cls`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.files import Rows, read_rows
from verl.data.prompts import PromptEncoder
from verl.data.schema import UNSCORED, Messages, at, check_row, messages_of
from verl.data.template_checks import TemplateChecks
from verl.errors import ConfigError, DataError, UnavailableRowError
from verl.registry import load_module, load_object

if TYPE_CHECKING:
    from verl.config import DataConfig
    from verl.config.sections.data import SFTDataConfig

logger = logging.getLogger(__name__)

DEFAULT_SEED = 42

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def whole_section(config: DataConfig | Mapping[str, Any]) -> Any:
    """The section `data`, with defaults for keys that a mapping (a recipe's own config) leaves out. Additional keys of the
    mapping stay."""
    from verl.config import DataConfig

    if isinstance(config, DataConfig) or not isinstance(config, Mapping):
        return config
    from omegaconf import OmegaConf

    whole = OmegaConf.merge(OmegaConf.create(dataclasses.asdict(DataConfig())), OmegaConf.create(dict(config)))
    return OmegaConf.create(OmegaConf.to_container(whole))


class RLHFDataset:
    """Rows of data files with their chat messages; a map-style data set for subclassing.

    `dataset[i]` is the row as the file has it, plus raw_prompt (messages), index (`extra_info.index`, or 0),
    tools_kwargs and interaction_kwargs (of `extra_info`, or {}), and dummy_tensor (uint8 [1]). Nothing is tokenized,
    but with `filter_overlong_prompts` prompts are measured. At most `max_samples` rows are kept (-1: all): the first
    ones, or with `shuffle` a sample that `data.seed` selects. Raises DataError for files or rows that cannot be used.
    """

    def __init__(
        self, data_files: Files, tokenizer: Any, config: DataConfig, processor: Any = None, max_samples: int = -1
    ):
        config = whole_section(config)
        self.data_files = data_files
        self.tokenizer = tokenizer
        self.config = config
        self.processor = processor
        self.max_samples = max_samples
        self.prompt_key = config.prompt_key
        self.max_prompt_length = config.max_prompt_length
        self.truncation = config.truncation
        self.dataframe: Any = None  # rows by number; existing subclasses use this name
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        """Fills `self.dataframe`; subclasses replace it to read something else."""
        rows = read_rows(self.data_files)
        if 0 < self.max_samples < len(rows):
            rows = rows.select(self._sampled(len(rows)))
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def _sampled(self, num_rows: int) -> Sequence[int]:
        if not self.config.shuffle:
            return range(self.max_samples)
        seed = DEFAULT_SEED if self.config.seed is None else self.config.seed
        return np.random.default_rng(seed).choice(num_rows, size=self.max_samples, replace=False).tolist()

    def maybe_filter_out_long_prompts(self, dataframe: Rows) -> Rows:
        """The rows whose prompt fits `max_prompt_length`, or all of them without `filter_overlong_prompts`."""
        if not self.config.filter_overlong_prompts:
            return dataframe
        encoder = PromptEncoder(self.tokenizer, self.config)
        fitting = []
        for number in range(len(dataframe)):
            row, place = dataframe[number], dataframe.place(number)
            with at(place):
                messages = messages_of(row, self.prompt_key)
            ids = encoder.encode_whole(_prompt(row, messages, self.prompt_key), place)
            if len(ids) <= self.max_prompt_length:
                fitting.append(number)
        if not fitting:
            raise DataError(
                f"All {len(dataframe)} prompts of {self.data_files} are longer than data.max_prompt_length="
                f"{self.max_prompt_length} tokens; raise the limit."
            )
        if len(fitting) < len(dataframe):
            logger.info("%d of %d prompts are too long and left out.", len(dataframe) - len(fitting), len(dataframe))
        return dataframe.select(fitting)

    def _build_messages(self, example: dict[str, Any]) -> Messages:
        """Chat messages of a row."""
        return messages_of(example, self.prompt_key)

    def place(self, item: int) -> str:
        """File and row number of a row, for messages."""
        return self.dataframe.place(item) if isinstance(self.dataframe, Rows) else f"row {item} of {self.data_files}"

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        import torch

        row = dict(self.dataframe[item])
        with at(self.place(item)):
            row["raw_prompt"] = self._build_messages(row)
        extra = row.get("extra_info")
        extra = extra if isinstance(extra, Mapping) else {}
        row["index"] = extra.get("index") or 0
        row["tools_kwargs"] = extra.get("tools_kwargs") or {}
        row["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
        row["dummy_tensor"] = torch.zeros(1, dtype=torch.uint8)
        return row


def collate_fn(data_list: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows to columns: tensors are stacked, everything else becomes a 1-d object array (None where a row lacks it)."""
    import torch

    from verl.data_proto.merge import object_array

    names = dict.fromkeys(name for row in data_list for name in row)
    columns = {name: [row.get(name) for row in data_list] for name in names}
    return {
        name: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)  # type: ignore[arg-type]
        for name, values in columns.items()
    }


def _prompt(row: dict[str, Any], messages: Messages, prompt_key: str) -> Messages | str:
    """A prompt that was written as a plain text stays one, for tokenizers that have no chat template."""
    text = row.get(prompt_key)
    return text if isinstance(text, str) else messages


class UnavailableRows:
    """Rows that need a feature which is not available, counted by feature."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.places: dict[str, list[str]] = {}

    def add(self, error: UnavailableRowError, place: str) -> None:
        self.places.setdefault(error.feature, []).append(place)

    def sentences(self) -> list[str]:
        """One sentence for each feature, with the count and the first row."""
        return [
            f"{len(places)} of {self.num_rows} rows, the first {places[0]}: {feature}"
            for feature, places in self.places.items()
        ]


class PromptRows:
    """The rows that loaders read, of any data set class; each is checked as it is read. Rows whose rewards do not train
    (`scored=False`) may lack what selects and feeds a scorer."""

    def __init__(self, dataset: Any, config: DataConfig, agents: Collection[str] = (), *, scored: bool = True):
        self.dataset = dataset
        self.config = config
        self.agents = agents
        self.scored = scored

    @cached_property
    def data_sources(self) -> list[str]:
        """Names of the tasks in the data that are scored. Reads every row, so that a bad one is known before the run begins.
        Raises DataError naming it, or one sentence for each feature that rows need and that is not available."""
        names: set[str] = set()
        unavailable = UnavailableRows(len(self))
        for number in range(len(self)):
            try:
                row = self[number]
                if self.scored or row["reward_model"] != UNSCORED:
                    names.add(row[self.config.reward_fn_key])
            except UnavailableRowError as error:
                unavailable.add(error, self.place(number))
        if sentences := unavailable.sentences():
            raise DataError(" ".join(sentences))
        return sorted(names)

    def __len__(self) -> int:
        return len(self.dataset)

    def place(self, item: int) -> str:
        """File and row number of a row, for messages."""
        named = getattr(self.dataset, "place", None)
        return named(item) if named else f"row {item} of {type(self.dataset).__name__}"

    def __getitem__(self, item: int) -> dict[str, Any]:
        """A checked row, with raw_prompt."""
        row = self.dataset[item]
        if not isinstance(row, dict) or "raw_prompt" not in row:
            raise DataError(
                f"{self.place(item)}: {type(self.dataset).__name__}.__getitem__ must return a dict with 'raw_prompt', "
                "the chat messages of the prompt."
            )
        if not self.scored and row.get("reward_model") is None:
            name = self.config.reward_fn_key
            row = {**row, "reward_model": UNSCORED, name: row.get(name) or "prompts"}
        with at(self.place(item)):
            check_row(row, self.config, self.agents)
        return row

    def as_written(self, item: int) -> dict[str, Any]:
        """The row as its file has it; of a data set class without `dataframe`, as the class gives it."""
        return dict(getattr(self.dataset, "dataframe", self.dataset)[item])

    def prompt(self, row: dict[str, Any]) -> Messages | str:
        """The input of the encoder for a row of this data set."""
        return _prompt(row, row["raw_prompt"], self.config.prompt_key)


def dataset_class(config: DataConfig | SFTDataConfig) -> Any:
    """`data.custom_cls`, or RLHFDataset. Raises ConfigError when the class is not found or is no map-style data set."""
    path, name = config.custom_cls.path, config.custom_cls.name
    if not path:
        return RLHFDataset
    if not name:
        classes = [n for n, v in vars(load_module(path)).items() if isinstance(v, type) and not n.startswith("_")]
        raise ConfigError(f"data.custom_cls.path={path} needs data.custom_cls.name; the file has {', '.join(classes)}.")
    cls = load_object(f"{path}:{name}")
    if not (isinstance(cls, type) and hasattr(cls, "__getitem__") and hasattr(cls, "__len__")):
        raise ConfigError(f"data.custom_cls.name={name} of {path} is not a class with __len__ and __getitem__.")
    return cls


def load_dataset(
    files: Files,
    tokenizer: Any,
    config: DataConfig,
    *,
    processor: Any = None,
    max_samples: int = -1,
    agents: Collection[str] = (),
    scored: bool = True,
) -> PromptRows:
    """Read and check all rows of `files`; with `data.truncation=error` every prompt is measured too, so that a long one
    does not stop the run in the middle. The model must read all of a prompt (TemplateChecks). `agents`: agent loops that rows
    may name; `scored`: see PromptRows. Raises DataError naming the first bad row, ConfigError for data.custom_cls."""
    dataset = dataset_class(config)(
        data_files=files, tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples
    )
    rows = PromptRows(dataset, config, agents, scored=scored)
    if not rows.data_sources and not len(rows):
        raise DataError(f"{type(dataset).__name__} has no rows.")
    encoder, checks = PromptEncoder(tokenizer, config), TemplateChecks(tokenizer)
    is_measured = config.truncation == "error" and not config.filter_overlong_prompts
    for number in range(len(rows)):
        prompt, place = rows.prompt(rows[number]), rows.place(number)
        if is_measured:
            encoder.encode(prompt, place)
        checks.check_prompt(prompt, place, encoder.template_kwargs)
    return rows
