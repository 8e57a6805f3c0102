"""Mutated rows, the outcome of each of the two readers of data, and whether that outcome is right.

A row is right to be accepted when `is_valid` says so: the schema, written a second time and independently of the code, for
the row as read back from the file. The tokens that would train must then have the row's content.
"""

import copy
import datetime
import json
import math
import string

import pyarrow
import pyarrow.parquet

from tests.config.edits import typos_apart
from tests.damage import parent_of, places
from tests.data.rows import config, row
from verl.data.check import check_rows
from verl.data.dataset import load_dataset
from verl.data.loader import PromptLoader
from verl.data.order import PromptOrder
from verl.data.prompts import PromptEncoder
from verl.errors import DataError, VerlError
from verl.models.tiny import make_tokenizer

CONFIG = config(max_prompt_length=400)
COMMON_ROLES = ("system", "user", "assistant", "tool", "function", "developer")
DEEP = "@@deep@@"


def base_rows() -> list[dict]:
    """Rows of every kind that is right."""
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "question"}]
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How many?"}]
    return [
        row(1),
        row(2, prompt="a plain text"),
        row(3, prompt=chat, images=[], note="of the author"),
        row(4, prompt=[{"role": "user", "content": parts}]),
        row(5, reward_model={"style": "model"}, extra_info=...),
        row(6, reward_model={"style": "rule", "ground_truth": {"inputs": ["1"], "outputs": ["2", 3.5]}}),
        row(7, extra_info={"index": 7, "hints": {"calc": {"x": [1, None]}}, "name": "Ümläut ☃"}),
    ]


def drop(rng, value):
    return ...


def retype(rng, value):
    choices = [7, -1.5, True, None, "text", [], {}, ["text"], {"role": "user"}, [[]], 10**30, b"raw", ""]
    return rng.choice([c for c in choices if type(c) is not type(value)])


def nest(rng, value):
    for _ in range(rng.choice([1, 1, 2, 10, 40, 60])):
        value = rng.choice([[value], {"content": value}])
    return value


def deep(rng, value):
    return DEEP


def huge(rng, value):
    if isinstance(value, str):
        return (value or "x") * rng.choice([100, 3000])
    return [copy.deepcopy(value)] * rng.choice([50, 1000])


def text(rng, value):
    odd = [
        "\ud800",
        "\udc80x",
        "\x00",
        "\u202e",
        "e\u0301",
        "\ufeff",
        "\uffff",
        "😀",
        "\u2028",
        "<|im_end|>",
        "{{ x }}",
        "'\"\\",
    ]
    return rng.choice(odd) if not isinstance(value, str) else value + rng.choice(odd)


def number(rng, value):
    return rng.choice([math.nan, math.inf, -math.inf, -0.0, 1e308])


def binary(rng, value):
    return rng.choice([b"", b"\xff\xfe", datetime.datetime(2024, 1, 1), datetime.date.max, value if value else b"x"])


def typo(rng, value):
    if not isinstance(value, str) or not value:
        return ...
    at = rng.randrange(len(value))
    return rng.choice(
        [value[:at] + value[at + 1 :], value[:at] + rng.choice(string.ascii_letters) + value[at + 1 :], value.title()]
    )


KINDS = (drop, retype, nest, deep, huge, text, number, binary, typo)


def mutated(rng) -> tuple[str, dict]:
    """(kind, row) with one thing done to one field, or to its name."""
    changed = copy.deepcopy(rng.choice(base_rows()))
    path = rng.choice(list(places(changed))[1:])
    parent, key = parent_of(changed, path), path[-1]
    if rng.random() < 0.15 and isinstance(key, str):
        new = rng.choice([typo(rng, key), rng.choice(list(changed)), "x", key.upper(), f" {key}"])
        parent[key if new is ... or new in parent else new] = parent.pop(key)
        return "rename", changed
    kind = rng.choice(KINDS)
    value = kind(rng, parent[key])
    if value is ...:
        parent.pop(key)
    else:
        parent[key] = value
    return kind.__name__, changed


def write(rng, folder, changed: dict):
    """`changed` as the only row of a file of some kind; returns its path."""
    if rng.random() < 0.5:
        path = folder / "rows.parquet"
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([changed]), path)
            return path
        except (pyarrow.ArrowException, ValueError, TypeError, OverflowError, NotImplementedError):
            pass  # such a row cannot be in such a file
    try:
        content = json.dumps(changed, ensure_ascii=rng.random() < 0.5)
        content.encode()
    except UnicodeEncodeError:
        content = json.dumps(changed)
    except TypeError:
        content = json.dumps(changed, default=str)  # as people do with dates and bytes
    nested = rng.choice([40, 500, 3000, 100_000])
    content = content.replace(f'"{DEEP}"', "[" * nested + "]" * nested)
    path = folder / rng.choice(["rows.jsonl", "rows.json"])
    path.write_text(f"[{content}]" if path.suffix == ".json" else content + "\n", encoding="utf-8")
    return path


