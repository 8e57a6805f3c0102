"""DeepSpeed's ZeRO behind the contract of training engines; needs the extra `deepspeed`.

Stages 1 to 3 are DeepSpeed's: its hooks reduce gradients and gather parameters, its optimizers hold the masters in flat
partitions and clip. Steps are those of the optimizer of `optim`, and compute weights are rounded as everywhere here. Stage 0
shares nothing between devices, so that nothing of DeepSpeed is left: every device steps by itself on summed gradients.
"""
