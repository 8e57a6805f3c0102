"""Load a reward function and verify, before the run, that it takes the arguments it will be called with; and call functions
that Python code gives.

f(data_source, solution_str, ground_truth, extra_info) -> number or dict      (verl)
f(prompts, completions, **columns) -> list of numbers or None      (TRL; a column called as an argument is not passed)
"""

import ast
import functools
import hashlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl.data_proto.tokenizer import listing_ids
from verl.errors import RewardError, VerlError, nearest
from verl.families import SERVICE_ROLLOUT
from verl.registry import load_module, load_object, referenced_name, user_file
from verl.regular_files import syntax_tree
from verl.rewards.completions import completion_of

SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
# argument with the reward model's output: of a function for one sample, of one for lists
MODEL_SCORE = ("reward_model_score", "reward_model_scores")
MODEL_REPLY = ("reward_model_reply", "reward_model_replies")
_OF_A_SERVICE = ("reward_router_address", "reward_model_tokenizer")
FUNCTION_LIST = "pkg://verl.rewards.functions"  # the module that calls functions of Python code
SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"
BATCH_SIGNATURE = "(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)"

RewardFunction = Callable[..., object]


@dataclass(frozen=True)
class RewardFunctionSpec:
    """Reference to a reward function: RewardFunctionSpec("rewards.py", "compute_score", {"penalty": 0.1}).

    path: a .py file, a dotted module or `pkg://module`; None is the built-in scorer of the row's data_source. batched: called
    once with lists. kwargs: added to every call. from_model: the argument for the output of a reward model. parts: numbers that
    it must return in addition to the score. by_position: called as `fn(data_source, solution_str, ground_truth)` where its
    parameters have other names.
    """

    path: str | None = None
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batched: bool = False
    from_model: str | None = None
    parts: tuple[str, ...] = ()
    by_position: bool = False
    tokenizer: str | None = None  # folder or hub name of the tokenizer that it gets as reward_model_tokenizer

    def file_digest(self) -> str | None:
        """SHA-256 of the function's current file; None for modules and unreadable files."""
        if not self.path or not self.path.endswith(".py"):
            return None
        try:
            return hashlib.sha256(user_file(self.path.removeprefix("file://")).read_bytes()).hexdigest()
        except OSError:
            return None

    @property
    def label(self) -> str:
        """Name in messages: "compute_score of rewards.py"; the names of functions that Python code passed."""
        if self.path == FUNCTION_LIST:
            return ", ".join(map(referenced_name, self.kwargs["functions"]))
        return "default_compute_score" if self.path is None else f"{self.name} of {self.path}"


def load_reward_function(spec: RewardFunctionSpec) -> RewardFunction:
    """Load the callable and check its signature. Raises RewardError with file, function and both signatures."""
    if spec.path is None:
        from verl.rewards.scorers.route import default_compute_score, default_compute_scores

        function: RewardFunction = default_compute_scores if spec.batched else default_compute_score
    else:
        function = _load_user_function(spec.path, spec.name)
        if spec.by_position:
            function = _by_position(function)
        if not spec.batched:
            function = _of_answers(function)
    check_signature(function, spec)
    if spec.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = listing_ids(AutoTokenizer.from_pretrained(spec.tokenizer))
        function = functools.partial(function, **{_OF_A_SERVICE[1]: tokenizer})
    return function


def _by_position(function: RewardFunction) -> RewardFunction:
    """`function`, or if the names of its parameters differ, a function that passes it three arguments by position."""
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(SAMPLE_ARGUMENTS))
    except TypeError:
        pass
    else:
        return function

    def call(
        data_source: str, solution_str: str, ground_truth: object, extra_info: object = None, **kwargs: object
    ) -> Any:
        return function(data_source, solution_str, ground_truth, **kwargs)

    try:
        signature.bind(*SAMPLE_ARGUMENTS[:3])
    except TypeError:
        return function  # the check of its signature refuses it
    return call


def _of_answers(function: RewardFunction) -> RewardFunction:
    """`function`, or if it takes the reply and the reference answer only, a function that also takes the source and
    `extra_info`. Scorers of TinyZero and Logic-RL are like this."""
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(SAMPLE_ARGUMENTS[1:3]))
        by_keyword = not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    except (TypeError, ValueError):  # further arguments, or written in C
        return function
    surplus = set(SAMPLE_ARGUMENTS) - signature.parameters.keys() if by_keyword else ()
    if not surplus:
        return function

    @functools.wraps(function)
    def call(**arguments: object) -> object:
        return function(**{name: value for name, value in arguments.items() if name not in surplus})

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(surplus)]
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *parameters])  # type: ignore[attr-defined]
    return call


