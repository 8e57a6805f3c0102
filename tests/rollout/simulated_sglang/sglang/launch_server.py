"""`python -m sglang.launch_server --model-path P --port N ...` answers as the recorded server does.

VERL_TEST_SGLANG names the file for its arguments. If the file holds "fail", the server ends with an error.
"""

import json
import os
import sys
from pathlib import Path

from tests.rollout.service import Service
from tests.rollout.sglang_service import SimulatedSGLang
from verl.registry import load_object

VOCABULARY = 264


def options(arguments):
    """{"--name": value}; True for a flag."""
    parsed = {}
    for word in arguments:
        if word.startswith("--"):
            name = word
            parsed[name] = True
        else:
            parsed[name] = word
    return parsed


class SimulatedServer(SimulatedSGLang):
    """Its samples tell the weights that it holds: after the last token of the prompt, how often it was given new ones."""

    def __init__(self, model, context_length):
        super().__init__(model, self.scripted, vocab_size=VOCABULARY, context_length=context_length, receive=self.take)
        self.released, self.is_busy = [], False

    def scripted(self, ids, position, params):
        return (self.num_updates, -0.25) if position else (ids[-1], -0.5)

    def take(self, message):
        """Weights are read and counted."""
        call = json.loads(message)
        assert "weights" not in self.released
        assert self.is_updating or call["step"] == "try"
        if "bucket" in call:
            self.num_read = len(list(load_object(call["reader"])(call["bucket"])))
        self.num_updates += call["step"] == "finish"

    def release(self, body):
        """As in SGLang, what is freed already would end the server."""
        assert not {*self.released} & {*body["tags"]}
        self.released += body["tags"]

    def resume(self, body):
        for tag in body["tags"]:
            self.released.remove(tag)

    def flush(self, body):
        """Refused the first time, as while requests run."""
        self.is_busy = not self.is_busy
        return (400, "pending requests") if self.is_busy else (200, "Cache flushed.\n")

    def generate(self, body):
        assert not self.released
        return super().generate(body)


def main():
    note, arguments = Path(os.environ["VERL_TEST_SGLANG"]), options(sys.argv[1:])
    if note.exists() and note.read_text() == "fail":
        sys.exit("no kernel for this device")
    note.write_text(json.dumps({**arguments, "pid": os.getpid(), "seen": os.environ.get("CUDA_VISIBLE_DEVICES")}))
    server = SimulatedServer(arguments["--model-path"], int(arguments["--context-length"]))
    answers = {
        **server.answers,
        "/abort_request": (200, ""),
        "/flush_cache?timeout=30": server.flush,
        "/release_memory_occupation": lambda body: server.release(body) or {},
        "/resume_memory_occupation": lambda body: server.resume(body) or {},
        "/simulated_memory": lambda body: {"released": server.released},
    }
    Service(answers, int(arguments["--port"])).server.serve_forever(poll_interval=0.01)


if __name__ == "__main__":
    main()
