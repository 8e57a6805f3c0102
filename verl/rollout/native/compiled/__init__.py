"""Decoding on a CPU by compiled kernels. They are optional: without them torch computes."""
