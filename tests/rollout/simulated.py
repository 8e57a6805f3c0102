"""vLLM and its server, simulated with the model of a test: what their engines ask for, they compute token by token."""

import json
import threading
from functools import partial

import torch

from tests.rollout.service import choice
from verl.config import ModelConfig, load_config
from verl.data_proto.samples import Completion, SamplingParams
from verl.errors import ModelError
from verl.programs.specs import ppo_run_spec, rollout_spec
from verl.registry import load_object
from verl.reshard import engine_transfer
from verl.reshard.delivery import Delivery
from verl.reshard.shared_memory import read_shared_bucket
from verl.reshard.weight_files import write_folder
from verl.rollout.api import WeightTransfer
from verl.rollout.hf import eager_view
from verl.rollout.requests import StopRules
from verl.rollout.sampling import sample
from verl.rollout.uniforms import sample_keys, uniforms_at
from verl.rollout.vllm.engine import VLLMRollout
from verl.rollout.vllm.weights import LINK_READER, Manifest


def weight_transfer(path="model", bucket_bytes=1 << 14):
    device = torch.device("cpu")
    delivery = Delivery(None, device, (0,), ((0,),), torch.float32, bucket_bytes)
    return WeightTransfer(
        model=ModelConfig(path=path),
        device=device,
        dtype=torch.float32,
        write_buckets=delivery,
        trial=delivery.trial,
        reader="verl.reshard.shared_memory:read_shared_bucket",
        write_folder=partial(write_folder, bucket_bytes=bucket_bytes),
        folder_reader="verl.reshard.weight_files:read_folder",
        start_timeout_s=10.0,
        call_timeout_s=5.0,
        in_process=False,
    )


def transfer_of_run(*keys, device="cpu", **more):
    """(config, weight transfer) of a run with these keys."""
    config = load_config(keys, check=False).config
    return config, engine_transfer.weight_transfer(
        rollout_spec(config), ppo_run_spec(config), torch.device(device), **more
    )


def send(engine, module, version):
    """The weights of `module` arrive in the engine as `version`."""
    engine.load(module.named_parameters())
    engine.publish(version)


class Model:
    """A model with weights that arrive in buckets, and the next token of a sample."""

    def __init__(self, module):
        self.parameters, self.view = dict(module.named_parameters()), eager_view(module)
        self.lock, self.computed = threading.Lock(), {}

    def logits(self, ids):
        """Computed once for equal tokens and weights, as greedy samples have."""
        state = (*ids, sum(parameter._version for parameter in self.parameters.values()))
        if state not in self.computed:
            self.computed[state] = self.view(torch.tensor([ids])).logits[:, -1]
        return self.computed[state]

    def next_token(self, ids, key, position, params):
        with self.lock, torch.no_grad():
            logits = self.logits(ids)
            u = uniforms_at(torch.tensor([key]), torch.tensor([position]))
            token, log_prob = sample(logits, params, u)
        return int(token), float(log_prob)

    def begin_update(self):
        self.manifest, self.missing = Manifest(), set(self.parameters)

    def update(self, bucket, reader=read_shared_bucket):
        with torch.no_grad():
            for name, tensor in reader(bucket):
                self.missing.remove(name)
                self.parameters[name].copy_(tensor)
        self.manifest.add(bucket)

    def finish_update(self, manifest):
        if self.missing or manifest != self.manifest.digest:
            raise ModelError("did not receive the tensors that were sent")


class Core(Model):
    """The methods of verl.rollout.vllm.core.Core; a step is one token of every sample."""

    def __init__(self, module, setup, tokenizer):
        super().__init__(module)
        self.setup, self.tokenizer = setup, tokenizer

    def open(self, params, step):
        self.params, self.step, self.running, self.num_steps = params, step, {}, 0
        self.stop = StopRules(params, self.setup.eos_token_ids, self.setup.vocab_size, self.tokenizer)

    def add(self, requests):
        for request in requests:
            name = (request.ordinal, request.first_sample)
            key = sample_keys(self.params.seed, self.step, *torch.tensor(name).unsqueeze(1)).item()
            self.running[name] = (request, key, [], [])

    def poll(self, timeout_s):
        ended = []
        while self.running and not ended:
            self.num_steps += 1
            for name, (request, key, tokens, log_probs) in list(self.running.items()):
                position = request.num_drawn + len(tokens)
                token, log_prob = self.next_token([*request.token_ids, *tokens], key, position, self.params)
                tokens.append(token)
                log_probs.append(log_prob)
                stopped = token in self.stop.token_ids
                stopped |= self.stop.has_strings and self.stop.ends_string(torch.tensor(tokens).numpy())
                limit = min(request.max_new_tokens or self.params.max_new_tokens, self.params.max_new_tokens)
                if stopped or len(tokens) == limit:
                    ended.append(Completion(*name, tokens, log_probs, StopRules.reason(stopped), -1))
                    del self.running[name]
            if timeout_s is not None:
                break
        return ended

    def abort(self, keys):
        for key in keys:
            del self.running[key]

    def close_generation(self):
        return {"num_decode_steps": self.num_steps}

    def abandon_update(self):
        pass

    def sleep(self, discards=False):
        pass


class SimulatedVLLM(VLLMRollout):
    """The engine with `Core` in this process."""

    factory = "tests.rollout.simulated"

    def __init__(self, module, tokenizer, config, **more):
        self._core = lambda setup: Core(module, setup, tokenizer)
        super().__init__(module, tokenizer, config, **more)

    def _start(self, setup):
        return self._core(setup)


def vllm_server(module, reads_memory=True, fetches=False):
    """Answers of vLLM's server started as verl.rollout.http.dialects.VLLM asks; stop strings are left to the engine. It reads
    buckets in memory of the host, or fetches them, or does neither."""
    model, label = Model(module), ["default"]

    def complete(body):
        key, position, temperature, top_k, top_p, min_p = body["vllm_xargs"]["verl_draw"]
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens, log_probs = [], []
        while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in body["stop_token_ids"]):
            token, log_prob = model.next_token([*body["prompt"], *tokens], key, position + len(tokens), params)
            tokens.append(token)
            log_probs.append(log_prob)
        return choice(tokens, log_probs, "stop" if tokens[-1] in body["stop_token_ids"] else "length")

    def on_workers(body):
        if body["method"] == "verl_begin":
            model.begin_update()
        elif body["method"] == "verl_try":
            message = json.loads(body["args"][0])
            if not (fetches if message["reader"] == LINK_READER else reads_memory):
                return {"results": [{"error": "It is on another host."}]}
            assert list(load_object(message["reader"])(message["bucket"]))
        elif body["method"] == "verl_load":
            message = json.loads(body["args"][0])
            model.update(message["bucket"], load_object(message["reader"]))
        else:
            model.finish_update(*body["args"])
        return {"results": [{}]}

    def relabel(body):
        label[0] = body["new_version"]
        return {"success": True}

    return {
        "/v1/models": {"data": [{"id": "model"}]},
        "/v1/completions": complete,
        "/collective_rpc": on_workers,
        "/reset_prefix_cache": {"success": True},
        "/update_weight_version": relabel,
        "/weight_info": lambda body: {"weight_version": label[0]},
    }
