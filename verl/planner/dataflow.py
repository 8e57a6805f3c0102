"""Programs as dataflows of calls on roles, for the search and the simulator.

Dataflow.ppo(actor=shape, critic=shape, reference=shape, reward=shape)
stages: generate | values, reference log-probs, scores | updates        calls of a stage may run at the same time
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from verl.planner.shapes import ModelShape

Kind = Literal["generate", "forward", "train"]
ROLLOUT = "rollout"


class Call(NamedTuple):
    role: str
    kind: Kind

    @property
    def name(self) -> str:
        return {"generate": "generation", "forward": f"{self.role} forward", "train": f"{self.role} update"}[self.kind]


@dataclass(frozen=True)
class Dataflow:
    """`shapes` of the roles that have a model; `stages` in order, each of calls that do not wait for one another. The
    rollout is a part of the actor's devices unless a placement gives it its own."""

    name: str
    shapes: Mapping[str, ModelShape]
    stages: tuple[tuple[Call, ...], ...]
    trainable: int | None = None  # parameters of the actor that train; None: all
    frozen_width: int | None = None  # bytes of a weight that does not train; None: as it computes

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.shapes.items())), self.stages, self.trainable, self.frozen_width))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    @property
    def generates(self) -> bool:
        return any(call.kind == "generate" for stage in self.stages for call in stage)

    def calls(self, role: str) -> list[tuple[int, Kind]]:
        """(stage, kind) of the calls on `role`."""
        return [(i, call.kind) for i, stage in enumerate(self.stages) for call in stage if call.role == role]

    def trains(self, role: str) -> bool:
        return any(kind == "train" for _, kind in self.calls(role))

    @classmethod
    def ppo(
        cls,
        actor: ModelShape,
        critic: ModelShape | None = None,
        reference: ModelShape | None = None,
        reward: ModelShape | None = None,
        teachers: Mapping[str, ModelShape] | None = None,
        *,
        old_log_probs: bool = False,
        trainable: int | None = None,
    ) -> Dataflow:
        """PPO, and without a critic GRPO and its family. `teachers`, by role, are the models that distillation learns from.
        `old_log_probs`: the actor computes the log-probs of the samples before it trains."""
        optional = {"critic": critic, "reference": reference, "reward": reward, **(teachers or {})}
        shapes = {"actor": actor, **{name: shape for name, shape in optional.items() if shape is not None}}
        annotate = [Call(name, "forward") for name in optional if name in shapes]
        annotate += [Call("actor", "forward")] if old_log_probs else []
        update = [Call(name, "train") for name in ("actor", "critic") if name in shapes]
        stages = ((Call("actor", "generate"),), tuple(annotate), tuple(update))
        name = "ppo" if critic is not None else "grpo"
        return cls(name, shapes, tuple(stage for stage in stages if stage), trainable)

    @classmethod
    def sft(cls, model: ModelShape, trainable: int | None = None, name: str = "sft") -> Dataflow:
        """Training on given rows."""
        return cls(name, {"actor": model}, ((Call("actor", "train"),),), trainable)

    @classmethod
    def preference(
        cls, model: ModelShape, reference: ModelShape | None = None, trainable: int | None = None
    ) -> Dataflow:
        """Training on given pairs, with a reference that computes them in each step, or without."""
        if reference is None:
            return cls.sft(model, trainable, "preference")
        stages = ((Call("reference", "forward"),), (Call("actor", "train"),))
        return cls("preference", {"actor": model, "reference": reference}, stages, trainable)
