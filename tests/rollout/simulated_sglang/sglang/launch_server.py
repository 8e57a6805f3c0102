"""`python -m sglang.launch_server --model-path P --port N ...` answers as the recorded server does.

VERL_TEST_SGLANG names the file into which it writes its arguments. If the file holds "fail", the server ends with an error.
"""

import json
import os
import sys
from pathlib import Path

from tests.rollout.service import Service


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


class SimulatedServer:
    """Its samples say which weights it holds: the number of tensors that it was given last."""

    def __init__(self, model):
        self.model, self.version, self.num_updates = model, "default", 0
        self.released, self.is_busy = [], False

    def info(self, body):
        return {"model_path": self.model, "weight_version": self.version}

    def release(self, body):
        assert not self.released
        self.released = body["tags"]

    def resume(self, body):
        assert body["tags"] == self.released
        self.released = []

    def flush(self, body):
        """Refused the first time, as while requests run."""
        self.is_busy = not self.is_busy
        return (400, "pending requests") if self.is_busy else (200, "Cache flushed.\n")

    def update(self, body):
        assert not self.released
        assert list(Path(body["model_path"]).glob("*.safetensors"))
        self.num_updates += 1
        return {"success": True}

    def label(self, body):
        self.version = body["new_version"]
        return {"success": True}

    def generate(self, body):
        assert not self.released
        rows = [[-0.5, body["input_ids"][-1], None], [-0.25, self.num_updates, None]]
        return {
            "meta_info": {
                "finish_reason": {"type": "length"}, "output_token_logprobs": rows, "weight_version": self.version,
            }
        }  # fmt: skip


def main():
    note, arguments = Path(os.environ["VERL_TEST_SGLANG"]), options(sys.argv[1:])
    if note.exists() and note.read_text() == "fail":
        sys.exit("no kernel for this device")
    note.write_text(json.dumps({**arguments, "pid": os.getpid(), "seen": os.environ.get("CUDA_VISIBLE_DEVICES")}))
    server = SimulatedServer(arguments["--model-path"])
    answers = {
        "/health": {},
        "/model_info": server.info,
        "/abort_request": (200, ""),
        "/flush_cache?timeout=30": server.flush,
        "/release_memory_occupation": lambda body: server.release(body) or {},
        "/resume_memory_occupation": lambda body: server.resume(body) or {},
        "/simulated_memory": lambda body: {"released": server.released},
        "/generate": server.generate,
        "/update_weights_from_disk": server.update,
        "/update_weight_version": server.label,
    }
    Service(answers, int(arguments["--port"])).server.serve_forever(poll_interval=0.01)


if __name__ == "__main__":
    main()
