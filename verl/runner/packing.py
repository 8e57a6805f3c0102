"""Blocks of rows for a script that packs them: by TRL's own function, of our tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.config import SFT, load_config
from verl.data.conversations.dataset import ConversationDataset
from verl.data.conversations.tokens import ConversationEncoder, TrainingSequence
from verl.data.python_rows import Row
from verl.errors import ConfigError
from verl.runner.rows import ScriptRows


class Packing:
    """Packs the rows of a run of `algorithm` on the model at `path`, if `args` ask for it. `keys` are the script's."""

    def __init__(self, args: Any, algorithm: str, path: str, tokenizer: Any, keys: Mapping[str, str]):
        self.args, self.algorithm, self.path, self.tokenizer, self.keys = args, algorithm, path, tokenizer, keys

    def blocks(self, rows: list[Row] | None, split: str = "") -> list[Row] | None:
        """The rows as they are, or as rows with the lengths of their sequences, of at most `args.max_length` tokens. Blocks in
        which nothing trains are left out. Raises ConfigError without max_length."""
        default = getattr(self.args, "packing", False)
        is_packed = default if (choice := getattr(self.args, f"{split}packing", None)) is None else choice
        if not rows or self.algorithm != "sft" or not is_packed:
            return rows
        if self.args.max_length is None:
            raise ConfigError("packing=True makes blocks of max_length tokens. Set max_length.")
        from datasets import Dataset
        from trl import pack_dataset

        sequences = self._sequences(rows)
        columns = {
            "input_ids": [sequence.input_ids.tolist() for sequence in sequences],
            "labels": [np.where(sequence.loss_mask, sequence.input_ids, -100).tolist() for sequence in sequences],
        }
        packed = pack_dataset(Dataset.from_dict(columns), self.args.max_length, self.args.packing_strategy).to_list()
        return [block for block in packed if any(label != -100 for label in block["labels"][1:])]

    def _sequences(self, rows: Sequence[Row]) -> list[TrainingSequence]:
        keys: dict[str, object] = {"data.text_key": self.args.dataset_text_field, "data.train_on_line_end": True}
        keys |= ScriptRows(self.args, self.algorithm, None, None, self.args.output_dir).loss_on(rows)
        keys |= {key: value for key, value in self.keys.items() if key.startswith("data.")}
        overrides = [f"model.path={self.path}", *(f"{key}={value}" for key, value in keys.items())]
        settings = load_config(overrides, schema=SFT, check=False).config.data
        dataset, encoder = ConversationDataset(), ConversationEncoder(self.tokenizer, settings)
        parts = [dataset.sequences_of(row, encoder, f"row {place}")[1] for place, row in enumerate(rows)]
        return [sequence for part in parts for sequence in part]
