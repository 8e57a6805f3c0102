"""The field's terms in docstrings, errors, log messages and documents; plain first lines; names that say what a value is.

`python -m tests.house.test_words` lists the number of findings of each folder and document, and the rate of each phrase of
REFERENCES in each kind of text.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.source import ROOT, nodes, relative

PREFERRED = {  # pattern -> preferred term
    r"number formats?": "dtype",
    r"dr[ae]wn?(?! lines?)|drawing|draws": "sample, choose at random",
    r"go(es)? on|went on|going on": "resume, continue",
    r"anew": "again",
    r"portions?|pieces?": "chunk, segment",
    r"figures?": "metric",
    r"written[- ]out": "fused, hand-written",
    r"straight(-line)? forwards?": "fused forward",
    r"models? without numbers": "meta-device model",
    r"hands? (on|over)|handed (on|over)|handing (on|over)": "pass, return, weight sync",
    r"prove[sdn]?|proving|proofs?": "verify, checksum",
    r"leads and follows": "rank 0 and others",
    r"said|told|heard": "sent, received, stated",
    r"keepers?": "supervisor, reaper",
    r"box(es)?": "sandbox, slice",
    r"kin": "family",
    r"mend(s|ed|ing)?": "fix",
    r"played": "simulated",
    r"own cop(y|ies)|cop(y|ies) that generates?": "rollout replica",
    r"the house": "the codebase",
    r"(?<!make )(?<!enough )(?<!the )rooms?(?! for)": "package",
    r"doors?": "compatibility path",
    r"board": "rank status",
    r"settles?|settled": "wait_all, drain",
    r"buries|buried|bury": "reap",
    r"whoever|nobody|somebody|anybody": "the process, the user, the caller",
}
PATTERNS = {
    re.compile(rf"(?<![\w\\$./-])(?:{pattern})(?![\w/(=-])", re.IGNORECASE): term for pattern, term in PREFERRED.items()
}
ANY = re.compile("|".join(f"(?:{pattern.pattern})" for pattern in PATTERNS), re.IGNORECASE)
# references in place of nouns: at most so many in 10,000 words
REFERENCES = ("those of", "that of", "alone", "beside", "of its own", "one that")
MAX_REFERENCES = 1.0
# a value is named for what it is: rows, path, expected
VAGUE_NAMES = {"found", "wanted", "given", "kept", "made", "seen"}
VAGUE_VALUES = VAGUE_NAMES | {
    "asked",
    "known",
    "left",
    "most",
    "others",
    "own",
    "shown",
    "there",
    "whole",
}  # not of functions
# in 10,000 words of docstrings and comments of a folder: one relative clause a sentence, and nouns
LIMITS = [("which|where|whose", {"verl": 25.0, "tests": 45.0}), ("others|rest|whole|whatever", {"verl": 5.0})]
ROOTS = ("verl", "tests", "benchmarks", "examples")
QUESTION = re.compile(r"(What|Who|Whose|Which|How|When|Where|Why)\b")
MAX_WORDS = 25  # of the first line of a docstring

COMMENT = re.compile(r"(?:^|\s)#:? (.+)$")

HISTORY = ("docs/history/2026-11.md", "docs/history/2026-12.md", "CHANGELOG.md")


class Finding(NamedTuple):
    place: str  # file:line
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def messages(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, text) of text in `raise` statements, and of log messages."""
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _constants(node.exc)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name) and node.func.value.id in ("log", "logger"):
                yield from _constants(node)


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, its classes and functions."""
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.lineno, first.value.value


def _constants(node: ast.AST) -> Iterator[tuple[int, str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.lineno, part.value


def in_text(place: str, line: int, text: str) -> Iterator[Finding]:
    for offset, row in enumerate(text.splitlines()):
        prose = re.sub(r"`[^`]*`|\"[^\"]*\"|https?:\S+", " ", row)  # names, quotations and addresses are no prose
        for pattern, term in PATTERNS.items() if ANY.search(prose) else ():
            for match in pattern.finditer(prose):
                yield Finding(f"{place}:{line + offset}", f"{match[0]!r}: write {term}")


def in_python(path: Path) -> Iterator[Finding]:
    place, module = relative(path), nodes(path)
    for line, text in (*messages(module), *docstrings(module), *comments(path)):
        yield from in_text(place, line, text)
    for line, text in docstrings(module):
        first = text.strip().partition("\n")[0]
        if QUESTION.match(first):
            yield Finding(f"{place}:{line}", f"begin with a noun or a verb, not {first.split()[0]!r}")
        if len(first.split()) > MAX_WORDS:
            yield Finding(f"{place}:{line}", f"first line of {len(first.split())} words, more than {MAX_WORDS}")


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for line, row in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for text in COMMENT.findall(row):
            yield line, text


def unfenced(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the lines of a document outside of blocks of code."""
    fenced = False
    for number, row in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = row.startswith("```")
        fenced ^= fence
        if not (fenced or fence):  # the three ticks of an end would pair with ticks of the text
            yield number, row


def in_document(path: Path) -> Iterator[Finding]:
    for number, row in unfenced(path):
        yield from in_text(relative(path), number, row)


