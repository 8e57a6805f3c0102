"""A vLLM simulated by the native engine in a separate process that dies on request.

`python -m tests.rollout.stand_in key=value ...` is `verl train` with it. VERL_TEST_LOST="generate 2 FILE": it is killed in its
second generation after its first samples, and then FILE is written, so that this happens once ("update 2 FILE": with a bucket).
VERL_TEST_STARTS=FILE gets a line for each start.
"""

import json
import os
import signal
import sys
from pathlib import Path

from benchmarks.chaos.chaos_engine import NativeCore
from verl.rollout.vllm.core import Setup


class StandIn(NativeCore):
    def __init__(self, setup):
        if "VERL_TEST_STARTS" in os.environ:
            size = setup.llm["tensor_parallel_size"]
            with Path(os.environ["VERL_TEST_STARTS"]).open("a") as file:
                file.write(json.dumps({"parent": os.getppid(), "tensor_parallel_size": size}) + "\n")
        super().__init__(setup)
        self.counts, self.num_ended = {"generate": 0, "update": 0}, 0

    def open(self, params, step):
        self.counts["generate"] += 1
        super().open(params, step)

    def poll(self, timeout_s):
        ended = super().poll(timeout_s)
        if self.num_ended:  # the first samples have been returned
            self._perhaps_die("generate")
        self.num_ended += len(ended)
        return ended

    def close_generation(self):
        self.num_ended = 0
        return super().close_generation()

    def begin_update(self):
        self.counts["update"] += 1
        super().begin_update()

    def update(self, bucket):
        super().update(bucket)
        self._perhaps_die("update")

    def _perhaps_die(self, what):
        moment, number, file = os.environ.get("VERL_TEST_LOST", "never 0 .").split(" ", 2)
        if what == moment and self.counts[what] == int(number) and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def start(setup):
    return StandIn(Setup(**setup))


def main():
    import verl.cli.train
    from verl.cli.main import run_verb

    train = verl.cli.train._train

    def with_stand_in(loaded, restarted=False):
        from verl.rollout.vllm.engine import VLLMRollout

        VLLMRollout.factory = "tests.rollout.stand_in:start"
        return train(loaded, restarted)

    verl.cli.train._train = with_stand_in
    return run_verb("train", sys.argv[1:], whole_process=True)


if __name__ == "__main__":
    raise SystemExit(main())
