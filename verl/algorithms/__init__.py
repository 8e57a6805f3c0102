"""Advantages, losses, KL, corrections and reductions: pure functions of named tensors, without config, I/O or state.

Tensors are [batch, response] unless stated otherwise. `response_mask` is true on the tokens that train, false on padding
and tool output, and may be bool or 0/1 of any dtype. Results have the dtype of the inputs: float64 stays float64.
"""
