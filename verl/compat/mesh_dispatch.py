"""Calls on users' workers with ranks that choose their rows (`Worker._register_dispatch_collect_info`)."""

from __future__ import annotations

from typing import Any

from verl.data_proto.padding import pad_dataproto_to_divisor
from verl.data_proto.proto import DataProto
from verl.parallel.register import Mode


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Mode:
    """A dispatch mode: DataProtos are cut into one chunk per data-parallel rank of the mesh `mesh_name`, padded if they do
    not divide, and the results of the ranks that answer are joined without the padding. Other arguments go to all ranks."""

    def cut(value: object, info: list[tuple[int, bool]]) -> list[Any]:
        if not isinstance(value, DataProto):
            return [value] * len(info)
        padded, _ = pad_dataproto_to_divisor(value, 1 + max(share for share, _ in info))
        chunks = padded.chunk(1 + max(share for share, _ in info))
        return [chunks[share] for share, _ in info]

    def dispatch(group: Any, *args: object, **kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        info = group.mesh_info(mesh_name)
        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
        group.num_rows_sent = len(batches[0]) if batches else 0
        return tuple(cut(a, info) for a in args), {k: cut(v, info) for k, v in kwargs.items()}

    def collect(group: Any, outputs: list[Any]) -> Any:
        info = group.mesh_info(mesh_name)
        answering = sorted((share, output) for (share, answers), output in zip(info, outputs, strict=True) if answers)
        rank_outputs = [output for _, output in answering]
        if not rank_outputs or not all(isinstance(output, DataProto) for output in rank_outputs):
            return rank_outputs
        joined = DataProto.concat(rank_outputs)
        return joined.slice(0, group.num_rows_sent) if group.num_rows_sent <= len(joined) else joined

    return Mode(f"nd_compute({mesh_name})", (dispatch, collect))
