"""A vLLM simulated by the native engine in a separate process, which dies on request.

`python -m tests.rollout.stand_in key=value ...` is `verl train` with it. VERL_TEST_LOST="generate 2 FILE": it is killed in its
second generation after its first samples, and then FILE is written, so that this happens once ("update 2 FILE": with a bucket).
VERL_TEST_STARTS=FILE gets a line for each start.
"""

import json
import os
import signal
import sys
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
        self.counts, self.num_ended = {"generate": 0, "update": 0}, 0

    def open(self, params, step):
        self.counts["generate"] += 1
        self.generation = self.native.open(params, step=step)

    def add(self, requests):
        for request in requests:
            self.generation.add(request)

    def poll(self, timeout_s):
        ended = self.generation.poll(timeout_s)
        if self.num_ended:  # the first samples have been returned
            self._perhaps_die("generate")
        self.num_ended += len(ended)
        return ended

    def abort(self, keys):
        self.generation.abort(keys)

    def close_generation(self):
        self.num_ended = 0
        return self.generation.close()

    def begin_update(self):
        from verl.rollout.vllm.weights import Manifest

        self.counts["update"] += 1
        self.manifest, self.left = Manifest(), dict(self.module.named_parameters())

    def update(self, bucket):
        from verl.reshard.shared_memory import read_shared_bucket

        for name, tensor in read_shared_bucket(bucket):
            self.left.pop(name).copy_(tensor)
        self.manifest.add(bucket)
        self._perhaps_die("update")

    def finish_update(self, manifest):
        assert manifest == self.manifest.digest
        assert not self.left
        self.native.publish(self.counts["update"])

    def abandon_update(self):
        pass

    def sleep(self, discards=False):
        self.native.release()

    def _perhaps_die(self, what):
        moment, number, file = os.environ.get("VERL_TEST_LOST", "never 0 .").split(" ", 2)
        if what == moment and self.counts[what] == int(number) and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def start(setup):
    from verl.rollout.vllm.core import Setup

    return StandIn(Setup(**setup))


def main():
    import verl.cli.train
    from verl.cli.main import run_verb

    train = verl.cli.train._train

    def with_stand_in(loaded):
        from verl.rollout.vllm.engine import VLLMRollout

        VLLMRollout.factory = "tests.rollout.stand_in:start"
        return train(loaded)

    verl.cli.train._train = with_stand_in
    return run_verb("train", sys.argv[1:], whole_process=True)


if __name__ == "__main__":
    raise SystemExit(main())
