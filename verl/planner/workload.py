"""Programs as dataflows of calls on roles, and the work of a step: prompts, samples, and the distribution of their lengths.

    Dataflow.ppo(actor=shape, critic=shape, reference=shape, reward=shape)
    Workload(num_prompts=64, samples=32, prompt_mean=200, response=Lengths.of(mean=701, longest=1536))

A batch of samples lasts as long as its longest one: while short ones end, the batch shrinks and a step of decoding costs almost
as much. `Lengths.profile` gives the steps of a rollout engine as segments of equal occupancy.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, NamedTuple

from verl.errors import ConfigError
from verl.models.shapes import ModelShape

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
    reused_bytes: float = 0.0  # most bytes of activations that the sampler keeps on a CPU for the update

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


_POINTS = 200  # quantiles of a distribution
_SIGMA = 0.7  # of the logarithm of lengths, if only mean and limit are known: a wide, right-skewed distribution
_SEGMENTS = 24


class DecodeSegment(NamedTuple):
    """`steps` steps of decoding with `active` samples of `context` generated tokens each, on average."""

    steps: float
    active: float
    context: float


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens, as equally likely quantiles, ascending."""

    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, mean: float, longest: float) -> Lengths:
        """A log-normal distribution that is cut at `longest`, with this mean."""
        if not 0 < mean <= longest:
            raise ConfigError(f"A mean response of {mean} tokens needs a limit of at least as many, not {longest}.")
        low, high = math.log(max(mean / 50, 1e-3)), math.log(longest) + 4
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if _cut_normal(middle, longest).mean < mean else (low, middle)
        return _cut_normal(high, longest)

    @classmethod
    def constant(cls, length: float) -> Lengths:
        return cls((float(length),) * _POINTS)

    @classmethod
    def through(cls, p10: float, p50: float, p90: float, longest: float) -> Lengths:
        """Straight lines between the given quantiles. Raises ConfigError when they do not ascend."""
        if not 0 < p10 <= p50 <= p90 <= longest:
            raise ConfigError(
                f"plan.workload.response=[{p10:g},{p50:g},{p90:g},{longest:g}] does not ascend; give the lengths in tokens "
                "that 10%, 50% and 90% of the responses have at most, and the longest."
            )
        points = ((0.0, max(1.0, 2 * p10 - p50)), (0.1, p10), (0.5, p50), (0.9, p90), (1.0, longest))
        return cls(tuple(_between(points, (i + 0.5) / _POINTS) for i in range(_POINTS)))

    @classmethod
    def from_samples(cls, lengths: Sequence[float]) -> Lengths:
        """The distribution of response lengths of an earlier run. Raises ConfigError without any."""
        if not lengths:
            raise ConfigError(
                "The samples file has no response lengths; give samples/train/STEP.jsonl of an earlier run."
            )
        ordered = sorted(lengths)
        return cls(tuple(float(ordered[int((i + 0.5) / _POINTS * len(ordered))]) for i in range(_POINTS)))

    @property
    def mean(self) -> float:
        return sum(self.quantiles) / len(self.quantiles)

    @property
    def longest(self) -> float:
        return self.quantiles[-1]

    def quantile(self, share: float) -> float:
        return self.quantiles[min(int(share * len(self.quantiles)), len(self.quantiles) - 1)]

    @property
    def mean_square(self) -> float:
        return sum(q * q for q in self.quantiles) / len(self.quantiles)

    def profile(self, num_samples: int, slots: int) -> tuple[DecodeSegment, ...]:
        """The steps of an engine with `slots` slots that generates `num_samples` samples; a free slot takes the next one."""
        return _profile(self.quantiles, max(1, num_samples), max(1, slots))


def _cut_normal(mu: float, longest: float) -> Lengths:
    normal = NormalDist(mu, _SIGMA)
    return Lengths(tuple(min(math.exp(normal.inv_cdf((i + 0.5) / _POINTS)), longest) for i in range(_POINTS)))


def _between(points: Sequence[tuple[float, float]], share: float) -> float:
    for (a, low), (b, high) in itertools.pairwise(points):
        if share <= b:
            return low + (high - low) * (share - a) / (b - a)
    return points[-1][1]


