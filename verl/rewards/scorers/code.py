"""Scorer of programs (APPS, CodeContests, Codeforces, TACO): runs the program in the reply on the row's tests.

Ground truths, as JSON text or values:
{"inputs": ["2 3\\n"], "outputs": ["5\\n"]}: the program's input and expected output
{"inputs": ["2\\n3"], "outputs": ["5"], "fn_name": "add"}: arguments, a line of JSON each, and the expected return value
{"assert_case": ["assert add(2, 3) == 5"]}, or a list of such texts: code that must run through after the program
"""

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from typing import Any

from verl.errors import DataError, RewardError
from verl.rewards.programs import Output, ProgramLimits, run_program
from verl.rewards.scorers.route import Scorer

_TOLERANCE, _LEAST = Decimal("1e-5"), Decimal("1e-8")
NUM_ALWAYS_RUN = 10  # tests that run although an earlier one has failed

# Depth of recursion and names that programs of these data sets take for granted, as PRIME's tests (arXiv:2502.01456) do
_DEPTH = "import sys\nsys.setrecursionlimit(600_000)\n"
_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
_NAMES = (
    "".join(f"from {name} import *\n" for name in (*_MODULES.split(), "builtins", "typing"))
    + f"import {_MODULES.replace(' ', ', ')}\n"
)
# These run in the program's process. The program's prints go to stderr, so that stdout has only the answer.
_BEGIN = """
names = {**globals(), "__name__": "solution"}
import json
given = json.load(sys.stdin)
answers, sys.stdout = sys.stdout, sys.stderr
exec(compile(given["solution"], "solution.py", "exec"), names)
"""
_CALL_FUNCTION = _BEGIN + (
    """
name = given["name"]
function = names[name] if name in names else getattr(names["Solution"](), name)
json.dump(function(*given["arguments"]), answers)
"""
)
_RUN_ASSERTS = _BEGIN.replace(
    "given = json.load(sys.stdin)", "given = json.load(sys.stdin)\nword = given.pop('word')"
) + (
    """
exec(compile(given["asserts"], "asserts.py", "exec"), names)
answers.write(word)
"""
)
_FENCED = re.compile(r"^[ \t]*```([^`\n]*)\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)

Test = Callable[[str, ProgramLimits], str]  # (program, limits) -> "" if it passes, else the failure


def program_in(reply: str) -> str:
    """The last fenced block of a reply, a Python one if there is any; the complete reply without one."""
    blocks = _FENCED.findall(reply.replace("\r\n", "\n"))
    python = [code for language, code in blocks if re.match(r"\s*\W?py", language, re.IGNORECASE)]
    return str((python or [code for _, code in blocks] or [reply])[-1])


def compute_score(
    solution_str: str, ground_truth: object, time_limit_s: float = 5.0, memory_limit_mb: int = 1024, **_sample: object
) -> dict[str, Any]:
    """{"score": share of the tests that pass, "acc", "num_tests", "num_passed"}; the score is 1 only when all of them do.

    `time_limit_s` and `memory_limit_mb` (MiB) hold for each test. After a failure no more than NUM_ALWAYS_RUN tests run, and
    after a test that takes too long none. The share still counts all tests that would have run. Raises RewardError for a
    ground truth that is none of the three forms.
    """
    limits = ProgramLimits(time_s=time_limit_s, memory_mb=memory_limit_mb)
    program = program_in(solution_str)
    tests = list(_tests(ground_truth))
    num_passed, failure = 0, ""
    for done, test in enumerate(tests):
        if failure and done >= NUM_ALWAYS_RUN:
            break
        wrong = test(program, limits)
        num_passed += not wrong
        failure = failure or wrong
        if "took longer" in wrong:
            break
    num_counted = len(tests) if not failure else max(min(len(tests), NUM_ALWAYS_RUN), num_passed + 1)
    passes = num_passed == len(tests)
    return {
        "score": num_passed / num_counted,
        "acc": float(passes),
        "num_tests": len(tests),
        "num_passed": num_passed,
        "failure": failure[:200],
    }


def _check(ground_truth: object) -> None:
    """Raise DataError for unequal lists of inputs and outputs."""
    truth = _parsed(ground_truth)
    if isinstance(truth, dict) and (why := _unequal(truth)):
        raise DataError(f"field 'reward_model.ground_truth' {why}.")


def _unequal(truth: dict[str, Any]) -> str:
    inputs, outputs = (truth.get(key) or [] for key in ("inputs", "outputs"))
    if not (isinstance(inputs, list) and isinstance(outputs, list)):
        return "needs lists of inputs and outputs"
    if len(inputs) == len(outputs):
        return ""
    return f"has {len(inputs)} inputs and {len(outputs)} outputs; give each input of a program its expected output"


def _tests(ground_truth: object) -> Iterator[Test]:
    truth = _parsed(ground_truth)
    if isinstance(truth, str):
        truth = {"assert_case": [truth]}
    elif isinstance(truth, list):
        truth = {"assert_case": truth}
    if not isinstance(truth, dict) or not (truth.get("assert_case") or truth.get("inputs")):
        raise RewardError(
            "The ground_truth of a program needs 'inputs' and 'outputs', or 'assert_case'; this one is "
            f"{str(ground_truth)[:80]!r}."
        )
    if why := _unequal(truth):
        raise RewardError(f"The ground_truth of a program {why}.")
    cases = truth.get("assert_case") or []
    for case in [cases] if isinstance(cases, str) else cases:
        if _only_defines(str(case)):
            raise RewardError(
                f"These asserts only define functions, so they hold for any program: {case!r:.80}. Call them."
            )
        yield partial(_assert, str(case))
    for stdin, expected in zip(truth.get("inputs") or [], truth.get("outputs") or [], strict=True):
        if name := truth.get("fn_name"):
            yield partial(_call, name, stdin, expected)
        else:
            yield partial(_print, _text(stdin), _text(expected))


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _only_defines(asserts: str) -> bool:
    try:
        return all(isinstance(part, _DEFINITIONS) for part in ast.parse(asserts).body)
    except (SyntaxError, ValueError):
        return False  # running it says why


def _text(value: object) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _run(script: str, stdin: str, limits: ProgramLimits) -> Output:
    """The output of a script. A name that it lacks may be one of _NAMES; their import takes longer than most programs."""
    output = run_program(_DEPTH + script, stdin, limits)
    return run_program(_DEPTH + _NAMES + script, stdin, limits) if "NameError: name" in output.stderr else output


def _print(stdin: str, expected: str, program: str, limits: ProgramLimits) -> str:
    # compiled separately: a program may begin with `from __future__`
    output = _run(f"exec(compile({program!r}, 'program.py', 'exec'))", stdin, limits)
    return _wrong(output) or ("" if same_text(output.stdout, expected) else "printed something else")


def _call(name: str, inputs: object, expected: object, program: str, limits: ProgramLimits) -> str:
    arguments = [_parsed(line) for line in inputs.splitlines()] if isinstance(inputs, str) else inputs
    call = {"solution": program, "name": name, "arguments": arguments}
    output = _run(_CALL_FUNCTION, json.dumps(call), limits)
    if wrong := _wrong(output):
        return wrong
    returned, answer = _parsed(output.stdout), _parsed(expected)
    return "" if returned in (answer, expected) or [returned] == answer else "returned something else"


def _assert(asserts: str, program: str, limits: ProgramLimits) -> str:
    word = secrets.token_hex(16)  # so that a program does not pass by ending early
    message = {"solution": program, "asserts": asserts, "word": word}
    output = _run(_RUN_ASSERTS, json.dumps(message), limits)
    return _wrong(output) or ("" if output.stdout == word else "ended before the asserts")


def _wrong(output: Output) -> str:
    last = output.stderr.strip().splitlines()[-1:]
    return f"{output.failure}: {last[0]}" if output.failure and last else output.failure


def same_text(printed: str, expected: str) -> bool:
    """Whether two outputs agree but for space at the ends of lines, or token by token with numbers to a relative 1e-5, and to
    an absolute 1e-5 if the expected one is an integer."""
    lines, expected_lines = ([line.strip() for line in text.strip().splitlines()] for text in (printed, expected))
    words, target = printed.split(), expected.split()
    return lines == expected_lines or (len(words) == len(target) and all(map(_same_number, words, target)))


def _same_number(word: str, target: str) -> bool:
    try:
        size = 1 if re.fullmatch(r"[+-]?\d+", target) else abs(Decimal(target))
        return word == target or abs(Decimal(word) - Decimal(target)) <= max(size * _TOLERANCE, _LEAST)
    except ArithmeticError:  # not numbers
        return word == target


# rows have tests, not programs that pass them
SCORER = Scorer(compute_score, lambda ground_truth, extra_info: None, check=_check)
