"""The processes that a run asks of a Ray cluster, what one node must have for them, and their environment."""

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import ConfigError

# variables of the driver that processes on other nodes get
_PASSED_ON = (
    "HF_",
    "VERL_",
    "NCCL_",
    "NVSHMEM_",
    "UCX_",
    "FI_",  # libfabric, as for EFA
    "GLOO_",
    "TORCH_",
    "TOKENIZERS_",
    "CUBLAS_",
    "CUDA_DEVICE_MAX",
    "PYTORCH_",
    "SGLANG_",
    "TRITON_",
    "VLLM_",
    "LOG_LEVEL",
    "GLIBC_TUNABLES",
)


@dataclass(frozen=True)
class Request:
    """The processes that a run asks of a cluster: `nodes[i]` on node i, each with a CPU and, with `gpus`, a GPU (None: if the
    cluster has any); `otherwise` is asked of a cluster without nodes of that size."""

    nodes: Sequence[int]
    gpus: bool | None
    timeout_s: float
    otherwise: Sequence[int] = ()

    @property
    def num_processes(self) -> int:
        return sum(self.nodes)

    @property
    def resource(self) -> str:
        return "GPU" if self.gpus else "CPU"

    def check_node(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError for devices that this node by itself does not have, before a local cluster is started."""
        if len(self.nodes) > 1:
            raise ConfigError(
                f"trainer.nnodes={len(self.nodes)} needs a Ray cluster of several nodes. Start it (ray start --head, and ray "
                "start --address=... on the others) and give its address: ray_kwargs.ray_init.address=auto."
            )
        import torch

        if self.gpus or (self.gpus is None and torch.cuda.is_available()):
            have, what, more = torch.cuda.device_count(), "GPUs", ""
        else:
            have, what = settings.get("num_cpus") or os.cpu_count() or 1, "CPU cores"
            more = f", or let cores be shared with ray_kwargs.ray_init.num_cpus={self.num_processes}"
        if self.num_processes > have:
            raise ConfigError(
                f"The run needs {self.num_processes} devices, but this machine has {have} {what}. Lower "
                f"trainer.n_gpus_per_node{more}."
            )


def is_short(have: Sequence[int], need: Sequence[int]) -> bool:  # both in descending order
    return len(have) < len(need) or any(h < n for h, n in zip(have, need, strict=False))


def ask_for_token() -> None:
    """A local cluster listens on all interfaces and executes what clients send. Ray admits only clients with its token. This
    run generates a token instead of leaving one in a file, unless the user has one or has set RAY_AUTH_MODE=disabled."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ and not Path("~/.ray/auth_token").expanduser().exists():
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # it warns that there is a token
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


def passed_environment() -> dict[str, str]:
    """Environment of a process; Ray would set one thread for each."""
    passed = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
    source = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(dict.fromkeys([source, *inherited])).rstrip(os.pathsep)
    return {**passed, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": path, "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}