@lru_cache(maxsize=1 << 14)
def _profile(quantiles: tuple[float, ...], num_samples: int, slots: int) -> tuple[DecodeSegment, ...]:
    # at most 512 samples are followed, each for several; a fixed permutation mixes short and long ones
    weight = max(1.0, num_samples / 512)
    count, width = round(num_samples / weight), max(1, round(slots / weight))
    lengths = [quantiles[int((i + 0.5) / count * len(quantiles))] for i in range(count)]
    mixed = [lengths[i * _stride(count) % count] for i in range(count)]
    heap: list[float] = []
    spans = []
    for length in mixed:
        start = heapq.heappop(heap) if len(heap) >= width else 0.0
        heapq.heappush(heap, start + length)
        spans.append((start, start + length))
    return _segments(spans, weight)


def _stride(count: int) -> int:
    """A step that visits all of `count` places, near the golden ratio of them."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) > 1:
        step += 1
    return step


def _segments(spans: list[tuple[float, float]], weight: float) -> tuple[DecodeSegment, ...]:
    ends = sorted(stop for _, stop in spans)
    edges = sorted(
        {
            0.0,
            *(
                ends[int((i + 1) / _SEGMENTS * len(ends)) - 1]
                for i in range(_SEGMENTS)
                if len(ends) * (i + 1) >= _SEGMENTS
            ),
            ends[-1],
        }
    )
    segments = []
    for first, last in itertools.pairwise(edges):
        tokens = context = 0.0
        for start, stop in spans:
            a, b = max(start, first), min(stop, last)
            if a < b:
                tokens += b - a
                context += (b - a) * ((a + b) / 2 - start)
        segments.append(DecodeSegment(last - first, weight * tokens / (last - first), context / tokens))
    return tuple(segments)


@dataclass(frozen=True)
class Workload:
    """One step of a program: `num_prompts` prompts, `samples` responses of each, divided into `updates` optimizer steps for
    each of `epochs` passes. `shares_prompts`: a micro-batch computes a prompt of several samples once, as packed batches do
    (verl/models/packing.py)."""

    num_prompts: int
    samples: int
    prompt_mean: float
    response: Lengths
    updates: int = 1
    epochs: int = 1
    prompt_longest: float = 0.0
    shares_prompts: bool = False
    image_tokens: float = 0.0  # of a prompt, on average
    kv_cache_dtype: str = "auto"

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.samples

    @property
    def longest(self) -> float:
        """The longest sequence, prompt and response."""
        return max(self.prompt_longest, self.prompt_mean) + self.response.longest

    @property
    def batch(self) -> SequenceBatch:
        """All sequences of the step; if prompts are shared, each is computed once."""
        return self._batch(self.samples if self.shares_prompts else 1)

    def computed(self, data: int, micro_batch: float, updates: int = 1) -> SequenceBatch:
        """All sequences of the step as `data` data parallel ranks compute them in micro-batches of `micro_batch` tokens (0: one
        for each rank). The samples of a prompt stay on one rank, unless an optimizer step has fewer prompts than ranks, and in
        one micro-batch as far as they fit; each further one computes the prompt again (verl/engines/micro_batches.py)."""
        if not self.shares_prompts or data > self.num_prompts / updates:
            return self._batch(1)
        sharing = float(self.samples)
        if micro_batch:
            fitting = max(1, int((micro_batch - self.prompt_mean) / self.response.mean + 1e-9))
            sharing /= math.ceil(sharing / fitting)
        return self._batch(sharing)

    def _batch(self, sharing: float) -> SequenceBatch:
        """All sequences; `sharing` samples have the prompt of one."""
        p, r, share = self.prompt_mean, self.response, 1 / sharing
        square = share * p * p + 2 * p * r.mean + r.mean_square
        return SequenceBatch(self.num_samples, share * p + r.mean, square, share * self.image_tokens)


class SequenceBatch(NamedTuple):
    """`num` sequences of `mean` tokens. Their squares have the mean `square`; a tower computes `image_tokens` of each."""

    num: float
    mean: float
    square: float
    image_tokens: float = 0.0

    @classmethod
    def equal(cls, num: float, length: float) -> SequenceBatch:
        return cls(num, length, length * length)

    @property
    def tokens(self) -> float:
        return self.num * self.mean

    @property
    def attended(self) -> float:
        """The length of equal sequences with as many tokens and the same cost of attention."""
        return self.square / self.mean
