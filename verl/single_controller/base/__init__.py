"""Door: what a worker of one's own is made of, whatever the runtime."""

from verl.controller.group import WorkerGroup
from verl.parallel.register import Dispatch, Execute, register, register_dispatch_mode, update_dispatch_mode
from verl.workers.worker import Worker

__all__ = [
    "Dispatch", "Execute", "Worker", "WorkerGroup", "register", "register_dispatch_mode", "update_dispatch_mode",
]  # fmt: skip
