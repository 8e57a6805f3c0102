"""Reward calls in the process of the run, one after the other, so that a breakpoint in a reward function works."""

from __future__ import annotations

import time
from bdb import BdbQuit
from collections.abc import Sequence
from concurrent.futures import Future

from verl.data_proto.samples import Score, ScoreRequest
from verl.rewards.pool import RewardPool, samples_of
from verl.rewards.worker import Caller, load_caller


class DebugPool(RewardPool):
    """Pool for `reward.debug=True`: `submit` makes each call on its thread, without sandbox, processes and time limits.

    The allowed return values are the same, and a call that raises costs its own sample. Leaving the debugger ends the run.
    """

    caller: Caller | None = None

    def start(self, data_sources: Sequence[str] = ()) -> None:
        if self.caller is None:
            self.caller = load_caller(self.function, sorted(set(data_sources)), self.limits)
            self.caller.raised = (BdbQuit, KeyboardInterrupt)

    def submit(self, requests: Sequence[ScoreRequest]) -> Future[list[Score]]:
        self.start()
        assert self.caller is not None
        future: Future[list[Score]] = Future()
        start = time.perf_counter()
        outcomes = self.caller.score(samples_of(requests))
        future.set_result(self.scores(requests, outcomes, time.perf_counter() - start))
        return future
