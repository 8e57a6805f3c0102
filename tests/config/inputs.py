"""Values of config keys and YAML files as strangers write them, and what becomes of them."""

import json
import math
import random
import string

from tests.foreign_text import NASTY, foreign_text, prints
from verl.config import PPO, SFT, load_config
from verl.errors import ConfigError

NUMBERS = (
    "0", "-1", "1e400", "-1e400", "inf", "nan", "1e308", "1e39", "1_000", "0x10", "9" * 20, "9" * 400, "9" * 5000, "-0.0",
    "1e-400", "9223372036854775807", "9223372036854775808", "1e19", ".5", "5.", "1e5",
)  # fmt: skip
WORDS = (
    "null",
    "none",
    "true",
    "False",
    "yes",
    "???",
    "~",
    "",
    "auto",
    "[]",
    "{}",
    "[[]]",
    "{a: 1}",
    "[1, a, null, {b: [2]}]",
)
REFERENCES = (
    "${trainer.nnodes}", "${", "${}", "${a", "${no.key}", "${oc.env:NOTHING}", "${oc.decode:'['}", "${oc.create:{a: 1}}",
    "${a:${b}}", "${trainer}", "${.nnodes}", "x${data.seed}y", "${trainer.experiment_name}", "${trainer.project_name}",
)  # fmt: skip
BRACKETS = (
    "[" * 60 + "]" * 60,
    "{a:" * 60 + "1" + "}" * 60,
    "[" * 5000,
    "{" * 5000 + "}" * 5000,
    "[1,2",
    "{a:1",
    "{a}",
    "]",
)

TREE = "trainer: {total_epochs: 3, logger: [console]}\ndata:\n  train_files: a.parquet\n  seed: 7\n"
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
DOCUMENTS = {
    "deep list": "a: " + "[" * 5000 + "]" * 5000,
    "deep mapping": "{a: " * 5000 + "1" + "}" * 5000,
    "deep block": "\n".join(" " * n + "a:" for n in range(300)),
    "bomb": BOMB,
    "bomb of merges": MERGE_BOMB,
    "anchor in itself": "trainer: &a {logger: *a}",
    "unknown anchor": "trainer: *a",
    "tag of Python": "trainer: !!python/object/apply:os.system [id]",
    "tag of a number": "trainer: {nnodes: !!int x}",
    "tag of a float": "trainer: {nnodes: !!float ''}",
    "tag of a date": "trainer: {nnodes: !!timestamp x}",
    "tag of bytes": "trainer: {experiment_name: !!binary aGk=}",
    "tag of a set": "trainer: {experiment_name: !!set {a, b}}",
    "date": "trainer: {experiment_name: 2024-01-01}",
    "twice": "trainer: {nnodes: 1, nnodes: 2}",
    "several documents": "a: 1\n---\nb: 2\n",
    "no mapping": "[1, 2]",
    "text": "trainer",
    "empty": "",
    "null": "null",
    "NUL": "trainer: \0",
    "names": "? [a, b]\n: 1\n",
    "numbers as names": "1: 2\ntrue: 3\nnull: 4\n",
    "no section": "trainer: 3\n",
    "long number": "data: {seed: " + "9" * 5000 + "}",
    "huge number": "actor_rollout_ref: {actor: {optim: {lr: 1e400}}}",
    "defaults: mapping": "defaults: {a: b}",
    "defaults: list in list": "defaults: [[a]]",
    "defaults: options": "defaults: [{actor: [a]}, {x: {y: 1}}, {a: b}, 3, null, ppo_trainer]",
    "defaults: itself": "defaults: [run]",
    "half character": 'trainer: {experiment_name: "\\ud800"}',
    "half character in a name": '"\\ud800": 1',
    "NUL in a value": 'trainer: {experiment_name: "a\\0b"}',
    "line end in a folder": 'trainer: {default_local_dir: "a\\nb"}',
}
VALUES = (math.inf, math.nan, 1e308, 10**30, 10**400, -1, 2.5, None, True, [], {}, [[1]], {"a": {"b": [None]}}, ["x"])
KEYS = {schema: sorted(schema.leaves) for schema in (PPO, SFT)}


def value(rng: random.Random) -> str:
    """A value as the command line has it."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice([*WORDS, *BRACKETS])
    if kind == 2:
        return rng.choice(REFERENCES)
    if kind == 3:
        return "".join(rng.choice("[]{}(),:'\"\\ $a1.eE+-~=\t\n") for _ in range(rng.randrange(30)))
    if kind == 4:
        return f"[{', '.join(rng.choice([*NUMBERS, *WORDS]) for _ in range(rng.randrange(4)))}]"
    return foreign_text(rng)[1][:5000]


def document(rng: random.Random, schema) -> tuple[str, bytes]:
    """(kind, content) of a YAML file."""
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice(sorted(DOCUMENTS))
        return name, DOCUMENTS[name].encode("utf-8", "surrogatepass")
    if kind == 1:  # a valid value of any type for a key, as JSON (JSON is YAML)
        tree = rng.choice(VALUES)
        if rng.random() < 0.4:
            tree = rng.choice([*NASTY.values(), *REFERENCES])
        for name in reversed(rng.choice(KEYS[schema]).split(".")):
            tree = {name: tree}
        return "value", json.dumps(tree).encode()
    content = bytearray(TREE.encode())
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(content) + 1)
        if kind == 2:
            content[at : at + rng.randrange(3)] = rng.choice(string.printable).encode()
        else:
            content[at : at + 1] = rng.randbytes(rng.randrange(3))
    return "mutated" if kind == 2 else "other bytes", bytes(content)


def read(schema, overrides, file=None):
    """The loaded config, or the sentence of its error."""
    try:
        return load_config(overrides, None if file is None else str(file), schema=schema)
    except ConfigError as error:
        return str(error)


def outcome(schema, overrides, file, folder) -> str:
    """The outcome of a config: "refused", with a sentence that prints, or "accepted": its numbers are finite, and the file
    that a run writes of it reads back the same."""
    loaded = read(schema, overrides, file)
    if isinstance(loaded, str):
        assert loaded, (overrides, file)
        assert prints(loaded), ascii(loaded)
        return "refused"
    flat = schema.flatten(loaded.config)
    again = load_config([], str(loaded.write(folder / "written")), schema=schema, check=False)
    assert repr(schema.flatten(again.config)) == repr(flat), (overrides, file)
    for path, leaf in schema.leaves.items():
        bounds, number = leaf.key.bounds, flat[path]
        if isinstance(number, float) and not leaf.inert:
            assert math.isfinite(number) or number in bounds.also, path
    return "accepted"


def cases(rng, count, folder):
    """(kind of input, outcome) of `count` values given on the command line, and YAML files."""
    for _ in range(count):
        schema = rng.choice([PPO, SFT])
        if rng.random() < 0.6:
            key = rng.choice(KEYS[schema])
            entry = rng.choice(["", ".x", ".a.b"]) if schema.leaves[key].free else ""
            overrides = [f"{rng.choice(['', '', '+', '++'])}{key}{entry}={value(rng)}"]
            kind = f"key of {schema.name}"
            yield kind, outcome(schema, overrides, None, folder)
        else:
            kind, content = document(rng, schema)
            file = folder / "run.yaml"
            file.write_bytes(content)
            yield kind, outcome(schema, [], file, folder)
