"""tokens.jsonl: the texts of the tokens of a run's samples."""

import json

from tests.json_lines import read_lines
from verl.models.tiny import make_tokenizer
from verl.tracking.pictures import TokenTexts


def test_each_token_is_written_once(tmp_path):
    file, tokenizer = tmp_path / "tokens.jsonl", make_tokenizer()
    ids = tokenizer("a b ä")["input_ids"]
    texts = TokenTexts(file, tokenizer)
    texts.record([{"prompt_ids": ids, "response_ids": [*ids, tokenizer.eos_token_id]}, {"prompt": "no ids"}])
    rows = read_lines(file)
    assert sorted(row["id"] for row in rows) == sorted({*ids, tokenizer.eos_token_id})
    assert {row["id"] for row in rows if row.get("special")} >= {tokenizer.eos_token_id}
    assert "a" in {row["text"] for row in rows}
    again = TokenTexts(file, tokenizer)  # as after a resume
    again.record([{"response_ids": ids}])
    assert len(file.read_text().splitlines()) == len(rows)


def test_sentencepiece_keeps_its_spaces(tmp_path):
    class SentencePiece:
        all_special_ids = ()

        def decode(self, ids, **_):
            return "the"

        def convert_ids_to_tokens(self, ids):
            return ["▁the"]

    TokenTexts(tmp_path / "tokens.jsonl", SentencePiece()).record([{"response_ids": [5]}])
    assert json.loads((tmp_path / "tokens.jsonl").read_text()) == {"id": 5, "text": " the"}
