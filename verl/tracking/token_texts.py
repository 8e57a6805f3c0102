"""The texts of the tokens in samples/, in tokens.jsonl: with them a reader shows tokens without the tokenizer.

{"id": 260, "text": " the"}   {"id": 2, "text": "<|im_end|>", "special": true}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.data_proto.tokenizer import Tokenizer
from verl.tracking.files import append_rows, has, is_count, is_text, read_json_rows

NAME = "tokens.jsonl"
TOKEN = has(id=is_count, text=is_text)
_COLUMNS = ("prompt_ids", "response_ids")


class TokenTexts:
    """Appends a row for each token that no earlier row of the file has."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self._path = path
        self._tokenizer = tokenizer
        self._known: set[int] | None = None

    def record(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Record the tokens of samples."""
        if self._known is None:
            self._known = {row["id"] for row in read_json_rows(self._path, TOKEN)}
        import numpy as np  # readers of the file need none

        columns = (np.unique(row[name]) for row in rows for name in _COLUMNS if row.get(name) is not None)
        ids = set(np.unique(np.concatenate([np.empty(0, np.int64), *columns])).tolist())
        new = sorted(ids - self._known)
        if new:
            append_rows(self._path, map(self._row, new))
            self._known.update(new)

    def _row(self, token: int) -> dict[str, object]:
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        (form,) = self._tokenizer.convert_ids_to_tokens([token])
        if isinstance(form, str) and form.startswith("▁") and not text.startswith(" "):
            text = f" {text}"  # SentencePiece leaves out the space at the start of a text
        special = {"special": True} if token in self._tokenizer.all_special_ids else {}
        return {"id": token, "text": text, **special}
