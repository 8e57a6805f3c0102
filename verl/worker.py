"""The name that recipes import; the code lives in verl/controller/hybrid_worker.py."""

from verl.controller.hybrid_worker import ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker"]
