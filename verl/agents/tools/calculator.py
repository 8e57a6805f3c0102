"""A calculator as a tool: `multi_turn.function_tool_path=pkg://verl.agents.tools.calculator`."""

import ast
import operator
from typing import Any

from verl.tools.function_tool import function_tool

MAX_LENGTH = 200  # characters of an expression
MAX_VALUE = 1e15
_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@function_tool
def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression with + - * / // % and parentheses.

    Args:
        expression: the expression, such as (3 + 4) * 5
    """
    return calculated(expression)


def calculated(expression: str) -> str:
    """The value of an expression as text. Raises ValueError for anything but numbers and the operations above."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no expression") from error
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node: ast.AST) -> float:
    value: float
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.operand))
    else:
        raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")
    if not abs(value) <= MAX_VALUE:
        raise ValueError(f"a value is beyond {MAX_VALUE:g}")
    return value
