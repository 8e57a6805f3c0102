"""CUDA graphs of decode steps: the host launches all kernels of a step at once."""

import logging
from collections.abc import Callable, Hashable

import torch

from verl.parallel.process_settings import without_collection

log = logging.getLogger(__name__)


class StepGraphs:
    """Runs steps, and replays repeated steps.

    A step reads and writes tensors at fixed addresses and never waits for the device. Steps of one key have the same shapes.
    The first run of a key is an ordinary run, which compiles kernels and allocates workspaces, and is captured at once, so
    that a size which a generation needs once is replayed in the next one. All graphs share one memory pool, so a step
    overwrites the temporary tensors of another step.
    """

    def __init__(self, device: torch.device, enabled: bool):
        self._enabled = enabled and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._refused: set[Hashable] = set()  # keys with a capture that ran out of memory
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """One run of the step called `key`."""
        if key in self._graphs:
            self._graphs[key].replay()
            return
        step()
        if self._enabled and key not in self._refused:
            self._capture(key, step)

    def _capture(self, key: Hashable, step: Callable[[], object]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                without_collection(),  # a collection may destroy an earlier graph, and so end the capture with an error
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                step()
        except torch.OutOfMemoryError:
            log.warning(
                "A decode step of %s runs without a CUDA graph: capturing it took more memory than is free.", key
            )
            self._refused.add(key)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            log.warning("CUDA graphs are not used: capturing a decode step failed (%s).", error)
            self._enabled = False
        else:
            self._graphs[key] = graph
