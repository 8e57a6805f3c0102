"""Data sets of prompts: `RLHFDataset` of the built-in schema, or the user's class of `data.custom_cls`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.files import Files, read_rows
from verl.data.images import image_messages
from verl.data.messages import columns_of_chat, prompt_messages, row_template_kwargs, text_or_messages
from verl.data.prompts import PromptEncoder, answer_prefix
from verl.data.row_cache import key_of
from verl.data.scan import BadRows, Scan, ScanPart, scan_rows
from verl.data.schema import UNSCORED, Messages, at, check_row, message_of, whole_section
from verl.data.tables import Rows, copy_of_row
from verl.data.template_checks import TemplateChecks
from verl.data_proto.tokenizer import Tokenizer
from verl.errors import ConfigError, DataError
from verl.registry import load_module, load_object
from verl.user_objects import require_call

if TYPE_CHECKING:
    from verl.config import DataConfig
    from verl.config.sections.data import SFTDataConfig

logger = logging.getLogger(__name__)

DEFAULT_SEED = 42
Scored = bool | Callable[[str, object], object]


class RLHFDataset:
    """Rows of data files with their chat messages; a map-style data set for subclassing.

    `dataset[i]` is the row as the file has it, plus raw_prompt (messages), index (`extra_info.index`, or 0),
    tools_kwargs and interaction_kwargs (of `extra_info`, or {}), and dummy_tensor (uint8 [1]). Nothing is tokenized,
    but with `filter_overlong_prompts` prompts are measured. At most `max_samples` rows are kept (-1: all): the first
    ones, or with `shuffle` a sample that `data.seed` selects. Raises DataError for files or rows that cannot be used.
    """

    def __init__(
        self,
        data_files: Files,
        tokenizer: Tokenizer,
        config: DataConfig,
        processor: object = None,
        max_samples: int = -1,
    ):
        config = whole_section(config)
        self.data_files = [data_files] if isinstance(data_files, str) else data_files  # subclasses iterate over them
        self._place = str(data_files)
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
        rows: list[int] = np.random.default_rng(seed).choice(num_rows, size=self.max_samples, replace=False).tolist()
        return rows

    def maybe_filter_out_long_prompts(self, dataframe: Rows) -> Rows:
        """The rows with a prompt of at most `max_prompt_length` tokens, or all of them without `filter_overlong_prompts`."""
        if not self.config.filter_overlong_prompts:
            return dataframe
        encoder = PromptEncoder(self.tokenizer, self.config)
        scan = scan_rows(
            self._place,
            len(dataframe),
            partial(self._measure, dataframe, encoder),
            key=lambda: key_of("fit", dataframe.digest(), *encoder.identity(), *self._rules()),
            forks=encoder.images is None,
        )
        fitting = np.flatnonzero(scan.results()[0]["lengths"] <= self.max_prompt_length)
        if not len(fitting):
            raise DataError(
                f"All {len(dataframe)} prompts of {self._place} are longer than data.max_prompt_length="
                f"{self.max_prompt_length} tokens; raise the limit."
            )
        if len(fitting) < len(dataframe):
            logger.info("%d of %d prompts are too long and left out.", len(dataframe) - len(fitting), len(dataframe))
        return dataframe.select(fitting)

    def _rules(self) -> list[object]:
        return [self.prompt_key, *columns_of_chat(self.config), self.max_prompt_length]

    def _measure(self, dataframe: Rows, encoder: PromptEncoder, numbers: range) -> ScanPart:
        """The prompt tokens of rows: an Examine of verl/data/scan.py."""
        bad, prompts = BadRows(), self._prompts(dataframe, numbers) if encoder.images is None else None
        lengths = [0] * len(numbers) if prompts is None else encoder.lengths(*prompts, bounded=True)
        for index, number in enumerate(numbers):
            if not lengths[index]:
                row, place = dataframe[number], dataframe.place(number)
                try:
                    with at(place):
                        messages, images = self._placed(row)
                        kwargs = row_template_kwargs(row, self.config)
                    prompt = text_or_messages(row, messages, self.prompt_key)
                    lengths[index] = len(encoder.encode_whole(prompt, place, images, kwargs).ids)
                except DataError as error:
                    bad.add(BadRows(bad_fields=(number, str(error))))
        return ScanPart({"lengths": np.array(lengths, dtype=np.int32)}, bad=bad)

    def _prompts(self, dataframe: Rows, numbers: range) -> tuple[list[Messages | str], list[dict[str, object]]] | None:
        """The prompts of rows and their arguments of the template; None when one of them is wrong."""
        try:
            rows = dataframe.batch(numbers, (self.prompt_key, *columns_of_chat(self.config)))
            prompts = [text_or_messages(row, prompt_messages(row, self.config), self.prompt_key) for row in rows]
            return prompts, [row_template_kwargs(row, self.config) for row in rows]
        except DataError:
            return None

    def _build_messages(self, example: dict[str, object]) -> Messages:
        return prompt_messages(example, self.config, images=self.processor is not None)

    def _placed(self, row: Mapping[str, object]) -> tuple[Messages, list[object]]:
        """See image_messages; a model without a processor reads text."""
        messages = prompt_messages(row, self.config, images=self.processor is not None)
        if self.processor is None:
            return messages, []
        return image_messages(messages, row, self.config)

    def place(self, item: int) -> str:
        return self.dataframe.place(item) if isinstance(self.dataframe, Rows) else f"row {item} of {self.data_files}"

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = copy_of_row(self.dataframe[item])
        with at(self.place(item)):
            return self._with_fields(row)

    def batch(self, items: range) -> list[dict[str, Any]]:
        """`self[item]` of each. Raises DataError, perhaps without the row's name."""
        return [self._with_fields(row) for row in self.dataframe.batch(items)]

    def _with_fields(self, row: dict[str, object]) -> dict[str, object]:
        import torch

        row["raw_prompt"] = self._build_messages(row)
        extra = row.get("extra_info")
        extra = extra if isinstance(extra, Mapping) else {}
        row["index"] = extra.get("index") or 0
        row["tools_kwargs"] = extra.get("tools_kwargs") or {}
        row["interaction_kwargs"] = extra.get("interaction_kwargs") or {}
        row["dummy_tensor"] = torch.zeros(1, dtype=torch.uint8)
        return row


