"""Processes of one thread each on this machine that exchange tensors, for a script that measures them."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 600.0


def launch(
    measure: Callable[..., dict[str, Any]], num_ranks: int, folder: Path, *arguments: Any
) -> list[dict[str, Any]]:
    """The result of `measure(comm, *arguments)` on each of `num_ranks` ranks; files lie in `folder`. The first argument has the
    type of the devices (`device`). Ends the script when a rank fails or takes longer than LIMIT_S."""
    from verl.parallel.collectives import free_port

    context, port = multiprocessing.get_context("spawn"), free_port()
    files = [folder / f"measures-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
    ranks = [
        context.Process(target=_serve, args=(measure, rank, num_ranks, port, str(file), *arguments), daemon=True)
        for rank, file in enumerate(files)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + LIMIT_S
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    if any(process.exitcode != 0 for process in ranks):
        for process in ranks:
            process.kill()
        raise SystemExit(f"The ranks ended with {[p.exitcode for p in ranks]} within {LIMIT_S:.0f} s; see above.")
    return [json.loads(file.read_text()) for file in files]


def _serve(
    measure: Callable[..., dict[str, Any]], rank: int, num_ranks: int, port: int, file: str, *arguments: Any
) -> None:
    from verl.parallel.process_settings import keep_freed_memory

    keep_freed_memory()  # as every process of a run does
    import torch

    from verl.parallel.collectives import Collectives, Peer

    torch.set_num_threads(1)
    peer = Peer(rank, num_ranks, "127.0.0.1", port)
    limits = {"timeout_s": LIMIT_S, "start_timeout_s": 120.0, "call_timeout_s": LIMIT_S}
    comm = Collectives.start(peer, device_type=arguments[0].device, **limits)
    Path(file).write_text(json.dumps(measure(comm, *arguments)))
    comm.barrier("the end")
    comm.close()