def sources(*roots: str) -> list[Path]:
    """Python files of folders, or files."""
    paths = (ROOT / root for root in roots)
    return sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))


def in_folder(name: str) -> list[Finding]:
    """Findings of a folder or a file."""
    return [finding for file in sources(name) for finding in in_python(file)]


def folders() -> list[str]:
    """Folders and files directly below verl, and the other roots."""
    parts = (p for p in (ROOT / "verl").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())
    return [*sorted(map(relative, parts)), *ROOTS[1:]]


def documents() -> list[str]:
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return sorted(name for path in paths if (name := str(path.relative_to(ROOT))) not in HISTORY)


@pytest.mark.parametrize("name", folders())
def test_words_of_a_folder(name):
    assert not (findings := in_folder(name)), "\n".join(map(str, findings))


@pytest.mark.parametrize("name", documents())
def test_words_of_a_document(name):
    assert not (findings := list(in_document(ROOT / name))), "\n".join(map(str, findings))


def test_every_pattern_finds_its_words():
    text = '"""What goes on anew."""\n\ndef f():\n    raise ValueError("a number format is said")\n'
    module = tuple(ast.walk(ast.parse(text)))
    rows = (*messages(module), *docstrings(module))
    lines = [(line, term) for line, row in rows for p, term in PATTERNS.items() if p.search(row)]
    assert lines == [(4, "dtype"), (4, PREFERRED[r"said|told|heard"]), (1, "resume, continue"), (1, "again")]


@functools.cache
def prose() -> dict[str, str]:
    """Kind of text -> all text of the kind, without code in backticks."""
    package, further = sources("verl"), sources("tests", "benchmarks", "examples")
    kinds = {
        "docstrings": (text for path in package for _, text in docstrings(nodes(path))),
        "errors and log messages": (text for path in package for _, text in messages(nodes(path))),
        "comments": (text for path in package + further for _, text in comments(path)),
        "docstrings of tests, benchmarks, examples": (text for path in further for _, text in docstrings(nodes(path))),
        "names of tests": (
            node.name.replace("_", " ")
            for path in sources("tests")
            for node in nodes(path)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ),
        "documents": (row for name in documents() for _, row in unfenced(ROOT / name)),
    }
    return {kind: without_code("\n".join(rows)) for kind, rows in kinds.items()}


def without_code(text: str) -> str:
    """`text` without code in backticks and without quotations."""
    return re.sub(r"`[^`]*`|\"[^\"\n]*\"", " ", text)


@functools.cache
def rates(kind: str) -> tuple[float, ...]:
    """Uses of each phrase of REFERENCES in 10,000 words."""
    text = prose()[kind]
    return tuple(1e4 * len(re.findall(rf"\b{p}\b", text, re.IGNORECASE)) / len(text.split()) for p in REFERENCES)


@pytest.mark.parametrize("phrase", REFERENCES)
def test_texts_repeat_the_noun(phrase):
    above = {kind: rate for kind in prose() if (rate := rates(kind)[REFERENCES.index(phrase)]) > MAX_REFERENCES}
    assert not above, f"{phrase!r} in 10,000 words: {above}; repeat the noun"


@pytest.mark.parametrize(("words", "limits"), LIMITS)
def test_sentences_are_plain(words, limits):
    for root, limit in limits.items():
        rows = (text for path in sources(root) for _, text in (*docstrings(nodes(path)), *comments(path)))
        text = without_code("\n".join(rows))
        rate = 1e4 * len(re.findall(rf"\b({words})\b", text, re.IGNORECASE)) / len(text.split())
        assert rate <= limit, f"{words} in {root}: {rate:.1f} in 10,000 words; write two sentences, `if`, or the noun"


def vague_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of values, functions and classes named found, given, ..., and of values named own, of_rows, ..."""
    for node in nodes:
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.ExceptHandler(name=str(name))
            ) if name.lower() in VAGUE_VALUES or name.startswith("of_"):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) if (
                name.lower() in VAGUE_NAMES
            ):
                yield node.lineno, name


@pytest.mark.parametrize("root", ROOTS)
def test_values_are_named_for_what_they_are(root):
    vague = [f"{relative(path)}:{line}: {name}" for path in sources(root) for line, name in vague_names(nodes(path))]
    assert not vague, "name the value for what it is, as rows or path:\n" + "\n".join(vague)


def test_vague_names_of_each_kind():
    code = (
        "def f(given, *, a=lambda seen: 0):\n    self.kept = found = of_rows = 1\n    class Made: pass\n"
        "    read(self.wanted)\ndef others(own): pass\n"
    )
    names = {name for _, name in vague_names(ast.walk(ast.parse(code)))}
    assert names == {"Made", "found", "given", "kept", "of_rows", "own", "seen"}


if __name__ == "__main__":
    for folder in folders():
        print(f"{len(in_folder(folder)):5} {folder}")
    for document in documents():
        print(f"{len(list(in_document(ROOT / document))):5} {document}")
    for kind in prose():
        print(f"in 10,000 words of {kind}:", *(f"{p} {rate:.1f}" for p, rate in zip(REFERENCES, rates(kind))), sep="  ")
