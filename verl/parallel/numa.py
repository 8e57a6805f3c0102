"""Processors near a GPU: copies between pinned memory and a GPU of another socket reach 60 to 80% of the rate."""

import logging
import os
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SYSFS = Path("/sys")


def bind_near(device: torch.device) -> None:
    """Run this thread, and the threads and processes that it starts, on the processors of the node of `device`, a GPU. Nothing
    changes if the user has chosen processors, or the system does not say which are near."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return
    if (allowed := os.sched_getaffinity(0)) != _numbers("devices/system/cpu/online"):
        return
    properties = torch.cuda.get_device_properties(device)
    place = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    node = _text("bus/pci/devices/{:04x}:{:02x}:{:02x}.0/numa_node".format(*place))
    near = allowed & _numbers(f"devices/system/node/node{node}/cpulist")
    if near and near < allowed:
        os.sched_setaffinity(0, near)
        log.info("%s is at node %s: this process runs on its %d processors.", device, node, len(near))


def _text(path: str) -> str:
    try:
        return (SYSFS / path).read_text().strip()
    except OSError:
        return ""


def _numbers(path: str) -> set[int]:
    """Of a list such as 0-3,8-11."""
    spans = [part.split("-") for part in _text(path).split(",") if part]
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
