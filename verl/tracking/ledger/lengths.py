"""Response lengths of the prompts that have ended, which an order of later prompts may follow: longest first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from verl.data_proto.proto import DataProto

_PROMPT = np.dtype([("row", "<u4"), ("tokens", "<f4")])


def packed(lengths: Iterable[tuple[int, float]]) -> bytes:
    """(row of the data, mean tokens of a sample) of prompts, as the ledger has them."""
    return np.array(list(lengths), _PROMPT).tobytes()


class ResponseLengths:
    """The mean tokens of a sample in the newest ended prompt of each row. They are a function of the steps so far: a resumed
    run begins its prompts in the order of an unbroken one."""

    def __init__(self, prompts: bytes = b""):
        self._tokens = np.zeros(0, np.float32)  # by row, 0 if unknown
        self.add(prompts)

    def add(self, prompts: bytes) -> None:
        """Add prompts as `packed` gave them, the newest last."""
        new = np.frombuffer(prompts, _PROMPT)
        self._tokens.resize(max(len(self._tokens), int(new["row"].max(initial=0)) + 1), refcheck=False)
        self._tokens[new["row"]] = new["tokens"]

    def of(self, rows: np.ndarray) -> np.ndarray:
        """float32 [rows], 0 for rows without a prompt that has ended."""
        return np.where(rows < len(self._tokens), self._tokens.take(rows, mode="clip"), np.float32(0))

    def expected(self, prompts: DataProto) -> DataProto:
        """The loader's prompts with the column expected_tokens, or as they are where no row has a length."""
        import torch

        from verl.data_proto.proto import DataProto

        tokens = torch.from_numpy(self.of(prompts.batch["row_index"].numpy()))
        return prompts.slice().union(DataProto.from_dict({"expected_tokens": tokens})) if tokens.any() else prompts
