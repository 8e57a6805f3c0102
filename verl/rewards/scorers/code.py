"""Scorer of programs (APPS, CodeContests, Codeforces, TACO): runs the program in the reply on the row's tests.

Ground truths, as JSON text or values:
{"inputs": ["2 3\\n"], "outputs": ["5\\n"]}: the program's input and expected output
{"inputs": ["2\\n3"], "outputs": ["5"], "fn_name": "add"}: arguments, a line of JSON each, and the expected return value
{"assert_case": ["assert add(2, 3) == 5"]}, or a list of such texts: code that must run through after the program
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from verl.errors import RewardError
from verl.rewards.programs import Output, ProgramLimits, run_program
from verl.rewards.scorers.route import Scorer

NUM_ALWAYS_RUN = 10  # tests that run although an earlier one has failed

# Both run in the program's process. The program's prints go to stderr, so that stdout has only the answer.
_BEGIN = """
import json, sys
given = json.load(sys.stdin)
answers, sys.stdout = sys.stdout, sys.stderr
names = {"__name__": "solution"}
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
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)

Test = Callable[[str, ProgramLimits], str]  # (program, limits) -> "" if it passes, else the failure


def program_in(reply: str) -> str:
    """The last fenced block of a reply, a Python one if there is any; the whole reply without one."""
    python = reply.rpartition("```python")
    blocks = _FENCED.findall(python[1] + python[2]) if python[1] else _FENCED.findall(reply)
    return blocks[0] if python[1] and blocks else blocks[-1] if blocks else reply


def compute_score(
    solution_str: str,
    ground_truth: object,
    time_limit_s: float = 5.0,
    memory_limit_mb: int = 1024,
    **_sample: object,
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
    cases = truth.get("assert_case") or []
    for case in [cases] if isinstance(cases, str) else cases:
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


def _text(value: object) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _print(stdin: str, expected: str, program: str, limits: ProgramLimits) -> str:
    output = run_program(program, stdin, limits)
    return _wrong(output) or ("" if same_text(output.stdout, expected) else "printed something else")


def _call(name: str, inputs: object, expected: object, program: str, limits: ProgramLimits) -> str:
    arguments = [_parsed(line) for line in inputs.splitlines()] if isinstance(inputs, str) else inputs
    call = {"solution": program, "name": name, "arguments": arguments}
    output = run_program(_CALL_FUNCTION, json.dumps(call), limits)
    if wrong := _wrong(output):
        return wrong
    returned, answer = _parsed(output.stdout), _parsed(expected)
    return "" if returned == answer or [returned] == answer else "returned something else"


def _assert(asserts: str, program: str, limits: ProgramLimits) -> str:
    word = secrets.token_hex(16)  # so that a program which ends early does not pass
    message = {"solution": program, "asserts": asserts, "word": word}
    output = run_program(_RUN_ASSERTS, json.dumps(message), limits)
    return _wrong(output) or ("" if output.stdout == word else "ended before the asserts")


def _wrong(output: Output) -> str:
    last = output.stderr.strip().splitlines()[-1:]
    return f"{output.failure}: {last[0]}" if output.failure and last else output.failure


def same_text(printed: str, expected: str) -> bool:
    """Whether two outputs agree but for space at the ends of lines, or token by token with numbers to a relative 1e-5."""
    lines, expected_lines = ([line.strip() for line in text.strip().splitlines()] for text in (printed, expected))
    words, target = printed.split(), expected.split()
    return lines == expected_lines or (len(words) == len(target) and all(map(_same_number, words, target)))


def _same_number(a: str, b: str) -> bool:
    try:
        return a == b or math.isclose(float(a), float(b), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False


SCORER = Scorer(compute_score, lambda ground_truth, extra_info: None)  # rows have tests, not programs that pass them
