"""SGLang's server with verl inside: samples by our keys, new weights from memory, verified.

    python -m verl.rollout.http.in_sglang --model-path PATH ...     # options of sglang.launch_server

    /generate                   custom_params has the key and rules of a sample; verl samples its tokens
    /update_weights_from_ipc    zmq_handles has a message of verl (JSON) in place of sockets; no part of it is pickle

Everything that is taken from SGLang is in this file. Importing it imports SGLang.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from runpy import run_module
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from verl.errors import ModelError
from verl.models.quantized import fp8_blocks
from verl.parallel.device import to_device
from verl.registry import load_object
from verl.rollout.http.dialects import MESSAGE, OWN_SERVER
from verl.rollout.vllm.sample import NO_RULE, SamplingRules
from verl.rollout.vllm.weight_check import HeldWeights, any_worker
from verl.rollout.vllm.weights import ELSEWHERE, OWN_READERS, READERS, Description, Manifest

_BACKEND = "pytorch"  # of sampling; on some devices SGLang takes no other one
_PROCESSORS = "--enable-custom-logit-processor"
_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip

_PARTS: dict[str, str | tuple[int, ...]] = {"qkv_proj": "qkv", "gate_up_proj": (0, 1)}  # by the names of its loaders
_CACHE_SCALES = (".k_scale", ".v_scale")  # of the KV cache, in a model in fp8

_SGLangs: TypeAlias = Any  # an object of SGLang, which has no types here
_Receive: TypeAlias = Callable[[_SGLangs, _SGLangs], tuple[bool, str]]
_rules = SamplingRules()


class KeyedSampler(Sampler):
    """Samples the tokens of requests with a key; further requests are SGLang's."""

    def __init__(self) -> None:
        super().__init__()
        SamplingBatchInfo.adjusted_from_schedule_batch = _read
        SamplingBatchInfo.adjusted_filter_batch = _filter
        SamplingBatchInfo.adjusted_merge_batch = _merge

    def forward(
        self, logits_output: _SGLangs, sampling_info: _SGLangs, return_logprob: bool, *args: _SGLangs, **more: _SGLangs
    ) -> torch.Tensor:
        """Token ids, int64 [requests]; their log-probs go to `logits_output`. The third of `args` are positions in the sequence
        before the new token."""
        table, rules = sampling_info.sampling_seed, sampling_info.custom_params
        if table is None or set(rules) <= {NO_RULE}:
            return self._foreign(logits_output, sampling_info, return_logprob, *args, **more)
        keys, first, numbers = table.T
        rows = torch.stack([keys, first + args[2] + 1, numbers])
        values, tokens = _rules.draw(logits_output.next_token_logits.float().clone(), rows, rules).max(-1)
        if NO_RULE in rules:
            is_ours = numbers != NO_RULE
            theirs = self._foreign(logits_output, sampling_info, return_logprob, *args, **more)
            tokens = torch.where(is_ours, tokens, theirs)
            if return_logprob:
                values = torch.where(is_ours, values, logits_output.next_token_logprobs)
        if return_logprob:
            logits_output.next_token_logprobs = values
        return tokens

    def _foreign(
        self, logits_output: _SGLangs, sampling_info: _SGLangs, *args: _SGLangs, **more: _SGLangs
    ) -> torch.Tensor:
        table, sampling_info.sampling_seed = sampling_info.sampling_seed, None
        try:
            return cast("torch.Tensor", super().forward(logits_output, sampling_info, *args, **more))
        finally:
            sampling_info.sampling_seed = table


def _read(info: _SGLangs, batch: _SGLangs, vocab_size: int) -> None:
    """The requests of `batch` in fields that SGLang divides and joins with its batches: in the place of its seeds int64
    [requests, 3], with key, number of the sample's first token by its place in the sequence, and rule; rules on the host."""
    draws = [_rules.read(SimpleNamespace(extra_args=request.sampling_params.custom_params)) for request in batch.reqs]
    rows = [
        (key, num_drawn - len(request.origin_input_ids), rule)
        for (key, num_drawn, rule), request in zip(draws, batch.reqs, strict=True)
    ]
    info.sampling_seed = to_device(torch.tensor(rows, dtype=torch.int64).view(-1, 3), info.device)
    info.custom_params = [rule for _, _, rule in draws]


def _filter(info: _SGLangs, keep: list[int], on_device: torch.Tensor) -> None:
    info.custom_params = [info.custom_params[row] for row in keep]


def _merge(info: _SGLangs, other: _SGLangs) -> None:
    info.custom_params = [*info.custom_params, *other.custom_params]


