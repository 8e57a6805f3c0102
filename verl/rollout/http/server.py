"""A server of SGLang that a run starts for itself, on the devices of a replica; it ends with the process that started it."""

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from verl.config import ModelConfig, RolloutConfig, full_key
from verl.errors import ConfigError, DeadlineError, ModelError, UnreachableError
from verl.models.decoder.weights import DenseDecoder
from verl.models.hf_module import HFModule
from verl.models.lora import CONFIG_FILE, WEIGHTS_FILE, LoRASpec, adapted_layers, peft_names
from verl.models.quantized import BLOCK
from verl.models.vision import is_vision_model
from verl.parallel.child_processes import python_command
from verl.parallel.collectives import free_port
from verl.rollout.api import Weights, WeightTransfer
from verl.rollout.engine_names import SERVICE, require_names
from verl.rollout.http.client import Client
from verl.rollout.http.dialects import CONTEXT_MARGIN, OWN_SERVER
from verl.rollout.process import Child
from verl.rollout.vllm.settings import fp8_arguments, longest_sequence
from verl.rollout.weight_version import complete

_POLL_S = 0.5
_HEALTH_S = 10.0  # for one answer about its health
_SHARED_MEMORY = "/dev/shm"
_MAIN = "verl.rollout.http.in_sglang"
FP8_CHECKPOINT = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
# the margin may go beyond the model's positions, without a token there; log-probs are at the sampling temperature
_ENVIRONMENT = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    OWN_SERVER: "1",
}


class SGLangServer:
    """Started with verl inside (in_sglang.py), and ready when this returns. `weights_dir` is a folder for new weights, for
    a server that cannot read memory of this process.

    Raises ModelError when the server ends or SGLang lacks a name that verl uses, DeadlineError when the server is not ready
    after `transfer.start_timeout_s`.
    """

    def __init__(self, config: RolloutConfig, transfer: WeightTransfer, skeleton: HFModule):
        require_names("sglang", SERVICE, "versions known to work: 0.5.23")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = arguments(config, transfer, skeleton, port)
        self.frees_memory = "--enable-memory-saver" in options
        server = python_command(_MAIN, *options)
        environment = dict(_ENVIRONMENT)
        if transfer.visible_devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(transfer.visible_devices)
        folder = config.service.weights_dir or _folder_in_memory(skeleton, transfer.dtype)
        self._folder = tempfile.TemporaryDirectory(prefix="verl-weights-", dir=folder)
        self.weights_dir = self._folder.name
        self._child = Child(python_command("verl.parallel.child_processes", str(os.getpid()), *server), environment)
        try:
            self._wait(transfer.start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def ending(self) -> str:
        """The end of the server, as a clause; "" while it runs."""
        return self._child.ending() if self._child.has_died() else ""

    def close(self) -> None:
        """End the server with everything that it started. May be called again."""
        self._child.close()
        self._folder.cleanup()

    def _wait(self, timeout_s: float) -> None:
        client = Client(self.url, token_env="", timeout_s=min(timeout_s, _HEALTH_S), num_retries=0)
        until = time.monotonic() + timeout_s
        while not self._answers(client):
            if self._child.has_died():
                raise ModelError(f"SGLang's server (pid {self.pid}) {self._child.ending()} while it was starting.")
            if time.monotonic() > until:
                raise DeadlineError(
                    f"SGLang's server (pid {self.pid}) was not ready within {timeout_s:g} s{self._child.last_words()}. Raise "
                    "trainer.ray_wait_register_center_timeout if it needs longer."
                )
            time.sleep(_POLL_S)

    def _answers(self, client: Client) -> bool:
        try:
            client.get("/health")
        except (UnreachableError, ModelError, DeadlineError):  # not listening yet, or loading its model
            return False
        return True


def _folder_in_memory(skeleton: HFModule, dtype: torch.dtype) -> str | None:
    """The folder of shared memory, if it has room for the weights; None: the folder of temporary files."""
    num_bytes = _num_bytes(skeleton, dtype)
    has_room = Path(_SHARED_MEMORY).is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * num_bytes
    return _SHARED_MEMORY if has_room else None


class NamedAdapters:
    """The LoRA adapters of `model` as SGLang loads them. `skeleton` is the model on the meta device. Raises ConfigError for
    adapters that do not fit it."""

    def __init__(self, model: ModelConfig, skeleton: HFModule):
        spec = LoRASpec.of(model)
        assert spec is not None
        self.layers, self.rank = adapted_layers(skeleton, spec), spec.rank
        # SGLang scales by alpha / r
        self._config = {
            **spec.to_json(model.path, self.layers),
            "lora_alpha": spec.scale * spec.rank,
            "use_rslora": False,
        }
        sizes = {name: skeleton.get_parameter(f"{name}.weight").shape for name in self.layers}
        shapes = {f"{name}.lora_A": torch.Size((spec.rank, size[1])) for name, size in sizes.items()}
        shapes |= {f"{name}.lora_B": torch.Size((size[0], spec.rank)) for name, size in sizes.items()}
        self._shapes: dict[str, torch.Size] = peft_names(shapes)

    def options(self, device: torch.device) -> dict[str, object]:
        """Arguments of sglang.launch_server."""
        return {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self.layers}),
            "max_loras_per_batch": 2,  # the other one is the model without adapters, as checks of the server ask it
            "lora_strict_loading": True,
            "lora_backend": "torch_native" if device.type == "cpu" else None,
        }

    def write(self, folder: Path, weights: Weights) -> None:
        """Write `weights` under peft's names to a new folder. Raises ModelError when one is missing."""
        numbers = {name: number for number, name in enumerate(self._shapes)}
        tensors = {n: t.detach().cpu().contiguous() for n, t in complete(weights, self._shapes, numbers)}
        folder.mkdir(parents=True)
        save_file(tensors, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(self._config), encoding="utf-8")


