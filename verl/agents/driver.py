"""The driver of episodes: many agents at once over one open generation.

    event loop (a thread)                     driver (the thread of the rank)
    episode: await generate(tokens) ──queue──► generation.add
             await tool              ◄─future─ generation.poll
             result                  ──queue──► on_finish, keys aborted

An episode that waits for a tool has no row of the batch: running ones decode meanwhile, and its turn joins at the next step.
Only the driver computes, so an engine needs no lock.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from verl.agents.episode import CURRENT, AgentKilled, Episode, EpisodeError, EpisodeResult, EpisodeTask
from verl.agents.results import failed
from verl.config import full_key
from verl.data_proto.samples import Completion, PromptRequest, SampleKey, SamplingParams, TurnRequest
from verl.errors import DeadlineError, ModelError
from verl.foreign_text import clean
from verl.rollout.api import Generation, RolloutEngine, Stats

T = TypeVar("T")
log = logging.getLogger(__name__)

GATHER_S = 0.05  # longest wait for the first turns of all episodes; these turns share their prompts
POLL_S = 0.002  # while another episode may ask for its next turn
CLOSE_TIMEOUT_S = 5.0
MAX_NAMED = 5  # failed episodes of one run that the log names; the journal has all
MAX_TAKES = 3  # of an episode with an agent that is killed from outside
GRACE_S = 60.0  # beyond an episode's own time limit, before the event loop is taken for stuck

RunEpisode = Callable[[Episode], Awaitable[EpisodeResult]]
OnResult = Callable[[EpisodeResult], None]


@dataclass
class _Asked:
    request: PromptRequest | TurnRequest
    answer: asyncio.Future[Completion]

    @property
    def key(self) -> SampleKey:
        request = self.request
        return request.ordinal, request.sample if isinstance(request, TurnRequest) else request.first_sample


class _FailedTake(Exception):
    """An episode has failed and is made again."""


@dataclass
class _Ended:
    index: int
    episode: Episode
    result: EpisodeResult


@dataclass
class _Dropped:
    """An episode that is made again."""

    episode: Episode
    answer: asyncio.Future[Any]


class EventLoop:
    """An event loop on its own thread, until the process ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self.thread.start()

    def start(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine there; returns its concurrent future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        if not self.thread.is_alive():
            return
        with contextlib.suppress(
            concurrent.futures.TimeoutError
        ):  # an agent that blocks the loop ends with the process
            self.start(self._cancel_all()).result(CLOSE_TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CLOSE_TIMEOUT_S)
        if not self.thread.is_alive():
            self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):  # of an agent's code: its task has ended, and the loop continues
                log.debug("An episode tried to end the process", exc_info=True)


_Event = _Asked | _Ended | _Dropped


class EpisodeDriver:
    """Runs episodes with one engine. At most `max_episodes` are in progress, each for at most `timeout_s` seconds. One that
    fails is made again `num_retries` times. `filler` is the token of a response that could not be made."""

    def __init__(
        self, engine: RolloutEngine, events: EventLoop, *, max_episodes: int, timeout_s: float, filler: int,
        num_retries: int = 0,
    ):  # fmt: skip
        self.engine, self.events, self.num_retries = engine, events, num_retries
        self.max_episodes, self.timeout_s, self.filler = max_episodes, timeout_s, filler
        self.stats: Stats = {}

    def run(
        self,
        tasks: Sequence[EpisodeTask],
        run_episode: RunEpisode,
        params: SamplingParams,
        *,
        step: int,
        on_finish: OnResult | None = None,
    ) -> list[EpisodeResult]:
        """The result of each task, in order. `on_finish` gets each as soon as it ends. An episode that fails has an `error`;
        raises NumericsError and ModelError of the engine, and DeadlineError when no episode answers any more."""
        if not tasks:
            return []
        generation = self.engine.open(replace(params, n=1), step=step, keep=True)
        session = _Session(self, generation, tasks, run_episode)
        work = self.events.start(session.run_all())
        try:
            results = session.drive(on_finish)
            if (more := session.num_failed - MAX_NAMED) > 0:
                log.warning("So are %d more episodes of this step; episodes/ of the run folder has the reasons.", more)
            return results
        finally:
            work.cancel()
            self.stats = {**generation.close(), **session.times()}


