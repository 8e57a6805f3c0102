"""Door: what a worker of one's own is made of, whatever the runtime."""

from verl.parallel.register import Dispatch, Execute, register, register_dispatch_mode, update_dispatch_mode
from verl.runtime.user_worker import Worker
from verl.runtime.worker_group import WorkerGroup

__all__ = [
    "Dispatch", "Execute", "Worker", "WorkerGroup", "register", "register_dispatch_mode", "update_dispatch_mode",
]  # fmt: skip
