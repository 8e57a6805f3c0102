"""Declares the operators of torchvision's library for CUDA, without which its wheel cannot be imported with PyTorch for CPUs.
vLLM reads pictures with torchvision, in code that is Python's. Python imports this file from a folder of PYTHONPATH."""

import sys


class _Operators:
    """A finder that declares them before torchvision is imported."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Operators())