def check_signature(function: RewardFunction, spec: RewardFunctionSpec) -> None:
    """Raises RewardError unless `function` takes the keyword arguments that it will be called with."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have no signature to look at
        return
    names = [*(BATCH_ARGUMENTS if spec.batched else SAMPLE_ARGUMENTS), *([spec.from_model] if spec.from_model else [])]
    names += [_OF_A_SERVICE[1]] if spec.tokenizer else []
    try:
        signature.bind(**dict.fromkeys(names), **spec.kwargs)
    except TypeError as error:
        if spec.from_model and spec.from_model in str(error):
            raise RewardError(
                f"The reward function {spec.label} with the signature {signature} has no parameter {spec.from_model!r}, so "
                "it would not get the reward model's output. Add the parameter, or set "
                "reward.reward_model.enable=False."
            ) from error
        if served := next((name for name in _OF_A_SERVICE if repr(name) in str(error)), None):
            raise RewardError(
                f"The reward function {spec.label} asks for {served}, of a reward model that is served. Set "
                f"reward.reward_model.enable=True, rollout.name={SERVICE_ROLLOUT} and rollout.service.url there, and "
                "reward.network=True."
            ) from error
        needed = BATCH_SIGNATURE if spec.batched else SIGNATURE
        extra = f" and the reward_kwargs {sorted(spec.kwargs)}" if spec.kwargs else ""
        raise RewardError(
            f"The reward function {spec.label} has the signature {signature}, but it is called by keyword as "
            f"{spec.name}{needed}{extra}: {error}. Change its parameters."
        ) from error


def service_arguments(path: str, name: str) -> set[str]:
    """The parameters in _OF_A_SERVICE of the function `name` of a file."""
    return parameters_in_file(path, name) & set(_OF_A_SERVICE)


def takes_completions(path: str | None, name: str) -> bool:
    """Whether the function `name` of a file has TRL's form."""
    parameters = parameters_in_file(path or "", name)
    return "completions" in parameters and "solution_str" not in parameters


def parameters_in_file(path: str, name: str) -> set[str]:
    """The parameters of the function `name` of a .py file. The file is read and not run."""
    if not path.endswith(".py"):
        return set()
    try:
        tree = syntax_tree(user_file(path.removeprefix("file://")).read_bytes())
    except (OSError, ValueError, SyntaxError, VerlError):
        return set()  # as loading it will say
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        argument.arg
        for function in functions
        if function.name == name
        for argument in (*function.args.args, *function.args.kwonlyargs)
    }


def _load_user_function(path: str, name: str) -> RewardFunction:
    try:
        module = load_module(path)
    except VerlError as error:
        raise RewardError(
            f"The reward function {name} of custom_reward_function.path={path} cannot be loaded. {error}"
        ) from error
    function = getattr(module, name, None)
    if function is None:
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = (
            nearest(name, public)
            or f"; it has {', '.join(public[:8]) or 'no functions'}. Set reward.custom_reward_function.name."
        )
        raise RewardError(f"The file {path} has no reward function {name!r}{hint}")
    if not callable(function):
        raise RewardError(
            f"{name!r} in {path} is a {type(function).__name__}, not a function; set reward.custom_reward_function.name."
        )
    return function  # type: ignore[no-any-return]


def no_reward(completions: Sequence[object], **columns: object) -> list[float]:
    """0 for each response. Here, since a scorer's process imports the file of its function."""
    return [0.0] * len(completions)


Sample = tuple[str, str, Any, Mapping[str, Any]]  # data source, response, reference answer, columns of the row


class Raised(NamedTuple):
    """In place of the result of a sample: the exception that its function raised."""

    error: Exception


def _tried(function: RewardFunction, sample: Sample) -> object:
    try:
        return results_of(function, [sample])[0]
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        return Raised(error)


def score_lists(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[object],
    extra_infos: Sequence[Mapping[str, object]],
    *,
    functions: Sequence[str],
    weights: Sequence[float] = (),
    arguments: Mapping[str, object] | None = None,
) -> list[dict[str, object] | Raised]:
    """The weighted sum of all `functions` (references, see verl/registry.py) for each sample as "score"; with several functions
    each is a part under its name. A function that returns None for a sample is left out of its sum. If a function of one sample
    raises, the sample is a Raised, and no other is lost. `arguments` are further ones of a function of TRL's form. Raises
    RewardError as `results_of`."""
    samples = list(zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True))
    results = {}
    for reference in functions:
        function = load_object(reference)
        one_by_one = "solution_str" in reward_parameters(function)
        results[name_of(function)] = (
            [_tried(function, s) for s in samples] if one_by_one else results_of(function, samples, arguments)
        )
    rows = zip(*results.values(), strict=True)
    return [_sum(list(results), row, weights or [1.0] * len(results)) for row in rows]


def score_sample(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object],
    *,
    functions: Sequence[str],
    arguments: Mapping[str, object] | None = None,
) -> dict[str, object] | Raised:
    """`score_lists` of one sample: a function that scores samples fails, and has its limits, for each of them."""
    sample = ([data_source], [solution_str], [ground_truth], [extra_info])
    return score_lists(*sample, functions=functions, arguments=arguments)[0]


