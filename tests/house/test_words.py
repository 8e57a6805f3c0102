"""The field's terms in docstrings, errors, log messages and documents, and plain first lines of docstrings.

`python -m tests.house.test_words` lists the number of findings of each folder and document.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.source import ROOT

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
# references in place of nouns: at most so many in 10,000 words of docstrings, as in TRL, httpx and torchtitan
REFERENCES = ("those of", "that of", "alone", "beside", "of its own", "one that")
MAX_REFERENCES = 1.0
QUESTION = re.compile(r"(What|Who|Whose|Which|How|When|Where|Why)\b")
MAX_WORDS = 25  # of the first line of a docstring

HISTORY = ("docs/lab-notebook.md", "CHANGELOG.md")


class Finding(NamedTuple):
    place: str  # file:line
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, of text in `raise` statements, and of log messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _constants(node.exc)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("log.", "logger.")):
            yield from _constants(node)
    yield from docstrings(tree)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, its classes and functions."""
    for node in ast.walk(tree):
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
        for pattern, term in PATTERNS.items():
            for match in pattern.finditer(prose):
                yield Finding(f"{place}:{line + offset}", f"{match[0]!r}: write {term}")


def in_python(path: Path) -> Iterator[Finding]:
    place, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))
    for line, text in texts(tree):
        yield from in_text(place, line, text)
    for line, text in docstrings(tree):
        first = text.strip().partition("\n")[0]
        if QUESTION.match(first):
            yield Finding(f"{place}:{line}", f"begin with a noun or a verb, not {first.split()[0]!r}")
        if len(first.split()) > MAX_WORDS:
            yield Finding(f"{place}:{line}", f"first line of {len(first.split())} words, more than {MAX_WORDS}")


def in_document(path: Path) -> Iterator[Finding]:
    fenced = False
    for number, row in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fenced ^= row.startswith("```")
        if not fenced:
            yield from in_text(str(path.relative_to(ROOT)), number, row)


def in_folder(name: str) -> list[Finding]:
    """Findings of verl/NAME, a folder or a file."""
    path = ROOT / "verl" / name
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [finding for file in files for finding in in_python(file)]


def folders() -> list[str]:
    """Folders and files directly below verl/."""
    return sorted(p.name for p in (ROOT / "verl").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())


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
    lines = [(line, term) for line, row in texts(ast.parse(text)) for p, term in PATTERNS.items() if p.search(row)]
    assert lines == [
        (4, "dtype"),
        (4, PREFERRED[r"said|told|heard"]),
        (1, "resume, continue"),
        (1, "again"),
    ]


if __name__ == "__main__":
    for folder in folders():
        print(f"{len(in_folder(folder)):5} verl/{folder}")
    for document in documents():
        print(f"{len(list(in_document(ROOT / document))):5} {document}")


@pytest.mark.parametrize("phrase", REFERENCES)
def test_docstrings_name_things_instead_of_referring_to_them(phrase):
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "verl").rglob("*.py"))
    text = re.sub(r"`[^`]*`", " ", "\n".join(text for tree in trees for _, text in docstrings(tree)))
    rate = 1e4 * len(re.findall(rf"\b{phrase}\b", text, re.IGNORECASE)) / len(text.split())
    assert rate <= MAX_REFERENCES, f"{phrase!r}: {rate:.1f} in 10,000 words; repeat the noun"
