"""One episode: the turns of an agent on one sample, with the provenance of every token.

A branch is a sequence of tokens that grows turn by turn. A call continues it if its prompt begins with these tokens,
and the engine keeps its computed state. Any other call begins a new branch. A branch is the unit of training: its sampled
tokens carry their log-probs and weight version at sampling, all further tokens are context.

An episode may pause while the weights change (`EpisodeTask.part`). Then it is repeated from its beginning. The agent acts as
before: its turns are answered with the sampled tokens (`EpisodeTask.so_far`), its tools with their recorded results.
The episode continues after a pause as it does after a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import itertools
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from verl.data.schema import Messages
from verl.data_proto.media import Media, MediaSpan, Spans, images_in
from verl.data_proto.samples import Completion, FinishReason, PromptRequest, TurnRequest
from verl.data_proto.token_ids import num_common, token_ids, token_mask
from verl.data_proto.trajectory import Segment, Status, Trajectory
from verl.errors import DataError, VerlError

SAMPLE_BITS = 20  # of a sample's number; the bits above number its branches
CURRENT: contextvars.ContextVar[Episode] = contextvars.ContextVar("episode")

Submit = Callable[["Episode", PromptRequest | TurnRequest], Awaitable[Completion]]


class EpisodeError(VerlError):
    """An episode cannot continue: it has no score and does not train. The run continues."""


class AgentKilled(EpisodeError):
    """The process of an agent was killed from outside: the episode is made again from its beginning."""


@dataclass(frozen=True)
class EpisodeTask:
    """A sample to make: the row and its prompt. `limit` bounds the response, tool output included. After `part` sampled tokens
    (None: any number) it pauses; `so_far` is what earlier parts have made. `stop_token_ids` end a turn."""

    ordinal: int
    sample: int
    step: int
    split: str
    prompt_ids: tuple[int, ...]
    row: dict[str, Any]
    limit: int
    max_prompt_length: int
    part: int | None = None
    so_far: Trajectory | None = None
    stop_token_ids: frozenset[int] = frozenset()
    vocab_size: int = 1 << 31
    media: Media | None = None  # images of the prompt
    image_marks: Mapping[str, int] = field(default_factory=dict)  # tokens of parts of images: text -> id

    @property
    def name(self) -> str:
        """As in messages: train/7/0."""
        return f"{self.split}/{self.ordinal}/{self.sample}"


@dataclass(eq=False)
class Branch:
    """A sequence of tokens and how each came about. `number` names it to the engine.

    >>> branch = Branch(number=0, num_prompt=2, tokens=[1, 2], sampled=[False] * 2, log_probs=[0.0] * 2, versions=[-1] * 2)
    >>> branch.add([5, 6], log_probs=[-0.1, -2.0], version=3)
    >>> branch.versions
    [-1, -1, 3, 3]
    """

    number: int
    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # 0 if not sampled
    versions: list[int] = field(default_factory=list)  # -1 if not sampled
    is_kept: bool = False  # the engine can continue it; else it gets all of its tokens again
    is_busy: bool = False
    spans: Spans = ()  # its images, at places from its first token

    @classmethod
    def of(cls, trajectory: Trajectory) -> Branch:
        branch = cls(trajectory.sample, len(trajectory.prompt_ids))
        branch.add(trajectory.prompt_ids, None, -1)
        for segment in trajectory.segments:
            log_probs = None if segment.log_probs is None else segment.log_probs.tolist()
            branch.add(segment.token_ids.tolist(), log_probs, segment.weight_version)
        return branch

    def copy(self, other: Branch, end: int) -> None:
        """Append the tokens of another branch from its own length on, up to `end`."""
        taken = slice(len(self.tokens), end)
        self.tokens += other.tokens[taken]
        self.sampled += other.sampled[taken]
        self.log_probs += other.log_probs[taken]
        self.versions += other.versions[taken]

    def add(self, tokens: Sequence[int], log_probs: Sequence[float] | None, version: int) -> None:
        """Append tokens; `log_probs` is None for tokens that were not sampled."""
        self.tokens += tokens
        self.sampled += [log_probs is not None] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs
        self.versions += [version if log_probs is not None else -1] * len(tokens)


@dataclass
class EpisodeResult:
    """The outcome of an episode. `reward` None: the reward function scores it. `extra` reaches the reward function."""

    task: EpisodeTask
    trajectory: Trajectory
    reward: float | None = None
    extra: dict[str, object] = field(default_factory=dict)
    num_turns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    branches: list[Trajectory] = field(default_factory=list)  # further conversations that train
    conversations: list[Messages] = field(default_factory=list)  # all further ones
    num_sampled: int = 0  # tokens of all of them


class Episode:
    """The state of one episode, used only on the event loop. `submit` sends a request to the engine."""

    def __init__(self, task: EpisodeTask, submit: Submit):
        self.task = task
        self.branches: list[Branch] = []
        self.num_calls = self.num_unrecorded = (
            0  # of tools; without a record, so that a repetition would call them again
        )
        self.generate_s = 0.0
        self.messages: Messages = []
        self.conversations: dict[int, Messages] = {}  # by the number of their branch
        self.unread: Mapping[int, int] = {}  # branch -> its length without an answer that does not count
        self.tool_results: list[Any] = []
        self.faults: Counter[str] = Counter()  # calls by what kept them from running
        self.is_paused = self.is_dropped = False
        self.end_agent: Callable[[], object] = lambda: None  # cancels the agent; set by the driver
        self._submit = submit
        self._num_left = task.part
        self._past = None if task.so_far is None else Branch.of(task.so_far)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int | None = None,
        *,
        is_first: bool | None = None,
        media: Sequence[Media] | None = None,
        stop: tuple[str, ...] = (),
        grammar: str = "",
    ) -> Completion | None:
        """Sample the tokens after `prompt_ids`, with `media` in this order in them (None: the images of the row); None when
        the response of the episode is full. `is_first`: whether a new branch has the random numbers of the sample itself (None:
        the first one has). The turn ends with one of `stop`, and follows the JSON schema `grammar`. Raises EpisodeError for a
        prompt that is too long or has other images, ModelError for tokens that the model does not know. Does not return if the
        episode pauses."""
        prompt = self._token_ids(prompt_ids, "prompt_ids")
        media = images_in(self.task.media) if media is None else media
        branch = self._continued(prompt, media) or self._begin(prompt, is_first, media)
        room = self.task.limit - (len(prompt) - branch.num_prompt)
        room -= max(0, branch.num_prompt - self.task.max_prompt_length)
        if room <= 0:
            return None
        num_new = min(room, max_new_tokens or room)
        branch.spans += self._placed(prompt, len(branch.tokens), media[len(branch.spans) :])
        branch.is_busy = True
        if len(self.branches) > 1 or (branch.tokens and len(prompt) == len(branch.tokens)):
            # tokens show the turns only in a single branch, with other tokens between the turns
            self._num_left = None
        reason = self._repeat(branch, prompt, num_new)
        while reason is None:
            rules = {"stop": stop, "grammar": grammar}
            done = await self._sample(branch, prompt[len(branch.tokens) :], len(prompt) + num_new, rules)
            if done.finish_reason != "length" or len(branch.tokens) == len(prompt) + num_new:
                reason = done.finish_reason
        branch.is_busy = False
        start = len(prompt)
        tokens, log_probs = branch.tokens[start:], branch.log_probs[start:]
        return Completion(self.task.ordinal, branch.number, tokens, log_probs, reason, max(branch.versions[start:]))

    def _repeat(self, branch: Branch, prompt: list[int], max_tokens: int) -> FinishReason | None:
        """Answer a turn with its earlier tokens. Returns the finish reason; None for a turn that continues or is new."""
        past, start = self._past, len(prompt)
        if past is None:
            return None
        stop, end = start, min(len(past.tokens), start + max_tokens)
        while stop < end and past.sampled[stop]:
            stop += 1
        is_last = stop == len(past.tokens)
        added = past.sampled[len(branch.tokens) : start]
        if (
            branch is not self.branches[0]
            or past.tokens[:start] != prompt
            or any(added)
            or (stop == start and not is_last)
        ):
            raise EpisodeError(
                "its agent did not do again what it had done before it paused or was cut by a kill. Agents and environments "
                "must be functions of their row, the model's turns and the results of tools"
            )
        branch.copy(past, stop)
        if is_last:
            self._past = None
        if stop - start == max_tokens:
            return "stop" if past.tokens[stop - 1] in self.task.stop_token_ids else "length"
        return None if is_last else "stop"

    async def _sample(self, branch: Branch, new: list[int], end: int, rules: Mapping[str, Any]) -> Completion:
        """Sample behind a branch and `new`, up to `end` tokens in all, by the `rules` of a request. Pauses if the part is used
        up."""
        num_new = end - len(branch.tokens) - len(new)
        if self._num_left is not None:
            num_new = min(num_new, self._num_left)
        if num_new == 0:
            branch.add(new, None, -1)
            self.is_paused = True
            self.end_agent()
            await asyncio.get_running_loop().create_future()  # until the agent is cancelled
        started_at = time.perf_counter()
        request: PromptRequest | TurnRequest
        if branch.is_kept:
            start = len(branch.tokens)
            spans = tuple(span.moved(-start) for span in branch.spans if span.start >= start)
            request = TurnRequest(self.task.ordinal, branch.number, tuple(new), num_new, spans, **rules)
        else:
            tokens = (*branch.tokens, *new)
            num_drawn = len(tokens) - branch.num_prompt
            request = PromptRequest(
                self.task.ordinal, tokens, branch.number, num_drawn, 1, num_new, spans=branch.spans, **rules
            )
        done = await self._submit(self, request)
        self.generate_s += time.perf_counter() - started_at
        branch.is_kept = True
        branch.add(new, None, -1)
        branch.add(done.token_ids, done.log_probs, done.weight_version)
        if self._num_left is not None:
            self._num_left -= len(done.token_ids)
        return done

    def _continued(self, prompt: list[int], media: Sequence[Media]) -> Branch | None:
        """The longest branch with tokens and images that begin a prompt."""
        fitting = [
            b
            for b in self.branches
            if b.tokens
            and not b.is_busy
            and prompt[: len(b.tokens)] == b.tokens
            and [span.media for span in b.spans] == list(media[: len(b.spans)])
        ]
        return max(fitting, key=lambda b: len(b.tokens), default=None)

    def _token_ids(self, ids: Sequence[int], name: str) -> list[int]:
        with _as_episode_error():
            checked: list[int] = token_ids(ids, name, self.task.vocab_size).tolist()
        return checked

    def _placed(self, prompt: list[int], start: int, media: Sequence[Media]) -> Spans:
        """The images `media` at the tokens from `start` on that stand for them. Raises EpisodeError for other tokens."""
        marks = self.task.image_marks
        places = [at for at in range(start, len(prompt)) if prompt[at] in marks.values()]
        pattern = "|".join(map(re.escape, marks))
        parts = [[marks[mark] for text in item.texts for mark in re.findall(pattern, text)] for item in media if marks]
        if [*itertools.chain(*parts)] != [prompt[at] for at in places]:
            raise EpisodeError(
                f"its prompt has {len(places)} new tokens that stand for parts of images, and its new images have "
                f"{sum(map(len, parts))}, or others. Render messages with apply_chat_template, and give generate all images up "
                "to them, in their order"
            )
        ends = np.cumsum([0, *map(len, parts)])
        return tuple(
            MediaSpan(places[first], places[end - 1] + 1 - places[first], images)
            for images, first, end in zip(media, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        )

    def _begin(self, prompt: list[int], is_first: bool | None, media: Sequence[Media]) -> Branch:
        task = self.task
        if not prompt:
            raise EpisodeError("it asked for tokens after an empty prompt")
        if len(prompt) > task.max_prompt_length + task.limit or (
            not self.branches and len(prompt) > task.max_prompt_length
        ):
            raise EpisodeError(
                f"its prompt has {len(prompt)} tokens, more than data.max_prompt_length={task.max_prompt_length} allows"
            )
        first = not self.branches if is_first is None else is_first
        taken = {branch.number for branch in self.branches}
        number, count = task.sample, 0
        while not first or number in taken:
            # of the prompt and not of the order of the calls: it may depend on time
            content = np.asarray([count, *prompt], dtype="<i8").tobytes()
            content += "".join(images.digest for images in media).encode()
            digest = int.from_bytes(hashlib.blake2b(content, digest_size=5).digest(), "little")
            number, first, count = task.sample | ((digest + 1) << SAMPLE_BITS), True, count + 1
        self.branches.append(Branch(number, len(prompt)))
        return self.branches[-1]

    def keys(self) -> list[tuple[int, int]]:
        """Names of its branches to the engine."""
        return [(self.task.ordinal, branch.number) for branch in self.branches]

    def digest(self) -> str:
        state = hashlib.blake2b(digest_size=12)
        for branch in sorted(self.branches, key=lambda b: b.number):
            state.update(np.asarray([branch.number, *branch.tokens], dtype="<i8").tobytes())
            state.update("".join(span.media.digest for span in branch.spans).encode())
        return state.hexdigest()

    # -- what trains

    def so_far(self) -> Trajectory:
        branch = self.branches[0]
        start = branch.num_prompt
        return self.trajectory(branch.tokens[:start], branch.tokens[start:], branch.sampled[start:], "length")

    def further(self, trained: Trajectory) -> list[Trajectory]:
        """The conversations with sampled tokens, without the conversation of `trained`, in the order of their numbers. Tokens
        of a prompt beyond the longest prompt become context of the response."""
        sequence = [*trained.prompt_ids, *trained.response_ids]
        main = max(self.branches, key=lambda branch: num_common(branch.tokens, sequence))
        trajectories = []
        for branch in sorted(self.branches, key=lambda branch: branch.number):
            start, end = (
                min(branch.num_prompt, self.task.max_prompt_length),
                self.unread.get(branch.number, len(branch.tokens)),
            )
            if branch is main or not any(branch.sampled[start:end]):
                continue
            mask = [int(sampled) for sampled in branch.sampled[start:end]]
            one = self.trajectory(branch.tokens[:start], branch.tokens[start:end], mask, "stop")
            trajectories.append(replace(one, messages=self.conversations.get(branch.number, [])))
        return trajectories

    def trajectory(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], mask: Sequence[int], status: Status
    ) -> Trajectory:
        """The trajectory of a response; its tokens with mask 1 train. Raises EpisodeError if a token would train that was
        not sampled at its place."""
        prompt_ids, response_ids = (
            self._token_ids(ids, name) for name, ids in (("prompt_ids", prompt_ids), ("response_ids", response_ids))
        )
        sequence, start = [*prompt_ids, *response_ids], len(prompt_ids)
        with _as_episode_error():
            mask = token_mask(mask, "response_mask", len(response_ids)).tolist()
        matching = [(num_common(branch.tokens, sequence), branch) for branch in self.branches]
        length, branch = max(matching, key=lambda match: match[0], default=(0, Branch(0, 0)))
        sampled = branch.sampled[:length] + [False] * (len(sequence) - length)
        wrong = next((i for i, train in enumerate(mask) if train and not sampled[start + i]), None)
        if wrong is not None:
            raise EpisodeError(
                f"its response token {wrong} ({sequence[start + wrong]}) would train but was not sampled there: the agent loop "
                "has changed or tokenized again what the model wrote. Return the token ids of generate, and mask 0 elsewhere"
            )
        end = min(len(sequence), start + self.task.limit)
        media = tuple(s.moved(-start) for s in branch.spans if s.start + s.length <= min(length, end))
        result = Trajectory(self.task.ordinal, self.task.sample, tuple(prompt_ids), status=status, media=media)
        at, newest = start, next((v for v in branch.versions if v >= 0), 0)
        while at < end:
            kind = (bool(mask[at - start]), branch.versions[at] if at < length and mask[at - start] else -1)
            stop = at
            while (
                stop < end and (bool(mask[stop - start]), branch.versions[stop] if mask[stop - start] else -1) == kind
            ):
                stop += 1
            tokens = np.asarray(sequence[at:stop], dtype=np.int32)
            if kind[0]:
                log_probs = np.asarray(branch.log_probs[at:stop])
                newest = max(newest, kind[1])
                result.segments.append(Segment(tokens, log_probs, kind[1]))
            else:
                result.segments.append(Segment(tokens, None, newest, "environment"))
            at = stop
        return result


@contextlib.contextmanager
def _as_episode_error() -> Iterator[None]:
    """Turn a DataError about an agent's values into an EpisodeError."""
    try:
        yield
    except DataError as error:
        raise EpisodeError(f"its agent loop returned invalid values: {str(error).removesuffix('.')}") from error
