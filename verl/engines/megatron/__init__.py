"""Megatron-core behind the contract of training engines; needs the extra `megatron`.

Megatron's are the decoder (tensor, sequence, pipeline and expert parallel layers), the schedules of the pipeline, and the
buffers that sum gradients and, with the distributed optimizer, divide them and gather weights. Ours are attention to packed
batches (a module of the layer's specification), log-probs of a divided vocabulary, and the step of the masters.
"""
