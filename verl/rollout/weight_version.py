"""What engines with weights of their own have in common: which weights they must be sent, and which version they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl.errors import ModelError
from verl.rollout.api import Weights


def checked(weights: Weights, skeleton: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights` in `dtype`, each compared with the parameter of that name of `skeleton`, whose numbers are not looked at.

    Raises ModelError for a name or shape that the model has not, a name that comes twice, and at the end when a parameter is
    missing; of tied ones either name will do.
    """
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    left = {id(p): name for name, p in parameters.items()}
    came: set[str] = set()
    for name, tensor in weights:
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != tensor.shape or name in came:
            fault = "twice" if name in came else f"as {tuple(tensor.shape)}, which the rollout engine's model has not"
            raise ModelError(
                f"The trained model hands on the weight {name} {fault}. Both must be built from the same "
                "actor_rollout_ref.model."
            )
        came.add(name)
        left.pop(id(parameter), None)
        yield name, tensor.detach().to(dtype)
    if left:
        raise ModelError(
            f"The trained model hands on its weights without {next(iter(left.values()))}; the rollout engine would sample "
            "from old ones. Both must be built from the same actor_rollout_ref.model."
        )


class CopyState:
    """Which version of the weights an engine holds, and whether it holds any that may be used."""

    def __init__(self) -> None:
        self.version = 0
        self._whole = True  # those of the model's files, to begin with
        self._fresh = False

    def begin(self) -> None:
        """An update begins; until it has ended well nothing may be generated."""
        self._whole = self._fresh = False

    def loaded(self) -> None:
        """The engine holds new weights, proved."""
        self._whole = self._fresh = True

    def publish(self, version: int) -> None:
        """The weights that were loaded last are `version`. Raises ModelError when none were since the last version."""
        self.require_whole()
        if version != self.version and not self._fresh:
            raise ModelError(
                f"Version {version} was published, but no new weights have come since version {self.version}; its samples "
                "would be those of old weights."
            )
        self.version, self._fresh = version, False

    def require_whole(self) -> None:
        """Raise ModelError after an update that did not end well."""
        if not self._whole:
            raise ModelError(
                f"The rollout engine's weights are between version {self.version} and the next one, since an update did not "
                "end well. Nothing may be generated with them: update again, or start the run again."
            )
