"""Door: `register` and the dispatch modes."""

from verl.parallel.named_mesh import make_nd_compute_dataproto_dispatch_fn
from verl.parallel.register import Dispatch, Execute, register, register_dispatch_mode, update_dispatch_mode

__all__ = [
    "Dispatch", "Execute", "make_nd_compute_dataproto_dispatch_fn", "register", "register_dispatch_mode",
    "update_dispatch_mode",
]  # fmt: skip
