"""The name that recipes import; the code lives in verl/runtime/hybrid_worker.py."""

from verl.runtime.hybrid_worker import ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker"]
