"""Base class of user-written workers: one process of a group, with its place in the group."""

import os
from collections.abc import Callable

from verl.compat.dispatch import Dispatch, Execute, register


class Worker:
    """Reads its rank and the group's size from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). The
    group sets these variables before it makes the worker."""

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def get_master_addr_port(self) -> tuple[str, str]:
        """The address for a process group of the ranks."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """This rank's share of the rows, and whether it answers, in calls that are declared for the mesh `mesh_name`."""
        if not hasattr(self, "_meshes"):
            self._meshes: dict[str, tuple[int, bool]] = {}
        self._meshes[mesh_name] = (dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def mesh_info(self, mesh_name: str) -> tuple[int, bool]:
        """(share of the rows, whether this rank answers) in a mesh; without a registration every rank has its own share."""
        info: tuple[int, bool] = getattr(self, "_meshes", {}).get(mesh_name, (self.rank, True))
        return info

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        """`func(self, ...)` on this rank's share."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        """`func(...)` on the first rank."""
        return func(*args, **kwargs)