def read(path, tokenizer):
    """(row, tokens) that a run would train on, or the sentence of `verl check` and the run that refuses the file."""
    checked = refused = loaded = None
    try:
        report = check_rows(str(path), tokenizer, CONFIG)
        checked = report.problems[0] if report.problems else None
    except DataError as error:
        checked = str(error)
    try:
        rows = load_dataset(str(path), tokenizer, CONFIG)
        loader = PromptLoader(rows, PromptEncoder(tokenizer, CONFIG), PromptOrder(len(rows), 42, False), 1)
        batch = loader.take(0, 1).non_tensor_batch
        loaded = rows[0], batch["prompt_token_ids"][0]
    except VerlError as error:
        refused = str(error)
    assert (checked is None) == (refused is None), f"verl check says {checked}, the run {refused}"
    assert refused is None or str(path) in refused, refused
    return loaded if refused is None else refused


def is_valid(parsed: dict) -> bool:
    """The schema of a row."""
    source, prompt, reward, extra = (parsed.get(k) for k in ("data_source", "prompt", "reward_model", "extra_info"))
    if not isinstance(source, str) or not source or not isinstance(reward, dict):
        return False
    if not source.isprintable() or len(source) > 200:
        return False
    if extra is not None and not isinstance(extra, dict):
        return False
    if reward.get("style") != "model" and reward.get("ground_truth") is None:
        return False
    truth = reward.get("ground_truth")
    if isinstance(truth, float) and not math.isfinite(truth):
        return False
    if not all(_holds_nothing(parsed.get(name)) for name in ("images", "videos", "audios")):
        return False
    if isinstance(prompt, list):
        return bool(prompt) and all(map(_is_message, prompt)) and all(map(_is_plain, (prompt, source, reward, extra)))
    return isinstance(prompt, str) and bool(prompt) and all(map(_is_plain, (prompt, source, reward, extra)))


def _holds_nothing(media) -> bool:
    """A Parquet file fills in an object with unwritten fields."""
    return all(map(_holds_nothing, media.values())) if isinstance(media, dict) else media in (None, [], "", b"")


def _is_message(message) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        return False
    role, content = message["role"], message.get("content")
    if role not in COMMON_ROLES and any(typos_apart(role, common) <= 1 for common in COMMON_ROLES):
        return False
    return isinstance(content, str) or text_of(content) is not None


def text_of(content) -> str | None:
    """The text of a message's content, None if it is none."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    if all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
        return "".join(p["text"] for p in parts)
    return None


def _is_plain(value, depth=0) -> bool:
    if isinstance(value, str):
        return not any(0xD800 <= ord(c) < 0xE000 for c in value)
    if isinstance(value, dict):
        return depth < 50 and all(_is_plain(k) and _is_plain(v, depth + 1) for k, v in value.items())
    if isinstance(value, list):
        return depth < 50 and all(_is_plain(v, depth + 1) for v in value)
    return value is None or isinstance(value, bool | int | float)


def outcome(rng, folder, tokenizer) -> tuple[str, str]:
    """(kind of mutation, outcome). Raises AssertionError for what must not be, and whatever is no sentence."""
    kind, changed = mutated(rng)
    path = write(rng, folder, changed)
    answer = read(path, tokenizer)
    path.unlink()
    if isinstance(answer, str):
        return kind, "refused"
    parsed, tokens = answer
    assert is_valid(parsed), f"a wrong row is accepted: {kind}: {changed!r}"
    said = tokenizer.decode(tokens)
    for message in parsed["raw_prompt"]:
        assert (text_of(message.get("content")) or "") in said, (
            f"the prompt does not say what the row says: {changed!r}"
        )
    return kind, "accepted, valid"


def outcomes(outcome_of, rng, count, folder):
    """`outcome_of` each of `count` mutated rows."""
    tokenizer = make_tokenizer()
    for _ in range(count):
        yield outcome_of(rng, folder, tokenizer)


def cases(rng, count, folder):
    """Outcomes of `count` mutated rows."""
    return outcomes(outcome, rng, count, folder)
