"""A worker without a model or torch, for benchmarks.processes."""

import os


class StandIn:
    def echo(self, value: bytes) -> bytes:
        return value

    def fail(self, rank: int) -> None:
        if os.environ["RANK"] == str(rank):
            raise ValueError("it was asked to fail")