class _Session:
    """One `run`."""

    def __init__(
        self, driver: EpisodeDriver, generation: Generation, tasks: Sequence[EpisodeTask], run_episode: RunEpisode
    ):
        self.driver, self.generation, self.tasks, self.run_episode = driver, generation, tasks, run_episode
        self.inbox: queue.SimpleQueue[_Asked | _Ended | _Dropped] = queue.SimpleQueue()
        self.waiting: dict[SampleKey, _Asked] = {}
        self.live: dict[int, Episode] = {}
        self.busy_s = self.idle_s = 0.0
        self.num_failed = self.num_retried = 0

    # -- on the event loop

    async def run_all(self) -> None:
        """All episodes, each started as an earlier one ends."""
        slots = asyncio.Semaphore(self.driver.max_episodes)

        async def one(index: int) -> None:
            async with slots:
                await self._run_one(index)

        await asyncio.gather(*(one(index) for index in range(len(self.tasks))))

    async def _run_one(self, index: int) -> None:
        num_kills, num_retries = MAX_TAKES - 1, self.driver.num_retries
        while True:
            try:
                return await self._take_one(index, is_last=not num_kills, may_fail=num_retries > 0)
            except (AgentKilled, _FailedTake) as error:
                killed = isinstance(error, AgentKilled)
                num_kills, num_retries = num_kills - killed, num_retries - (not killed)
                log.warning("Episode %s is made again: %s.", self.tasks[index].name, str(error).removesuffix("."))
                self.num_retried += not killed
                await self._drop(self.live[index])

    async def _drop(self, episode: Episode) -> None:
        """Return when the engine has forgotten the episode's samples, so that they can be made again."""
        episode.is_dropped = True
        dropped = _Dropped(episode, asyncio.get_running_loop().create_future())
        self.inbox.put(dropped)
        await dropped.answer

    async def _take_one(self, index: int, *, is_last: bool, may_fail: bool) -> None:
        """Run an episode and hand in its result. Raises AgentKilled unless `is_last`, and if it `may_fail`, _FailedTake for one
        that fails and can be made again."""
        task = self.tasks[index]
        episode = self.live[index] = Episode(task, self._submit)
        CURRENT.set(episode)
        agent = asyncio.ensure_future(self.run_episode(episode))
        episode.end_agent = agent.cancel
        why = None
        try:
            result = await asyncio.wait_for(agent, self.driver.timeout_s)
        except asyncio.TimeoutError:
            limit = self.driver.timeout_s
            may_fail = False  # what it left behind may still act
            why = f"took longer than {full_key('rollout.agent.episode_timeout_s')}={limit:g} s"
        except asyncio.CancelledError:
            if not episode.is_paused:
                raise
        except EpisodeError as error:
            if isinstance(error, AgentKilled) and not is_last:
                raise
            why = str(error)
        except (Exception, SystemExit) as error:  # agents are code of the user's and may raise anything
            why = f"raised {type(error).__name__}: {clean(error, 300)}"
            log.debug("Episode %s", task.name, exc_info=True)
        if why is not None and may_fail and not episode.is_paused and not episode.num_unrecorded:
            raise _FailedTake(why)
        if episode.is_paused:  # also if its agent raised at its end
            result = EpisodeResult(task, episode.so_far())
        elif why is not None:
            self.num_failed += 1
            level = logging.WARNING if self.num_failed <= MAX_NAMED else logging.DEBUG
            log.log(level, "Episode %s is left out: %s.", task.name, why.removesuffix("."))
            result = failed(task, why, self.driver.filler, self.driver.engine.weight_version)
        self.inbox.put(_Ended(index, episode, result))

    async def _submit(self, episode: Episode, request: PromptRequest | TurnRequest) -> Completion:
        call = _Asked(request, asyncio.get_running_loop().create_future())
        if not episode.is_dropped:  # else it is a late call of a killed agent, without an answer
            self.inbox.put(call)
        return await call.answer

    # -- on the driver's thread

    def drive(self, on_finish: OnResult | None) -> list[EpisodeResult]:
        results: dict[int, EpisodeResult] = {}
        arrived = self._first_wave()
        while True:
            for ended in self._take(arrived):
                results[ended.index] = ended.result
                if on_finish is not None:
                    on_finish(ended.result)
            if len(results) == len(self.tasks):
                return [results[index] for index in range(len(self.tasks))]
            if self.waiting:
                self._poll()
            arrived = self._arrived(block=not self.waiting)

    def times(self) -> Stats:
        """Seconds of computing by the engine, and of waiting for something else by all episodes."""
        return {"busy_s": self.busy_s, "idle_s": self.idle_s, "num_retried_episodes": self.num_retried}

    def _first_wave(self) -> list[_Event]:
        count, until = min(len(self.tasks), self.driver.max_episodes), time.monotonic() + GATHER_S
        events = self._arrived(block=True)
        while len(events) < count and time.monotonic() < until:
            time.sleep(0.001)
            events += self._arrived(block=False)
        return events

    def _arrived(self, *, block: bool) -> list[_Event]:
        events: list[_Event] = []
        if block:
            started_at, limit = time.perf_counter(), self.driver.timeout_s + GRACE_S
            try:
                events.append(self.inbox.get(timeout=limit))
            except queue.Empty:
                names = ", ".join(episode.task.name for episode in list(self.live.values())[:5])
                raise DeadlineError(
                    f"No episode has asked for a turn or ended for {limit:.0f} s. In progress: {names}. An agent loop blocks "
                    "the event loop, for example by time.sleep in an async function; await instead, or use a plain function."
                ) from None
            self.idle_s += time.perf_counter() - started_at
        while True:
            try:
                events.append(self.inbox.get_nowait())
            except queue.Empty:
                return events

    def _take(self, arrived: list[_Event]) -> list[_Ended]:
        """Hand requests to the generation, and drop the samples of episodes that have ended; returns the latter."""
        calls = [event for event in arrived if isinstance(event, _Asked) and not event.answer.cancelled()]
        for request, members in _merged(calls):
            try:
                self.generation.add(request)
            except ModelError as error:
                for member in members:
                    self._answer(member, error)
            else:
                self.waiting.update({member.key: member for member in members})
        for event in arrived:
            if not isinstance(event, _Asked):
                self._forget(event.episode)
            if isinstance(event, _Dropped):
                self._answer(event, None)
        ended = [event for event in arrived if isinstance(event, _Ended)]
        for event in ended:
            self.live.pop(event.index, None)
        return ended

    def _forget(self, episode: Episode) -> None:
        keys = episode.keys()
        self.generation.abort(keys)
        for key in keys:
            self.waiting.pop(key, None)

    def _poll(self) -> None:
        others_wait = len(self.live) > len(self.waiting)
        started_at = time.perf_counter()
        for done in self.generation.poll(POLL_S if others_wait else None):
            self._answer(self.waiting.pop(done.key), done)
        self.busy_s += time.perf_counter() - started_at

    def _answer(self, request: _Asked | _Dropped, value: Any) -> None:
        def set_answer() -> None:
            if request.answer.done():
                return  # the episode was cancelled
            if isinstance(value, Exception):
                request.answer.set_exception(value)
            else:
                request.answer.set_result(value)

        self.driver.events.loop.call_soon_threadsafe(set_answer)


def _merged(requests: list[_Asked]) -> list[tuple[PromptRequest | TurnRequest, list[_Asked]]]:
    """Requests for the engine: samples of one prompt that begin together are one request, so its prompt is computed once."""
    merged: list[tuple[PromptRequest | TurnRequest, list[_Asked]]] = []
    for one in sorted(requests, key=lambda a: a.key):
        last = merged[-1][0] if merged else None
        request = one.request
        if (
            isinstance(last, PromptRequest)
            and isinstance(request, PromptRequest)
            and (last.ordinal, last.token_ids, last.max_new_tokens, last.spans, last.stop, last.grammar)
            == (
                request.ordinal,
                request.token_ids,
                request.max_new_tokens,
                request.spans,
                request.stop,
                request.grammar,
            )
            and request.first_sample == last.first_sample + (last.num_samples or 1)
        ):
            merged[-1] = (replace(last, num_samples=(last.num_samples or 1) + 1), [*merged[-1][1], one])
        else:
            merged.append((request, [one]))
    return merged