def require_blocks(skeleton: HFModule, config: RolloutConfig) -> None:
    """Raise ConfigError if SGLang does not compute the model of `skeleton` with weights of the run in blocks of fp8."""
    key, name, size = full_key("rollout.quantization"), type(skeleton).__name__, config.tensor_model_parallel_size
    end, decoder = f"Set {key}=null", DenseDecoder.of_shapes(skeleton)
    if config.adapters_by_name:
        raise ConfigError(f"{key}=fp8 needs updates of all weights, and a run of adapters sends none to SGLang. {end}.")
    if decoder is None or decoder.has_experts or "latent" in decoder.departures or is_vision_model(skeleton):
        raise ConfigError(f"{key}=fp8 is for dense text models on SGLang, and {name} is none. {end}.")
    for layer in decoder.layers:
        widths = [part.out_features for joined in (layer.qkv, layer.gate_up) for part in joined.parts]
        widths += [part.in_features for joined in (layer.o, layer.down) for part in joined.parts if size > 1]
        if uneven := next((width for width in widths if width % (size * BLOCK)), None):
            raise ConfigError(
                f"{key}=fp8 has blocks of {BLOCK} on SGLang, and a projection of {uneven} on {size} devices does not divide "
                f"into them. {end}, or choose another {full_key('rollout.tensor_model_parallel_size')}."
            )


def require_space(folder: Path, skeleton: HFModule, dtype: torch.dtype) -> None:
    """Raise ConfigError when `folder` has no room for the weights."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free, needed = shutil.disk_usage(existing).free, _num_bytes(skeleton, dtype)
    if free < needed:
        raise ConfigError(
            f"New weights for the service are files in {folder}, which has {free / 1e9:.1f} GB free for {needed / 1e9:.1f} GB "
            f"of them. Choose another folder ({full_key('rollout.service.weights_dir')}), or free some space."
        )


def _num_bytes(skeleton: HFModule, dtype: torch.dtype) -> int:
    return sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize


def arguments(config: RolloutConfig, transfer: WeightTransfer, skeleton: HFModule, port: int) -> list[str]:
    """The arguments of sglang.launch_server. Entries of rollout.engine_kwargs.sglang override them."""
    model = transfer.model
    sleeps = config.free_cache_engine and transfer.device.type == "cuda"
    overridden = {k: v for k, v in (model.override_config or {}).items() if k != "attn_implementation"}
    # a checkpoint in fp8, which updates bring
    overridden |= {"quantization_config": FP8_CHECKPOINT} if config.quantization else {}
    defaults: dict[str, object] = {
        "model_path": model.path,
        "tokenizer_path": model.tokenizer_path or model.path,
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": overridden,
        "load_format": "dummy" if config.quantization else None,
        "host": "127.0.0.1",
        "port": port,
        "device": transfer.device.type,
        "dtype": str(transfer.dtype).removeprefix("torch."),
        "tp_size": config.tensor_model_parallel_size,
        "ep_size": config.expert_parallel_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "context_length": longest_sequence(config, skeleton) + CONTEXT_MARGIN,
        "max_running_requests": config.max_num_seqs,
        "random_seed": config.seed,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_decode_cuda_graph": config.enforce_eager,
        "disable_prefill_cuda_graph": config.enforce_eager,
        "enable_memory_saver": sleeps,
        "log_level": "warning",
        **fp8_arguments(config, transfer.device.type == "cpu", {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}),
        **(NamedAdapters(model, skeleton).options(transfer.device) if config.adapters_by_name else {}),
    }
    words: list[str] = []
    for name, value in {**defaults, **config.engine_kwargs.sglang}.items():
        if value is None or value is False or value == {}:
            continue
        option = "--" + name.replace("_", "-")
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [option] if value is True else [option, *map(str, values)]
    return words
