"""The plan of a run on its page: plan.json, written into a run folder by `verl plan --beside` and `--simulate`."""

from pathlib import Path
from typing import NamedTuple

from verl.tracking.files import Check, Json, each, has, is_number, is_text, maybe, read_json
from verl.tracking.timeline import PLAN


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


_CALL = has(total=is_number, bound=is_text)
_CHOICE = has(text=is_text, seconds=each(_CALL), bytes=each(each(is_number)))
_GROUP = has(roles=_list_of(is_text), devices=is_number, peak_bytes=is_number, choices=each(_CHOICE))
_ONE = has(
    run=is_text, model=is_text, device=has(name=is_text, bytes=is_number), step_s=is_number, weight_sync_s=is_number,
    gpu_hours=is_number, placement=_list_of(_GROUP), overrides=_list_of(is_text),
)  # fmt: skip
_PLANS = has(best=_ONE, runner_up=maybe(_ONE))


class Bar(NamedTuple):
    """A call of a role. `parts` are (name, start and width in thousandths of the scale, value); `note` says what bounds it."""

    name: str
    total: float
    parts: list[tuple[str, float, float, float]]
    note: str


def plan_context(folder: Path) -> dict[str, object] | None:
    """The best plan and the runner-up of the run in `folder`; None without a readable plan."""
    try:
        plans = read_json(folder / PLAN, _PLANS)
    except (OSError, ValueError):
        return None
    best = plans["best"]
    calls = [
        (f"{role} {kind}", choice, kind)
        for group in best["placement"]
        for role, choice in group["choices"].items()
        for kind in choice["seconds"]
    ]
    longest = max((choice["seconds"][kind]["total"] for _, choice, kind in calls), default=0.0)
    return {
        "best": best,
        "runner_up": plans["runner_up"],
        "parts_of": lambda bars: list(dict.fromkeys(part[0] for bar in bars for part in bar.parts)),
        "times": [_time(name, choice["seconds"][kind], longest) for name, choice, kind in calls],
        "memory": [
            _memory(name, choice["bytes"].get(kind, {}), best["device"]["bytes"]) for name, choice, kind in calls
        ],
    }


def _time(name: str, call: Json, scale: float) -> Bar:
    seconds = {part: value for part, value in call.items() if part != "total" and is_number(value)}
    return Bar(name, call["total"], parts_of_bar(seconds, scale), call["bound"])


def _memory(name: str, sizes: Json, scale: float) -> Bar:
    total = sum(sizes.values())
    return Bar(name, total, parts_of_bar(sizes, scale), f"{total / scale:.0%}" if scale > 0 else "")


def parts_of_bar(values: Json, scale: float) -> list[tuple[str, float, float, float]]:
    """The parts of a Bar one after the other, without empty parts."""
    offset, parts = 0.0, []
    for name, value in values.items():
        width = min(1000 * value / scale, 1000 - offset) if scale > 0 else 0.0
        if width > 0:
            parts.append((str(name), offset, width, value))
        offset += max(width, 0.0)
    return parts
