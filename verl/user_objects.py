"""Functions that Python code passes: what decides their results, whether their file still gives the same, and what they take.

The results depend on the code, the defaults, the closure, the globals that are read, and the functions of the user's that are
called. Of an instance, a bound method and a partial the state counts too.
"""

import ast
import dis
import functools
import hashlib
import inspect
import logging
import os
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from verl.errors import ConfigError, VerlError
from verl.regular_files import syntax_tree

log = logging.getLogger(__name__)

LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MAX_DEPTH = 8
_NOT_THE_USERS = (f"{Path(__file__).parent}{os.sep}", "<", *LIBRARIES)  # how their files begin

P = ParamSpec("P")
T = TypeVar("T")


def short_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """`function` of our API. Its VerlError or KeyboardInterrupt shows one frame of verl. The frames of the user's code stay, in
    the error and in its cause. With LOG_LEVEL=DEBUG all frames stay. An argument that is given by place and by name, as by
    `data={...}` for keys of that section, is a ConfigError."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            if twice := [name for name in names[: len(args)] if name in kwargs]:
                section = f"config={{'{twice[0]}': {{...}}}}"
                raise ConfigError(
                    f"The argument {twice[0]} has two values, one by its place. Name the arguments behind the first, and give "
                    f"keys of a section of this name by {section}."
                )
            return function(*args, **kwargs)
        except (VerlError, KeyboardInterrupt) as error:
            if os.environ.get("LOG_LEVEL", "").upper() == "DEBUG":
                raise
            cause = error.__cause__
            if cause is not None and cause.with_traceback(_frames_of_user(cause.__traceback__)).__traceback__ is None:
                cause = None
            error.with_traceback(_frames_of_user(error.__traceback__))
            raise error from cause

    return call


def objects_in(file: Path) -> str:
    """The end of a sentence about a reference that names only a file: the public functions and classes of that file."""
    try:
        body = syntax_tree(file.read_bytes()).body if file.suffix == ".py" else []
    except (OSError, ValueError, SyntaxError):
        return "."
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]
    return f"; {file.name} has {', '.join(names[:8])}." if names else "."


def _frames_of_user(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the first file of the user's on; None without one."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        trace = trace.tb_next
    return trace


def digest_of_object(obj: object) -> str:
    """The digest of all that decides the results of a function, a class or an instance, the same in each process. An object of
    a library counts by its class."""
    digest, waiting, met = hashlib.blake2b(digest_size=16), deque([("", obj, 0)]), set[int]()
    while waiting:
        label, value, depth = waiting.popleft()
        digest.update(f"{label} {type(value).__qualname__} {_text(value)}\n".encode(errors="surrogatepass"))
        if id(value) in met or depth == _MAX_DEPTH:
            continue
        met |= set() if isinstance(value, (*_PLAIN, tuple)) else {id(value)}
        waiting += [(f"{label}.{name}", part, depth + 1) for name, part in _parts(value)]
    return digest.hexdigest()


def _text(value: Any) -> str:
    if _is_plain(value):
        return repr(value)
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # of numpy
        return f"{value.dtype}{value.shape}{hashlib.blake2b(value.tobytes()).hexdigest()}"
    if isinstance(value, types.CodeType):
        return repr(_work(value))
    return str(getattr(value, "__qualname__", ""))


def _is_plain(value: object) -> bool:
    return all(isinstance(part, _PLAIN) for part in (value if isinstance(value, list | tuple) else (value,)))


def _parts(value: Any) -> Iterable[tuple[str, object]]:
    """The values within `value` by name."""
    if isinstance(value, Mapping):
        return ((repr(name), part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return () if _is_plain(value) else ((str(number), part) for number, part in enumerate(value))
    if isinstance(value, functools.partial):
        return (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    if isinstance(value, types.MethodType):
        return (("func", value.__func__), ("self", value.__self__))
    if isinstance(value, staticmethod | classmethod):
        return (("func", value.__func__),)
    if isinstance(value, property):
        return (("func", value.fget),)
    if not _is_of_user(value if isinstance(value, types.FunctionType | type) else type(value)):
        return ()
    if isinstance(value, types.FunctionType):
        code = (("code", value.__code__), ("defaults", value.__defaults__), ("keywords", value.__kwdefaults__))
        return (*code, *_closure_of(value), *_globals_of(value).items())
    if isinstance(value, type):
        bases = [(f"base {base.__qualname__}", base) for base in value.__bases__]
        return (
            *bases,
            *((name, part) for name, part in vars(value).items() if not name.startswith("__") or callable(part)),
        )
    return (("class", type(value)), *getattr(value, "__dict__", {}).items())


def _is_of_user(obj: Any) -> bool:
    name = str(obj.__module__)
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or bool(file and name.partition(".")[0] != "verl" and not file.startswith(LIBRARIES))


def _closure_of(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    """A code and those within it."""
    codes = [code]
    for one in codes:
        codes += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return codes


def _globals_of(function: types.FunctionType) -> dict[str, object]:
    """The globals that a function reads, without modules, and without globals that it sets as its state."""
    uses = [(op.opname, op.argval) for code in _codes_in(function.__code__) for op in dis.get_instructions(code)]
    names = {name for use, name in uses if use == "LOAD_GLOBAL"} - {name for use, name in uses if use == "STORE_GLOBAL"}
    values = {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}
    return {n: v for n, v in values.items() if not isinstance(v, types.ModuleType) and not n.startswith("__")}


def _work(code: types.CodeType) -> tuple[object, ...]:
    """The work of a code, wherever it stands in its file."""
    constants = [
        _work(c) if isinstance(c, types.CodeType) else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return code.co_name, code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars


# -- files --------------------------------------------------------------------------------------------------------------


def differs_from_file(obj: object, file: str) -> bool:
    """Whether a process that imports `file` gets another function than `obj`; a warning then names what differs."""
    names = _other_names(obj, file) if isinstance(obj, types.FunctionType) and _is_in(obj, file) else []
    if names:
        log.warning(
            "%s is used as this process has it, within this process: importing %s would give another %s. Set globals outside "
            "of the main guard, and import an edited file again.",
            getattr(obj, "__qualname__", ""),
            file,
            ", ".join(names),
        )
    return bool(names)


def _other_names(function: types.FunctionType, file: str) -> list[str]:
    """Functions that `function` calls and plain globals that it reads, if the file has other ones."""
    try:
        source = Path(file).read_bytes()
        tree = syntax_tree(source)
        works = [_work(code) for code in _codes_in(InspectLoader.source_to_code(source, file))]
    except (OSError, SyntaxError, ValueError, RecursionError):  # its import says so
        return []
    bound, literals, guarded = _bindings(tree)
    names, functions = dict[str, None](), [function]
    for one in functions:
        names |= {} if _work(one.__code__) in works else {one.__name__: None}
        for name, value in _globals_of(one).items():
            if isinstance(value, types.FunctionType) and _is_in(value, file):
                functions += [value] if value not in functions else []
            elif isinstance(value, bool | int | float | str | None):
                is_set = name in guarded and function.__module__ == "__main__"  # the guard was run here
                is_other = literals[name] != value if name in literals else is_set or bound.isdisjoint((name, "*"))
                names |= {name: None} if is_other else {}
    return list(names)


def _is_in(function: types.FunctionType, file: str) -> bool:
    return os.path.realpath(function.__code__.co_filename) == os.path.realpath(file)


def _bindings(tree: ast.Module) -> tuple[set[str], dict[str, object], set[str]]:
    """Of a module: the names that its import binds, the values of those that are bound once to a literal, and the names that
    its main guard binds."""
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    body = [node for node in tree.body if node not in guards]
    bound, literals = [name for node in body for name in _names_bound(node)], dict[str, object]()
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError):
                continue
            literals |= {t.id: value for t in targets if isinstance(t, ast.Name) and bound.count(t.id) == 1}
    return set(bound), literals, {name for guard in guards for name in _names_bound(guard)}


def _names_bound(statement: ast.AST) -> Iterator[str]:
    """The names that a statement of a module binds; those within functions and classes are theirs."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.alias):
        yield (statement.asname or statement.name).partition(".")[0]
    if isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    for inner in ast.iter_child_nodes(statement):
        yield from _names_bound(inner)


def require_call(label: str, function: Callable[..., object], *positional: str, keywords: Iterable[str] = ()) -> None:
    """Raises ConfigError, beginning with `label`, if `function` does not take these arguments, given by their names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of an extension module
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join((*positional, *(f"{name}=..." for name in keywords)))
        raise ConfigError(f"{label} has the signature {signature}, but it is called as ({call}): {error}.") from error


def require_kind(label: str, row: object, base: type | None) -> None:
    """Raises ConfigError, beginning with `label`, unless `row` has the public methods of `base`, or is a function if that is
    None."""
    if base is None and (isinstance(row, type) or not callable(row)):
        raise ConfigError(f"{label} is no function, but {type(row).__name__} {row!r}.")
    methods = [name for name in dir(base) if name[0] != "_" and callable(getattr(base, name))] if base else []
    missing = [name for name in methods if not callable(getattr(row, name, None))]
    missing += sorted(getattr(row, "__abstractmethods__", ())) if base else []
    if base and missing:
        place = f"{base.__module__}.{base.__qualname__}"
        raise ConfigError(f"{label} has no method {missing[0]!r}. Write a subclass of {place}.")