class Receiver:
    """New weights of the model of this process: `begin`, `load` for each bucket, `finish`. All processes that divide the model
    call a method together, and each raises when one fails."""

    def __init__(self, readers: tuple[str, ...]):
        self._readers = readers
        self._manifest: Manifest | None = None  # of the update under way

    def __call__(self, model: _SGLangs, step: str, **arguments: object) -> None:
        """Do a step. Raises ModelError."""
        group, problem = _group(), cast("ModelError | None", None)
        steps: dict[str, Callable[..., None]] = {
            "try": self._try, "begin": self._begin, "load": self._load, "finish": self._finish,
        }  # fmt: skip
        try:
            with torch.no_grad():
                steps[step](model, **arguments)
        except Exception as error:  # noqa: BLE001 - any error raised further on would end the server
            problem = error if isinstance(error, ModelError) else ModelError(f"{type(error).__name__}: {error}")
        if any_worker(problem is not None, group):
            self._manifest = None
            raise problem or ModelError(ELSEWHERE)
        if step == "finish":
            self._compare(group)

    def _try(self, model: _SGLangs, reader: str, bucket: Description) -> None:
        for _ in self._tensors(reader, bucket):
            pass

    def _begin(self, model: _SGLangs) -> None:
        self._manifest, self._held = Manifest(), HeldWeights(model, _group(), _FUSED)
        self._held.end()  # SGLang packs weights after the last step
        for name, parameter in model.named_parameters():
            if name.endswith(_CACHE_SCALES):  # no update brings them
                self._held.sent(name, parameter)

    def _load(self, model: _SGLangs, reader: str, bucket: Description) -> None:
        if self._manifest is None:
            raise ModelError("No update has begun here: the server was started again, or another one failed.")
        tensors: dict[str, torch.Tensor] = {}
        scales: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors(reader, bucket):
            tensors[name] = tensor
            if self._held.format_of(name) == torch.float8_e4m3fn:
                tensors[name], scales[f"{name}_scale_inv"] = fp8_blocks(tensor)
        model.load_weights(iter(tensors.items()))
        self._load_scales(dict(model.named_parameters()), scales)
        for name, tensor in (*tensors.items(), *scales.items()):
            self._held.sent(name, tensor)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()  # the bucket is written over after the answer
        self._manifest.add(bucket)

    def _load_scales(self, parameters: dict[str, _SGLangs], scales: dict[str, torch.Tensor]) -> None:
        """Scales of blocks by the loaders of their parameters: SGLang's Llama takes none by their names."""
        for name, scale in scales.items():
            held_name, number = self._held.place(name)
            parts = _PARTS.get(held_name.split(".")[-2], "")
            parameters[held_name].weight_loader(parameters[held_name], scale, *parts[number : number + 1])

    def _finish(self, model: _SGLangs, manifest: str) -> None:
        if self._manifest is None or self._manifest.digest != manifest:
            raise ModelError("The server did not receive the tensors that were sent; some were lost or came twice.")
        if missing := self._held.missing():
            raise ModelError(f"No new weight came for {missing} of the server; it would sample with an old one.")

    def _compare(self, group: dist.ProcessGroup | None) -> None:
        self._manifest, error = None, ""
        try:
            self._held.check()
        except ModelError as difference:
            error = str(difference)
        if any_worker(bool(error), group):
            raise ModelError(error or ELSEWHERE)

    def _tensors(self, reader: str, bucket: Description) -> Iterator[tuple[str, torch.Tensor]]:
        if reader not in self._readers:
            raise ModelError(f"{reader!r} is not a reader of weights; there are {', '.join(self._readers)}.")
        return cast("Iterator[tuple[str, torch.Tensor]]", load_object(reader)(bucket))


def _group() -> dist.ProcessGroup | None:
    """The processes (not devices) that share this one's model; None if there is one."""
    group = get_parallel().tp_group
    return group.cpu_group if group.world_size > 1 else None


def _receiving(original: _Receive) -> _Receive:
    """SGLang's method for weights of another process: the `original` one for messages that are not from verl."""
    receiver = Receiver(OWN_READERS if os.environ.get(OWN_SERVER) else READERS)

    def receive(updater: _SGLangs, request: _SGLangs) -> tuple[bool, str]:
        message = request.zmq_handles.get(MESSAGE)
        if message is None:
            return original(updater, request)
        try:
            receiver(updater.get_model(), **json.loads(message))
        except Exception as error:  # noqa: BLE001 - a message that is none; raised, it would end the server
            return False, str(error)
        return True, ""

    return receive


def _without_noise(original: Callable[[_SGLangs, _SGLangs], None]) -> Callable[[_SGLangs, _SGLangs], None]:
    """SGLang's method that takes the scales of a layer's KV cache, with scales of 1: a server without files has noise there,
    and CUDA graphs keep the numbers of the start."""

    def process(method: _SGLangs, layer: _SGLangs) -> None:
        layer.k_scale.data.fill_(1.0)
        layer.v_scale.data.fill_(1.0)
        original(method, layer)

    return process


def change_server() -> None:
    """Change this process: the server, or a process that the server has spawned."""
    if os.environ.get(OWN_SERVER):
        BaseKVCacheMethod.process_weights_after_loading = _without_noise(
            BaseKVCacheMethod.process_weights_after_loading
        )
    register_sampler_backend(_BACKEND, KeyedSampler)
    WeightUpdater.update_weights_from_ipc = _receiving(WeightUpdater.update_weights_from_ipc)


if __name__ in ("__main__", "__mp_main__"):
    from verl.rollout.http import in_sglang

    in_sglang.change_server()
if __name__ == "__main__":
    if _PROCESSORS in sys.argv:
        sys.exit(f"{_PROCESSORS} cannot be used with verl's sampler, which takes its place: leave it out.")
    if "--sampling-backend" not in sys.argv:
        sys.argv += ["--sampling-backend", _BACKEND]
    run_module("sglang.launch_server", run_name="__main__")
