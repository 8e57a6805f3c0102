"""DeepSpeed's ZeRO behind the contract of training engines; needs the extra `deepspeed`.

Stages 1 to 3 are DeepSpeed's: its hooks reduce gradients and gather parameters, its optimizers hold the masters in flat
partitions and clip. The optimizer of `optim` takes the steps, and compute weights are rounded as everywhere here. Stage 0
divides nothing between devices and computes without DeepSpeed: every device steps by itself on summed gradients.
"""
