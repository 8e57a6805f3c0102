"""New weights inside a worker of vLLM: received in buckets, verified, loaded by layers.

    begin ──► load (bucket) ... load ──► finish        each answers {} or {"error": sentence}; an exception would end vLLM

`finish` succeeds only when the received tensors equal the sent tensors. Every parameter of the engine must have got a new
value, and hold the sent value (weight_check.py). An output layer that shares its weight with the embedding must also compute
with the new weight: on a CPU it multiplies by a packed copy, and vLLM's reload does not renew that copy.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F

from verl.config import full_key
from verl.errors import ModelError
from verl.models.hf_module import HFModule
from verl.registry import load_object
from verl.rollout.vllm.weight_check import HeldWeights, any_worker

Description = dict[str, Any]  # of a bucket: JSON with "entries" that begin with the names

# a message names one of them; over HTTP any client of the server can send one, so nothing else is called
LINK_READER = "verl.reshard.link:read_link"
READERS = ("verl.reshard.shared_memory:read_shared_bucket", LINK_READER, "verl.reshard.weight_files:read_folder")
OWN_READERS = (*READERS, "verl.reshard.device_memory:read_device_bucket")
ELSEWHERE = "Another worker of the rollout engine did not take the new weights."
_SAME_HEAD = 0.05  # relative; a packed product in bfloat16 is within 0.01, another weight is not


class Manifest:
    """A running digest of the tensors sent or received, in order: names, dtypes, shapes and digests of the values."""

    def __init__(self) -> None:
        self._found = hashlib.blake2b(digest_size=16)

    def add(self, bucket: Description) -> None:
        """Add the tensors of a bucket to the digest, from its description."""
        for entry in bucket["entries"]:
            self._found.update(json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    @property
    def digest(self) -> str:
        return self._found.hexdigest()


def _answers(method: Callable[..., None]) -> Callable[..., dict[str, str]]:
    """The method as vLLM calls it: it answers {} or {"error": sentence}."""

    @functools.wraps(method)
    def answered(self: WeightReceiver, *args: str) -> dict[str, str]:
        from verl.rollout.vllm.library import set_current_vllm_config

        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                method(self, *args)
        except Exception as error:  # noqa: BLE001 - any error raised here would end the engine
            return {"error": str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"}
        return {}

    return answered


class WeightReceiver:
    """Mixed into vLLM's worker by `LLM(worker_extension_cls="verl.rollout.vllm.weights.WeightReceiver")`."""

    model_runner: Any
    model_config: object
    vllm_config: object
    verl_readers: tuple[str, ...] = READERS

    @_answers
    def verl_try(self, message: str) -> None:
        """Read the bucket that `message` describes, as in `verl_load`, without loading it."""
        for _ in self._verl_read(**json.loads(message)):
            pass

    @_answers
    def verl_begin(self) -> None:
        """New weights will come; nothing may be generated before they are complete."""
        from verl.rollout.vllm.library import initialize_layerwise_reload, tensor_parallel_group

        model, self._verl_group = self.model_runner.model, tensor_parallel_group()
        self._verl_manifest = Manifest()
        # scales are made here, of the weights that come
        self._verl_left = {name for name, _ in model.named_parameters() if "_scale" not in name.rpartition(".")[2]}
        self._verl_held = HeldWeights(model, self._verl_group)
        self._verl_flips = any(getattr(layer, "is_fused_checkpoint_transposed", False) for layer in model.modules())
        initialize_layerwise_reload(model)

    @_answers
    def verl_load(self, message: str) -> None:
        """Load the bucket that the JSON `message` describes: {"reader": "module:function", "bucket": description}."""
        description = json.loads(message)
        # copies: vLLM keeps them until a layer is complete, and the bucket is written over before
        tensors = [(name, _copied(tensor)) for name, tensor in self._verl_read(**description)]
        self._verl_manifest.add(description["bucket"])
        for name, tensor in tensors:
            self._verl_held.sent(name, tensor)
        loaded = self.model_runner.model.load_weights((n, self._verl_as_in_files(n, t)) for n, t in tensors)
        self._verl_left -= set(loaded or ())

    @_answers
    def verl_finish(self, manifest: str) -> None:
        """End the update. It fails unless `manifest` is the digest of all received tensors."""
        problem = self._verl_problem(manifest)
        # workers that share the model compare sums together: an absent worker would leave its peers waiting
        if any_worker(problem is not None, self._verl_group):
            raise problem or ModelError(ELSEWHERE)
        self._verl_held.check()
        _renew_tied_heads(self.model_runner.model)

    @_answers
    def verl_abandon(self) -> None:
        """The weights will not be complete and must not be used; another update may begin."""
        self._verl_end()

    def _verl_read(self, reader: str, bucket: Description) -> Iterator[tuple[str, torch.Tensor]]:
        if reader not in self.verl_readers:
            raise ModelError(f"{reader!r} is not a reader of weights; there are {', '.join(self.verl_readers)}.")
        return cast("Iterator[tuple[str, torch.Tensor]]", load_object(reader)(bucket))

    def _verl_as_in_files(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Joint experts as published files of some families have them: transposed. vLLM transposes them back."""
        return tensor.mT if self._verl_flips and ".experts." in name and tensor.dim() == 3 else tensor

    def _verl_problem(self, manifest: str) -> Exception | None:
        """The first fault in the weights of this worker, or None; faults of other workers are not looked for."""
        try:
            self._verl_end()
        except Exception as error:  # noqa: BLE001 - raised when the other workers have it too
            return error
        if self._verl_manifest.digest != manifest:
            return ModelError(
                "The rollout engine did not receive the tensors that were sent; some were lost or came twice."
            )
        if self._verl_left:
            return ModelError(
                f"No new weight came for {sorted(self._verl_left)[0]} of the rollout engine; it would sample with old ones."
            )
        return None

    def _verl_end(self) -> None:
        from verl.rollout.vllm.library import finalize_layerwise_reload

        try:
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        finally:
            self._verl_held.end()


class OwnWeightReceiver(WeightReceiver):
    """The receiver in a vLLM that verl has started and that has no other client. It also opens memory of the GPU: handles go to
    CUDA's driver unchecked."""

    verl_readers = OWN_READERS


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor`, on the GPU of this worker if it comes from a GPU."""
    device = torch.device("cuda", torch.cuda.current_device()) if tensor.is_cuda else tensor.device
    return tensor.to(device, copy=True)


def _renew_tied_heads(model: HFModule) -> None:
    """Renew output layers that share the embedding's weight. Raises ModelError when one still has another."""
    from verl.rollout.vllm.library import ParallelLMHead

    for head in _tied(model.modules(), ParallelLMHead):
        head.quant_method.process_weights_after_loading(head)
        weight = head.weight.detach()
        some = torch.linspace(-1, 1, weight.shape[1], dtype=torch.float32, device=weight.device).to(weight.dtype)[None]
        expected = F.linear(some, weight).float()
        error = (head.quant_method.apply(head, some).float() - expected).norm() / expected.norm().clamp_min(1e-20)
        if not error < _SAME_HEAD:
            raise ModelError(
                "The rollout engine's output layer still multiplies by the old weight of the embedding that it shares. Use "
                f"another version of vLLM, or {full_key('rollout.name')}=native."
            )


def _tied(modules: Iterable[Any], head_class: type) -> list[Any]:
    """The output layers that share their weight with another module."""
    layers = list(modules)
    further = {id(m.weight) for m in layers if not isinstance(m, head_class) and getattr(m, "weight", None) is not None}
    return [m for m in layers if isinstance(m, head_class) and id(getattr(m, "weight", None)) in further]