def collate_fn(data_list: list[dict[str, object]]) -> dict[str, object]:
    """Rows to columns: tensors are stacked, everything else becomes a 1-d object array (None if a row lacks it)."""
    import torch

    from verl.data_proto.merge import object_array

    names = dict.fromkeys(name for row in data_list for name in row)
    columns = {name: [row.get(name) for row in data_list] for name in names}
    return {
        name: torch.stack(values) if isinstance(values[0], torch.Tensor) else object_array(values)  # type: ignore[arg-type]
        for name, values in columns.items()
    }


class PromptRows:
    """The rows that loaders read, of any data set class; each is checked as it is read. Rows whose rewards do not train
    (`scored=False`) may lack what selects and feeds a scorer. A function raises DataError for a wrong (task, answer)."""

    def __init__(
        self,
        dataset: Any,
        config: DataConfig,
        agents: Collection[str] = (),
        *,
        scored: Scored = True,
        reads_images: bool = False,
    ):
        self.dataset = dataset
        self.config = config
        self.agents = agents
        self.scored = scored
        self.reads_images = reads_images
        self.has_images = False  # whether a row has any, once all are examined
        # a row of a user's class is anything that its __getitem__ returns, one by one
        readers = (type(dataset).__getitem__, getattr(type(dataset), "_build_messages", None))
        self._in_batches = readers == (RLHFDataset.__getitem__, RLHFDataset._build_messages) and isinstance(
            dataset.dataframe, Rows
        )
        self._scan: Scan | None = None  # that runs

    @cached_property
    def data_sources(self) -> list[str]:
        """Names of the tasks in the data that are scored."""
        names = self.dataset.dataframe.texts(self.config.reward_fn_key) if self._in_batches and self.scored else None
        if names is not None:
            return sorted(names)
        rows = (self[number] for number in range(len(self)))
        return sorted(
            {row[self.config.reward_fn_key] for row in rows if self.scored or row["reward_model"] != UNSCORED}
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def place(self, item: int) -> str:
        named = getattr(self.dataset, "place", None)
        return named(item) if named else f"row {item} of {type(self.dataset).__name__}"

    def __getitem__(self, item: int) -> dict[str, Any]:
        """A checked row, with raw_prompt."""
        row = self.dataset[item]
        with at(self.place(item)):
            return self._checked(row)

    def _checked(self, row: object) -> dict[str, object]:
        if not isinstance(row, dict) or "raw_prompt" not in row:
            raise DataError(
                f"{type(self.dataset).__name__}.__getitem__ must return a dict with 'raw_prompt', the chat messages of the "
                "prompt."
            )
        if not self.scored and row.get("reward_model") is None:
            name = self.config.reward_fn_key
            row = {**row, "reward_model": UNSCORED, name: row.get(name) or "prompts"}
        check_row(row, self.config, self.agents, images=self.reads_images)
        if callable(self.scored):
            self.scored(row[self.config.reward_fn_key], row["reward_model"].get("ground_truth"))
        if not row.keys().isdisjoint(columns_of_chat(self.config)):
            row = {**row, "template_kwargs": row_template_kwargs(row, self.config)}
        kwargs = {**self.config.apply_chat_template_kwargs, **row.get("template_kwargs", {})}
        if (prefix := answer_prefix(row["raw_prompt"], kwargs)) is not None:
            row = {**row, "extra_info": {**(row.get("extra_info") or {}), "assistant_prefix": prefix}}
        if not self.reads_images:
            return row
        raw = [message_of(m, f"field 'raw_prompt[{i}]'", images=True) for i, m in enumerate(row["raw_prompt"])]
        messages, images = image_messages(raw, row, self.config)
        return {**row, "raw_prompt": messages, self.config.video_key: None, self.config.image_key: images}

    def images(self, row: dict[str, Any]) -> list[Any]:
        """The sources of the images and videos of a row of this data set, in the order of its messages."""
        return row[self.config.image_key] if self.reads_images else []

    def batch(self, items: range) -> list[dict[str, Any] | DataError]:
        """`self[item]` of each, or the error that it raises."""
        try:
            rows = self.dataset.batch(items) if self._in_batches else [None] * len(items)
        except DataError:
            rows = [None] * len(items)
        return [self._outcome(item, row) for item, row in zip(items, rows, strict=True)]

    def _outcome(self, item: int, row: dict[str, object] | None) -> dict[str, object] | DataError:
        if row is not None:
            with contextlib.suppress(DataError):
                return self._checked(row)
        try:
            return self[item]
        except DataError as error:
            return error

    def examined(
        self, items: range, encoder: PromptEncoder, checks: TemplateChecks, *, measured: bool, bounded: bool = False
    ) -> Iterator[tuple[int, dict[str, Any] | None, int, DataError | None]]:
        """(item, row, prompt tokens, error) of each of `items`. The row is None when its fields are wrong, the number 0 when
        it is not `measured` or the prompt has no tokens; `bounded`: see PromptEncoder.lengths."""
        rows = self.batch(items)
        texts = [row for row in rows if not isinstance(row, DataError) and not self.images(row)]
        prompts, kwargs_of_texts = (
            [self.prompt(row) for row in texts],
            [row.get("template_kwargs", {}) for row in texts],
        )
        lengths = iter(encoder.lengths(prompts, kwargs_of_texts, bounded=bounded) if measured else [0] * len(texts))
        for item, row in zip(items, rows, strict=True):
            if isinstance(row, DataError):
                yield item, None, 0, row
                continue
            prompt, images, error = self.prompt(row), self.images(row), None
            row_kwargs = row.get("template_kwargs", {})
            kwargs, length = {**encoder.template_kwargs, **row_kwargs}, 0 if images else next(lengths)
            try:
                if measured or images:
                    length = length or len(encoder.encode_whole(prompt, self.place(item), images, row_kwargs).ids)
                    if length > encoder.max_length and not self.config.filter_overlong_prompts:
                        encoder.encode_row(prompt, self.place(item), images, row_kwargs)
                checks.check_prompt(prompt, self.place(item), kwargs, tools_matter="tools" in row_kwargs)
            except DataError as caught:
                error = caught
            yield item, row, length, error

    def examine(self, tokenizer: Tokenizer) -> None:
        """Check the rows, see `load_dataset`. Raises DataError for bad rows that are known when this method returns; `poll`
        raises it for later ones."""
        config, encoder = self.config, PromptEncoder(tokenizer, self.config)
        checks = TemplateChecks(tokenizer)
        measured = config.truncation == "error" and not config.filter_overlong_prompts

        def examine_batch(items: range) -> ScanPart:
            lengths, bad = [], BadRows()
            for item, row, length, error in self.examined(items, encoder, checks, measured=measured, bounded=True):
                lengths.append(length)
                self.has_images |= row is not None and bool(self.images(row))
                if error is not None:
                    bad.add_error(item, error, self.place(item), in_prompt=row is not None)
            return ScanPart({"lengths": np.array(lengths, dtype=np.int32)}, bad=bad)

        scan = scan_rows(
            str(getattr(self.dataset, "data_files", type(self.dataset).__name__)),
            len(self),
            examine_batch,
            key=lambda: key_of("checks", self.dataset.dataframe.digest(), *encoder.identity(), *self._rules()),
            wait=config.check == "all",
            forks=self._in_batches and encoder.images is None,  # image files are not in the key of the cache
        )
        self._scan = scan if scan.runs else None

    def _rules(self) -> list[object]:
        keys = "prompt_key reward_fn_key image_key video_key audio_key tools_key enable_thinking_key".split()
        lengths = ("truncation", "max_prompt_length", "filter_overlong_prompts")
        settings = {name: getattr(self.config, name) for name in (*keys, *lengths)}
        return [settings, sorted(self.agents), "answers" if callable(self.scored) else self.scored]

    def poll(self) -> None:
        """Raise DataError for a bad row that has become known."""
        if self._scan is not None:
            self._scan.poll()
            self._scan = self._scan if self._scan.runs else None

    def prompt(self, row: dict[str, Any]) -> Messages | str:
        """The input of the encoder for a row of this data set."""
        return text_or_messages(row, row["raw_prompt"], self.config.prompt_key)


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


def open_dataset(section: DataConfig | SFTDataConfig, /, **arguments: object) -> Any:
    """The rows by `dataset_class`. Raises ConfigError also for a class that does not take `arguments`."""
    cls = dataset_class(section)
    require_call(f"data.custom_cls: {cls.__name__}", cls, keywords=arguments)
    return cls(**arguments)


def load_dataset(
    files: Files,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    max_samples: int = -1,
    agents: Collection[str] = (),
    scored: Scored = True,
    checked: bool = False,
) -> PromptRows:
    """The rows of `files`, checked: fields, images, and with `data.truncation=error` the length of every prompt. The model must
    read all of a prompt (TemplateChecks). With `data.check=first` the checks of many rows continue after this call, see
    verl/data/scan.py. `agents`: agent loops that rows may name; `scored`: see PromptRows; `checked`: not checked again. Raises
    DataError naming the first bad row, ConfigError for data.custom_cls."""
    processor = getattr(tokenizer, "processor", None)
    dataset = open_dataset(
        config, data_files=files, tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples
    )
    rows = PromptRows(dataset, config, agents, scored=scored, reads_images=processor is not None)
    if not len(rows):
        raise DataError(f"{type(dataset).__name__} has no rows.")
    if not checked:
        rows.examine(tokenizer)
    return rows
