"""A vLLM that is played by the native engine in a process of its own, and that dies when it is told to.

`python -m tests.rollout.stand_in key=value ...` is `verl train` with it. VERL_TEST_LOST="generate 2 FILE": it is killed in its
second generation after the first sample, and then FILE is written, so that this happens once ("update 2 FILE": with a bucket).
VERL_TEST_STARTS=FILE gets a line for each start.
"""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path


class StandIn:
    """The methods of verl.rollout.vllm.core.Core."""

    def __init__(self, setup):
        import torch

        from verl.config import RolloutConfig
        from verl.models.load import load_causal_lm
        from verl.rollout.api import ENGINES
        from verl.rollout.vllm.core import _tokenizer

        if "VERL_TEST_STARTS" in os.environ:
            size = setup.llm["tensor_parallel_size"]
            with Path(os.environ["VERL_TEST_STARTS"]).open("a") as file:
                file.write(json.dumps({"parent": os.getppid(), "tensor_parallel_size": size}) + "\n")
        self.module = load_causal_lm(setup.llm["model"], dtype=getattr(torch, setup.llm["dtype"])).requires_grad_(False)
        self.native = ENGINES.get("native")(
            self.module, _tokenizer(setup), RolloutConfig(max_num_seqs=4), eos_token_ids=setup.eos_token_ids
        )
        self.counts = {"generate": 0, "update": 0}

    def generate(self, prompts, params, *, step, on_finish, on_step):
        self.counts["generate"] += 1

        def told(done):
            on_finish(done)
            self._perhaps_die("generate")

        self.native.generate(prompts, params, step=step, on_finish=told)
        return self.native.stats()

    def begin_update(self):
        from verl.rollout.vllm.weights import Manifest

        self.counts["update"] += 1
        self.manifest, self.left = Manifest(), dict(self.module.named_parameters())

    def update(self, bucket):
        from verl.reshard.shared_memory import read

        for name, tensor in read(bucket):
            self.left.pop(name).copy_(tensor)
        self.manifest.add(bucket)
        self._perhaps_die("update")

    def finish_update(self, manifest):
        assert manifest == self.manifest.digest
        assert not self.left
        self.native.publish(self.counts["update"])

    def abandon_update(self):
        pass

    def sleep(self):
        self.native.release()

    def _perhaps_die(self, what):
        moment, number, file = os.environ.get("VERL_TEST_LOST", "never 0 .").split(" ", 2)
        if what == moment and self.counts[what] == int(number) and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def start(setup):
    from verl.rollout.vllm.core import Setup
    from verl.rollout.vllm.process import ServedCore

    return ServedCore(StandIn(Setup(**setup)))


def main():
    import verl.cli.train
    from verl.cli.main import run_verb

    train = verl.cli.train._train

    def with_stand_in(loaded):
        from verl.rollout.vllm import engine

        engine.require_vllm = lambda: None
        engine.RemoteCore = partial(engine.RemoteCore, factory="tests.rollout.stand_in:start")
        return train(loaded)

    verl.cli.train._train = with_stand_in
    return run_verb("train", sys.argv[1:], whole_process=True)


if __name__ == "__main__":
    raise SystemExit(main())
