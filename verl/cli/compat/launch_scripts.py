"""Commands of a shell script that start a module of verl, with its variables expanded, without running it."""

import ast
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-((?:[^{}]|\$\{[^{}]*\})*))?\})")
_COMPUTED = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_FOLDER = re.compile(r'"\$\(\s*pwd\s*\)"|\$\(\s*pwd\s*\)|`\s*pwd\s*`')  # of the script's start
_PRINTED = re.compile(r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`")  # output of a program
_ARGUMENTS = ("$@", "${@}", "$*", "${@:1}")
_SWITCHES = ("--dry-run",)  # of the command, without a value
_OPTIONS = {"--config-path": "config_path", "-cp": "config_path", "--config-dir": "config_path", "-cd": "config_path",
            "--config-name": "config_name", "-cn": "config_name"}  # fmt: skip


@dataclass
class Command:
    """One `python -m MODULE` command: overrides and options as the shell would pass them."""

    module: str
    overrides: list[str] = field(default_factory=list)
    config_path: str | None = None
    config_name: str | None = None
    unknown: dict[str, str] = field(default_factory=dict)  # omitted argument -> the variable without a value


def read_commands(text: str) -> list[Command]:
    """The commands of a script, in order, that start a module of verl or of a recipe."""
    values: dict[str, str] = {"HOME": os.path.expanduser("~"), "PWD": os.getcwd()}
    lists: dict[str, list[str]] = {}
    commands: list[Command] = []
    for line in _logical_lines(_FOLDER.sub("${PWD}", text)):
        if _assign(line, values, lists):
            continue
        words = _words(line, values, lists)
        quoted = (
            _words(word, values, lists) for word in words if re.search(r"\s-m\s+(verl|recipe)", word)
        )  # bash -c '...'
        commands += filter(None, map(_command, [words, *quoted]))
    return commands


def _logical_lines(text: str) -> Iterator[str]:
    """Lines with their continuations, and arrays with all their lines; without comments."""
    pending = ""
    in_list = False
    for raw in text.splitlines():
        line = re.sub(r"(^|\s)#.*$", "", raw) if in_list or not pending else re.sub(r"^\s*#.*$", "", raw)
        pending = f"{pending} {line}" if pending else line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        in_list = bool(re.match(r"^\s*(?:\w+\s+)?\w+\+?=\(", pending)) and not pending.rstrip().endswith(")")
        if in_list or _open_quote(pending):
            continue
        yield pending.strip()
        pending = ""
    if pending.strip():
        yield pending.strip()


def _open_quote(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


def _assign(line: str, values: dict[str, str], lists: dict[str, list[str]]) -> bool:
    """Record an assignment; False if the line is none, or has a command after it."""
    match = _ASSIGNMENT.match(line)
    if match is None:
        return False
    name, more, value = match.groups()
    if value.startswith("("):
        items = _words(value.strip()[1:-1], values, lists)
        lists[name] = [*lists.get(name, []), *items] if more else items
        return True
    value = _compute(value, values)
    try:
        words = shlex.split(_PRINTED.sub("x", value), comments=True)
    except ValueError:
        return False
    if len(words) > 1:
        return False
    text = _expand(value if _PRINTED.search(value) else "".join(shlex.split(value, comments=True)), values)
    if text != f"${name}":
        values[name] = values.get(name, "") + text if more else text
    return True


def _words(line: str, values: dict[str, str], lists: dict[str, list[str]]) -> list[str]:
    """The words of a line as the shell splits them; a variable without a value stays as written."""
    try:
        words = shlex.split(_compute(line, values), comments=True)
    except ValueError:
        return []
    expanded: list[str] = []
    for word in words:
        array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
        if array:
            expanded += lists.get(array[1], [])
        elif word not in _ARGUMENTS:
            text = _expand(word, values)
            bare = re.fullmatch(r"\$\{?\w+\}?", word) is not None
            expanded += shlex.split(text) if bare and " " in text else [text]
    return expanded


def _expand(text: str, values: dict[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in values:
            return values[name]
        return _expand(match[3], values) if match[3] is not None else match[0]

    for _ in range(5):  # a value may contain variables
        expanded = _VARIABLE.sub(value_of, text)
        if expanded == text:
            break
        text = expanded
    return text


def _compute(text: str, values: dict[str, str]) -> str:
    """`text` with $((...)) evaluated if it is integer arithmetic."""

    def computed(match: re.Match[str]) -> str:
        term = re.sub(r"\b[A-Za-z_]\w*", lambda m: values.get(m[0], m[0]), _expand(match[1], values))
        try:
            return str(_number(ast.parse(term.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    for _ in range(3):  # nested ones
        text = _COMPUTED.sub(computed, text)
    return text


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp):
        a, b = _number(node.left), _number(node.right)
        results = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}
        if type(node.op) in results:
            return results[type(node.op)]
        if isinstance(node.op, ast.Div):
            return a // b
        if isinstance(node.op, ast.Mod):
            return a % b
    raise ValueError(node)


def _command(words: list[str]) -> Command | None:
    """The command after `-m`, anywhere in a line's words (ray job submit, torchrun)."""
    modules = [i + 1 for i, w in enumerate(words[:-1]) if w == "-m" and words[i + 1].startswith(("verl", "recipe"))]
    if not modules:
        return None
    module, rest = words[modules[0]], words[modules[0] + 1 :]
    command = Command(module)
    position = 0
    while position < len(rest):
        word = rest[position]
        if word in ("|", "||", "&&", ";", "&", ">", ">>", "2>&1") or word.startswith((">", "2>", "|")):
            break
        if word.endswith(";"):  # the next command follows
            word, rest = word[:-1], rest[: position + 1]
        name, equals, value = word.partition("=")
        if name in _OPTIONS:
            if not equals:
                position += 1
                value = rest[position] if position < len(rest) else ""
            setattr(command, _OPTIONS[name], value.strip("'\""))
        elif unknown := _unknown_variable(word):
            command.unknown[word] = unknown
        elif word not in _SWITCHES:
            command.overrides.append(word)
        position += 1
    return command


def _unknown_variable(word: str) -> str:
    """The shell variable without a value, or the program's output, in `word`; "" for OmegaConf's ${a.b}."""
    match = re.search(r"\$\(.*\)|`.*`|\$(\w+)|\$\{(\w+)(?:\[[^\]]*\])?[^.:{}]*\}", word)
    return match[0] if match else ""