def _sum(names: Sequence[str], values: Sequence[Any], weights: Sequence[float]) -> dict[str, object] | Raised:
    if raised := next((value for value in values if isinstance(value, Raised)), None):
        return raised
    if len(names) == 1:
        parts = values[0] if isinstance(values[0], Mapping) else {"score": values[0]}
        score: Any = parts.get("score")  # the worker refuses a value that is no number, for its sample
        return {**parts, "score": weights[0] * score if hasattr(score, "__float__") else score}
    scores = [value.get("score", value) if isinstance(value, Mapping) else value for value in values]
    if wrong := [score for score in scores if score is not None and not hasattr(score, "__float__")]:
        return {"score": wrong[0]}  # the worker refuses it, for this sample
    numbers = {name: score for name, score in zip(names, scores, strict=True) if score is not None}
    total = sum(weight * score for weight, score in zip(weights, scores, strict=True) if score is not None)
    return {**numbers, "score": float(total) if numbers else None}  # also if a function is called "score"


_of_thread = threading.local()


def finished(result: object) -> Any:
    """`result`, or the value of an awaitable. Its event loop is kept for the calls of this thread: clients of an async function
    belong to one. If the thread runs a loop already, as a notebook does, another thread runs it meanwhile."""
    if not inspect.isawaitable(result):
        return result
    import asyncio  # half of a worker's imports; a worker starts during a step

    loop = getattr(_of_thread, "loop", None)
    if loop is None or loop.is_running():  # it runs if an async function calls one of these functions
        loop = asyncio.new_event_loop()
        _of_thread.loop = getattr(_of_thread, "loop", None) or loop
    if asyncio._get_running_loop() is None:
        return loop.run_until_complete(_value_of(result))
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, loop.run_until_complete, _value_of(result)).result()


async def _value_of(awaitable: Awaitable[object]) -> object:
    return await awaitable


def name_of(function: RewardFunction) -> str:
    """The name of a reward function, also the name of its metric."""
    return str(getattr(function, "__name__", type(function).__name__))


def require_distinct(functions: Sequence[RewardFunction]) -> None:
    """Raises RewardError for two functions of one name."""
    names = [name_of(function) for function in functions]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise RewardError(f"Two reward functions are called {repeated!r}. Rename one: each is a metric under its name.")


def reward_parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    """The parameters of a reward function. Raises RewardError for a function of another form."""
    signature = inspect.signature(function)
    if not {"solution_str", "completions"} & set(signature.parameters):
        raise RewardError(
            f"The reward function {name_of(function)}{signature} has no parameter 'completions' or 'solution_str'. "
            "Write it as f(completions, **columns), which returns a list of numbers, or as "
            "f(data_source, solution_str, ground_truth, extra_info)."
        )
    return signature.parameters


def require_columns(function: RewardFunction, columns: Collection[str]) -> None:
    """Raises RewardError for a parameter of a function of TRL's form that is not in `columns` and has no default value."""
    for key, parameter in reward_parameters(function).items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and key not in columns:
            names = set(columns) - {"prompts", "completions"}
            hint = nearest(key, names) or f"; they have {', '.join(sorted(names)) or 'none'}."
            raise RewardError(
                f"The reward function {name_of(function)} takes {key!r}, and the rows have no such column{hint}"
            )


def results_of(
    function: RewardFunction, samples: Sequence[Sample], further: Mapping[str, object] | None = None
) -> list[Any]:
    """One result for each of `samples`. `further` are arguments that a function of TRL's form gets if it takes them. Without a
    prompt a completion is a text. Raises RewardError for a function of another form, and for another number of results than
    samples."""
    name, parameters = name_of(function), reward_parameters(function)
    if "solution_str" in parameters:
        return [
            finished(function(data_source=source, solution_str=text, ground_truth=answer, extra_info=dict(extra)))
            for source, text, answer, extra in samples
        ]
    names = {key: None for *_, extra in samples for key in extra}
    columns: dict[str, list[Any]] = {key: [extra.get(key) for *_, extra in samples] for key in names}
    prompts = columns.pop("prompt", [None] * len(samples))
    for key, values in (("data_source", [s[0] for s in samples]), ("ground_truth", [s[2] for s in samples])):
        if key in parameters:
            columns.setdefault(key, values)
    completions = [completion_of(text, prompt) for (_, text, _, _), prompt in zip(samples, prompts, strict=True)]
    arguments = {**columns, **(further or {}), "prompts": prompts, "completions": completions}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    require_columns(function, arguments)
    try:
        returned = finished(function(**arguments))
    except (AttributeError, TypeError) as error:
        if isinstance(completions[0], list) and ("list" in str(error) or type(completions[0]).__name__ in str(error)):
            hint = "a prompt of messages has completions of messages, so read the text as completion[0]['content']"
            error.args = (f"{error}; {hint}",)
        raise
    if isinstance(returned, str | Mapping) or not hasattr(returned, "__iter__"):
        raise RewardError(
            f"The reward function {name} returned a {type(returned).__name__} for {len(samples)} completions. "
            "Return a list with a number for each."
        )
    results = list(returned)
    if len(results) != len(samples):
        raise RewardError(f"The reward function {name} returned {len(results)} rewards for {len(samples)} completions.")
    return results
