"""Advantages, losses, KL, corrections and reductions: pure functions of named tensors. No config object, no I/O, no
state.

Tensors are [batch, response] unless said otherwise; `response_mask` is true on the tokens that train (false on
padding and on tool output) and may be bool or 0/1 of any dtype. Results have the dtype of what goes in, so float64
stays float64.
"""
