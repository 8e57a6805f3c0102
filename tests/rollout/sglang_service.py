"""A service with the rules of SGLang 0.5.23, for tests: ends of samples, room for tokens, its model's name, updates.

    with running(SimulatedSGLang("a/model", next_token, vocab_size).answers) as service: ...

`next_token(ids, position, params)` gives a token and its log-prob for the tokens so far, the number of sampled ones and
SamplingParams.
"""

import json
import math
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

from verl.data_proto.samples import SamplingParams
from verl.errors import ModelError

RESERVED = 6  # tokens of the context that an input never has
FLAT = 1e6  # at this temperature all tokens are equally likely


class SimulatedSGLang:
    """`eos_token_ids` are the model's, as the server knows them; `most_new` is its limit for one request. `receive(message)`
    takes weights as verl's part of a server does, and raises when it does not; None for a server without that part."""

    def __init__(
        self, path, next_token, vocab_size, context_length=1 << 20, eos_token_ids=(), most_new=1 << 20, original=False,
        receive=None,
    ):  # fmt: skip
        self.model_path = self.tokenizer_path = path
        self.next_token, self.vocab_size, self.context_length = next_token, vocab_size, context_length
        self.eos_token_ids, self.most_new, self.original = eos_token_ids, most_new, original
        self.version, self.num_updates, self.receive = "default", 0, receive
        self.is_updating = self.is_paused = False
        self.adapters, self.adapter_config = {}, None
        self.answers = {
            "/health": {},
            "/model_info": lambda body: self.info(),
            "/server_info": lambda body: {"max_req_input_len": self.context_length - RESERVED},
            "/generate": self.generate,
            "/update_weights_from_disk": self.update,
            "/update_weight_version": self.label,
            "/begin_weight_update": partial(self.open_session, True),
            "/end_weight_update": partial(self.open_session, False),
            "/update_weights_from_ipc": self.receive_weights,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/pause_generation": partial(self.pause, True),
            "/continue_generation": partial(self.pause, False),
            "/flush_cache": (200, "Cache flushed.\n"),
        }

    def restart(self):
        """Another process answers at the address, with the weights of the model's files."""
        self.version, self.is_updating, self.is_paused, self.adapters = "default", False, False, {}

    def open_session(self, opens, body):
        if opens == self.is_updating:
            open_already = "a weight-update session is already open; call end_weight_update() first"
            problem = open_already if opens else "no weight-update session is open; call begin_weight_update() first"
            return (400, json.dumps({"success": False, "message": problem}))
        self.is_updating = opens
        return {"success": True, "message": "Success"}

    def receive_weights(self, body):
        if self.receive is None:
            problem = "IPC weight update failed: ImportError checkpoint-engine is not installed."
            return (400, json.dumps({"success": False, "message": problem}))
        try:
            self.receive(body["zmq_handles"]["verl"])
        except ModelError as error:
            return (400, json.dumps({"success": False, "message": str(error)}))
        self.version = body["weight_version"] or self.version
        return {"success": True, "message": ""}

    def load_adapter(self, body):
        """Read at once, and kept under a name that no other one has."""
        assert body["lora_name"] not in self.adapters
        folder = Path(body["lora_path"])
        self.adapters[body["lora_name"]] = load_file(folder / "adapter_model.safetensors")
        self.adapter_config = json.loads((folder / "adapter_config.json").read_text())
        return {"success": True, "error_message": ""}

    def unload_adapter(self, body):
        del self.adapters[body["lora_name"]]
        return {"success": True, "error_message": ""}

    def pause(self, pauses, body):
        self.is_paused = pauses
        return {"status": "ok"}

    def info(self):
        return {
            "model_path": self.model_path, "tokenizer_path": self.tokenizer_path, "weight_version": self.version,
        }  # fmt: skip

    def update(self, body):
        self.model_path = body["model_path"]
        self.num_updates += 1
        return {"success": True, "message": "Succeeded to update model weights."}

    def label(self, body):
        self.version = body["new_version"]
        return {"success": True}

    def generate(self, body):
        assert not self.is_paused, "the server would never answer"
        if body.get("lora_path") not in (None, *self.adapters):
            return (400, f"LoRA adapter '{body['lora_path']}' is not loaded")
        ids, sampling = body["input_ids"], body["sampling_params"]
        if len(ids) >= self.context_length - RESERVED:
            return (
                400,
                f'{{"error": {{"message": "Input length ({len(ids)} tokens) exceeds the maximum allowed length"}}}}',
            )
        room = max(0, self.context_length - 2 - len(ids))
        limit = min(sampling["max_new_tokens"], room, self.most_new)
        stops = {*sampling["stop_token_ids"], *self.eos_token_ids}
        params = SamplingParams(temperature=sampling["temperature"])
        rows, reason = [], {"type": "length", "length": limit}
        while len(rows) < limit:
            token, log_prob = self.next_token([*ids, *(row[1] for row in rows)], len(rows), params)
            if params.temperature == FLAT and not self.original:
                log_prob = -math.log(self.vocab_size)
            rows.append([log_prob, token, None])
            if token in stops and not sampling["ignore_eos"]:
                reason = {"type": "stop", "matched": token}
                break
        return {
            "meta_info": {"finish_reason": reason, "output_token_logprobs": rows, "weight_version": self.version},
        }  # fmt: skip
