"""Tools with classes as arguments."""

import enum
from dataclasses import dataclass
from typing import Literal, Optional, TypedDict

from verl.tools.function_tool import function_tool


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(TypedDict, total=False):
    city: str
    number: int


@dataclass
class Order:
    color: Color
    count: int
    place: Place | None = None


@function_tool
def add(a: float, b: float) -> str:
    """Add.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


@function_tool
def paint(c: Color, kind: Literal["a", "b"] = "a", other: Optional[Color] = None) -> str:  # noqa: UP045
    """Paint.

    Args:
        c: the colour
        kind: a kind
        other: a second one
    """
    return f"{c!r} {kind} {other!r}"


@function_tool
def buy(orders: list[Order], fast: bool = False, count: int = 1) -> str:
    """Buy.

    Args:
        orders: what to buy
        fast: how
        count: how often
    """
    return f"{orders!r} {fast} {count}"
