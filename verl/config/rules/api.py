"""What a rule between keys is: which key, how bad, when it is broken, and the sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Rule:
    """`text` is a format string over the tree, where {c} is the root and {actor}, {rollout}, {draw} (val_kwargs) and
    {correction} are parts of it; or it is a function of the root that gives the sentence."""

    key: str
    level: Literal["error", "warning"]
    broken: Callable[[Any, set[str]], bool]  # (root, keys that the user set)
    text: str | Callable[[Any], str]

    def sentence(self, root: Any) -> str:
        if not isinstance(self.text, str):
            return self.text(root)
        group = root.actor_rollout_ref
        return self.text.format(
            c=root,
            actor=group.actor,
            rollout=group.rollout,
            draw=group.rollout.val_kwargs,
            correction=root.algorithm.rollout_correction,
        )
